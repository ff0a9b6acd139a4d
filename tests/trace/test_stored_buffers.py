"""A stored buffer that is only an addend is centred, as a parameter is; no other buffer is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from folding_live import D, floats, fold_in_place, randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.train.parametrize import merge, reparametrize

TOKENS = 6
SEVERAL = [(floats(2, TOKENS, 5, seed=7),), (floats(3, TOKENS, 5, seed=8),)]


class Positions(nn.Module):
    """Adds a table of positions; the sum is read by norms only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(TOKENS, D))
        self.embed, self.norm, self.norm2 = nn.Linear(5, D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.mlp, self.extra = nn.Linear(D, D), nn.Linear(D, D)
        self.change: Callable[..., torch.Tensor] = as_it_is
        self.__dict__["start"] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x) + self.table[: x.shape[1]]
        h = self.change(self, h + self.mlp(self.norm(h)), x)
        return self.norm2(h)

    def forget(self) -> None:
        """Go back to the first table, so that models that write it can be compared."""
        if self.start is not None:
            self.table = self.start.clone()


def as_it_is(model: Positions, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h


def ordered_by_value(model: Positions, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Python reads numbers of the input, so that ``torch.export`` gives up."""
    rows = x.abs().sum((-1, -2)).argsort().tolist()
    return h[rows][list(numpy.argsort(rows))]


@pytest.mark.parametrize("change", [as_it_is, ordered_by_value])
def test_a_stored_buffer_is_centred_in_the_weights(change: Any) -> None:
    model = randomised(Positions())
    model.change = change
    plan = analyze_module(model, floats(2, TOKENS, 5)).plan
    assert (
        "table" in {writer.parameter for writer in plan.centred_weights} and not plan.subtractions
    )
    before = model.table.clone()
    found = fold_in_place(model, floats(2, TOKENS, 5), others=SEVERAL)
    assert found.folded == {"norm", "norm2"} and found.error < 1e-12
    expected = before - before.mean(-1, keepdim=True)
    assert torch.allclose(model.table, expected, rtol=0, atol=1e-15)


def test_without_weights_the_verdict_is_the_same() -> None:
    live, bare = Positions(), Positions().to("meta")
    plans = [analyze_module(model, torch.ones(2, TOKENS, 5)).plan for model in (live, bare)]
    assert plans[0].centred_weights == plans[1].centred_weights and len(plans[1].folded) == 2


# Buffers that somebody else reads or writes.


def write(model: Positions, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    model.table.mul_(1.5)
    return h


def write_a_part(model: Positions, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    model.table[2, :3] = 0.5
    return h


def keep(model: Positions, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As a cache: the next call reads what this call has written."""
    model.table.copy_(h[0].detach())
    return h


def replace(model: Positions, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    model.table = model.table + 0.5
    return h


def read_elsewhere(model: Positions, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h * (1 + model.table.sum().tanh())


def as_statistics(model: Positions, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return h + nn.functional.batch_norm(model.norm(h).mT, model.table[0], model.table[1] ** 2).mT


@pytest.mark.parametrize(
    "change", [write, write_a_part, keep, replace, read_elsewhere, as_statistics]
)
@pytest.mark.parametrize("order", [as_it_is, ordered_by_value])
def test_a_buffer_that_is_more_than_an_addend_is_not_centred(change: Any, order: Any) -> None:
    model = randomised(Positions())
    model.change = lambda m, h, x: order(m, change(m, h, x), x)
    model.__dict__["start"] = model.table.clone()
    found = fold_in_place(model, floats(2, TOKENS, 5), others=SEVERAL)
    assert not found.folded and found.error < 1e-12


def two_names(model: Positions) -> None:
    model.extra.register_buffer("scale", model.table)


def a_row(model: Positions) -> None:
    model.extra.register_buffer("scale", model.table[1])


def not_stored(model: Positions) -> None:
    model.extra.register_buffer("scale", model.table[:3], persistent=False)


def a_parameter(model: Positions) -> None:
    model.extra.scale = nn.Parameter(model.table)


@pytest.mark.parametrize("share", [two_names, a_row, not_stored, a_parameter])
def test_a_buffer_that_shares_its_memory_is_not_centred(share: Any) -> None:
    model = randomised(Positions())
    share(model)
    model.change = lambda m, h, x: h * (1 + torch.as_tensor(m.extra.scale).sum().tanh())
    found = fold_in_place(model, floats(2, TOKENS, 5), others=SEVERAL)
    assert not found.folded and found.error < 1e-12


def test_a_buffer_that_is_not_stored_is_not_centred() -> None:
    model = Positions()
    model._non_persistent_buffers_set.add("table")
    assert "table" not in stored_weights(model)
    found = fold_in_place(randomised(model), floats(2, TOKENS, 5), others=SEVERAL)
    assert not found.folded and "constant" in found.said


def test_batch_norm_keeps_its_statistics() -> None:
    model = randomised(nn.Sequential(nn.Conv1d(5, D, 1), nn.BatchNorm1d(D), Features()))
    with torch.no_grad():
        model[1].running_var.abs_()
    before = {name: tensor.clone() for name, tensor in model.named_buffers()}
    found = fold_in_place(model, floats(2, 5, TOKENS), others=[(floats(3, 5, TOKENS),)])
    assert found.error < 1e-12
    assert all(torch.equal(before[name], tensor) for name, tensor in model.named_buffers())


class Features(nn.Module):
    """A norm over the channels of ``(batch, channel, position)``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.mT)


def test_a_centred_parametrisation_of_a_buffer() -> None:
    model, x = randomised(Positions()), floats(2, TOKENS, 5)
    expected = model(x)
    reparametrize(model, example=x)
    assert torch.allclose(model(x), expected, rtol=0, atol=1e-12)
    assert float(model.table.mean(-1).abs().max()) < 1e-15
    merge(model)
    assert torch.allclose(model(x), expected, rtol=0, atol=1e-12)
    assert "table" in model.state_dict() and "table" in dict(model.named_buffers())
