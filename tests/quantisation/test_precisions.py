"""Several precisions lie in one directory, and ``verify`` runs each of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from commands import good, refused
from live_models import CHECKPOINTS, ROOT, shaken
from tiny_models import WHISPER
from transformers import WhisperConfig, WhisperForConditionalGeneration

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import staged_output
from enjoyln_cli.onnx_export.programs import programs_of, save, with_weights
from enjoyln_cli.publish.precisions import (
    MadeFrom,
    can_add,
    keep_files,
    needs_data,
    record,
    records,
    require_addition,
    write_config,
)
from enjoyln_cli.quantisation.load_onnx import load_onnx
from enjoyln_cli.verification.generated_tokens import Agreement, agreement, continued

GPT2, LICENCE = CHECKPOINTS / "gpt2", ROOT / "LICENSE"
FROM = MadeFrom("/models/gpt2", None, "GPT2LMHeadModel")
ENTRY = {"format": "onnx", "scheme": "w8a8", **vars(FROM)}


def stored(out: Path, entry: Mapping[str, Any] = ENTRY, **verdict: Any) -> Path:
    """A directory with one precision, and a tokenizer that came from ``out``'s sibling."""
    for folder in (out, out.with_name("model")):
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
    record(out, "w8a8", entry, {"passed": True, "summary": "ok", **verdict})
    return out


def copies(out: Path) -> dict[str, Path]:
    return {"tokenizer.json": out.with_name("model") / "tokenizer.json"}


def test_another_precision_may_be_added(tmp_path: Path) -> None:
    out = stored(tmp_path / "out")
    assert can_add(out, force=False) and not can_add(out, force=True)
    require_addition(out, "w4a16", FROM, copies(out))
    assert needs_data(out)
    with staged_output(out, source=tmp_path / "model", force=True) as staged:
        (staged / "onnx").mkdir()
        (staged / "onnx" / "model_q4.onnx").write_bytes(b"4")
        keep_files(out, staged)
        record(staged, "w4a16", {**ENTRY, "scheme": "w4a16"}, {"passed": True})
    assert [*records(out)] == ["w8a8", "w4a16"]
    digests = json.loads((out / "enjoyln_verify.json").read_text())["sha256"]
    assert digests.keys() == {"enjoyln_precisions.json", "tokenizer.json", "onnx/model_q4.onnx"}
    require_addition(out, "float32", FROM, copies(out))


def test_a_directory_of_something_else_gets_nothing(tmp_path: Path) -> None:
    assert not can_add(tmp_path / "absent", force=False)
    (tmp_path / "mine").mkdir()
    assert not can_add(tmp_path / "mine", force=False)
    assert not can_add(stored(tmp_path / "out", {**ENTRY, "format": "openvino"}), force=False)


@pytest.mark.parametrize(
    ("precision", "made_from", "verdict", "why"),
    [
        ("w8a8", FROM, {}, "it has w8a8 already"),
        ("w4a16", MadeFrom("/models/other", None, "GPT2LMHeadModel"), {}, "it was made from /mod"),
        ("w4a16", MadeFrom("/models/gpt2", None, "GPT2Model"), {}, "it was made from /models/gpt2"),
        ("w4a16", FROM, {"passed": False, "summary": "error 0.5"}, "its last check failed (error"),
    ],
)
def test_what_may_not_be_added(
    precision: str, made_from: MadeFrom, verdict: dict[str, Any], why: str, tmp_path: Path
) -> None:
    out = stored(tmp_path / "out", **verdict)
    with pytest.raises(OutputError) as caught:
        require_addition(out, precision, made_from, copies(out))
    assert why in str(caught.value) and "cannot be added" in str(caught.value)


def test_another_revision_or_tokenizer_or_an_edit_is_refused(tmp_path: Path) -> None:
    at = MadeFrom("org/gpt2", "abc", "GPT2LMHeadModel")
    out = stored(tmp_path / "out", {**ENTRY, **vars(at)})
    require_addition(out, "w4a16", at, copies(out))
    other = MadeFrom("org/gpt2", "def", "GPT2LMHeadModel")
    with pytest.raises(OutputError, match="it was made from org/gpt2@abc"):
        require_addition(out, "w4a16", other, copies(out))
    (tmp_path / "model" / "tokenizer.json").write_text('{"other": 1}')
    with pytest.raises(OutputError, match="its tokenizer.json differs"):
        require_addition(out, "w4a16", at, copies(out))
    shutil.copy(tmp_path / "model" / "tokenizer.json", out)
    with pytest.raises(OutputError, match="tokenizer.json has changed since it was written"):
        require_addition(out, "w4a16", at, copies(out))


def test_a_failed_addition_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    out = stored(tmp_path / "out")
    before = {file.name: file.read_bytes() for file in out.iterdir()}

    def fail(staged: Path) -> None:
        keep_files(out, staged)
        record(staged, "w4a16", ENTRY, {})
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        staged_output(out, source=tmp_path / "model", force=True) as staged,
    ):
        fail(staged)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_the_config_names_programs_with_weights_beside_them(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    original = {"n_layer": 2, "enjoyln": {"version": 1}, "architectures": ["GPT2Model"]}
    written = {"n_layer": 2, "architectures": ["GPT2LMHeadModel"]}
    write_config(tmp_path, original, "GPT2LMHeadModel")
    assert json.loads((tmp_path / "config.json").read_text()) == written
    for suffix in ("_quantized", "_q4"):
        (tmp_path / "onnx" / f"model{suffix}.onnx_data").write_bytes(b"weights")
    write_config(tmp_path, original, "GPT2LMHeadModel")
    named = {"model_quantized.onnx": 1, "model_q4.onnx": 1}
    beside = {"transformers.js_config": {"use_external_data_format": named}}
    assert json.loads((tmp_path / "config.json").read_text()) == written | beside


def test_the_tokens_that_may_be_lost() -> None:
    recorded = {"inputs": 20, "tokens": 100, "same": 90}
    assert Agreement(20, 100, 80).passes(recorded, 1.1)
    assert not Agreement(20, 100, 70).passes(recorded, 1.1)
    assert Agreement(20, 200, 140).passes(recorded, 2.0)
    assert not Agreement(20, 200, 100).passes(recorded, 2.0)
    assert Agreement(4, 100, 100).passes(None, 1.1)
    assert not Agreement(4, 100, 99).passes(None, 1.1)


@pytest.mark.slow
def test_the_programs_generate_the_originals_tokens(tmp_path: Path) -> None:
    """And one changed weight shows."""
    torch.manual_seed(0)
    model = shaken(WhisperForConditionalGeneration(WhisperConfig(**WHISPER)), 0.3)
    batches = [{"input_features": torch.randn(1, 8, 40)} for _ in range(3)]
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    programs = programs_of(model, torch.float32)
    save(programs, tmp_path)
    prompts = continued(model, batches)
    found = agreement(load_onnx(tmp_path), prompts, model)
    assert found.inputs == 3 and found.same == found.tokens > 20
    with torch.no_grad():
        model.get_output_embeddings().weight[5:20] *= -3.0
    save(with_weights(programs, model), tmp_path)
    changed = agreement(load_onnx(tmp_path), prompts)
    assert changed.same < found.same and not changed.passes(None, 1.1)


@pytest.mark.slow
def test_precisions_are_added_verified_and_pushed(tmp_path: Path) -> None:
    out, folded, some = tmp_path / "out", tmp_path / "folded", ("--rotations", 0, "--inputs", 4)
    good("quantize", GPT2, "-o", out, "--text", LICENCE, *some)
    good("fold", GPT2, "-o", folded, "--no-verify")
    before = {name: (out / name).read_bytes() for name in ("config.json", "README.md")}
    other = shutil.copytree(GPT2, tmp_path / "other")
    line = refused("quantize", other, "-o", out, "--scheme", "w8a16", "--text", LICENCE, *some)
    assert f"it was made from {GPT2} (GPT2LMHeadModel)" in line
    line = refused("quantize", GPT2, "-o", out, "--text", LICENCE, *some)
    assert "it has w8a8 already" in line
    small = ("--max-error", 1e-9)
    refused("quantize", GPT2, "-o", out, "--scheme", "w8a16", "--text", LICENCE, *some, *small)
    assert all((out / name).read_bytes() == content for name, content in before.items())
    good("export", folded, "-o", out)
    assert "it has float32 already" in refused("export", folded, "-o", out)
    files = {file.name for file in (out / "onnx").iterdir()}
    assert files == {"model_quantized.onnx", "model.onnx"}
    card = (out / "README.md").read_text()
    assert all(line in card for line in ("## w8a8", "## float32", "--dtype float32", "_onnx("))
    shown = json.loads(good("verify", out, "--text", LICENCE, "--json"))
    assert shown["passed"] and [*shown["precisions"]] == ["w8a8", "float32"]
    quantised, exact = shown["precisions"].values()
    assert quantised["same_inputs"] and exact["differences"]["error"] < 1e-5
    assert exact["generated"]["same"] == exact["generated"]["tokens"] > 50
    assert quantised["generated"] == records(out)["w8a8"]["generated"]
    pushed = good("push", out, "me/gpt2", "--dry-run")
    assert all(f"onnx/{name}" in pushed for name in files)
    assert load_onnx(out, "fp32").dtype == torch.float32

    program = onnx.load(out / "onnx" / "model.onnx")
    norm = next(one for one in program.graph.initializer if one.name.endswith("ln_f.weight"))
    norm.raw_data = b"\0" * len(norm.raw_data)
    onnx.save(program, out / "onnx" / "model.onnx")
    assert "has changed since" in refused("verify", out, "--text", LICENCE, "-q")
    accept = ("--accept", "onnx/model.onnx")
    line = refused("verify", out, "--text", LICENCE, "-q", *accept)
    assert "not verified: float32: above the limit" in line
    line = refused("quantize", GPT2, "-o", out, "--scheme", "w8a16", "--text", LICENCE, *some)
    assert "its last check failed" in line or "has changed" in line


@pytest.mark.slow
@pytest.mark.parametrize(("model", "options"), [("bert", ["--widen-mlp"]), ("gpt2", [])])
def test_an_export_is_verified_without_data(model: str, options: list[str], tmp_path: Path) -> None:
    good("fold", CHECKPOINTS / model, "-o", tmp_path / "folded", "--no-verify", *options)
    good("export", tmp_path / "folded", "-o", tmp_path / "out", "--no-verify")
    assert "never verified" in refused("push", tmp_path / "out", "me/model")
    good("verify", tmp_path / "out")
    good("push", tmp_path / "out", "me/model", "--dry-run")
