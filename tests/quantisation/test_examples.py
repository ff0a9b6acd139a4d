"""The user's data as inputs: two halves that share nothing, prepared for the model."""

from __future__ import annotations

import json
import math
import shutil
import struct
import wave
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import CHECKPOINTS, ROOT
from tiny_models import BERT, WHISPER
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    BertConfig,
    BertLMHeadModel,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.utils.import_utils import (
    AUDIO_IMPORT_ERROR,
    TORCHVISION_IMPORT_ERROR,
    VISION_IMPORT_ERROR,
)
from vision_language import PATCHES, pictures, vision_language_model

from enjoyln_cli import export
from enjoyln_cli.calls.processed_inputs import cannot_read, from_audio
from enjoyln_cli.comparison.data_files import UserData, read_user_data, token_lists
from enjoyln_cli.comparison.text_scores import NOT_PREDICTED
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.quantisation.examples import Example, require_every_input, split, traced_batch
from enjoyln_cli.quantisation.measure import exact_outputs
from enjoyln_cli.quantisation.written_result import verify_quantised

LICENCE = (ROOT / "LICENSE").read_text()


def test_a_text_is_read_in_windows_and_halves_share_nothing() -> None:
    folder = CHECKPOINTS / "gpt2"
    choosing, held_out = split(
        AutoModelForCausalLM.from_pretrained(folder), folder, UserData(LICENCE), 5, False
    )
    assert len(choosing) == len(held_out) == 5
    windows = [one.batch["input_ids"] for one in (*choosing, *held_out)]
    assert len({tuple(window[0].tolist()) for window in windows}) == 10
    for example in held_out:
        ids, predicted = example.batch["input_ids"], example.predicted
        assert predicted is not None and torch.equal(predicted[:, :-1], ids[:, 1:])
        assert int(predicted[0, -1]) == NOT_PREDICTED


def test_a_masked_model_is_scored_on_what_masks_hide() -> None:
    folder = CHECKPOINTS / "bert"
    model = AutoModelForMaskedLM.from_pretrained(folder)
    (example, *_), _ = split(model, folder, UserData(LICENCE), 4, False)
    predicted, ids = example.predicted, example.batch["input_ids"]
    assert predicted is not None
    hidden = predicted != NOT_PREDICTED
    assert 0 < int(hidden.sum()) < ids.numel() / 3
    assert len(ids[hidden].unique()) == 1 and not (predicted[hidden] == ids[hidden]).any()
    assert set(example.batch) == {"input_ids", "attention_mask"}  # all that its tokenizer returns


SHORT = tuple((5, 6, 7 + at) for at in range(8))


@pytest.mark.parametrize("returns_types", [True, False])
def test_inputs_are_what_the_tokenizer_returns(returns_types: bool, tmp_path: Path) -> None:
    model = AutoModelForMaskedLM.from_pretrained(CHECKPOINTS / "bert")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHECKPOINTS / "bert" / file, tmp_path)
    names = ["input_ids", "attention_mask", *["token_type_ids"] * returns_types]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["model_input_names"] = names
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (example, *_), _ = split(model, tmp_path, UserData(LICENCE), 4, False)
    assert set(example.batch) == {*names}
    (example, *_), _ = split(model, tmp_path, UserData(tokens=SHORT), 4, False)
    assert set(example.batch) == {*names}
    (tmp_path / "none").mkdir()
    (example, *_), _ = split(model, tmp_path / "none", UserData(tokens=SHORT), 4, False)
    assert set(example.batch) == {"input_ids", "attention_mask"}


@pytest.mark.slow
def test_types_that_a_program_lacks_are_refused(tmp_path: Path) -> None:
    """Zeros are what BERT takes for types that are left out; GPT-2 adds embeddings to all types."""
    bert = BertLMHeadModel(BertConfig(**BERT, is_decoder=True))
    gpt2 = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2")
    for returned in (["input_ids"], ["input_ids", "token_type_ids"]):
        folder = Path(shutil.copytree(CHECKPOINTS / "gpt2", tmp_path / str(len(returned))))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["model_input_names"] = returned
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (example, *_), _ = split(gpt2, folder, UserData(LICENCE), 4, False)
        assert set(example.batch) == {*returned}
        require_every_input(bert, folder, example)
        if len(returned) == 1:
            require_every_input(gpt2, folder, example)
    with pytest.raises(UnsupportedModel, match="returns token_type_ids, which GPT2LMHeadModel"):
        require_every_input(gpt2, folder, example)
    export(folder, tmp_path / "onnx", verify=False)
    with pytest.raises(UnsupportedModel, match="take them out of model_input_names"):
        verify_quantised(tmp_path / "onnx", UserData(LICENCE))


def test_a_program_keeps_its_picture_input(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    model = vision_language_model(tmp_path)
    image = pictures(tmp_path / "images")
    text = UserData(texts=tuple(f"You may copy it {at} times ." for at in range(8)))
    (example, *_), _ = split(model, tmp_path, text, 4, False)
    with pytest.raises(UnsupportedModel, match="also takes pixel_values.* pass --image as well"):
        require_every_input(model, tmp_path, example)
    text = replace(text, images=tuple(image.iterdir()))
    (example, *_), _ = split(model, tmp_path, text, 4, False)
    require_every_input(model, tmp_path, example)
    assert example.batch["input_ids"].shape[1] > PATCHES
    assert traced_batch(model, example) is example.batch
    (tmp_path / "processor_config.json").unlink()  # text alone is all that can be prepared
    (example, *_), _ = split(model, tmp_path, UserData(texts=text.texts), 4, False)
    require_every_input(model, tmp_path, example)


def test_an_encoder_reads_each_line_as_one_text() -> None:
    folder = CHECKPOINTS / "bert"
    lines = [f"Licence number {at} is {'very ' * at}short." for at in range(8)]
    text = "\n\n".join(lines)
    halves = split(AutoModel.from_pretrained(folder), folder, UserData(text), 4, False)
    found = [one.batch["input_ids"] for half in halves for one in half]
    assert [len(ids) for ids in found] == [1] * 8
    lengths = [ids.shape[1] for ids in found]
    assert lengths == sorted(lengths) and lengths[0] < lengths[-1]
    assert halves[0][0].predicted is None


def test_images_are_prepared_by_the_image_processor(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    folder = CHECKPOINTS / "vit"
    for at in range(8):
        image.effect_noise((40 + at, 50), 80).convert("RGB").save(tmp_path / f"{at}.png")
    model = AutoModelForImageClassification.from_pretrained(folder).eval()
    halves = split(model, folder, read_user_data(images=[tmp_path]), 4, False)
    pixels = [one.batch["pixel_values"] for half in halves for one in half]
    assert [one.shape for one in pixels] == [(1, 3, 32, 32)] * 8
    assert not torch.equal(pixels[0], pixels[-1])


def test_equal_inputs_count_once_and_halves_share_none() -> None:
    folder = CHECKPOINTS / "bert"
    model = AutoModel.from_pretrained(folder)
    lines = [f"Licence number {at}." for at in range(8)]
    halves = split(model, folder, UserData("\n".join([*lines[:3], *lines])), 8, False)
    found = [example for half in halves for example in half]
    assert [one.name for one in found[:4]] == [f"line {at} of the text" for at in (1, 2, 3, 7)]
    assert len({one.digest for one in found}) == len(found) == 8
    again = split(model, folder, UserData("\n".join(lines)), 8, False)
    assert [one.digest for half in again for one in half] == [one.digest for one in found]
    with pytest.raises(UnsupportedModel, match=r"16 inputs .*, of which 9 repeat another, but 8"):
        split(model, folder, UserData("\n".join([*lines[:7], *9 * lines[:1]])), 8, False)


class Overflowing(GPT2LMHeadModel):
    """Returns NaN for a token, as a model with an overflow inside does for some inputs."""

    def forward(self, input_ids: torch.Tensor, **others: Any) -> Any:
        outputs = super().forward(input_ids, **others)
        outputs.logits[(input_ids == 7).any(-1)] = math.nan
        return outputs


def test_nan_is_refused_by_the_name_of_its_input(tmp_path: Path) -> None:
    folder = CHECKPOINTS / "gpt2"
    model = Overflowing.from_pretrained(folder).eval()

    def exact(ids: list[tuple[int, ...]]) -> list[dict[str, torch.Tensor]]:
        first, second = split(model, folder, UserData(tokens=tuple(ids)), 4, False)
        return exact_outputs(model, [*first, *second], ("logits",), tmp_path).outputs

    ids = [tuple(range(at + 8, at + 20)) for at in range(8)]
    assert len(exact(ids)) == 8
    with pytest.raises(UnsupportedModel, match="NaN in logits for input 3 of your data; leave it"):
        exact([*ids[:2], (*ids[2], 7), *ids[3:]])


def test_outputs_of_zeros_have_no_error(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").eval()
    examples = [Example({"input_ids": torch.arange(3 + at, 23 + at)[None]}) for at in range(2)]
    exact_outputs(model, examples, ("logits",), tmp_path)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
    with pytest.raises(UnsupportedModel, match="returns nothing but zeros in logits, so no error"):
        exact_outputs(model, examples, ("logits",), tmp_path)


def test_a_recording_of_nan_and_a_broken_picture_are_named(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    soundfile = pytest.importorskip("soundfile")
    sizes = {**WHISPER, "num_mel_bins": 80, "max_source_positions": 100}
    whisper = WhisperForConditionalGeneration(WhisperConfig(**sizes)).eval()
    WhisperFeatureExtractor(chunk_length=2).save_pretrained(tmp_path)
    audio, pictures = tmp_path / "audio", tmp_path / "pictures"
    audio.mkdir()
    pictures.mkdir()
    for at in range(8):
        wave_of = torch.full((800,), math.nan) if at == 5 else torch.randn(800)
        soundfile.write(audio / f"{at}.wav", wave_of.numpy(), 16000, subtype="FLOAT")
        image.effect_noise((40 + at, 50), 80).convert("RGB").save(pictures / f"{at}.png")
    with pytest.raises(UnsupportedModel, match=r"audio/5.wav has NaN in it; leave it out"):
        split(whisper, tmp_path, read_user_data(audio=audio), 4, False)
    recordings = read_user_data(audio=audio).audio
    with pytest.raises(UnsupportedModel, match=r"audio/5.wav has NaN in it"):
        from_audio(whisper, recordings, tmp_path, torch.float32)
    assert len(from_audio(whisper, recordings[:5], tmp_path, torch.float32)) == 5
    whole = (pictures / "6.png").read_bytes()
    (pictures / "6.png").write_bytes(whole[:-200])
    vit = AutoModelForImageClassification.from_pretrained(CHECKPOINTS / "vit").eval()
    with pytest.raises(UnsupportedModel, match=r"pictures/6.png cannot be read: .*truncated"):
        split(vit, CHECKPOINTS / "vit", read_user_data(images=[pictures]), 4, False)
    (pictures / "6.png").write_bytes(whole)
    split(vit, CHECKPOINTS / "vit", read_user_data(images=[pictures]), 4, False)


@pytest.fixture
def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    config = T5Config(vocab_size=61, decoder_start_token_id=0, **sizes)
    return T5ForConditionalGeneration(config).eval()


def test_a_decoder_gets_what_the_original_generates(t5: Any, tmp_path: Path) -> None:
    ids = tuple(tuple(range(at + 3, at + 15)) for at in range(8))
    told: list[tuple[float, float]] = []
    progress = lambda *seconds: told.append(seconds)  # noqa: E731
    choosing, held_out = split(t5, tmp_path, UserData(tokens=ids), 4, False, on_progress=progress)
    [(done, total)] = told  # all rows are decoded together
    assert done == total and len(choosing) == len(held_out) == 4
    batch = choosing[0].batch
    assert batch["input_ids"].tolist() == [list(ids[0])]
    generated = t5.generate(batch["input_ids"], do_sample=False, max_new_tokens=48)
    assert torch.equal(batch["decoder_input_ids"], generated)
    traced = traced_batch(t5, choosing[0])
    assert traced["input_ids"].shape == (2, 12) and len(traced["decoder_input_ids"]) == 2
    assert traced["decoder_input_ids"].shape[1] != 12


def test_rows_decoded_together_are_as_each_alone(t5: Any, tmp_path: Path) -> None:
    torch.manual_seed(3)
    for weight in t5.parameters():
        torch.nn.init.normal_(weight, 0.1, 0.6)
    lengths = (5, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 5, 7, 9)
    ids = tuple(tuple(torch.randint(3, 60, (n,)).tolist()) for n in lengths)
    told: list[float] = []
    halves = split(
        t5,
        tmp_path,
        UserData(tokens=ids),
        9,
        False,
        on_progress=lambda _, total: told.append(total),
    )
    found = [one.batch for half in halves for one in half]
    assert len(told) == 4  # two of 5 tokens, eight and three of 9, one of 7: four times together
    sizes = set()
    for row, batch in zip(ids, found, strict=True):
        alone = t5.generate(torch.tensor([row]), do_sample=False, max_new_tokens=48)
        assert batch["input_ids"].tolist() == [list(row)]
        assert torch.equal(batch["decoder_input_ids"], alone)
        sizes.add(alone.shape[1])
    assert len(sizes) > 1  # some rows end before others do


def test_a_decoder_without_a_first_token_is_refused(t5: Any, tmp_path: Path) -> None:
    t5.generation_config.decoder_start_token_id = t5.generation_config.bos_token_id = None
    ids = tuple((at + 3, 5) for at in range(8))
    said = "T5ForConditionalGeneration generates no tokens for its decoder: .*decoder_start_token"
    with pytest.raises(UnsupportedModel, match=said):
        split(t5, tmp_path, UserData(tokens=ids), 4, False)


def test_token_ids_have_to_be_in_the_vocabulary(t5: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="token id 61: the model has ids up to 60"):
        split(t5, tmp_path, UserData(tokens=((1, 61),) * 8), 4, False)


@pytest.mark.parametrize("line", ["{}", "[1.5]", "[true]", "[-1]", "[1", '["a"]', "3"])
def test_a_line_that_is_no_list_of_ids_is_refused(line: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text(f"[1, 2]\n\n{line}\n")
    with pytest.raises(UnsupportedModel, match="line 3: not a JSON list of token ids"):
        token_lists(file)


def test_token_lists_are_read_line_by_line(tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text("".join(json.dumps(ids) + "\n" for ids in ([7, 8], [9, 10, 11])))
    assert read_user_data(tokens=file) == UserData(tokens=((7, 8), (9, 10, 11)))
    file.write_text("[]\n")
    with pytest.raises(UnsupportedModel, match="contains no token ids"):
        token_lists(file)


LIBROSA = """
{0} requires the librosa library. But that was not found in your environment. You can install them
with pip: `pip install librosa`
"""


@pytest.mark.parametrize(
    ("what", "message", "line"),
    [
        ("audio", LIBROSA, "reading audio needs: pip install librosa"),  # of transformers 5.17
        ("audio", AUDIO_IMPORT_ERROR, "reading audio needs: pip install soundfile soxr"),
        ("images", VISION_IMPORT_ERROR, "reading images needs: pip install pillow"),
        ("images", TORCHVISION_IMPORT_ERROR, "reading images needs: pip install torchvision"),
        ("audio", "No module named 'numba'", "reading audio failed: No module named 'numba'"),
    ],
)
def test_a_missing_library_is_as_transformers_names_it(what: str, message: str, line: str) -> None:
    assert str(cannot_read(what, ImportError(message.format("load_audio")))) == line


def test_recordings_are_prepared_by_the_feature_extractor(tmp_path: Path) -> None:
    pytest.importorskip("soundfile")
    torch.manual_seed(0)
    sizes = {**WHISPER, "num_mel_bins": 80, "max_source_positions": 100}
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes)).eval()
    WhisperFeatureExtractor(chunk_length=2).save_pretrained(tmp_path)
    audio = tmp_path / "audio"
    audio.mkdir()
    for at in range(8):
        with wave.open(str(audio / f"{at}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            tone = (int(9000 * math.sin(0.02 * (at + 1) * t)) for t in range(8000))
            file.writeframes(struct.pack("<8000h", *tone))
    choosing, held_out = split(model, tmp_path, read_user_data(audio=audio), 4, False)
    batch = choosing[0].batch
    assert batch["input_features"].shape == (1, 80, 200)
    assert batch["decoder_input_ids"][0, 0] == 1
    assert not torch.equal(batch["input_features"], held_out[0].batch["input_features"])
