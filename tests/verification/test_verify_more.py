"""Faults that outputs alone may hide: settings, missing weights, NaN, rare positions, float64."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import enjoyln
from live_models import CHECKPOINTS
from stored_files import changed, rewritten
from verify_cases import POSITIONS, D, folded, gpt2, right_plan

import enjoyln_cli
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.comparison import batches as inputs
from enjoyln_cli.comparison.metrics import distances
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel, VerificationFailed
from enjoyln_cli.rewrite.written_files import written_files
from enjoyln_cli.verification.verify import verify


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "source"
    gpt2().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def out(source: Path) -> Path:
    return folded(source, source.parent / "out", right_plan())


def with_config(found: Path, into: Path, **entries: Any) -> Path:
    """A copy with changed config entries; entries that are ``None`` are removed."""
    shutil.copytree(found, into)
    config = json.loads((into / "config.json").read_text()) | entries
    config = {key: value for key, value in config.items() if value is not None}
    (into / "config.json").write_text(json.dumps(config))
    return rewritten(into)


# config.json.


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("layer_norm_epsilon", 1e-3, r"layer_norm_epsilon \(0.001, in the original 1e-05\)"),
        ("tie_word_embeddings", False, r"tie_word_embeddings \(false, in the original true\)"),
        ("architectures", ["GPT2ForSequenceClassification"], "architectures"),
        ("task_specific_params", {"a": {"b": 1}}, r"task_specific_params.a.b \(1, in the original"),
    ],
)
def test_another_setting_fails(out: Path, tmp_path: Path, key: str, value: Any, words: str) -> None:
    found = verify(with_config(out, tmp_path / "out", **{key: value}), write=False)
    assert not found.passed
    (line,) = (one for one in found.failures if "config.json" in one)
    assert re.search(words, line), line
    assert "\n" not in line and len(line) < 200


def test_a_setting_with_which_it_cannot_be_loaded(out: Path, tmp_path: Path) -> None:
    other = with_config(out, tmp_path / "out", n_positions=POSITIONS + 1)
    with pytest.raises(BadCheckpoint, match=r"config.json differs .* n_positions \(41, .* 40\)"):
        verify(other, write=False)


def test_settings_about_the_origin_may_differ(out: Path, tmp_path: Path) -> None:
    """Other names of the same setting, and defaults that are left out, are no difference either."""
    entries = {"_name_or_path": "there", "transformers_version": "5.0.0", "dtype": None}
    entries |= {"torch_dtype": "float32", "architectures": None, "resid_pdrop": None}
    assert verify(with_config(out, tmp_path / "out", **entries), write=False).passed


def test_a_result_that_transformers_has_saved_again(out: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    model.save_pretrained(tmp_path / "out")
    shutil.copy(out / "enjoyln_plan.json", tmp_path / "out")
    assert verify(tmp_path / "out", write=False).failures == (
        "enjoyln_verify.json is missing; restore it, or if the change is meant pass --accept "
        "enjoyln_verify.json",
    )
    found = verify(tmp_path / "out", accept=["enjoyln_verify.json"])
    assert found.passed, found.summary
    assert verify(tmp_path / "out").passed, "the files are recorded now"


def test_the_advice_for_files_that_changed(out: Path, tmp_path: Path) -> None:
    other = shutil.copytree(out, tmp_path / "out")

    def advice() -> str:
        return written_files(Source(str(other), other, None)).failure

    (other / "notes.txt").write_text("mine")
    said = "notes.txt was added; remove it, or if the change is meant pass --accept notes.txt"
    assert advice() == said
    (other / "generation_config.json").write_text("{}")
    assert "; undo the changes, or if they are meant pass --accept " in advice()
    (other / "notes.txt").unlink()
    assert "has changed since it was written; restore it, or if the change is meant" in advice()


# Weights that are not there.


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["transformer.h.0.attn.c_attn.weight"], "h.0.attn.c_attn.weight, which GPT2LMHeadModel"),
        (["transformer.ln_f.bias", "transformer.ln_f.weight"], "ln_f.bias, .*ln_f.weight, which"),
        (["transformer.wte.weight"], "transformer.wte.weight"),
    ],
)
def test_a_weight_missing_in_both_checkpoints(
    source: Path, out: Path, tmp_path: Path, names: list[str], words: str
) -> None:
    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in names:
            del tensors[name]

    before = changed(source, tmp_path / "source", edit)
    after = changed(out, tmp_path / "out", edit)
    with pytest.raises(BadCheckpoint, match=f"source does not store .*{words}.*fetch") as caught:
        verify(after, against=before, write=False)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_a_new_head_that_nobody_trained(source: Path, tmp_path: Path) -> None:
    """A class that the user chooses may have parts that the checkpoint does not store."""
    head = "GPT2ForSequenceClassification"
    result = enjoyln_cli.fold(source, tmp_path / "out", model_class=head)
    assert result.verification.passed


# NaN and infinity.


@pytest.mark.slow
def test_a_model_that_returns_nan_does_not_pass(source: Path, tmp_path: Path) -> None:
    """It passes only with ``allow_nonfinite``."""
    name = "transformer.h.0.ln_1.bias"
    before = changed(source, tmp_path / "in", lambda t: t[name].fill_(torch.nan))
    with pytest.raises(VerificationFailed, match=f"cannot compare .*{name}.*nonfinite"):
        enjoyln_cli.fold(before, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    result = enjoyln_cli.fold(before, tmp_path / "out", allow_nonfinite=True)
    assert result.verification.passed
    assert verify(tmp_path / "out", write=False).passed


def test_nan_in_a_weight_that_is_centred(source: Path, tmp_path: Path) -> None:
    name = "transformer.h.0.attn.c_proj.weight"
    before = changed(source, tmp_path / "in", lambda t: t[name][3, 5].fill_(float("nan")))
    result = enjoyln_cli.fold(before, tmp_path / "out", allow_nonfinite=True)
    assert result.verification.passed, result.verification.summary
    other = changed(tmp_path / "out", tmp_path / "b", lambda t: t[name][7].fill_(float("nan")))
    found = verify(other, write=False)
    assert not found.passed and name in found.summary


def test_nan_that_no_weight_explains(source: Path, tmp_path: Path) -> None:
    """``allow_nonfinite`` does not excuse it."""
    before = with_config(source, tmp_path / "in", layer_norm_epsilon=-100.0)
    with pytest.raises(VerificationFailed, match="its weights are finite, so check its config"):
        enjoyln_cli.fold(before, tmp_path / "out", allow_nonfinite=True)


@pytest.mark.slow
def test_a_padding_token_beyond_the_embedding(source: Path, tmp_path: Path) -> None:
    before = with_config(source, tmp_path / "in", pad_token_id=10**6)
    assert enjoyln_cli.fold(before, tmp_path / "out").verification.passed


# Positions.


def test_outputs_of_any_shape() -> None:
    for shape in ((5,), (4, 3), (2, 3, 4, 5), (0, 3)):
        value = torch.ones(shape)
        (one,) = distances([{"a": value * 1.5}], [{"a": value}]).values()
        assert one.relative == (0.5 if value.numel() else 0.0)
        assert one.squares.shape == one.sizes.shape == shape[:1]
    (other,) = distances([{"a": torch.ones(3)}], [{"a": torch.ones(4)}]).values()
    assert not other.comparable


def test_an_error_at_one_late_position(tmp_path: Path) -> None:
    """Elsewhere the result is more exact than the original, so the ratio over all is low."""
    model = gpt2().half()
    with torch.no_grad():
        model.transformer.wpe.weight.add_(20.0)
    model.save_pretrained(tmp_path / "in")
    out = folded(tmp_path / "in", tmp_path / "out", right_plan())
    right = verify(out, write=False)
    assert right.passed and right.ratio < 0.5
    noise = torch.randn(D, generator=torch.Generator().manual_seed(1)).half()

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["transformer.wpe.weight"][-1] += 0.06 * (noise - noise.mean())

    wrong = changed(out, tmp_path / "wrong", edit)
    for samples in (None, 4, 1):
        found = verify(wrong, write=False, samples=samples)
        assert found.ratio < 1.25 and found.stock_ratio < 1.25
        (failure,) = found.failures
        assert "transformer.wpe.weight: not the original's tensor" in failure


def test_a_writer_that_matters_at_the_last_position_alone(tmp_path: Path) -> None:
    """The plan leaves out the position table, in which one row has a mean."""
    model = gpt2()
    with torch.no_grad():
        table = model.transformer.wpe.weight
        table.copy_((table * 64).round() / 64)  # sums of these values are exact
        table[:, 0] -= table.sum(1)
        table[-1] += 1e-3
    model.save_pretrained(tmp_path / "in")
    plan = right_plan()
    left = tuple(w for w in plan.centred_weights if w.parameter != "transformer.wpe.weight")
    found = verify(
        folded(tmp_path / "in", tmp_path / "out", replace(plan, centred_weights=left)), write=False
    )
    assert not found.passed
    assert found.identity_error > 1e-9 and "the edits change the function" in found.summary


def test_rows_reach_the_end_of_the_table() -> None:
    model = gpt2()
    (*_, last) = inputs.seeded_batches(model, 16, 0, torch.float32)
    late, longer, *_ = inputs.at_last_positions(model, last, 0, torch.float32)
    assert late["position_ids"].shape == last["input_ids"].shape
    assert int(late["position_ids"].max()) == POSITIONS - 1
    assert longer["input_ids"].shape[1] == POSITIONS
    unproven = inputs.at_last_positions(model, last, 0, torch.float32, ("position_ids",))
    assert all("position_ids" not in batch for batch in unproven)
    rotary = transformers.PhiForCausalLM.from_pretrained(CHECKPOINTS / "phi")
    batches = inputs.seeded_batches(rotary, 16, 0, torch.float32)
    assert not list(inputs.at_last_positions(rotary, batches[-1], 0, torch.float32))


def test_a_decoder_that_takes_no_positions_gets_longer_rows(tmp_path: Path) -> None:
    config = transformers.BartConfig(
        vocab_size=90, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=70,
    )  # fmt: skip
    model = transformers.BartModel(config).eval()
    (*_, last) = inputs.seeded_batches(model, 16, 0, torch.float32)
    late = next(inputs.at_last_positions(model, last, 0, torch.float32))
    assert late["input_ids"].shape[1] == 70 and late["decoder_input_ids"].shape[1] == 70
    assert late["input_ids"].numel() <= 8 * 32


# Float64.


def test_a_float64_checkpoint(tmp_path: Path) -> None:
    """A correct fold passes; a fold with a weight that is off by a billionth does not.

    No narrower dtype can represent the weights.
    """
    model = gpt2().double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(1e-3 * noise * parameter.abs())
    model.save_pretrained(tmp_path / "in")
    source, plan = tmp_path / "in", right_plan()
    out = folded(source, tmp_path / "out", plan)
    found = verify(out, write=False)
    assert found.passed, found.summary
    assert found.compute_dtype == "float64"
    assert 0.1 < found.ratio < 1.25 and 0.1 < found.stock_ratio < 1.25
    assert 0 < found.original_error < 1e-13
    tensor = next(w.tensor for w in plan.centred_weights if len(w.shape) > 1)
    wrong = changed(out, tmp_path / "wrong", lambda t: t[tensor].mul_(1 + 1e-9))
    found = verify(wrong, write=False)
    assert not found.passed
    assert tensor in found.summary and found.ratio > 100 and found.stock_ratio > 100


def test_a_dtype_that_a_model_does_not_run_in(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.float16:
            raise NotImplementedError("no such kernel")
        return torch.nn.functional.gelu(x, approximate="tanh")

    monkeypatch.setattr(transformers.activations.NewGELUActivation, "forward", refuse)
    with pytest.raises(UnsupportedModel, match="does not run in float16; pass.*: no such kernel"):
        verify(out, dtype="float16", write=False)


def test_what_cannot_be_kept_is_shown_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a directory where nobody may write."""

    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    out = tmp_path / "out"
    enjoyln_cli.fold(CHECKPOINTS / "gpt2", out, verify=False)
    monkeypatch.setattr("enjoyln_cli.events.write_whole", refuse)
    result = enjoyln("verify", out)
    assert result.exit_code == 0 and "original" in result.stdout
    warning = f"warning: {out / 'enjoyln_verify.json'} is not written: Permission denied"
    assert warning in result.stderr.splitlines()


OWN_CODE = """
from transformers import GPT2Config, GPT2LMHeadModel


class OwnConfig(GPT2Config):
    model_type = "own"


class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


@pytest.mark.slow
def test_a_check_makes_only_calls_that_are_proven(tmp_path: Path) -> None:
    """A model with code of its own refuses any other call, for example with ``position_ids``."""
    source = with_config(
        CHECKPOINTS / "gpt2",
        tmp_path / "own",
        model_type="own",
        architectures=["OwnModel"],
        auto_map={"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    )
    (source / "own.py").write_text(OWN_CODE)
    made = enjoyln_cli.fold(source, tmp_path / "out", trust_remote_code=True)
    assert made.verification is not None and made.verification.passed
    assert made.plan.covered is not None
