"""A weight that a call multiplies by numbers may be centred; after other changes it may not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from folding_live import VOCAB, D, ids, randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.runtime.install import fold_in_memory


class Changing(nn.Module):
    """The norm folds by centring ``up``, whose weight the model's calls change."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.up, self.norm = nn.Embedding(VOCAB, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.head = nn.Linear(D, D)
        self.how = how
        self.per_row = nn.Parameter(torch.ones(D, 1))
        if how == "one of two names":
            self.other = nn.Linear(D, D)
            self.other.weight = self.up.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        weight, before = self.up.weight, self.up(self.emb(tokens))
        with torch.no_grad():
            match self.how:
                case "multiplied in each call":
                    weight.mul_(0.5).mul_(3).div_(2)
                case "one of two names":
                    weight.div_(2)
                case "rounded":
                    weight.div_(0.25, rounding_mode="floor")
                case "multiplied by rows":
                    weight.mul_(self.per_row)
                case "one row":
                    weight[0].mul_(2)
                case "replaced":
                    weight.mul_(2)
                    self.up.weight = nn.Parameter(weight.tanh())
                case "returned":
                    weight.mul_(2)
                    return before, weight
                case "the head is divided":
                    y = self.head(self.norm(before))
                    self.head.weight.div_(2)
                    return y
        return self.head(self.norm(before) + self.norm(self.up(self.emb(tokens))))


def folded(how: str) -> set[str]:
    """The norms that fold. Several calls have to give the same outputs as before."""
    model: Any = randomised(Changing(how))
    original = copy.deepcopy(model)
    plan = analyze_module(model, ids()).plan
    fold_in_memory(model, plan)
    with torch.no_grad():
        for tokens in (ids(2, 5, seed) for seed in range(3, 7)):
            torch.testing.assert_close(model(tokens), original(tokens), rtol=0, atol=1e-12)
    return {v.norm for v in plan.folded}


@pytest.mark.parametrize("how", ["", "multiplied in each call"])
def test_a_weight_that_is_multiplied_by_numbers_is_centred(how: str) -> None:
    assert folded(how) == {"norm"}


@pytest.mark.parametrize(
    "how",
    [
        "one of two names", "rounded", "multiplied by rows", "one row", "returned",
    ],
)  # fmt: skip
def test_a_weight_that_is_changed_otherwise_stays(how: str) -> None:
    assert not folded(how)


def test_a_weight_that_is_replaced_is_refused() -> None:
    with pytest.raises(TraceFailed, match="leaves the graph as a parameter"):
        folded("replaced")


def test_nothing_is_fused_into_a_weight_that_is_multiplied() -> None:
    """W (γ x + β) + b with W / 2 in later calls: W β would not be halved in the bias."""
    options = Options(merge="affine")
    plan = analyze_module(randomised(Changing("the head is divided")), ids(), options=options).plan
    assert plan.folded and not plan.fused
