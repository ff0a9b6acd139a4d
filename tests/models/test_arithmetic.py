"""``models.arithmetic``: modules that only pass their input to torch's ``layer_norm``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

from enjoyln_cli.models.arithmetic import VALUE, decision, layer_norm_eps

WIDTH, EPS = 5, 3e-6

Formula = Callable[[nn.LayerNorm, torch.Tensor], torch.Tensor]


def plain(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


LOOKED_AT: dict[str, Formula] = {
    "torch's own": plain,
    "channels": lambda norm, x: plain(norm, x.permute(0, 2, 1)).permute(0, 2, 1),
    "by another name": lambda norm, x: torch.layer_norm(
        x.transpose(0, 1), (WIDTH,), norm.weight, norm.bias, norm.eps
    ).transpose(1, 0),
    "in the dtype that it asks for": lambda norm, x: plain(norm, x.to(x.dtype)),
}

NOT_TORCHS: dict[str, Formula] = {
    "asks a size": lambda norm, x: plain(norm, x) if x.shape[0] < 99 else x,
    "asks a number of dimensions": lambda norm, x: plain(norm, x) if x.ndim == 3 else x,
    "asks for a layout": lambda norm, x: plain(norm, x) if x.is_contiguous() else x,
    "asks a value": lambda norm, x: plain(norm, x) if x.sum() < 1e9 else x,
    "asks for a value of its weight": lambda norm, x: plain(norm, x) if norm.weight[0] < 9 else x,
    "asks for a length": lambda norm, x: plain(norm, x) if len(x) < 99 else x,
    "clips": lambda norm, x: plain(norm, x).clamp(-1e9, 1e9),
    "moves by sizes": lambda norm, x: plain(norm, x.reshape(-1, WIDTH)).view(2, 3, WIDTH),
    "another weight": lambda norm, x: layer_norm(x, (WIDTH,), 1 * norm.weight, norm.bias, norm.eps),
    "swapped parameters": lambda norm, x: layer_norm(x, (WIDTH,), norm.bias, norm.weight, norm.eps),
    "twice": lambda norm, x: plain(norm, plain(norm, x)),
    "root mean square": lambda norm, x: nn.functional.rms_norm(x, (WIDTH,), norm.weight, norm.eps),
}


class Computing(nn.LayerNorm):
    """A LayerNorm with a given ``forward``."""

    def __init__(self, formula: Formula) -> None:
        super().__init__(WIDTH, eps=EPS, dtype=torch.float64)
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)
        self.formula = formula

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self, x)


def eps_of(formula: Formula) -> float | None:
    norm = Computing(formula)
    shape = (2, WIDTH, 3) if formula is LOOKED_AT["channels"] else (2, 3, WIDTH)
    x = torch.randn(shape, dtype=torch.float64)
    kept = x.clone()
    found = layer_norm_eps(norm, x, norm.weight, norm.bias)
    assert x.equal(kept)
    return found


@pytest.mark.parametrize("kind", LOOKED_AT)
def test_a_module_that_only_calls_torchs_layer_norm_is_recognised(kind: str) -> None:
    assert eps_of(LOOKED_AT[kind]) == EPS


@pytest.mark.parametrize("kind", NOT_TORCHS)
def test_a_module_that_reads_or_computes_anything_else_is_not(kind: str) -> None:
    assert eps_of(NOT_TORCHS[kind]) is None


def test_what_a_module_writes_into_its_input_is_seen() -> None:
    def written(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
        return plain(norm, x.add_(1.0))

    assert eps_of(written) is None


ONE_FORMULA: dict[str, Formula] = {
    "spelled out": lambda norm, x: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + EPS),
    "one plus": lambda norm, x: layer_norm(x, (WIDTH,), 1 + norm.weight, norm.bias, norm.eps),
    "a size that decides nothing": lambda norm, x: layer_norm(x, x.shape[-1:], norm.weight),
}
DECIDED: dict[str, tuple[Formula, str]] = {
    "a length": (lambda norm, x: x if x.shape[1] > 512 else 2 * x, "branches on the number of"),
    "a part": (lambda norm, x: x - x[:3].mean(), "computes slice"),
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
