"""Weights that share memory with other tensors are found, and are not edited."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from folding_live import VOCAB, D, Outcome, fold_in_place, ids, randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module


class Stem(nn.Module):
    """An embedding, a norm and a head: the norm folds by centring the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)
        self.head = nn.Linear(D, VOCAB, bias=False)
        self.extra = nn.Linear(D, D)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.emb(tokens)))


def bind(model: Stem, forward: Callable[..., torch.Tensor]) -> None:
    """Replace the ``forward`` of an instance."""
    model.forward = MethodType(forward, model)  # type: ignore[method-assign]


def test_without_anything_shared_it_folds() -> None:
    found = fold_in_place(randomised(Stem()), ids())
    assert found.folded == {"norm"} and found.error < 1e-12


def two_parameters(model: Stem) -> None:
    model.head.weight.data = model.emb.weight.data


def transposed(model: Stem) -> None:
    square = nn.Parameter(torch.randn(D, D).double())
    model.emb = nn.Embedding.from_pretrained(square.data, freeze=False)
    model.head = nn.Linear(D, D, bias=False)
    model.head.weight = nn.Parameter(model.emb.weight.data.T)


def a_row(model: Stem) -> None:
    model.extra.bias.data = model.emb.weight.data[3]
    model.norm2 = nn.LayerNorm(D)
    bind(model, lambda self, t: self.norm(self.emb(t)) * self.extra.bias.sum())


def a_buffer(model: Stem) -> None:
    model.register_buffer("table", model.emb.weight.data)
    bind(model, lambda self, t: F.linear(self.norm(self.emb(t)), self.table))


def an_attribute(model: Stem) -> None:
    model.__dict__["table"] = model.emb.weight.detach()
    bind(model, lambda self, t: F.linear(self.norm(self.emb(t)), self.table))


def a_closure(model: Stem) -> None:
    table = model.emb.weight
    bind(model, lambda self, t: F.linear(self.norm(self.emb(t)), table))


SHARING = [two_parameters, transposed, a_row, a_buffer, an_attribute, a_closure]


@pytest.mark.parametrize("share", SHARING, ids=lambda share: share.__name__)
def test_a_weight_that_is_also_read_elsewhere_is_not_centred(
    share: Callable[[Stem], None],
) -> None:
    model = randomised(Stem())
    share(model)
    largest = model.emb.num_embeddings
    found = fold_in_place(model, ids() % largest, others=[(ids(3, 4, 5) % largest,)])
    assert found.error < 1e-12
    assert "norm" not in found.folded or "extra.bias" in found.said


def test_parameters_over_one_memory_are_one_tied_weight() -> None:
    """Equal shape and strides make a tie; the norm folds by an operation on the value."""
    model = randomised(Stem())
    two_parameters(model)
    plan = analyze_module(model, ids()).plan
    assert plan.writers == () or {w.parameter for w in plan.writers} != {"emb.weight"}
    (norm,) = plan.norms
    assert norm.status == "kept" and "head" in norm.culprit


class TwoTables(nn.Module):
    """Two embeddings; ``shared`` gives the memory of the second one."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(VOCAB, D), nn.Embedding(VOCAB, D)
        self.norm, self.shared = nn.LayerNorm(D), shared

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(tokens) + self.second(tokens.flip(-1)))


def test_a_weight_under_two_parameters_is_centred_once_and_right() -> None:
    model = randomised(TwoTables("all"))
    model.second.weight.data = model.first.weight.data
    found = fold_in_place(model, ids())
    assert found.folded == {"norm"} and found.error < 1e-12


def test_slices_of_one_flat_buffer_do_not_disturb_each_other() -> None:
    model = randomised(TwoTables("flat"))
    flat = torch.randn(2, VOCAB, D, dtype=torch.float64) + 0.5
    model.first.weight.data, model.second.weight.data = flat[0], flat[1]
    found = fold_in_place(model, ids())
    assert found.folded == {"norm"} and found.error < 1e-12


def test_slices_that_overlap_are_not_centred() -> None:
    model = randomised(TwoTables("overlap"))
    flat = torch.randn(VOCAB + 4, D, dtype=torch.float64) + 0.5
    model.first.weight.data, model.second.weight.data = flat[:VOCAB], flat[4:]
    found = fold_in_place(model, ids())
    assert found.error < 1e-12 and not found.folded
    assert "second.weight" in found.said or "first.weight" in found.said


class Changing(nn.Module):
    """Changes its own weight when it is called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)
        self.how = how

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.emb.weight
        if self.how == "clamp_":
            weight.data.clamp_(min=0.1)
        elif self.how == "assigned data":
            weight.data = weight.data.clamp(min=0.1)
        elif self.how == "new parameter":
            self.emb.weight = nn.Parameter(weight.clamp(min=0.1), requires_grad=False)
        return self.norm(self.emb(tokens))


@pytest.mark.parametrize("how", ["clamp_", "assigned data", "new parameter"])
def test_a_weight_that_a_call_changes_is_not_centred(how: str) -> None:
    found: Outcome = fold_in_place(randomised(Changing(how)), ids())
    assert found.error < 1e-12 and not found.folded


def test_a_tensor_computed_from_a_weight_before_the_call_is_a_constant() -> None:
    model = randomised(Stem())
    table = model.emb.weight.detach() * 2
    bind(model, lambda self, t: F.linear(self.norm(self.emb(t)), table))
    found = fold_in_place(model, ids())
    assert found.folded == {"norm"} and found.error < 1e-12
