"""An analysis leaves nothing in a model, wherever its code stores values."""

from __future__ import annotations

import functools
import gc
import random
import sys
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from folding_live import VOCAB, D, ids, randomised
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.effects.escapes import what_holds
from enjoyln_cli.errors import TraceFailed

LIST: list[Any] = []
DICT: dict[str, Any] = {"first": 1}
REBOUND: Any = None
HOME = types.ModuleType("tests_home_of_values")
COUNT = torch.zeros(())
TABLE = np.zeros(3)
ORDERED = OrderedDict[str, Any](b=1, a=2)
DEEP: Any = {"a": ({"b": [deque([1], maxlen=2)]},)}
FACTORY: Any = defaultdict(list)
CHOICE = random.Random(0)
WEAK: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


@functools.lru_cache
def cached(key: int) -> list[Any]:
    return []


@dataclass(frozen=True, slots=True)
class Frozen:
    value: Any = None


class Holder:
    shared: Any = None

    def keep(self, value: Any) -> None:
        type(self).shared = value


def keep_in_default(value: Any, kept: list[Any] = []) -> list[Any]:  # noqa: B006
    kept[:] = [value]
    return kept


def keep_on_function(value: Any) -> None:
    keep_on_function.value = value  # type: ignore[attr-defined]


def closure() -> tuple[Any, Any]:
    found = None

    def keep(value: Any) -> None:
        nonlocal found
        found = value

    return keep, lambda: found


KEEP, FOUND = closure()


class Keeping(nn.Module):
    """Stores the output of its embedding in one kind of place; ``held`` reads it."""

    last: Any = None

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)
        self.how = how
        self.plain = [nn.Linear(D, D)]
        self.holder, self.frozen = Holder(), Frozen()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        global REBOUND
        h = self.emb(tokens)
        match self.how:
            case "global list":
                LIST.append(h)
            case "global dict":
                DICT["second"] = h
            case "rebound global":
                REBOUND = h
            case "new global":
                global ADDED
                ADDED = h  # type: ignore[name-defined]
            case "attribute of a Python module":
                HOME.value = h  # type: ignore[attr-defined]
            case "class attribute":
                type(self).last = h
            case "class of an object":
                self.holder.keep(h)
            case "attribute of an object":
                self.holder.own = h  # type: ignore[attr-defined]
            case "frozen slot":
                object.__setattr__(self.frozen, "value", h)
            case "closure":
                KEEP(h)
            case "default argument":
                keep_in_default(h)
            case "function":
                keep_on_function(h)
            case "parameter":
                self.emb.weight.value = h  # type: ignore[attr-defined]
            case "global tensor":
                COUNT.value = h  # type: ignore[attr-defined]
            case "grad":
                self.emb.weight.grad = torch.zeros_like(self.emb.weight)
            case "unregistered module":
                self.plain[0].value = h  # type: ignore[assignment]
            case "weak key":
                WEAK[self.norm] = h
            case "cached function":
                cached(1).append(h)
            case "ordered dictionary":
                ORDERED.move_to_end("b")
                ORDERED["c"] = h
            case "default dictionary":
                FACTORY["a"].append(h)
            case "deep":
                DEEP["a"][0]["b"][0].append(h)
        return self.norm(h)

    def held(self) -> dict[str, Any]:
        return {
            "global list": list(LIST), "global dict": dict(DICT), "rebound global": REBOUND,
            "new global": globals().get("ADDED"), "class attribute": vars(type(self)).get("last"),
            "attribute of a Python module": vars(HOME).get("value"),
            "class of an object": Holder.shared, "attribute of an object": dict(vars(self.holder)),
            "frozen slot": self.frozen.value, "closure": FOUND(),
            "default argument": list(keep_in_default.__defaults__[0]),  # type: ignore[index]
            "function": dict(vars(keep_on_function)), "parameter": dict(vars(self.emb.weight)),
            "global tensor": dict(vars(COUNT)), "grad": self.emb.weight.grad,
            "unregistered module": vars(self.plain[0]).get("value"), "weak key": dict(WEAK),
            "cached function": cached.cache_info().currsize,
            "ordered dictionary": list(ORDERED.items()),
            "default dictionary": dict(FACTORY), "deep": list(DEEP["a"][0]["b"][0]),
        }  # fmt: skip


WAYS = [*Keeping("").held()]


@pytest.fixture(autouse=True)
def _forgotten() -> Any:
    """Remove what a test has stored in this file's globals."""
    yield
    global REBOUND
    REBOUND, Keeping.last, Holder.shared = None, None, None
    globals().pop("ADDED", None)
    KEEP(None)
    ORDERED.clear()
    ORDERED.update(b=1, a=2)
    for kept in (
        LIST,
        FACTORY,
        keep_in_default(None),
        WEAK,
        vars(keep_on_function),
        vars(COUNT),
    ):
        kept.clear()
    DICT.pop("second", None)
    DEEP["a"][0]["b"][0].clear()
    DEEP["a"][0]["b"][0].append(1)
    vars(HOME).pop("value", None)
    cached.cache_clear()


HOME.__file__ = __file__


PLACES = [("cpu", how) for how in WAYS]
RECORDED = [("meta", how) for how in ("global list", "parameter", "deep")]
"""A recording puts back what an export does: these are a Python object, a tensor, both nested."""


@pytest.mark.parametrize(("device", "how"), PLACES + RECORDED)
def test_what_a_trace_keeps_is_gone_and_counts_as_an_output(how: str, device: str) -> None:
    model: Any = randomised(Keeping(how)).to(device)
    at_first = model.held()
    plan = analyze_module(model, ids()).plan
    assert model.held() == at_first
    assert [verdict.norm for verdict in plan.folded] == (["norm"] if how == "grad" else [])
    if how != "grad" and device == "cpu":
        model(ids())
        assert repr(model.held()[how]) != repr(at_first[how]), "the call does keep something there"


def test_what_a_real_call_kept_is_there_again() -> None:
    model: Any = randomised(Keeping("global list"))
    model(ids())
    (before,) = LIST
    analyze_module(model, ids())
    assert len(LIST) == 1 and LIST[0] is before


class Counting(nn.Module):
    """State other than tensors of a trace: random numbers, arrays, positions of iterators."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.norm, self.how = nn.Embedding(VOCAB, D), nn.LayerNorm(D), how

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.emb(tokens)
        match self.how:
            case "tensor":
                COUNT.add_(1)
            case "array":
                TABLE[0] += 1
            case "random numbers":
                h = h * (1 + int(CHOICE.random()))
        return self.norm(h)


@pytest.mark.parametrize("how", ["tensor", "array", "random numbers"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_numbers_outside_of_the_model_are_what_they_were(how: str, device: str) -> None:
    def state() -> list[Any]:
        return [COUNT.item(), TABLE.tolist(), CHOICE.getstate()]

    model, before = randomised(Counting(how)).to(device), state()
    analyze_module(model, ids())
    assert state() == before


class Advancing(nn.Module):
    """Takes the next number of a generator, and stores a value that no code can find."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.emb, self.norm = nn.Embedding(VOCAB, D), nn.LayerNorm(D)
        self.hidden = hidden

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.emb(tokens)
        if self.hidden:
            globals()["HID" + "DEN"] = [h]
        else:
            next(NUMBERS)
        return self.norm(h)


NUMBERS = (number for number in range(10**6))


@pytest.mark.parametrize("hidden", [False, True])
def test_what_cannot_be_put_back_is_named(hidden: bool) -> None:
    named = "a value in a list" if hidden else "the position of a generator"
    try:
        with pytest.raises(TraceFailed, match=f"changes {named}.*build the model again"):
            analyze_module(randomised(Advancing(hidden)), ids())
    finally:
        globals().pop("HIDDEN", None)
        gc.collect()


def test_installed_packages_are_not_opened() -> None:
    """Libraries that a model calls keep their caches; the snapshot does not follow them."""
    from enjoyln_cli.effects.reachable import Snapshot

    remembered = Snapshot(randomised(Keeping("")))
    owners = [space.get("__name__", "") for space, _ in remembered._globals]
    assert __name__ in owners
    assert not any(name.startswith(("torch", "transformers", "numpy")) for name in owners)


@contextmanager
def all_objects_frozen() -> Iterator[None]:
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("how", ["function", "method", "wrapped", "static method"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("home", ["transformers.models.oneformer.modeling_oneformer", "mine"])
def test_what_transformers_caches_of_a_call_is_dropped(
    home: str, frozen: bool, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An analysis freezes the objects that existed before, for speed; a server may, too."""
    function = torch.arange if how == "static method" else lambda *size: torch.arange(size[-1])
    cached = functools.lru_cache(maxsize=1)(function)
    module: Any = types.ModuleType(home)
    monkeypatch.setitem(sys.modules, home, module)
    module.Layer = type("Layer", (), {"__module__": home})
    match how:
        case "function":
            cached.__module__ = home
            module.positions = cached
        case "method":
            module.Layer.positions = cached
        case "wrapped":
            module.Layer.positions = lambda self, size: cached(size)
        case "static method":
            module.Layer.positions = staticmethod(cached)
    with all_objects_frozen() if frozen else nullcontext():
        left = what_holds([weakref.ref(cached(3))])
    of_model = home != "mine"
    assert bool(left) != of_model
    assert cached.cache_info().currsize == (0 if of_model else 1)


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)))
        return y


class WritesItsInput(Layers):
    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return self.layers(x) * int(ids.sum() > 2)


class IndexesInATransform(Layers):
    """Like the masks of transformers: the graph holds a tensor that a transform created."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(x))
        with TransformGetItemToIndex():
            mask = torch.vmap(lambda i: torch.vmap(lambda j: (i >= j) & (ids[j] > 0))(rows))(rows)
        return self.layers(x).masked_fill(~mask, 0.0)


@pytest.mark.parametrize("kind", [WritesItsInput, IndexesInATransform])
def test_what_the_caller_or_the_graph_holds_is_not_left_behind(kind: type[Layers]) -> None:
    plan = analyze_module(kind(), torch.randn(6, 6), torch.arange(6)).plan
    assert [verdict.norm for verdict in plan.folded] == ["norm"]
