"""Modules that compute LayerNorm for common inputs only are no LayerNorms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_models import install
from spelled_norms import WIDTH, Block, Formula, Spelled, eps_outside, plain

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.norm_probe import LayerNormSpec, examine


class Trap(Spelled):
    """Computes LayerNorm for common inputs, and something else for others."""

    def __init__(self, kind: str) -> None:
        super().__init__(TRAPS[kind][0], 0.0 if kind == "eps outside" else 1e-6)


def looped(m: Any, x: torch.Tensor) -> torch.Tensor:
    parts = [x[:, i] for i in range(x.shape[1])] if x.ndim > 2 else []
    return plain(m, torch.stack(parts, 1) if parts else x)


def written(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = plain(m, x)
    x.copy_(y)
    return y


MORE = "which is not part of a LayerNorm"
VALUES, ROWS = "reads values of its input", "branches on the number of rows"
EXTREME = "not compute LayerNorm of rows that are tiny, huge or constant"
PARAMETERS = "where its parameters are"
TRAPS: dict[str, tuple[Formula, str]] = {
    "by value": (lambda m, x: x if x.max() > 1e9 else plain(m, x), VALUES),
    "by item": (lambda m, x: x if float(x.sum()) == 12345.0 else plain(m, x), VALUES),
    "by length": (lambda m, x: x if x.ndim > 2 and x.shape[1] > 512 else plain(m, x), ROWS),
    "by rows": (lambda m, x: x if x.numel() > 1_000_000 else plain(m, x), ROWS),
    "one token": (lambda m, x: x * 2 if x.ndim > 2 and x.shape[1] == 1 else plain(m, x), ROWS),
    "loop": (looped, ROWS),
    "half": (
        lambda m, x: x.clamp(-3, 3) if x.dtype == torch.bfloat16 else plain(m, x),
        f"computes clamp, {MORE}",
    ),
    "input clamped": (lambda m, x: plain(m, x.clamp(-1e7, 1e7)), f"computes clamp, {MORE}"),
    "finite": (lambda m, x: plain(m, torch.nan_to_num(x)), f"computes nan_to_num, {MORE}"),
    "no small variance": (
        lambda m, x: plain(m, x, variance=lambda v: v.clamp_min(1e-14)),
        f"computes clamp_min, {MORE}",
    ),
    "chosen variance": (
        lambda m, x: plain(
            m, x, variance=lambda v: torch.where(v > 1e-20, v, torch.ones_like(v))
        ),
        MORE,
    ),
    "rows together": (
        lambda m, x: plain(m, x, variance=lambda v: v + 1e-13 * v.mean()), EXTREME,
    ),
    "eps outside": (lambda m, x: eps_outside(m, x, 1e-12), EXTREME),
    "weight clamped": (
        lambda m, x: plain(m, x, weight=lambda w: w.clamp(-50, 50)), f"computes clamp, {MORE}",
    ),
    "weight absolute": (lambda m, x: plain(m, x, weight=lambda w: w.square().sqrt()), ""),
    "weight relu": (
        lambda m, x: plain(m, x, weight=lambda w: (w + w.square().sqrt()) / 2), "",
    ),
    "weight shifted": (lambda m, x: plain(m, x, weight=lambda w: w + 1e-8), PARAMETERS),
    "constant": (lambda m, x: plain(m, x, bias=lambda b: b + 1e-8), PARAMETERS),
    "scaled": (
        lambda m, x: plain(m, x, weight=lambda w: w * (1 + 3e-6)), "not compute LayerNorm of",
    ),
    "saturates": (
        lambda m, x: 1e12 * (plain(m, x) / 1e12).tanh(), f"computes tanh, {MORE}",
    ),
    "writes": (written, f"computes copy_, {MORE}"),
}  # fmt: skip


@pytest.mark.parametrize("kind", TRAPS)
def test_a_layer_norm_for_common_inputs_only_is_none(kind: str) -> None:
    torch.manual_seed(0)
    found = examine(Trap(kind), {})
    assert not isinstance(found, LayerNormSpec) and TRAPS[kind][1] in (found or "")


OF_EVERY_ANSWER = [
    "by value", "one token", "half", "rows together", "weight absolute", "weight shifted",
    "writes",
]  # fmt: skip
"""An analysis and an installation read no more than what is asserted above."""


@pytest.mark.parametrize("kind", OF_EVERY_ANSWER)
def test_a_layer_norm_for_common_inputs_only_is_kept(kind: str) -> None:
    torch.manual_seed(0)
    model, reason = Block(Trap(kind)).double(), TRAPS[kind][1]
    if kind != "by value":  # with which no graph can be captured
        norms = analyze_module(model, torch.randn(2, 5, WIDTH).double()).plan.norms
        assert [v.status for v in norms] == ["stays_layernorm"] * bool(reason)
        assert all(reason in v.reason for v in norms)
    with pytest.raises(UnsupportedModel, match="norm: Trap does not compute LayerNorm"):
        install(model, ["norm"], ())
