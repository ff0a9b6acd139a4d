"""Every value that leaves a call counts as an output, in whatever way it leaves."""

from __future__ import annotations

from collections import UserList, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_live import VOCAB, Computing, D, fold_in_place, ids, randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import TraceFailed


@dataclass(slots=True)
class Slotted:
    logits: torch.Tensor
    hidden: torch.Tensor | None = None


class WithMemory(Computing):
    """A model with a buffer that its calls may change."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__(run, **parts)
        self.register_buffer("memory", torch.zeros(1, 1, D))

    def seen(self) -> list[Any]:
        return [self.memory]


def leaving(leave: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> Any:
    """Returns what ``leave`` makes of the norm's result and of the stream before it.

    The norm folds by centring the embedding, if no other value shows the change.
    """

    def run(m: Any, tokens: torch.Tensor) -> Any:
        h = m.emb(tokens)
        return leave(m, m.norm(h), h)

    return randomised(WithMemory(run, emb=nn.Embedding(VOCAB, D), norm=nn.LayerNorm(D)))


def nowhere(m: Any, y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return y


def as_buffer(m: Any, y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    m.memory = h.mean((0, 1), keepdim=True)
    return y


def into_buffer(m: Any, y: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    m.memory.copy_(h.mean((0, 1), keepdim=True))
    return y


WAYS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], Any]] = {
    "dataclass with slots": lambda m, y, h: Slotted(y, h),
    "buffer": as_buffer,
    "written buffer": into_buffer,
    "returned number": lambda m, y, h: (y, h.sum().item()),
}


@pytest.mark.parametrize("how", WAYS)
def test_a_value_that_leaves_is_seen(how: str) -> None:
    found = fold_in_place(leaving(WAYS[how]), ids())
    assert found.error < 1e-12 and not found.folded


def test_without_it_the_norm_folds() -> None:
    found = fold_in_place(leaving(nowhere), ids())
    assert found.error < 1e-12 and found.folded == {"norm"}


PACKED: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "deque": lambda y, h: deque([y, deque([h])]),
    "views of dicts in a list": lambda y, h: [{"y": y}.items(), {"h": (h,)}.items()],
    "user's list": lambda y, h: UserList([y, h]),
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_returned_container_is_opened(kind: str) -> None:
    pack = PACKED[kind]
    assert not analyze_module(leaving(lambda m, y, h: pack(y, h)), ids()).plan.folded
    assert analyze_module(leaving(lambda m, y, h: pack(y, y.exp())), ids()).plan.folded


@pytest.mark.parametrize("how", ["buffer", "written buffer"])
def test_an_analysis_leaves_nothing_on_the_model(how: str) -> None:
    model = leaving(WAYS[how])
    memory, values = model.memory, model.memory.clone()
    analyze_module(model, ids())
    assert model.memory is memory and torch.equal(memory, values)
    assert "forward" not in vars(model.emb) and not model.emb._forward_pre_hooks


@pytest.mark.parametrize("before", [False, True])
def test_what_a_hook_collects_counts_as_an_output(before: bool) -> None:
    model = leaving(nowhere)
    collected: list[Any] = []
    if before:
        model.norm.register_forward_pre_hook(lambda module, args: collected.append(args))
    else:
        model.emb.register_forward_hook(lambda module, args, output: collected.append(output))
    plan = analyze_module(model, ids()).plan
    assert not plan.folded and not collected


def test_a_function_that_reads_its_model_reads_the_copy() -> None:
    model = leaving(nowhere)
    model.forward = lambda tokens: model.norm(model.emb(tokens))
    found = fold_in_place(model, ids())
    assert found.error < 1e-12 and found.folded == {"norm"}


KNOWN: list[nn.Module] = []


def test_a_module_that_is_called_through_a_global_is_refused() -> None:
    model = leaving(nowhere)
    KNOWN[:] = [model.norm]
    model.forward = lambda tokens: KNOWN[0](model.emb(tokens))
    found = fold_in_place(model, ids())
    assert found.refused and "reads norm.bias through a global" in found.said


class Recurrent(WithMemory):
    """Each call adds before the norm what the call before it has kept in the buffer."""

    def forget(self) -> None:
        self.memory = torch.zeros(1, 1, D, dtype=torch.float64)


def test_what_a_call_keeps_for_the_next_is_followed_into_it() -> None:
    def run(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        h = m.emb(tokens) + m.memory
        m.memory = h.mean((0, 1), keepdim=True).tanh()
        return m.norm(h)

    model = randomised(Recurrent(run, emb=nn.Embedding(VOCAB, D), norm=nn.LayerNorm(D)))
    others = [(ids(2, 5, seed),) for seed in range(3, 9)]
    found = fold_in_place(model, ids(), others=others)
    assert found.error < 1e-12 and not found.folded and not found.refused


# Places of operations.


def three_norms() -> nn.ModuleList:
    """So many norms of one value that an operation on it is worthwhile."""
    return nn.ModuleList(nn.LayerNorm(D) for _ in range(3))


def kept(leaf: Any, h: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    leaf.kept = h
    return h


LEAVES: dict[str, tuple[Callable[..., Any], Callable[..., torch.Tensor], bool]] = {
    "a tensor": (lambda leaf, h, tokens: h, lambda leaf, found: found, True),
    "first of a tuple": (lambda leaf, h, tokens: (h, tokens), lambda leaf, found: found[0], True),
    "second": (lambda leaf, h, tokens: (tokens, h), lambda leaf, found: found[1], False),
    "a dict": (lambda leaf, h, tokens: {"h": h}, lambda leaf, found: found["h"], False),
    "an attribute": (kept, lambda leaf, found: leaf.kept, False),
}
"""What a leaf makes of the rows that it looks up, how they are read from it, and the verdict."""


@pytest.mark.parametrize("how", LEAVES)
def test_an_operation_acts_on_the_value_that_was_proven(how: str) -> None:
    """The embedding is tied to the head: norms fold only by an operation on its output."""
    give, take, folds = LEAVES[how]
    weight = nn.Parameter(torch.zeros(VOCAB, D))
    leaf = Computing(
        lambda m, tokens: give(m, F.embedding(tokens, m.weight), tokens), weight=weight
    )

    def run(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        h = take(m.leaf, m.leaf(tokens))
        return sum(norm(h) for norm in m.norms) @ m.leaf.weight.T

    found = fold_in_place(randomised(Computing(run, leaf=leaf, norms=three_norms())), ids())
    assert found.error < 1e-12 and bool(found.folded) == folds


class Block(nn.Module):
    """Passes its input to norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Computing(lambda m, x: sum(norm(x) for norm in m.norms), norms=three_norms())
        self.linear = nn.Linear(D, D)

    def forward(self, *args: Any) -> torch.Tensor:
        return self.linear(self.norm(args[-1]))


class Named(Block):
    def forward(self, x: Any, other: Any = None) -> torch.Tensor:  # type: ignore[override]
        value = other if other is not None else x
        return self.linear(self.norm(value[0] if isinstance(value, tuple) else value))


BLOCKS: dict[str, tuple[type[Block], Callable[..., torch.Tensor], str]] = {
    "by position": (Block, lambda block, tokens, x: block(x), "blocks.0"),
    "by keyword": (Named, lambda block, tokens, x: block(x=x), "blocks.0"),
    "second": (Block, lambda block, tokens, x: block(tokens, x), "blocks.0.norm"),
    "second by keyword": (Named, lambda block, tokens, x: block(tokens, other=x), "blocks.0.norm"),
    "in a tuple": (Named, lambda block, tokens, x: block((x, x)), "blocks.0.norm"),
    "both ways": (Named, lambda block, tokens, x: block(x) + block((x,)), "blocks.0.norm"),
}
"""How a block is called on a value that is not the output of parameters alone, and the place."""


@pytest.mark.parametrize("how", BLOCKS)
def test_the_first_input_of_a_block_is_what_the_call_takes(how: str) -> None:
    """If a block cannot be used so, there is the module inside it that holds the norms."""
    kind, call, place = BLOCKS[how]

    def run(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        return call(m.blocks[0], tokens, m.emb(tokens).tanh())

    blocks = nn.ModuleList([kind()])
    model = randomised(Computing(run, emb=nn.Embedding(VOCAB, D), blocks=blocks))
    (op,) = analyze_module(model, ids()).plan.subtractions
    assert (op.module, op.place) == (place, "input")
    found = fold_in_place(model, ids())
    assert found.error < 1e-12 and len(found.folded) == 3


def test_a_forward_called_directly_is_a_call_of_the_place() -> None:
    def run(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        h, direct = m.emb(tokens), m.emb.forward(tokens.flip(-1))
        return sum(norm(h) for norm in m.norms) * direct.mean() @ m.emb.weight.T

    model = randomised(Computing(run, emb=nn.Embedding(VOCAB, D), norms=three_norms()))
    found = fold_in_place(model, ids())
    assert found.error < 1e-12 and not found.folded


# Norms and tensors of other classes.


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


@pytest.mark.parametrize("is_returned", [False, True])
def test_a_weight_that_is_cast_leaves_only_as_what_it_becomes(is_returned: bool) -> None:
    """It is cast to its own dtype, and may be returned after a cast to another dtype."""

    def run(m: Any, tokens: torch.Tensor) -> Any:
        weight = m.weight.to(torch.float64)
        y = m.norm(F.embedding(tokens, weight))
        return (y, weight.to(torch.float32).to(torch.float64)) if is_returned else y

    weight = nn.Parameter(torch.zeros(VOCAB, D))
    model = randomised(Computing(run, weight=weight, norm=nn.LayerNorm(D)))
    found = fold_in_place(model, ids())
    assert found.error < 1e-12 and bool(found.folded) != is_returned


class Own(torch.Tensor):
    """A tensor subclass whose objects share the memory of the original tensor."""


OTHER_OBJECTS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "returned": lambda model, h: h.as_subclass(Own),
    "kept as a parameter": lambda model, h: setattr(model, "kept", nn.Parameter(h)),
}


def folds(leave: Callable[[nn.Module, torch.Tensor], Any]) -> bool:
    """Whether a norm folds whose stream leaves as another object; its tokens depend on values.

    A recorded run may be refused, or only tell nothing.
    """

    def run(m: Any, x: torch.Tensor) -> Any:
        h = m.embed(x[x[:, 0] > -1e9])
        left = leave(m, h)
        return m.head(m.norm(h)), left

    parts = {"embed": nn.Linear(5, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 3)}
    try:
        return bool(analyze_module(Computing(run, **parts).eval(), torch.randn(2, 5)).plan.folded)
    except TraceFailed:
        return False


@pytest.mark.parametrize("how", OTHER_OBJECTS)
def test_a_value_does_not_leave_unseen_as_another_object(how: str) -> None:
    assert not folds(OTHER_OBJECTS[how])


def test_another_object_over_other_memory_is_no_such_value() -> None:
    constant = torch.randn(8)
    assert folds(lambda model, h: None)
    assert folds(lambda model, h: nn.Parameter(constant).mean().item())
