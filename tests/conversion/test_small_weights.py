"""Norms with a small weight: their bias is divided by it only if rounding allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import good
from safetensors.torch import load_file
from tiny_models import GPT2, live

from enjoyln_cli.conversion.fold import convert
from enjoyln_cli.plan.fold_options import Options


def with_small_weight(norm: str, dtype: torch.dtype, small: float, folder: Path) -> Any:
    """A GPT-2 in ``folder`` in which one weight of a norm is so small that its bias matters."""
    config = transformers.CONFIG_MAPPING["gpt2"](**GPT2 | {"n_embd": 24, "n_head": 3})
    model = live("GPT2LMHeadModel", config)
    with torch.no_grad():
        model.get_submodule(norm).weight[5] = small
    model.to(dtype).save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float64).eval()


SMALL = [(torch.float16, 1e-5), (torch.float32, 0.0)]
UNCHECKED = {"options": Options(fold=False, rotate=True, untie=True), "verify": False}
IDS = torch.tensor([[3, 14, 15, 9, 2, 6], [5, 3, 5, 8, 9, 7]])


@pytest.mark.one_case
@pytest.mark.parametrize(("dtype", "small"), SMALL)
def test_a_bias_beside_a_small_weight_goes_into_the_readers(
    dtype: torch.dtype, small: float, tmp_path: Path
) -> None:
    original = with_small_weight("transformer.h.1.ln_2", dtype, small, tmp_path / "in")
    convert(tmp_path / "in", tmp_path / "out", **UNCHECKED)
    rotated = type(original).from_pretrained(tmp_path / "out", dtype=torch.float64).eval()
    assert not torch.allclose(rotated.transformer.wpe.weight, original.transformer.wpe.weight)
    fused, divided = rotated.transformer.h[1].ln_2, rotated.transformer.h[0].ln_2
    assert not fused.bias.any() and divided.bias.abs().max() > 0.1
    with torch.no_grad():
        expected = original(IDS).logits
        far = (rotated(IDS).logits - expected).abs().max() / expected.abs().max()
    assert far <= 4 * torch.finfo(dtype).eps


def test_a_small_weight_before_a_biasless_layer_is_an_obstacle(tmp_path: Path) -> None:
    """GPT-2's head has no bias, so the bias of the last norm cannot go there."""
    with_small_weight("transformer.ln_f", torch.float16, 1e-5, tmp_path / "in")
    said = good("rotate", tmp_path / "in", "-o", tmp_path / "out", "--untie", "--no-verify")
    plain = " ".join(said.split())
    assert "not rotated: 1 residual stream of 24 features (transformer.wte.weight)" in plain
    assert "too small: its bias divided by it has no finite value" in plain
    assert "because of transformer.ln_f" in plain
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert max(float(t.abs().max()) for t in tensors.values()) < 10


@pytest.mark.slow
def test_small_weights_are_divided_by_if_rounding_allows(tmp_path: Path) -> None:
    """GPT-J's attention has no biases. Rounding adds up over its norms as squares do."""
    config = transformers.GPTJConfig(
        n_embd=64, n_head=4, n_layer=3, rotary_dim=4, n_inner=96, vocab_size=199, n_positions=64
    )
    norms = [f"transformer.{name}" for name in ("h.0.ln_1", "h.1.ln_1", "h.2.ln_1", "ln_f")]

    def rotated(small: float, some: list[str]) -> str:
        model, folder = live("GPTJForCausalLM", config), tmp_path / f"{small}_{len(some)}"
        with torch.no_grad():
            for norm in norms:
                model.get_submodule(norm).bias.normal_()
                model.get_submodule(norm).weight.uniform_(0.5, 1.5)
                model.get_submodule(norm).weight[3] = small if norm in some else 1.0
                model.get_submodule(norm).bias[3] = 1.0
        model.float().save_pretrained(folder)
        return " ".join(good("rotate", folder, "-o", f"{folder}-rotated").split())

    for said in (rotated(5e-2, norms), rotated(2e-2, norms[:1])):
        assert "rotate 1 residual stream" in said and "same outputs up to float32" in said
    for said in (rotated(2e-2, norms), rotated(1e-2, norms[:1])):
        assert "its bias divided by it would be rounded" in said
        assert "not rotated: 1 residual stream" in said
