"""``verify`` on the user's texts, images and recordings."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import transformers
from live_models import CHECKPOINTS
from packaging.version import Version
from rounding import TIMES
from transformers import PreTrainedTokenizerFast
from verify_cases import FAMILIES, VOCABULARY, folded, gpt2, proven, right_plan

from enjoyln_cli.comparison.data_files import read_user_data
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.verification.verify import verify


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("result")
    gpt2().save_pretrained(folder / "source")
    return folded(folder / "source", folder / "out", right_plan())


def words() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def test_verify_on_a_text(result: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(result, out)
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % 90}" for i in range(200)))
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        verify(out, text=text)
    words().save_pretrained(out)
    found = verify(out, text=text, write=False, accept=["tokenizer*"])
    assert found.passed, found.summary
    assert found.perplexity is not None
    assert found.perplexity["tokens"] == 5 * 37
    assert found.perplexity["folded"] == pytest.approx(
        found.perplexity["original"], rel=4 * TIMES * found.original_error
    )
    text.write_text("w1")
    with pytest.raises(UnsupportedModel, match="fewer than two tokens"):
        verify(out, text=text)


def test_a_text_that_is_not_utf_8_is_refused_first(result: Path, tmp_path: Path) -> None:
    text, stages = tmp_path / "latin1.txt", []
    text.write_bytes("w1 w2 Grüße".encode("latin-1"))
    with pytest.raises(UnsupportedModel, match="latin1.txt is not UTF-8 .* at byte 8") as caught:
        verify(result, text=text, device_map="disk", on_event=lambda *e: stages.append(e))
    assert "\n" not in str(caught.value)
    assert not stages, "loading would have told what it does"
    text.write_text("w1 w2 Grüße", encoding="utf-8")
    with pytest.raises(UnsupportedModel, match="tokenizer"):
        verify(result, text=text, device_map="disk", on_event=lambda *e: stages.append(e))
    assert stages


@pytest.mark.slow
def test_verify_on_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    if Version(transformers.__version__) < Version("5.23"):
        pytest.importorskip("torchvision")  # which processors need there
    source = CHECKPOINTS / "vit"
    out = folded(source, tmp_path / "out", proven(source, FAMILIES["vit"]))
    files = [tmp_path / f"{index}.png" for index in range(3)]
    for index, file in enumerate(files):
        image.effect_noise((40 + index, 50), 80).convert("RGB").save(file)
    found = verify(out, images=files, write=False)
    assert found.passed, found.summary
    assert found.rows > 3
    assert found.runtime_error != verify(out, write=False).runtime_error
    files[0].write_text("no image")
    with pytest.raises(UnsupportedModel, match=f"{files[0]} cannot be read"):
        verify(out, images=files)


def test_data_of_another_kind_than_the_model_takes(result: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="takes input_ids, so it cannot run on images"):
        verify(result, images=["x.png"])
    with pytest.raises(UnsupportedModel, match="no directory .*none with recordings"):
        verify(result, audio=tmp_path / "none")
    with pytest.raises(UnsupportedModel, match=r"none.txt cannot be read: No such file"):
        verify(result, text=tmp_path / "none.txt")
    assert read_user_data(images="x.png").images == ("x.png",)
    (tmp_path / "a.wav").touch()
    with pytest.raises(UnsupportedModel, match="recordings need a feature extractor, and .* none"):
        verify(result, audio=tmp_path)
    vit, text, ids = CHECKPOINTS / "vit", tmp_path / "text.txt", tmp_path / "ids.jsonl"
    text.write_text("A licence is short.")
    ids.write_text("[1, 2, 3]")
    out = folded(vit, tmp_path / "out", proven(vit, FAMILIES["vit"]))
    for option, file, kind in (("text", text, "texts"), ("tokens", ids, "token ids")):
        with pytest.raises(UnsupportedModel, match=f"takes pixel_values, .* cannot run on {kind}"):
            verify(out, **{option: file})


def test_text_and_tokens_at_once(result: Path) -> None:
    with pytest.raises(UnsupportedModel, match="choose one of them"):
        verify(result, text="some.txt", tokens="ids.jsonl")


@pytest.mark.slow
def test_a_text_without_a_language_head(tmp_path: Path) -> None:
    """The outputs are compared, but no perplexity is computed."""
    source = CHECKPOINTS / "bert"
    out = folded(source, tmp_path / "out", proven(source, "BertModel"))
    found = verify(out, text=Path(__file__), write=False)
    assert found.passed and found.perplexity is None and 0 < found.own_rows <= found.rows
    assert found == verify(out, text=str(__file__), write=False)
