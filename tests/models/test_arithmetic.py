"""``models.arithmetic``: whether a module computes one formula for all inputs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

from enjoyln_cli.models.arithmetic import VALUE, Float64, decision

WIDTH, EPS = 5, 3e-6

Formula = Callable[[nn.LayerNorm, torch.Tensor], torch.Tensor]


def plain(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


class Computing(nn.LayerNorm):
    """A LayerNorm with a given ``forward``."""

    def __init__(self, formula: Formula) -> None:
        super().__init__(WIDTH, eps=EPS, dtype=torch.float64)
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)
        self.formula = formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self, x)


ONE_FORMULA: dict[str, Formula] = {
    "torch's own": plain,
    "by another name": lambda norm, x: torch.layer_norm(
        x.transpose(0, 1), (WIDTH,), norm.weight, norm.bias, norm.eps
    ).transpose(1, 0),
    "in the dtype that it asks for": lambda norm, x: plain(norm, x.to(x.dtype)),
    "twice": lambda norm, x: plain(norm, plain(norm, x)),
    "spelled out": lambda norm, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + EPS),
    "one plus": lambda norm, x: layer_norm(x, (WIDTH,), 1 + norm.weight, norm.bias, norm.eps),
    "a size that decides nothing": lambda norm, x: layer_norm(x, x.shape[-1:], norm.weight),
}
DECIDED: dict[str, tuple[Formula, str]] = {
    "a number of rows": (lambda norm, x: plain(norm, x) if len(x) < 99 else x, "branches on the"),
    "a length": (lambda norm, x: x if x.shape[1] > 512 else 2 * x, "branches on the number of"),
    "a part": (lambda norm, x: x - x[:3].mean(), "computes slice"),
    "a value of its weight": (lambda norm, x: x if norm.weight[0] < 9 else 2 * x, VALUE),
    "a value": (lambda norm, x: x if x.sum() > 1e9 else 2 * x, VALUE),
    "a limit": (lambda norm, x: (x - x.mean()).clamp(-9, 9), "computes clamp"),
}


@pytest.mark.parametrize("kind", ONE_FORMULA)
def test_sums_and_products_are_one_formula_for_all_inputs(kind: str) -> None:
    assert decision(Computing(ONE_FORMULA[kind]), (6, 3, WIDTH), {2}) is None


@pytest.mark.parametrize("kind", DECIDED)
def test_whatever_may_be_another_formula_elsewhere_is_named(kind: str) -> None:
    formula, reason = DECIDED[kind]
    assert reason in (decision(Computing(formula), (6, 3, WIDTH), {2}) or "")


def test_float32_means_float64_in_an_exact_run() -> None:
    x = torch.randn(3, 5, dtype=torch.float64)
    with Float64():
        soft = torch.nn.functional.softmax(x, dim=-1, dtype=torch.float32)
        values = (soft, x.float(), x.to(torch.float32), torch.ones(2, dtype=torch.float32))
        values += (torch.full((), 0.1), torch.full((), torch.finfo(x.dtype).min), torch.ones(2))
    assert {v.dtype for v in values} == {torch.float64}
    assert torch.equal(soft, x.softmax(-1))
    assert x.float().dtype == torch.ones(2).dtype == torch.float32
