"""Programs as the model that they were made from: called, in ``generate``, in pipelines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from custom_code import custom_checkpoint
from live_models import CHECKPOINTS, shaken
from tiny_models import BERT, WHISPER
from transformers import (
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertLMHeadModel,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
    pipeline,
)
from transformers.modeling_outputs import BaseModelOutput

import enjoyln_cli
from enjoyln_cli.errors import ModelNotFound, UnsupportedModel
from enjoyln_cli.onnx_export.programs import programs_of, save
from enjoyln_cli.quantisers.integer_products import round_weights

pytestmark = pytest.mark.slow
TEXTS = ["You may copy and distribute the", "This licence"]


def written(model: Any, folder: Path) -> Any:
    """A model as programs, loaded again."""
    save(programs_of(model, torch.float32), folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    return enjoyln_cli.load_onnx(folder)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The model, and a folder with its programs in float32 and in 8 bits."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").eval()
    programs = programs_of(model, torch.float32)
    save(programs, folder)
    small = {name: one.clone() for name, one in programs.models.items()}
    for one in small.values():
        round_weights(one, products=True)
    save(replace(programs, models=small), folder, "_quantized")
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    return model, folder


def padded() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "gpt2", padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return tokenizer, tokenizer(TEXTS, return_tensors="pt", padding=True)


@pytest.mark.parametrize("beams", [1, 3])
def test_a_decoder_generates_what_the_original_does(beams: int, gpt2: tuple[Any, Path]) -> None:
    (original, folder), (_, inputs) = gpt2, padded()
    settings = {"max_new_tokens": 24, "do_sample": False, "num_beams": beams}
    loaded = enjoyln_cli.load_onnx(folder, "fp32")
    assert type(loaded).__name__ == "GPT2LMHeadModel" and loaded.device.type == "cpu"
    tokens = loaded.generate(**inputs, **settings)
    assert torch.equal(tokens, original.generate(**inputs, **settings))


def test_in_8_bits_it_generates_nearly_the_same(gpt2: tuple[Any, Path]) -> None:
    (original, folder), (tokenizer, inputs) = gpt2, padded()
    loaded = enjoyln_cli.load_onnx(folder, "quantized")
    with torch.no_grad():
        exact = original(**inputs).logits
    assert 1e-4 < float((loaded(**inputs).logits - exact).norm() / exact.norm()) < 0.03
    settings = {"max_new_tokens": 12, "do_sample": False}
    same = loaded.generate(**inputs, **settings) == original.generate(**inputs, **settings)
    assert float(same.float().mean()) > 0.8
    write = pipeline("text-generation", model=loaded, tokenizer=tokenizer, max_new_tokens=5)
    (made,) = write(TEXTS[0])
    assert made["generated_text"].startswith(TEXTS[0])


def test_a_precision_has_to_be_chosen_among_several(gpt2: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = gpt2
    with pytest.raises(UnsupportedModel, match="pass one of fp32, quantized"):
        enjoyln_cli.load_onnx(folder)
    with pytest.raises(ModelNotFound, match="no precision quantised, only fp32, quantized"):
        enjoyln_cli.load_onnx(folder, "quantised")
    with pytest.raises(ModelNotFound, match="no program"):
        enjoyln_cli.load_onnx(tmp_path)


def test_an_encoder_with_its_decoder_generates(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = shaken(WhisperForConditionalGeneration(WhisperConfig(**WHISPER)))
    likely = original(torch.ones(1, 8, 40), decoder_input_ids=torch.tensor([[1, 5]])).logits[0]
    first, later = (int(row.argmax()) for row in likely)
    original.generation_config.begin_suppress_tokens = [first]
    original.generation_config.suppress_tokens = [later, 2]
    loaded = written(original, tmp_path)
    features = torch.randn(2, 8, 40, generator=torch.Generator().manual_seed(1))
    settings = {"max_new_tokens": 9, "do_sample": False}
    tokens = loaded.generate(features, **settings)
    assert torch.equal(tokens, original.generate(features, **settings))
    ids = torch.tensor([[1, 5, 9], [1, 7, 2]])
    with torch.no_grad():
        exact = original(features, decoder_input_ids=ids).logits
    found = loaded(features, decoder_input_ids=ids).logits
    torch.testing.assert_close(found, exact, rtol=1e-3, atol=1e-3)
    encoded, cache, steps = loaded.get_encoder()(features), None, []
    for column in ids.split(1, 1):
        told = {"encoder_outputs": encoded, "past_key_values": cache}
        step = loaded(decoder_input_ids=column, **told)
        cache = step.past_key_values
        steps.append(step.logits)
        encoded = BaseModelOutput(0 * encoded[0])  # the cache holds the keys of the first call
    torch.testing.assert_close(torch.cat(steps, 1), exact, rtol=1e-3, atol=1e-3)


def test_inputs_that_no_program_reads_are_refused(gpt2: tuple[Any, Path], tmp_path: Path) -> None:
    """Zeros are what BERT takes for types that are left out; GPT-2 adds embeddings to all types."""
    torch.manual_seed(0)
    original = shaken(BertLMHeadModel(BertConfig(**BERT, is_decoder=True)))
    loaded, ids = written(original, tmp_path / "bert"), torch.tensor([[7, 5, 9, 11]])
    types = {"token_type_ids": torch.zeros_like(ids)}
    settings = {"max_new_tokens": 5, "do_sample": False}
    made = original.generate(ids, **types, **settings)
    assert torch.equal(loaded.generate(ids, **types, **settings), made)
    said = "the programs take no token_type_ids"
    with pytest.raises(UnsupportedModel, match=said):
        loaded(ids, token_type_ids=torch.ones_like(ids))
    with pytest.raises(UnsupportedModel, match=said):
        enjoyln_cli.load_onnx(gpt2[1], "fp32")(ids, **types)
    whisper = shaken(WhisperForConditionalGeneration(WhisperConfig(**WHISPER)))
    loaded, features = written(whisper, tmp_path / "whisper"), torch.randn(1, 8, 40)
    mask = torch.ones_like(ids)
    given = {"decoder_input_ids": ids, "decoder_attention_mask": mask}
    assert loaded(features, **given).logits.shape[:2] == (1, 4)
    mask[0, 0] = 0
    with pytest.raises(UnsupportedModel, match="take no decoder_attention_mask; leave it out"):
        loaded(features, **given)


@pytest.mark.parametrize(
    ("task", "name", "kind"),
    [
        ("feature-extraction", "bert", AutoModel),
        ("text-classification", "bert", AutoModelForSequenceClassification),
        ("image-classification", "vit", AutoModelForImageClassification),
    ],
)
def test_pipelines_of_models_that_do_not_generate(
    task: str, name: str, kind: Any, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    original = shaken(kind.from_pretrained(CHECKPOINTS / name), 0.1)
    loaded = written(original, tmp_path)
    if name == "bert":
        inputs, parts = TEXTS, {"tokenizer": AutoTokenizer.from_pretrained(CHECKPOINTS / name)}
    else:
        image = pytest.importorskip("PIL.Image")
        inputs = [image.effect_noise((40, 50), 80).convert("RGB") for _ in TEXTS]
        parts = {"image_processor": AutoImageProcessor.from_pretrained(CHECKPOINTS / name)}
    both = [pipeline(task, model=model, **parts) for model in (original, loaded)]
    exact, found = (torch.tensor(numbers(run(inputs))) for run in both)
    assert len(exact) > 1
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)


def numbers(results: Any) -> list[float]:
    """All numbers in the results of a pipeline."""
    if isinstance(results, float):
        return [results]
    inner = results.values() if isinstance(results, dict) else results
    return [x for one in inner if not isinstance(one, str) for x in numbers(one)]


def test_the_pipeline_of_speech(tmp_path: Path) -> None:
    torch.manual_seed(0)
    original = shaken(WhisperForConditionalGeneration(WhisperConfig(**WHISPER)))
    model = json.loads((CHECKPOINTS / "gpt2" / "tokenizer.json").read_text())["model"]
    tokenizer = WhisperTokenizer(vocab=model["vocab"], merges=[*map(tuple, model["merges"])])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|notimestamps|>"]})
    extractor = WhisperFeatureExtractor(8, chunk_length=1, hop_length=400)
    parts = {"tokenizer": tokenizer, "feature_extractor": extractor, "max_new_tokens": 9}
    sound = np.random.default_rng(0).standard_normal(16000)
    exact, found = (
        pipeline("automatic-speech-recognition", model=one, **parts)(sound)["text"]
        for one in (original, written(original, tmp_path))
    )
    assert found == exact and len({*exact}) > 2


OWN = """
from transformers import GPT2Config, GPT2LMHeadModel

class OwnConfig(GPT2Config):
    model_type = "own"

    def __init__(self, **given):
        sizes = dict(n_layer=1, n_head=2, n_embd=8, vocab_size=37, n_positions=31)
        super().__init__(**sizes | dict(bos_token_id=1, eos_token_id=2) | given)

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


@pytest.mark.slow
def test_code_that_comes_with_a_result_has_to_be_trusted(tmp_path: Path) -> None:
    source = custom_checkpoint(tmp_path / "own", OWN, fill=lambda model: shaken(model.float()))
    original = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True).eval()
    assert enjoyln_cli.fold(
        source, tmp_path / "folded", trust_remote_code=True, verify=False
    ).plan.folded
    folder = tmp_path / "onnx"
    written = enjoyln_cli.export(tmp_path / "folded", folder, trust_remote_code=True)
    assert written.programs["model"].nodes["RMSNormalization"] == 3
    with pytest.raises(UnsupportedModel, match="review it, then pass --trust-remote-code"):
        enjoyln_cli.load_onnx(folder)
    loaded = enjoyln_cli.load_onnx(folder, trust_remote_code=True)
    ids = torch.tensor([[5, 6, 7, 8], [9, 3, 4, 1]])
    with torch.no_grad():
        exact = original(ids).logits
    torch.testing.assert_close(loaded(ids).logits, exact, rtol=1e-4, atol=1e-4)
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    assert torch.equal(loaded.generate(ids, **settings), original.generate(ids, **settings))
