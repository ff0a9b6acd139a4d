"""Pieces of random calls of ops: shapes, tensors, keywords, and calls drawn by an op's schema."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import torch

from enjoyln_cli.plan.axis import Axis

aten = torch.ops.aten
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
Family = Callable[[Random], Case]
Shape = tuple[int, ...]
Draw = Callable[[Random, Shape], Any]
FAMILIES: dict[str, Family] = {}


def axes(shape: tuple[int, ...]) -> list[Axis]:
    """Whole dimensions, groups, strided groups, parts, and groups with gaps between them."""
    found = []
    for dim, n in enumerate(shape):
        found.append(Axis(dim, 0, 1, n, 1))
        for size in (2, 3):
            if n % size == 0 and n > size:
                found += [Axis(dim, 0, n // size, size, 1), Axis(dim, 0, 1, size, n // size)]
                found.append(Axis(dim, size, n // size - 1, size, 1))
                found.append(Axis(dim, 0, n // size, size - 1, 1, size))
                found.append(Axis(dim, 1, n // size, size - 1, 1, size))
    return [axis for axis in found if axis.size > 1]


def family(make: Family) -> Family:
    FAMILIES[make.__name__.strip("_")] = make
    return make


def sizes(r: Random, low: int = 0, high: int = 4) -> tuple[int, ...]:
    several = (1, 2, 2, 3, 4, 6, 0 if r.random() < 0.2 else 2)
    return tuple(r.choice(several) for _ in range(r.randint(low, high)))


def tensor(r: Random, *shape: int) -> torch.Tensor:
    """Mostly of float64; now and then integers, booleans, complex numbers, or float32."""
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    x = torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5
    if r.random() > 0.12:
        return x
    dtype = r.choice((torch.int64, torch.bool, torch.complex128, torch.float32))
    return (3 * x).to(dtype)


def real(r: Random, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    return torch.randn(shape, generator=generator, dtype=torch.float64) + 0.5


def whole(r: Random, below: int, *shape: int) -> torch.Tensor:
    shape = (0,) if below == 0 else shape
    generator = torch.Generator().manual_seed(r.randrange(2**31))
    return torch.randint(0, max(below, 1), shape, generator=generator)


def mask(r: Random, *shape: int) -> torch.Tensor:
    return real(r, *shape) > 0.4


def thinner(r: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to ``shape``."""
    kept = tuple(1 if r.random() < 0.25 else n for n in shape)
    return kept[r.randint(0, len(kept)) if r.random() < 0.3 else 0 :]


def wider(r: Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that ``shape`` broadcasts to."""
    front = sizes(r, 0, 1)
    return front + tuple(r.choice((2, 3, 6)) if n == 1 and r.random() < 0.6 else n for n in shape)


def dim(r: Random, rank: int) -> int:
    return r.randrange(-max(rank, 1), max(rank, 1))


def dims(r: Random, rank: int) -> list[int]:
    return [n - r.choice((0, rank)) for n in r.sample(range(rank), r.randint(0, rank))]


def options(r: Random, **values: Any) -> dict[str, Any]:
    """Some of the keyword arguments; each is a list to choose from."""
    return {name: r.choice(found) for name, found in values.items() if r.random() < 0.4}


def factored(r: Random, count: int) -> list[int]:
    """A shape of ``count`` elements."""
    shape = []
    while count > 1 and r.random() < 0.8:
        divisors = [n for n in range(1, count + 1) if count % n == 0]
        shape.append(r.choice(divisors))
        count //= shape[-1]
    return [*shape, count]


def numbers(count: int, least: int, most: int) -> Draw:
    """``count`` numbers, each between ``least`` and ``most``."""
    return lambda r, shape: [r.randint(least, most) for _ in range(count)]


def drawn(*ops: Any, shapes: Callable[[Random], Shape] = sizes, **how: Draw) -> Family:
    """Calls of one of the ops, whose arguments are drawn by ``how`` or else by ``value``.

    Arguments that may be left out mostly are. Now and then one tensor stands for all.
    """

    def make(r: Random) -> Case:
        op, shape = r.choice(ops), shapes(r)
        given: dict[str, Any] = {}
        for argument in op._schema.arguments:
            if not argument.has_default_value() or r.random() < 0.4:
                draw = how.get(argument.name) or partial(value, argument)
                given[argument.name] = draw(r, shape)
        names = [name for name, found in given.items() if isinstance(found, torch.Tensor)]
        names = [name for name in names if name not in VALUES]
        inputs = tuple(given[name] for name in names) or (tensor(r, *shape),)
        is_one = r.random() < 0.1

        def call(*tensors: torch.Tensor) -> Any:
            tensors = tensors[:1] * len(names) if is_one else tensors
            return op(**{**given, **dict(zip(names, tensors, strict=False))})

        return call, inputs

    return make


VALUES = ("condition", "index", "mask")
"""Tensors that are part of a function, not inputs."""
PLACES = re.compile("dim|axis|source|destination")
"""What arguments are called that name dimensions."""


def value(argument: Any, r: Random, shape: Shape) -> Any:
    """A value for an argument of a call with a first operand of this shape."""
    name, kind = argument.name, str(argument.real_type)
    if kind.startswith("Optional") and r.random() < 0.3:
        return None
    match name, re.sub(r"Optional\[(.*)\]", r"\1", kind):
        case "self" | "input", "Tensor":
            return tensor(r, *shape)
        case "condition" | "mask", "Tensor":
            return mask(r, *thinner(r, shape))
        case "index", "Tensor":
            return whole(r, min(shape, default=1), r.choice(shape or (1,)))
        case _, "Tensor":
            return tensor(r, *r.choice((thinner, wider))(r, shape))
        case _, "int" if PLACES.match(name):
            return dim(r, len(shape))
        case _, "List[int]" if PLACES.match(name):
            return dims(r, len(shape))
        case _, "List[int]":
            return [r.randint(0, 2) for _ in shape]
        case _, "int":
            return r.randint(-2, 3)
        case _, "number" | "float":
            return r.choice((-1, 0, 2, 1.5, 0.5))
        case _, "bool":
            return name != "pin_memory" and r.random() < 0.5
        case _, "ScalarType":
            return r.choice((torch.float64, torch.float64, torch.float32, torch.int64, torch.bool))
        case _, "str":
            return r.choice(("floor", "trunc") if name == "rounding_mode" else PADDINGS)
    return None  # a device, or a layout of memory


PADDINGS = ("constant", "reflect", "replicate")
