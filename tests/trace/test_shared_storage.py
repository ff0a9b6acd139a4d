"""Weights that share memory with other tensors are found, and are not edited."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_live import VOCAB, Computing, D, fold_in_place, ids, randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module


def stem() -> Any:
    """An embedding, a norm and a head: the norm folds by centring the embedding."""
    parts = {"emb": nn.Embedding(VOCAB, D), "norm": nn.LayerNorm(D), "extra": nn.Linear(D, D)}
    head = nn.Linear(D, VOCAB, bias=False)
    return randomised(Computing(lambda m, t: m.head(m.norm(m.emb(t))), **parts, head=head))


def test_without_anything_shared_it_folds() -> None:
    found = fold_in_place(stem(), ids())
    assert found.folded == {"norm"} and found.error < 1e-12


def two_parameters(model: Any) -> None:
    model.head.weight.data = model.emb.weight.data


def transposed(model: Any) -> None:
    square = nn.Parameter(torch.randn(D, D).double())
    model.emb = nn.Embedding.from_pretrained(square.data, freeze=False)
    model.head = nn.Linear(D, D, bias=False)
    model.head.weight = nn.Parameter(model.emb.weight.data.T)


def a_row(model: Any) -> None:
    model.extra.bias.data = model.emb.weight.data[3]
    model.run = lambda m, t: m.norm(m.emb(t)) * m.extra.bias.sum()


def a_buffer(model: Any) -> None:
    model.register_buffer("table", model.emb.weight.data)
    model.run = lambda m, t: F.linear(m.norm(m.emb(t)), m.table)


def an_attribute(model: Any) -> None:
    model.__dict__["table"] = model.emb.weight.detach()
    model.run = lambda m, t: F.linear(m.norm(m.emb(t)), m.table)


def a_closure(model: Any) -> None:
    table = model.emb.weight
    model.run = lambda m, t: F.linear(m.norm(m.emb(t)), table)


SHARING = [two_parameters, transposed, a_row, a_buffer, an_attribute, a_closure]


@pytest.mark.parametrize("share", SHARING, ids=lambda share: share.__name__)
def test_a_weight_that_is_also_read_elsewhere_is_not_centred(
    share: Callable[[Any], None],
) -> None:
    model = stem()
    share(model)
    largest = model.emb.num_embeddings
    found = fold_in_place(model, ids() % largest, others=[(ids(3, 4, 5) % largest,)])
    assert found.error < 1e-12
    assert "norm" not in found.folded or "extra.bias" in found.said


def test_parameters_over_one_memory_are_one_tied_weight() -> None:
    """Equal shape and strides make a tie; the norm folds by an operation on the value."""
    model = stem()
    two_parameters(model)
    plan = analyze_module(model, ids()).plan
    assert plan.centred_weights == () or {w.parameter for w in plan.centred_weights} != {
        "emb.weight"
    }
    (norm,) = plan.norms
    assert norm.status == "stays_layernorm" and "head" in norm.culprit


def one_memory() -> tuple[torch.Tensor, torch.Tensor]:
    table = torch.randn(VOCAB, D, dtype=torch.float64) + 0.5
    return table, table


def slices_of_one_buffer() -> tuple[torch.Tensor, torch.Tensor]:
    flat = torch.randn(2, VOCAB, D, dtype=torch.float64) + 0.5
    return flat[0], flat[1]


def slices_that_overlap() -> tuple[torch.Tensor, torch.Tensor]:
    flat = torch.randn(VOCAB + 4, D, dtype=torch.float64) + 0.5
    return flat[:VOCAB], flat[4:]


@pytest.mark.parametrize("tables", [one_memory, slices_of_one_buffer, slices_that_overlap])
def test_two_tables_are_each_centred_once_or_not_at_all(tables: Any) -> None:
    parts = {"first": nn.Embedding(VOCAB, D), "second": nn.Embedding(VOCAB, D)}
    parts["norm"] = nn.LayerNorm(D)
    model: Any = Computing(lambda m, t: m.norm(m.first(t) + m.second(t.flip(-1))), **parts)
    model = randomised(model)
    model.first.weight.data, model.second.weight.data = tables()
    found = fold_in_place(model, ids())
    assert found.error < 1e-12
    if tables is slices_that_overlap:
        assert not found.folded and re.search("first.weight|second.weight", found.said)
    else:
        assert found.folded == {"norm"}


def clamp_in_place(m: Any, weight: torch.Tensor) -> None:
    weight.data.clamp_(min=0.1)


def assign_data(m: Any, weight: torch.Tensor) -> None:
    weight.data = weight.data.clamp(min=0.1)


def assign_a_parameter(m: Any, weight: torch.Tensor) -> None:
    m.emb.weight = nn.Parameter(weight.clamp(min=0.1), requires_grad=False)


@pytest.mark.parametrize("change", [clamp_in_place, assign_data, assign_a_parameter])
def test_a_weight_that_a_call_changes_is_not_centred(change: Any) -> None:
    def run(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        change(m, m.emb.weight)
        return m.norm(m.emb(tokens))

    model = randomised(Computing(run, emb=nn.Embedding(VOCAB, D), norm=nn.LayerNorm(D)))
    found = fold_in_place(model, ids())
    assert found.error < 1e-12 and not found.folded


def test_a_tensor_computed_before_the_call_is_a_constant() -> None:
    model = stem()
    table = model.emb.weight.detach() * 2
    model.run = lambda m, t: F.linear(m.norm(m.emb(t)), table)
    found = fold_in_place(model, ids())
    assert found.folded == {"norm"} and found.error < 1e-12
