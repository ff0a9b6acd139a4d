"""Every value that leaves a call counts as an output, in whatever way it leaves."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from folding_live import VOCAB, D, fold_in_place, ids, randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import TraceFailed


@dataclass(slots=True)
class Slotted:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class Leaving(nn.Module):
    """The norm folds by centring the embedding, if no other value shows the change."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)
        self.how = how
        self.register_buffer("memory", torch.zeros(1, 1, D))

    def forward(self, tokens: torch.Tensor) -> Any:
        h = self.emb(tokens)
        y = self.norm(h)
        match self.how:
            case "dataclass with slots":
                return Slotted(y, h)
            case "buffer":
                self.memory = h.mean((0, 1), keepdim=True)
            case "written buffer":
                self.memory.copy_(h.mean((0, 1), keepdim=True))
            case "returned number":
                return y, h.sum().item()
        return y

    def seen(self) -> list[Any]:
        return [self.memory]


WAYS = ["dataclass with slots", "buffer", "written buffer", "returned number"]


@pytest.mark.parametrize("how", WAYS)
def test_a_value_that_leaves_is_seen(how: str) -> None:
    found = fold_in_place(randomised(Leaving(how)), ids())
    assert found.error < 1e-12 and not found.folded


def test_without_it_the_norm_folds() -> None:
    found = fold_in_place(randomised(Leaving("")), ids())
    assert found.error < 1e-12 and found.folded == {"norm"}


class Returning(nn.Module):
    """Returns the normalised values and the stream, packed by a function."""

    def __init__(self, pack: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.emb, self.norm, self.pack = nn.Embedding(VOCAB, D), nn.LayerNorm(D), pack

    def forward(self, tokens: torch.Tensor) -> Any:
        h = self.emb(tokens)
        return self.pack(self.norm(h), h)


PACKED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "deque": lambda y, h: deque([y, deque([h])]),
    "views of dicts in a list": lambda y, h: [{"y": y}.items(), {"h": (h,)}.items()],
    "user's list": lambda y, h: UserList([y, h]),
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_returned_container_is_opened(kind: str) -> None:
    assert not analyze_module(randomised(Returning(PACKED[kind])), ids()).plan.folded
    alone = Returning(lambda y, h: PACKED[kind](y, y.exp()))
    assert analyze_module(randomised(alone), ids()).plan.folded


@pytest.mark.parametrize("how", ["buffer", "written buffer"])
def test_an_analysis_leaves_nothing_on_the_model(how: str) -> None:
    model: Any = randomised(Leaving(how))
    memory, values = model.memory, model.memory.clone()
    analyze_module(model, ids())
    assert model.memory is memory and torch.equal(memory, values)
    assert "forward" not in vars(model.emb) and not model.emb._forward_pre_hooks


@pytest.mark.parametrize("before", [False, True])
def test_what_a_hook_collects_counts_as_an_output(before: bool) -> None:
    model: Any = randomised(Leaving(""))
    collected: list[Any] = []
    if before:
        model.norm.register_forward_pre_hook(lambda module, args: collected.append(args))
    else:
        model.emb.register_forward_hook(lambda module, args, output: collected.append(output))
    plan = analyze_module(model, ids()).plan
    assert not plan.folded and not collected


def test_a_function_that_reads_the_model_around_it_reads_the_copy() -> None:
    model: Any = randomised(Leaving(""))
    model.forward = lambda tokens: model.norm(model.emb(tokens))
    found = fold_in_place(model, ids())
    assert found.error < 1e-12 and found.folded == {"norm"}


KNOWN: list[nn.Module] = []


def test_a_module_that_is_called_through_a_global_is_refused() -> None:
    model: Any = randomised(Leaving(""))
    KNOWN[:] = [model.norm]
    model.forward = lambda tokens: KNOWN[0](model.emb(tokens))
    found = fold_in_place(model, ids())
    assert found.refused and "reads norm.bias through a global" in found.said


class Remembering(nn.Module):
    """Each call keeps a value in a buffer, and the next call adds it before the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)
        self.register_buffer("last", torch.zeros(D))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.emb(tokens) + self.last
        self.last = h.mean((0, 1)).tanh()
        return self.norm(h)

    def forget(self) -> None:
        self.last = torch.zeros(D, dtype=torch.float64)


def test_what_a_call_keeps_for_the_next_one_is_followed_into_it() -> None:
    others = [(ids(2, 5, seed),) for seed in range(3, 9)]
    found = fold_in_place(randomised(Remembering()), ids(), others=others)
    assert found.error < 1e-12 and not found.folded and not found.refused


class LeafOf(nn.Module):
    """A leaf that looks up embeddings, and returns them in different ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.zeros(VOCAB, D)), how

    def forward(self, tokens: torch.Tensor) -> Any:
        h = torch.nn.functional.embedding(tokens, self.weight)
        match self.how:
            case "tensor":
                return h
            case "tuple":
                return h, tokens
            case "second":
                return tokens, h
            case "dict":
                return {"h": h}
            case "attribute":
                self.kept = h
                return h
        return None


class Tied(nn.Module):
    """The embedding is tied to the head: norms fold only by an operation on its output."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.leaf, self.how = LeafOf(how), how
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: Any = self.leaf(tokens)
        match self.how:
            case "tensor":
                h = found
            case "tuple":
                h = found[0]
            case "second":
                h = found[1]
            case "dict":
                h = found["h"]
            case _:
                h = self.leaf.kept
        y = sum(norm(h) for norm in self.norms)
        return y @ self.leaf.weight.T


@pytest.mark.parametrize(
    ("how", "folds"),
    [("tensor", True), ("tuple", True), ("second", False), ("dict", False), ("attribute", False)],
)
def test_an_operation_acts_on_the_value_that_was_proven(how: str, folds: bool) -> None:
    found = fold_in_place(randomised(Tied(how)), ids())
    assert found.error < 1e-12 and bool(found.folded) == folds


class Fan(nn.Module):
    """Three norms of one value, so that an operation on it is worthwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((norm(x) for norm in self.norms), torch.zeros(()))


class Block(nn.Module):
    """Passes its input to norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = Fan(), nn.Linear(D, D)

    def forward(self, *args: Any) -> torch.Tensor:
        return self.linear(self.norm(args[-1]))


class Named(Block):
    def forward(self, x: Any, other: Any = None) -> torch.Tensor:  # type: ignore[override]
        value = other if other is not None else x
        return self.linear(self.norm(value[0] if isinstance(value, tuple) else value))


class Blocks(nn.Module):
    """A block on a value that is not the output of parameters alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        kind = Named if how.startswith(("keyword", "second", "tuple", "mixed")) else Block
        self.emb, self.how = nn.Embedding(VOCAB, D), how
        self.blocks = nn.ModuleList([kind()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens).tanh()
        (block,) = self.blocks
        match self.how:
            case "position":
                return block(x)
            case "keyword":
                return block(x=x)
            case "second by keyword":
                return block(tokens, other=x)
            case "tuple":
                return block((x, x))
            case "mixed":
                return block(x) + block((x,))
        return block(tokens, x)


@pytest.mark.parametrize("how", ["position", "keyword", "second by keyword", "tuple", "mixed"])
def test_the_first_input_of_a_block_is_the_one_that_the_call_takes(how: str) -> None:
    """If a block cannot be used so, there is the module inside it that holds the norms."""
    found = fold_in_place(randomised(Blocks(how)), ids())
    assert found.error < 1e-12 and len(found.folded) == 3
    (op,) = analyze_module(randomised(Blocks(how)), ids()).plan.ops
    expected = "blocks.0" if how in ("position", "keyword") else "blocks.0.norm"
    assert (op.module, op.place) == (expected, "input")


class Direct(nn.Module):
    """A leaf that is called, and whose ``forward`` is also called directly."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(VOCAB, D)
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.emb(tokens)
        direct = self.emb.forward(tokens.flip(-1))
        return sum(norm(h) for norm in self.norms) * direct.mean() @ self.emb.weight.T


def test_a_forward_that_is_called_directly_is_a_call_of_the_place() -> None:
    found = fold_in_place(randomised(Direct()), ids())
    assert found.error < 1e-12 and not found.folded


class OwnNorm(nn.Module):
    """LayerNorm in a custom class, which may do more than return the result."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(D)), nn.Parameter(torch.zeros(D))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        if self.how == "writes its input":
            x -= mean
            x += self.weight
            x -= self.weight
            centred = x
        else:
            centred = x - mean
        normed = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        if self.how == "keeps a value":
            self.__dict__["kept"] = normed.abs().amax()
        return normed * self.weight + self.bias


class WithOwnNorm(nn.Module):
    def __init__(self, how: str, dynamic: bool) -> None:
        super().__init__()
        self.emb, self.norm, self.dynamic = nn.Embedding(VOCAB, D), OwnNorm(how), dynamic
        self.linear, self.how = nn.Linear(D, D), how

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.dynamic:
            tokens = tokens[:, : int((tokens >= 0).sum(-1).max())]
        x = self.emb(tokens)
        y = self.linear(self.norm(x))
        return y + x if self.how == "writes its input" else y

    def seen(self) -> list[Any]:
        return [vars(self.norm).get("kept")]

    def forget(self) -> None:
        self.norm.__dict__.pop("kept", None)


@pytest.mark.one_case
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("how", ["writes its input", "keeps a value"])
def test_a_norm_that_does_more_than_return_is_not_swapped(how: str, dynamic: bool) -> None:
    found = fold_in_place(randomised(WithOwnNorm(how, dynamic)), ids())
    assert found.error < 1e-12 and not found.folded
    plain = fold_in_place(randomised(WithOwnNorm("", dynamic)), ids())
    assert plain.error < 1e-12 and plain.folded == {"norm"}


class Casting(nn.Module):
    """Casts its weight to the same dtype, and may return a cast to another dtype."""

    def __init__(self, is_returned: bool) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.zeros(VOCAB, D)), nn.LayerNorm(D)
        self.is_returned = is_returned

    def forward(self, tokens: torch.Tensor) -> Any:
        weight = self.weight.to(torch.float64)
        y = self.norm(nn.functional.embedding(tokens, weight))
        return (y, weight.to(torch.float32).to(torch.float64)) if self.is_returned else y


@pytest.mark.parametrize("is_returned", [False, True])
def test_a_weight_that_is_cast_leaves_only_as_what_it_becomes(is_returned: bool) -> None:
    found = fold_in_place(randomised(Casting(is_returned)), ids())
    assert found.error < 1e-12 and bool(found.folded) != is_returned


class Own(torch.Tensor):
    """A tensor subclass whose objects share the memory of the original tensor."""


OTHER_OBJECTS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "returned": lambda model, h: h.as_subclass(Own),
    "kept as a parameter": lambda model, h: setattr(model, "kept", nn.Parameter(h)),
}


class OtherObject(nn.Module):
    """Its tokens depend on values, so it is recorded; its stream leaves as another object."""

    def __init__(self, leave: Callable[[nn.Module, torch.Tensor], Any]) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.leave = leave

    def forward(self, x: torch.Tensor) -> Any:
        h = self.embed(x[x[:, 0] > -1e9])
        left = self.leave(self, h)
        return self.head(self.norm(h)), left


def folds(leave: Callable[[nn.Module, torch.Tensor], Any]) -> bool:
    """Whether the norm does; a recorded run may be refused, or only tell nothing."""
    try:
        plan = analyze_module(OtherObject(leave).eval(), torch.randn(2, 5)).plan
    except TraceFailed:
        return False
    return bool(plan.folded)


@pytest.mark.parametrize("how", OTHER_OBJECTS)
def test_a_value_does_not_leave_unseen_as_another_object(how: str) -> None:
    assert not folds(OTHER_OBJECTS[how])


def test_another_object_over_other_memory_is_no_such_value() -> None:
    constant = torch.randn(8)
    assert folds(lambda model, h: None)
    assert folds(lambda model, h: nn.Parameter(constant).mean().item())
