"""Nested graphs: control flow reads all of its operands; other regions are inlined."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_live import VOCAB, D, fold_in_place, ids, randomised
from torch import nn
from torch._higher_order_ops.map import map as map_rows
from torch.utils.checkpoint import checkpoint


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight) * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class Inner(nn.Module):
    """A norm after an embedding, and other code that runs in a graph of its own."""

    def __init__(self, how: str, dynamic: bool = False) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)
        self.linear, self.second = nn.Linear(D, D), nn.LayerNorm(D)
        self.third, self.fourth, self.act = nn.LayerNorm(D), nn.LayerNorm(D), nn.Tanh()
        self.table = nn.Parameter(torch.zeros(VOCAB, D))
        self.how, self.dynamic = how, dynamic

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.dynamic:
            tokens = tokens[:, : int((tokens >= 0).sum(-1).max())]
        h = self.emb(tokens)
        return self.norm(h) + getattr(self, self.how)(h, tokens)

    # These read the centred value, so that the norm is kept.

    def cond(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return torch.cond(tokens.sum() > 20, lambda x: x * 2, lambda x: x.tanh(), (h,))

    def cond_reads_the_weight(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        def logits(x: torch.Tensor) -> torch.Tensor:
            return (x @ self.emb.weight.T).sum(-1, keepdim=True)

        y = self.linear(self.norm(h))
        return torch.cond(tokens.sum() > 20, logits, lambda x: logits(2 * x), (y,))

    def cond_calls_the_norm(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y = F.embedding(tokens, self.table)
        return torch.cond(tokens.sum() > 20, lambda x: self.norm(x), lambda x: x * 1.0, (y,))

    def cond_calls_the_leaf(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        y, other = self.act(self.linear(self.norm(h))), F.embedding(tokens, self.table)
        z = torch.cond(tokens.sum() > 20, lambda x: self.act(x), lambda x: x * 1.0, (other,))
        return self.second(y) + self.third(y) + self.fourth(y) + z

    def map_(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return map_rows(lambda x: x.tanh(), h)

    def saved(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(h, self.linear.weight)

    def checkpointed(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: x.tanh(), h, use_reentrant=True)

    def autocast_reads(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return h.exp()

    # These read nothing that centring changes, so that both norms fold.

    def plain(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return self.linear(self.second(h))

    def nested(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = h * 2
            with torch.autocast("cpu", enabled=False):
                y = self.second(y)
                with torch.no_grad():
                    y = self.linear(y)
        return y

    def two_values(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y, z = self.second(h), self.linear(self.second(h * 3))
        return y * z

    def written(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = self.linear(self.second(h)).detach()
            y += 1
        return y

    def checkpointed_norm(self, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.linear(self.second(x)), h, use_reentrant=False)


SEEING = ["cond", "map_", "saved", "checkpointed", "autocast_reads", "cond_reads_the_weight"]
FOLDING = ["plain", "nested", "two_values", "written", "checkpointed_norm"]


@pytest.mark.one_case
@pytest.mark.parametrize("how", SEEING)
def test_what_a_graph_inside_reads_is_seen(how: str) -> None:
    found = fold_in_place(randomised(Inner(how)), ids())
    assert found.error < 1e-12 and "norm" not in found.folded


@pytest.mark.one_case
@pytest.mark.parametrize("how", ["cond_calls_the_norm", "cond_calls_the_leaf"])
def test_modules_that_a_graph_inside_calls_have_no_place(how: str) -> None:
    found = fold_in_place(randomised(Inner(how)), ids(), others=[(ids(2, 9, s),) for s in range(4)])
    assert found.error < 1e-12


@pytest.mark.parametrize("how", FOLDING)
def test_a_region_that_changes_no_value_is_transparent(how: str) -> None:
    found = fold_in_place(randomised(Inner(how)), ids())
    assert found.error < 1e-12 and found.folded == {"norm", "second"}


@pytest.mark.parametrize("how", ["plain", "nested", "map_", "saved"])
def test_recorded_runs_too(how: str) -> None:
    found = fold_in_place(randomised(Inner(how, dynamic=True)), ids())
    assert found.error < 1e-12
    if how in FOLDING:
        assert found.folded == {"norm", "second"}
    else:
        assert "norm" not in found.folded
