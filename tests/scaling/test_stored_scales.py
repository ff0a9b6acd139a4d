"""Checkpoints whose streams are held at another scale, in their stock class."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import refused
from large_features import TOKENS, with_large_features
from transformers import AutoModelForCausalLM

from enjoyln_cli import fold, verify
from enjoyln_cli.errors import NothingToFold, UnsupportedModel
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.recipe.read import load_recipe

ROTATE = Options(fold=False, rotate=True)


def largest_square(folder: Path) -> float:
    """The largest sum of the squares of a row of the residual stream."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    with torch.no_grad():
        states = model(torch.tensor(TOKENS.tokens), output_hidden_states=True).hidden_states
    return max(float(x.square().sum(-1).max()) for x in states[:-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "field"),
    [
        ("PhiForCausalLM", Options(), "layer_norm_eps"),
        ("PhiForCausalLM", Options(rotate=True, merge="affine"), "layer_norm_eps"),
        ("LlamaForCausalLM", ROTATE, "rms_norm_eps"),
        ("Gemma3ForCausalLM", Options(), "rms_norm_eps"),
        ("GPT2LMHeadModel", Options(untie=True), "layer_norm_epsilon"),
    ],
)
def test_the_stock_class_computes_the_same(
    name: str, options: Options, field: str, tmp_path: Path
) -> None:
    """The check that ``fold`` makes compares it in float64; it fails without the scale of eps."""
    source, out = with_large_features(name, tmp_path / "model"), tmp_path / "out"
    made = fold(source, out, options=options, fp16_data=TOKENS)
    assert made.verification is not None and made.verification.identity_error < 1e-12
    assert largest_square(source) > 65504 > largest_square(out) * 4
    shifts = {line["shift"] for line in load_recipe(out / "enjoyln_recipe.yaml").scaled.values()}
    before, after = (json.loads((at / "config.json").read_text()) for at in (source, out))
    assert after[field] == before[field] / 4 ** max(shifts)
    assert verify(out, seconds=5).passed
    (out / "config.json").write_text(json.dumps({**after, field: before[field]}))
    assert field in verify(out, seconds=5, write=False, accept=("config.json",)).failures[0]


@pytest.mark.slow
def test_an_eps_in_the_code_becomes_an_entry_of_another_class(tmp_path: Path) -> None:
    """OLMo's norms have 1e-5 in the code, Llama's an entry; with a feature less it has a factor."""
    source = with_large_features("OlmoForCausalLM", tmp_path / "model")
    for less, factor in ((False, 1.0), (True, 33 / 32)):
        out = tmp_path / f"out{less}"
        made = fold(source, out, stored_as="llama", compress=less, fp16_data=TOKENS)
        assert made.verification is not None and made.verification.identity_error < 1e-6
        (scaled,) = load_recipe(out / "enjoyln_recipe.yaml").scaled.values()
        config = json.loads((out / "config.json").read_text())
        assert config["rms_norm_eps"] == pytest.approx(1e-5 / 4 ** scaled["shift"] * factor)
        assert largest_square(source) > 4 * largest_square(out) and verify(out, seconds=5).passed
        (out / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
        failed = verify(out, seconds=5, write=False, accept=("config.json",)).failures
        assert any("rms_norm_eps" in failure for failure in failed)


@pytest.mark.slow
def test_an_eps_in_the_code_is_refused_or_has_no_effect(tmp_path: Path) -> None:
    """OPT's norms have 1e-5, which is nothing to rows with large features."""
    few = with_large_features("OPTForCausalLM", tmp_path / "few", tokens=[3])
    with pytest.raises(UnsupportedModel, match="has its eps of 1e-05 in its code.* float32"):
        fold(few, tmp_path / "out", fp16_data=TOKENS)
    made = fold(
        with_large_features("OPTForCausalLM", tmp_path / "all"),
        tmp_path / "out",
        fp16_data=TOKENS,
    )
    assert made.plan.scaled and not made.plan.settings
    assert made.verification is not None and made.verification.identity_error < 1e-12


@pytest.mark.slow
def test_what_cannot_be_scaled_is_named(tmp_path: Path) -> None:
    """GPT-2's table is also its head; weights of float16 have no smaller numbers."""
    source = with_large_features("GPT2LMHeadModel", tmp_path / "gpt2")
    with pytest.raises(UnsupportedModel, match="cannot hold its input at another scale: .*wte"):
        fold(source, tmp_path / "out", fp16_data=TOKENS)
    small = with_large_features("PhiForCausalLM", tmp_path / "phi", dtype=torch.float16)
    model = AutoModelForCausalLM.from_pretrained(small)
    with torch.no_grad():
        model.model.layers[0].mlp.fc2.bias.fill_(169 * 2.0**-24)
    model.save_pretrained(small)
    with pytest.raises(UnsupportedModel, match="fc2.bias would be rounded at .*--dtype float32"):
        fold(small, tmp_path / "out", fp16_data=TOKENS)
    assert fold(small, tmp_path / "wide", fp16_data=TOKENS, dtype="float32").plan.scaled
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_nothing_is_scaled_without_need(tmp_path: Path) -> None:
    source = with_large_features("Gemma3ForCausalLM", tmp_path / "gemma", large=0.0)
    with pytest.raises(NothingToFold, match="RMSNorm already"), pytest.warns(match="so nothing is"):
        fold(source, tmp_path / "out", fp16_data=TOKENS)
    source = with_large_features("PhiForCausalLM", tmp_path / "phi", large=0.0)
    made = fold(source, tmp_path / "out", fp16_data=TOKENS, verify=False)
    assert made.plan.folded and not made.plan.scaled


def test_the_option_needs_data(tmp_path: Path) -> None:
    for command in ("fold", "rotate"):
        said = refused(command, str(tmp_path), "-o", str(tmp_path / "x"), "--fp16-safe", status=2)
        assert "your data are needed" in said
