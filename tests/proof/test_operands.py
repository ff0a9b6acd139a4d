"""Models whose ops take operands of unusual shapes: folded exactly, or kept with the reason.

Each is analysed and folded in memory on float64 weights that are not centred, and compared on
inputs other than those that were traced.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from folding_live import randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.runtime.install import fold_in_memory

D = 6


class Model(nn.Module):
    """``compute(model, x)`` and one norm after it."""

    def __init__(self, compute: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.compute = compute
        self.first, self.second = nn.Linear(D, D), nn.Linear(D, D)
        self.row, self.rows = nn.Parameter(torch.zeros(D)), nn.Parameter(torch.zeros(D, D))
        self.table = nn.Parameter(torch.zeros(9, D))
        self.deep = nn.Parameter(torch.zeros(D, 2, D))
        self.none = nn.Parameter(torch.zeros(0, D))
        self.hollow = nn.Linear(0, D)
        self.norm = nn.LayerNorm(D)
        self.head = nn.Linear(D, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.compute(self, x)))


def inputs(seed: int, tokens: int = D) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(D, tokens, D, generator=generator, dtype=torch.float64) + 0.5


def folded(compute: Callable[..., torch.Tensor]) -> bool:
    """Whether the norm is folded; asserts that the outputs stay the same."""
    model = randomised(Model(compute))
    plan = analyze_module(model, inputs(1)).plan
    others = [inputs(2), 100 * inputs(3)]
    with torch.no_grad():
        before = [model(x) for x in others]
        fold_in_memory(model, plan)
        for x, expected in zip(others, before, strict=True):
            torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10, equal_nan=True)
    return bool(plan.folded)


def attended(
    values: Callable[[nn.Module], torch.Tensor], **how: bool
) -> Callable[..., torch.Tensor]:
    return lambda m, x: F.scaled_dot_product_attention(x, x, values(m), **how)


FOLDED: dict[str, Callable[..., torch.Tensor]] = {
    "a linear layer": lambda m, x: m.first(x),
    "a linear layer of one token": lambda m, x: m.first(x[0, 0]),
    "a bias alone with a product of matrices": lambda m, x: x @ m.rows + m.row,
    "an addend times a number": lambda m, x: torch.add(m.first(x), m.row, alpha=0.5),
    "attention whose values have no batch": attended(lambda m: m.table[:D].clone()),
    "attention whose values are broadcast": attended(lambda m: m.rows.expand(1, D, D)),
    "fewer heads of values": lambda m, x: F.scaled_dot_product_attention(
        x, x[:3], (x[:3] @ m.rows), enable_gqa=True
    ),
    "nothing before the tokens": lambda m, x: torch.cat([x.new_zeros(0), m.first(x)], 1),
    "a parameter without rows": lambda m, x: torch.cat([m.none.expand(D, 0, D), m.first(x)], 1),
    "no rows of a table": lambda m, x: torch.cat([m.none, m.first(x[0])]),
    "a layer of no inputs": lambda m, x: m.first(x) + m.hollow(x[..., :0]),
    "a product over nothing": lambda m, x: m.first(x) + x[..., :0] @ m.none,
    "rows of a table by one number": lambda m, x: (
        F.embedding(torch.tensor(3), m.table, padding_idx=1) + m.first(x)
    ),
    "a letter twice": lambda m, x: torch.einsum("bij,jk->bik", x, m.rows),
    "one number for all features of a lerp": lambda m, x: torch.lerp(m.first(x), m.second(x), 0.3),
    "unbatched convolution": lambda m, x: F.conv1d(x[0].mT, m.deep.mT).mT,
    "means of rows": lambda m, x: (
        F.embedding_bag(torch.tensor([[1, 2], [0, 8]]), m.table, mode="mean") + m.first(x[:2, 0])
    ),
    "a spread that scales": lambda m, x: (lambda y: y / y.std(-1, keepdim=True))(m.first(x)),
}
"""Cases that are proven, and were not or were wrong once."""

KEPT: dict[str, Callable[..., torch.Tensor]] = {
    "a trace": lambda m, x: torch.einsum("bii,k->bk", m.first(x), m.row) + m.first(x[0]).relu(),
    "values of one feature": lambda m, x: F.scaled_dot_product_attention(
        x.mT, x.mT, m.row.expand(D, D).mT
    ),
    "a column that is added": lambda m, x: m.first(x) + m.row[:, None],
    "a spread over tokens too": lambda m, x: m.first(x) * m.first(x).var((1, 2))[:, None, None],
    "complex numbers": lambda m, x: torch.view_as_real(
        torch.complex(m.first(x), m.second(x))
    ).sum(-1),
}  # fmt: skip
"""Cases that cannot be proven."""


@pytest.mark.one_case
@pytest.mark.parametrize("name", FOLDED)
def test_what_is_proven_is_folded(name: str) -> None:
    assert folded(FOLDED[name])


@pytest.mark.parametrize("name", KEPT)
def test_what_is_not_proven_stays(name: str) -> None:
    assert not folded(KEPT[name])
