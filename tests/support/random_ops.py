"""Calls of every op that has a rule, at random: ranks, broadcasts, dtypes, keywords, empty sizes.

Each family is a function of a random generator that gives ``(function, inputs)``; torch refuses
some of these calls, which then are no cases. ``drawn`` makes a family of ops by their schemas. Ops
whose operands have to fit each other have families of their own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from math import prod
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 (defines an op)

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


# Pieces of a call.


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


# Views, copies and casts.


def into(r: Random, shape: Shape) -> Shape:
    """Another shape for as many elements."""
    if not prod(shape):
        return tuple(r.sample([*shape, r.randint(0, 3)], len(shape)))
    return tuple(factored(r, prod(shape)))


FAMILIES["copies"] = drawn(
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default,
    aten.lift_fresh_copy.default, aten.neg.default, aten.positive.default, aten.detach_.default,
)  # fmt: skip
FAMILIES["views"] = drawn(
    aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.view_as.default,
    aten.reshape_as.default, aten.view.dtype,
    size=into, shape=into, other=lambda r, shape: tensor(r, *into(r, shape)),
    dtype=lambda r, shape: r.choice((torch.int64, torch.float32, torch.complex128)),
)  # fmt: skip
FAMILIES["dimensions"] = drawn(
    aten.flatten.using_ints, aten.unflatten.int, aten.unsqueeze.default, aten.squeeze.default,
    aten.squeeze.dim, aten.squeeze.dims, sizes=lambda r, shape: factored(r, 6),
)  # fmt: skip
FAMILIES["orders"] = drawn(
    aten.permute.default, aten.transpose.int, aten.t.default, aten.numpy_T.default,
    aten.movedim.int, aten.movedim.intlist, aten.swapaxes.default, aten.swapdims.default,
    aten.moveaxis.int, aten.mT.default,
    dims=lambda r, shape: [at - r.choice((0, len(shape))) for at in shuffled(r, shape)],
)  # fmt: skip
FAMILIES["casts"] = drawn(
    aten._to_copy.default, aten.to.dtype, aten.to.other, aten.type_as.default, aten.copy.default
)
FAMILIES["dropouts"] = drawn(aten.dropout.default, aten.feature_dropout.default)


def shuffled(r: Random, shape: Shape) -> list[int]:
    return r.sample(range(len(shape)), len(shape))


# Sums, products and choices.


FAMILIES["sums"] = drawn(aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar)
FAMILIES["factors"] = drawn(
    aten.mul.Tensor, aten.multiply.Tensor, aten.div.Tensor, aten.div.Tensor_mode,
    aten.true_divide.Tensor,
)  # fmt: skip
FAMILIES["scalings"] = drawn(
    aten.mul.Scalar, aten.multiply.Scalar, aten.div.Scalar, aten.div.Scalar_mode,
    aten.true_divide.Scalar, other=lambda r, shape: r.choice((-1, 2, 1.5)),
)  # fmt: skip
FAMILIES["choices"] = drawn(
    aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar,
    aten.where.default,
)  # fmt: skip
FAMILIES["fillings"] = drawn(
    aten.masked_fill.Scalar, value=lambda r, shape: r.choice((0, 0.0, 1.5))
)
FAMILIES["fillings_by_tensors"] = drawn(
    aten.masked_fill.Tensor, value=lambda r, shape: tensor(r, *sizes(r, 0, 1))
)
FAMILIES["lerps"] = drawn(aten.lerp.Scalar, aten.lerp.Tensor)


@family
def centrings(r: Random) -> Case:
    x = real(r, *sizes(r, 1))
    some, keep = dims(r, x.ndim), r.random() < 0.8
    one = [dim(r, x.ndim)]
    which = r.choice((some, one, one, None))
    scaled, kind = options(r, alpha=[2]), options(r, dtype=[torch.float32])
    return lambda x: aten.sub(x, aten.mean.dim(x, which, keep, **kind), **scaled), (x,)


# Repeats, slices and concatenations.


def onto(r: Random, shape: Shape) -> list[int]:
    """A shape that ``shape`` can be expanded to; a size that stays may be given as -1."""
    found = list(wider(r, shape))
    for at in range(1, len(shape) + 1):
        found[-at] = -1 if r.random() < 0.2 else found[-at]
    return found


def counts(r: Random, shape: Shape) -> list[int]:
    return [r.choice((1, 1, 2, 0)) for _ in range(r.randint(0, len(shape) + 1))]


FAMILIES["repeats"] = drawn(
    aten.expand.default, aten.broadcast_to.default, aten.expand_as.default, size=onto,
    other=lambda r, shape: tensor(r, *wider(r, shape)),
)  # fmt: skip
FAMILIES["repetitions"] = drawn(aten.repeat.default, aten.tile.default, repeats=counts, dims=counts)
FAMILIES["interleaved"] = drawn(aten.repeat_interleave.self_int)


@family
def rows_repeated(r: Random) -> Case:
    shape = sizes(r)
    by = whole(r, 3, shape[0] if shape else 1)
    op, total = aten.repeat_interleave.self_Tensor, int(by.sum())
    return lambda x: op(x, by, 0, output_size=total), (tensor(r, *shape),)


@family
def slices(r: Random) -> Case:
    x = tensor(r, *sizes(r))
    at, n = dim(r, x.ndim), 0 if not x.ndim else x.shape[dim(r, x.ndim)]
    k = r.randrange(-max(n, 1), max(n, 1))
    rest = [a for a in (r.randint(0, n), r.randint(0, n)) if a <= n]
    parts = [min(rest), max(rest) - min(rest), n - max(rest)]
    width = r.randint(1, 3)
    return r.choice((
        lambda x: aten.split.Tensor(x, width, at)[k] + 0,
        lambda x: aten.split_with_sizes.default(x, parts, at)[k] + 0,
        lambda x: aten.chunk.default(x, width, at)[k] + 0,
        lambda x: aten.unbind.int(x, at)[k] + 0,
    )), (x,)  # fmt: skip


FAMILIES["narrower"] = drawn(
    aten.slice.Tensor, aten.narrow.default, aten.select.int, aten.unfold.default,
    start=lambda r, shape: r.randint(-2, 2), length=lambda r, shape: r.randint(1, 3),
)  # fmt: skip


@family
def picks(r: Random) -> Case:
    """What fused projections are taken apart with."""
    lead, inner = sizes(r, 0, 2), [r.choice((1, 2, 3, 4)) for _ in range(3)]
    total = inner[0] * inner[1] * inner[2]
    x, at = tensor(r, *lead, total), len(lead) + r.randrange(3)
    order = r.sample(range(len(lead) + 3), len(lead) + 3)
    moved_to = order.index(at)
    k, stop = r.randrange(inner[at - len(lead)]), r.randint(1, 3)
    width = lambda x: x.shape[moved_to]  # noqa: E731
    return r.choice((
        lambda x: x.view(*lead, *inner).unbind(at)[k] + 0,
        lambda x: x.view(*lead, *inner).permute(order).unbind(moved_to)[k] + 0,
        lambda x: x.view(*lead, *inner).permute(order).select(moved_to, k).transpose(0, -1),
        lambda x: x.reshape(*lead, *inner).select(at, k) + 0,
        lambda x: x.reshape(*lead, *inner).permute(order).narrow(moved_to, k, 1) + 0,
        lambda x: x.view(*lead, *inner).split(1, at)[k].flatten() + 0,
        lambda x: aten.slice.Tensor(x.view(*lead, *inner), at, k, None, stop) + 0,
        lambda x: x.view(*lead, *inner).select(at, k).flatten(0, 1).unflatten(0, (-1, 2)),
        lambda x: x.view(*lead, *inner).permute(order).reshape(-1, width(x)).select(0, 0),
    )), (x,)  # fmt: skip


@family
def rows_side_by_side(r: Random) -> Case:
    shape = sizes(r, 1)
    at = dim(r, len(shape))
    other = list(shape)
    other[at] = r.choice((1, 2, 3))
    x, y = tensor(r, *shape), tensor(r, *(other if r.random() < 0.7 else shape))
    empty = real(r, 0)
    op = r.choice((aten.cat, aten.concat, aten.concatenate))
    return r.choice((
        lambda x, y, e: op([x, y], at),
        lambda x, y, e: op([x, y]),
        lambda x, y, e: op([x, y, x], at),
        lambda x, y, e: op([e, x, y], at),
        lambda x, y, e: op([e, e], 0),
        lambda x, y, e: aten.stack([x, y], at),
        lambda x, y, e: aten.stack([x, x]),
    )), (x, y, empty)  # fmt: skip


# Indices.


@family
def indices(r: Random) -> Case:
    x = tensor(r, *sizes(r, 1))
    n = x.ndim
    places: list[torch.Tensor | None] = []
    common = sizes(r, 0, 2)
    while len(places) < n and r.random() < 0.7:
        here = x.shape[len(places)]
        if r.random() < 0.3:
            places.append(None)
        elif r.random() < 0.2:
            places.append(mask(r, here))
        else:
            places.append(whole(r, here, *thinner(r, common)))
    if not any(p is not None for p in places):
        places = [whole(r, x.shape[0], *common)]
    if r.random() < 0.5:
        return lambda x: aten.index.Tensor(x, places), (x,)
    try:
        picked = x[tuple(slice(None) if p is None else p for p in places)]
    except IndexError:
        picked = x
    values = tensor(r, *thinner(r, tuple(picked.shape)))
    add = r.random() < 0.4
    return lambda x, y: aten.index_put(x, places, y, add), (x, values)


FAMILIES["rows_by_number"] = drawn(
    aten.index_select.default, aten.index_add.default, aten.index_copy.default,
    aten.flip.default, source=lambda r, shape: tensor(r, *shape),
)  # fmt: skip
FAMILIES["rolls"] = drawn(
    aten.roll.default, shifts=numbers(1, -2, 2), dims=lambda r, shape: [dim(r, len(shape))]
)


@family
def gathers(r: Random) -> Case:
    shape = sizes(r, 0, 3)
    x, n = tensor(r, *shape), len(shape)
    at = dim(r, n)
    smaller = [r.randint(1, max(s, 1)) for s in shape] if r.random() < 0.3 else list(shape)
    thin, onto = list(smaller), list(smaller)
    for d in range(n):
        if r.random() < 0.5:
            thin[d] = 1
    below = shape[at] if shape else 1
    narrow = whole(r, below, *thin)
    times = [o // max(t, 1) for o, t in zip(onto, thin, strict=True)]
    index = r.choice((lambda: narrow.expand(onto), lambda: narrow * 1))
    y = tensor(r, *shape)
    return r.choice((
        lambda x, y: aten.gather(x, at, index()),
        lambda x, y: aten.gather(x, at, narrow.repeat(times)),
        lambda x, y: aten.scatter_add(x, at, index(), y),
        lambda x, y: aten.scatter(x, at, index(), y),
        lambda x, y: aten.take_along_dim(x, index(), at),
        lambda x, y: aten.take_along_dim(x, index()),
    )), (x, y)  # fmt: skip


@family
def parts_replaced(r: Random) -> Case:
    shape = sizes(r)
    x, at = tensor(r, *shape), dim(r, len(shape))
    if not shape or not shape[at]:
        return lambda x: x.clone(), (x,)
    start, step = r.randrange(shape[at]), r.choice((1, 1, 2))
    if r.random() < 0.5:
        y = tensor(r, *x.select(at, start).shape)
        return lambda x, y: aten.select_scatter(x, y, at, start), (x, y)
    end = r.randint(start, shape[at] + 1)
    places = [slice(None)] * x.ndim
    places[at] = slice(start, end, step)
    y = tensor(r, *x[tuple(places)].shape)
    return lambda x, y: aten.slice_scatter(x, y, at, start, end, step), (x, y)


@family
def scatters_of_rows(r: Random) -> Case:
    shape = sizes(r)
    x, m = tensor(r, *shape), mask(r, *thinner(r, shape))
    count = int(m.expand(shape).sum())
    y = tensor(r, *(thinner(r, shape) if r.random() < 0.3 else (count + 2, *shape[-1:])))
    if r.random() < 0.6:
        return lambda x, y: aten.masked_scatter(x, m.expand(shape), y), (x, y)
    return lambda x, y: aten.masked_scatter(x, m, y), (x, y)


# Reductions, windows, images.


FAMILIES["reductions"] = drawn(
    aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.cumsum.default,
    self=lambda r, shape: tensor(r, *shape) if r.random() < 0.8 else whole(r, 9, *shape),
)  # fmt: skip


FAMILIES["sequences"] = drawn(
    aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default, aten.upsample_nearest1d.default,
    aten.upsample_linear1d.default, aten.upsample_nearest1d.vec, aten.upsample_linear1d.vec,
    shapes=lambda r: (*sizes(r, 1, 2), 6), kernel_size=numbers(1, 1, 2), stride=numbers(1, 1, 2),
    padding=numbers(1, 0, 1), output_size=numbers(1, 1, 7), scale_factors=numbers(1, 2, 2),
)  # fmt: skip
FAMILIES["images"] = drawn(
    aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default, aten.upsample_bicubic2d.default,
    aten.upsample_bilinear2d.default, aten.upsample_nearest2d.default,
    aten._upsample_bicubic2d_aa.default, aten._upsample_bilinear2d_aa.default,
    shapes=lambda r: (*sizes(r, 1, 2), 4, 6), kernel_size=numbers(2, 1, 2),
    stride=numbers(2, 1, 2), padding=numbers(2, 0, 1), output_size=numbers(2, 1, 7),
)  # fmt: skip


def widths(r: Random, shape: Shape) -> list[int]:
    return [r.choice((0, 0, 1, 2, -1)) for _ in range(2 * r.randint(0, len(shape)))]


FAMILIES["paddings"] = drawn(
    aten.constant_pad_nd.default, aten.pad.default, aten.replication_pad1d.default,
    aten.replication_pad2d.default, aten.replication_pad3d.default,
    aten.reflection_pad1d.default, aten.reflection_pad2d.default, aten.reflection_pad3d.default,
    pad=widths, padding=lambda r, shape: [max(0, width) for width in widths(r, shape)],
)  # fmt: skip
FAMILIES["zeros"] = drawn(aten.zeros.default, aten.new_zeros.default, aten.zeros_like.default)


# Products with weights, and norms.


@family
def linears(r: Random) -> Case:
    lead, i, o = sizes(r, 0, 3), r.choice((2, 3, 4)), r.choice((2, 3, 4))
    x, w = tensor(r, *lead, i), tensor(r, *((i,) if r.random() < 0.2 else (o, i)))
    if r.random() < 0.3:
        return aten.linear, (x, w)
    b = tensor(r, *r.choice(((o,), (o,), (o,), (*lead[-1:], o), (1,), (), lead)))
    return (lambda x, w, b: aten.linear(x, w, b)), (x, w, b)


@family
def matrices(r: Random) -> Case:
    i, j, k, b = (r.choice((1, 2, 3, 4)) for _ in range(4))
    batch = sizes(r, 0, 2)
    x = tensor(r, *thinner(r, batch), *((i, j) if r.random() < 0.85 else (j,)))
    y = tensor(r, *thinner(r, batch), *((j, k) if r.random() < 0.85 else (j,)))
    how = options(r, alpha=[2, 0], beta=[0, 1, 3])
    added = tensor(r, *thinner(r, (i, k))), tensor(r, *thinner(r, (b, i, k)))
    flat = tensor(r, i, j), tensor(r, j, k)
    deep = tensor(r, b, i, j), tensor(r, b, j, k)
    return r.choice((
        (aten.matmul, (x, y)),
        (aten.mm, flat),
        (aten.bmm, deep),
        (lambda a, x, y: aten.addmm(a, x, y, **how), (added[0], *flat)),
        (lambda a, x, y: aten.baddbmm(a, x, y, **how), (added[1], *deep)),
        (lambda x: aten.mm(x, x), (tensor(r, i, i),)),
    ))  # fmt: skip


@family
def equations(r: Random) -> Case:
    size = {letter: r.choice((2, 3, 4)) for letter in "abcd"}
    count = r.choice((1, 2, 2, 3))
    terms = ["".join(r.choices("abcd", k=r.randint(0, 3))) for _ in range(count)]
    used = sorted({letter for term in terms for letter in term})
    out = "".join(r.sample(used, r.randint(0, len(used))))
    shapes = [[1 if r.random() < 0.1 else size[letter] for letter in term] for term in terms]
    if r.random() < 0.4:
        dots = r.choice(("", "...", "..."))
        out = r.choice(("", dots)) + out
        front = sizes(r, 0, 2)
        terms[0] = "..." + terms[0]
        shapes[0] = [*front, *shapes[0]]
        if r.random() < 0.5:
            terms[-1] = terms[-1] if "..." in terms[-1] else terms[-1] + "..."
            shapes[-1] = [*shapes[-1], *front] if len(terms) > 1 else shapes[-1]
    equation = ",".join(terms) + r.choice(("->" + out, "->" + out, "->" + out, "", " -> " + out))
    return (
        lambda *xs: aten.einsum(equation, list(xs)),
        tuple(tensor(r, *shape) for shape in shapes),
    )


@family
def expert_products(r: Random) -> Case:
    """In float64 only the fallback of transformers runs."""
    offsets = torch.tensor([1, 1, 4], dtype=torch.int32)
    op = torch.ops.transformers.grouped_mm_fallback
    return lambda x, w: op(x, w, offsets), (tensor(r, 4, 3), tensor(r, 3, 3, r.choice((2, 4))))


@family
def convolutions(r: Random) -> Case:
    n, groups = r.randint(1, 3), r.choice((1, 1, 1, 2))
    channels, out, lead = 2 * r.randint(1, 2), 2 * r.randint(1, 3), ((), (2,), (2,))[r.randrange(3)]
    spatial, kernel = [r.randint(3, 4)] * n, [r.randint(1, 2)] * n
    x = tensor(r, *lead, channels, *spatial)
    weight = tensor(r, out, channels // groups, *kernel)
    turned = tensor(r, channels, out // groups, *kernel)
    bias = None if r.random() < 0.4 else tensor(r, out)
    biases = () if bias is None else (bias,)
    forward = (aten.conv1d, aten.conv2d, aten.conv3d)[n - 1]
    backward = (aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)[n - 1]
    one, zero, pad = [1] * n, [0] * n, [r.randint(0, 1)] * n
    if r.random() < 0.15:
        mode = r.choice(("same", "valid"))
        return lambda x, w, *b: forward.padding(x, w, *(b or (None,)), one, mode, one, groups), (
            x, weight, *biases,
        )  # fmt: skip
    return r.choice((
        (lambda x, w, *b: forward(x, w, *(b or (None,)), one, pad, one, groups), (
            x, weight, *biases)),
        (lambda x, w, *b: backward(x, w, *(b or (None,)), one, pad, zero, groups), (
            x, turned, *biases)),
        (lambda x, w, *b: aten.convolution(
            x, w, *(b or (None,)), one, pad, one, False, zero, groups), (x, weight, *biases)),
        (lambda x, w, *b: aten.convolution(
            x, w, *(b or (None,)), one, pad, one, True, zero, groups), (x, turned, *biases)),
    ))  # fmt: skip


@family
def embeddings(r: Random) -> Case:
    w, index = tensor(r, 5, r.choice((1, 2, 4))), whole(r, 5, *sizes(r, 0, 3))
    how = options(r, padding_idx=[-1, 2], scale_grad_by_freq=[True])
    if "scale_grad_by_freq" in how:
        how.setdefault("padding_idx", 1)
    return lambda w: aten.embedding(w, index, *how.values()), (w,)


@family
def bags_of_embeddings(r: Random) -> Case:
    w, mode = tensor(r, 5, r.choice((2, 4))), r.randrange(3)
    index, starts, weights = whole(r, 5, 6), torch.tensor([0, 2, 2]), tensor(r, 6)
    last, padding = r.random() < 0.3, r.choice((None, 1))
    part = r.choice((0, 0, 1))
    bag = (False, mode, False)
    if mode == 0 and r.random() < 0.5:
        rest = (last, padding)
        return (
            lambda w, s: aten.embedding_bag.padding_idx(w, index, starts, *bag, s, *rest)[part] + 0,
            (w, weights),
        )
    if r.random() < 0.5:
        return lambda w: aten.embedding_bag(w, index, starts, *bag)[part] + 0, (w,)
    return lambda w: F.embedding_bag(index.view(2, 3), w, mode=("sum", "mean", "max")[mode]), (w,)


@family
def attentions(r: Random) -> Case:
    heads, t, s, e, v = r.choice((1, 2, 4)), *(r.choice((1, 2, 3, 4)) for _ in range(4))
    lead = sizes(r, 0, 1)
    grouped = r.random() < 0.2
    fewer = heads // 2 or 1 if grouped else heads
    q = tensor(r, *thinner(r, (*lead, heads)), t, e)
    k = tensor(r, *thinner(r, (*lead, fewer)), s, e)
    x = tensor(r, *thinner(r, (*lead, fewer)), s, v)
    how: dict[str, Any] = options(r, scale=[0.5], dropout_p=[0.0])
    how |= options(r, is_causal=[True]) or options(r, attn_mask=[real(r, t, s), mask(r, t, s)])
    how |= {"enable_gqa": True} if grouped else {}
    op = aten.scaled_dot_product_attention
    if r.random() < 0.15:
        return lambda q, x: op(q, x, x, **how), (tensor(r, heads, t, v), x)
    return lambda q, k, x: op(q, k, x, **how), (q, k, x)


@family
def layer_norms(r: Random) -> Case:
    shape = sizes(r)
    x, over = real(r, *shape), list(shape[r.randint(0, len(shape)) :])
    w = real(r, *over) if r.random() < 0.3 else None
    b = real(r, *over) if r.random() < 0.4 else None
    given = tuple(p for p in (w, b) if p is not None)

    def call(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        rest_ = list(rest)
        weight = rest_.pop(0) if w is not None else None
        return aten.layer_norm(x, over, weight, rest_.pop(0) if b is not None else None)

    return call, (x, *given)


FAMILIES["spreads"] = drawn(
    aten.softmax.int, aten.log_softmax.int, aten._softmax.default, aten.var.dim, aten.var.default,
    aten.var.correction, aten.std.correction, aten.std.default, aten.group_norm.default,
    aten.tanh.default, shapes=lambda r: sizes(r, 1), self=lambda r, shape: real(r, *shape),
    half_to_float=lambda r, shape: False,
)  # fmt: skip
"""Ops over elements, which a shift may or may not change."""


@family
def moments(r: Random) -> Case:
    x = real(r, *sizes(r, 1))
    over, part = r.choice((dims(r, x.ndim), [dim(r, x.ndim)], None)), r.randrange(2)
    how = options(r, correction=[0, 1], keepdim=[True])
    return lambda x: aten.var_mean.correction(x, over, **how)[part] + 0, (x,)
