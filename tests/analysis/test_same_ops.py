"""Two models compute the same if every op of their runs is the same, on the same operands."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from enjoyln_cli.analysis.same_ops import require_same, same_but_for_sizes
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.errors import UnsupportedModel

TOKENS = Call("tokens", (((torch.tensor([[3, 1, 4]]),), {}),))


class Tied(nn.Module):
    """Embeds, scales by a number or a tensor, and reads with the table or with a head."""

    def __init__(self, factor: float, as_tensor: bool, tied: bool, swapped: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 6), nn.Linear(6, 11, bias=False)
        self.inside, self.outside = nn.Linear(6, 9), nn.Linear(9, 6)
        self.factor, self.as_tensor, self.swapped = factor, as_tensor, swapped
        self.register_buffer("first", torch.zeros(6))
        self.register_buffer("second", torch.ones(6))
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.table(tokens)
        h = h * (torch.tensor(self.factor) if self.as_tensor else self.factor)
        a, b = (self.second, self.first) if self.swapped else (self.first, self.second)
        return self.head(self.outside(self.inside(h)) * a + b)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_an_untied_model_has_to_scale_as_the_tied_model(as_tensor: bool) -> None:
    tied = Tied(2.0, as_tensor, tied=True)
    require_same(tied, Tied(2.0, as_tensor, tied=False), TOKENS)
    with pytest.raises(UnsupportedModel, match="would give other results with untied weights"):
        require_same(tied, Tied(3.0, as_tensor, tied=False), TOKENS)


def test_a_model_that_is_tied_instead_or_does_not_run_is_refused() -> None:
    apart = Tied(2.0, False, tied=False)
    with pytest.raises(UnsupportedModel, match="would give other results"):
        require_same(apart, Tied(2.0, False, tied=True), TOKENS)
    apart.head.weight = nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(UnsupportedModel, match="does not run without its weights"):
        require_same(Tied(2.0, False, tied=True), apart, TOKENS)


def test_operands_may_not_be_exchanged() -> None:
    with pytest.raises(UnsupportedModel, match="would give other results"):
        require_same(Tied(2.0, False, tied=True), Tied(2.0, False, False, swapped=True), TOKENS)


class Wide(nn.Module):
    """An MLP of ``size`` hidden units; ``scaled`` divides by their number."""

    def __init__(self, size: int, scaled: bool) -> None:
        super().__init__()
        self.inside, self.outside, self.scaled = nn.Linear(6, size), nn.Linear(size, 6), scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inside(x).relu()
        h = h.reshape(*h.shape[:-1], 2, h.shape[-1] // 2).flatten(-2)
        return self.outside(h / h.shape[-1] if self.scaled else h)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_number_outside_of_lists_is_no_size(scaled: bool) -> None:
    call = Call("x", (((torch.randn(2, 6),), {}),))
    assert same_but_for_sizes(Wide(8, scaled), Wide(12, scaled), call, 8, 12) is not scaled
