"""Calls of every op that has a rule, at random: ranks, broadcasts, dtypes, keywords, empty sizes.

Each family is a function of a random generator that gives ``(function, inputs)``; torch refuses
some of these calls, which then are no cases.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
import transformers.integrations.moe  # noqa: F401 (defines an op)

aten = torch.ops.aten
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
FAMILIES: dict[str, Callable[[Random], Case]] = {}


def family(make: Callable[[Random], Case]) -> Callable[[Random], Case]:
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


def unary(*ops: Any, low: int = 0) -> Callable[[Random], Case]:
    return lambda r: (r.choice(ops), (tensor(r, *sizes(r, low)),))


# Views, copies and casts.

FAMILIES["copies"] = unary(
    aten.clone, aten.contiguous, aten.alias, aten.detach, aten.lift_fresh_copy, aten.neg,
    aten.positive, aten.zeros_like, lambda x: aten.detach_(x.clone()),
)  # fmt: skip


@family
def views(r: Random) -> Case:
    x = tensor(r, *sizes(r))
    shape = factored(r, x.numel()) if x.numel() else r.sample([*x.shape, r.randint(0, 3)], x.ndim)
    ops = [aten.view, aten.reshape, aten._unsafe_view]
    if r.random() < 0.3:
        other = tensor(r, *shape)
        return r.choice((aten.view_as, aten.reshape_as)), (x, other)
    if r.random() < 0.1:
        return lambda x: x.view(r.choice((torch.int64, torch.float32, torch.complex128))), (x,)
    op = r.choice(ops)
    return lambda x: op(x, shape), (x,)


@family
def dimensions(r: Random) -> Case:
    x = tensor(r, *sizes(r))
    n, some = x.ndim, dims(r, x.ndim)
    at, split, to = dim(r, n), factored(r, 6), dim(r, n + 1)
    first, last = sorted((dim(r, n) % max(n, 1), dim(r, n) % max(n, 1)))
    return r.choice((
        lambda x: aten.flatten.using_ints(x, first, last),
        lambda x: aten.unflatten.int(x, at, split),
        lambda x: aten.unsqueeze(x, to),
        lambda x: aten.squeeze(x),
        lambda x: aten.squeeze.dim(x, at),
        lambda x: aten.squeeze.dims(x, some),
    )), (x,)  # fmt: skip


@family
def orders(r: Random) -> Case:
    x = tensor(r, *sizes(r))
    n = x.ndim
    order, one, two = r.sample(range(n), n), dim(r, n), dim(r, n)
    some = dims(r, n)
    return r.choice((
        lambda x: aten.permute(x, [d - r.choice((0, n)) for d in order]),
        lambda x: aten.transpose.int(x, one, two),
        lambda x: aten.t(x),
        lambda x: aten.numpy_T(x),
        lambda x: aten.movedim.int(x, one, two),
        lambda x: aten.movedim.intlist(x, some, some[::-1]),
        lambda x: aten.swapaxes(x, one, two),
        lambda x: aten.swapdims(x, one, two),
        lambda x: aten.moveaxis.int(x, one, two),
        lambda x: aten.mT(x),
    )), (x,)  # fmt: skip


@family
def casts(r: Random) -> Case:
    x = tensor(r, *sizes(r))
    y = tensor(r, *(x.shape if r.random() < 0.5 else sizes(r)))
    dtype = r.choice((torch.float64, torch.float64, torch.int32, torch.bool, torch.complex128))
    return r.choice((
        lambda x, y: aten._to_copy(x, dtype=dtype),
        lambda x, y: aten.to.dtype(x, dtype, False, True),
        lambda x, y: aten.to.other(x, y),
        lambda x, y: aten.type_as(x, y),
        lambda x, y: aten.copy(x, y),
    )), (x, y)  # fmt: skip


@family
def dropouts(r: Random) -> Case:
    x, train, p = tensor(r, *sizes(r)), r.random() < 0.3, r.choice((0.0, 0.5, 1.0))
    op = r.choice((aten.dropout, aten.feature_dropout))
    return lambda x: op(x, p, train), (x,)


# Sums, products and choices.


def two(r: Random) -> tuple[torch.Tensor, torch.Tensor]:
    shape = sizes(r)
    return tensor(r, *thinner(r, shape)), tensor(r, *thinner(r, shape))


@family
def sums(r: Random) -> Case:
    op, scaled = r.choice((aten.add, aten.sub)), options(r, alpha=[2, 0, -1])
    if r.random() < 0.25:
        by = r.choice((0, 2, 1.5))
        return lambda x: op(x, by, **scaled), (tensor(r, *sizes(r)),)
    return lambda x, y: op(x, y, **scaled), two(r)


@family
def centrings(r: Random) -> Case:
    x = real(r, *sizes(r, 1))
    some, keep = dims(r, x.ndim), r.random() < 0.8
    one = [dim(r, x.ndim)]
    which = r.choice((some, one, one, None))
    scaled, kind = options(r, alpha=[2]), options(r, dtype=[torch.float32])
    return lambda x: aten.sub(x, aten.mean.dim(x, which, keep, **kind), **scaled), (x,)


@family
def factors(r: Random) -> Case:
    op = r.choice((aten.mul, aten.multiply, aten.div, aten.true_divide))
    how = options(r, rounding_mode=["floor", "trunc"]) if op is aten.div else {}
    if r.random() < 0.25:
        by = r.choice((-1, 2, 1.5))
        return lambda x: op(x, by, **how), (tensor(r, *sizes(r)),)
    if r.random() < 0.15:
        return lambda x: op(x, x, **how), (tensor(r, *sizes(r)),)
    return lambda x, y: op(x, y, **how), two(r)


@family
def choices(r: Random) -> Case:
    shape = sizes(r)
    m, (x, y) = mask(r, *thinner(r, shape)), two(r)
    number = r.choice((0, 0.0, 1.5))
    x, y = (x, y) if r.random() < 0.3 else (tensor(r, *thinner(r, shape)), tensor(r, *shape))
    return r.choice((
        lambda x, y: aten.where.self(m, x, y),
        lambda x, y: aten.where.ScalarSelf(m, number, y),
        lambda x, y: aten.where.ScalarOther(m, x, number),
        lambda x, y: aten.where.Scalar(m, number, number),
        lambda x, y: aten.where.default(m),
        lambda x, y: aten.masked_fill.Scalar(x, m, number),
        lambda x, y: aten.masked_fill.Tensor(x, m, y.sum()),
    )), (x, y)  # fmt: skip


@family
def lerps(r: Random) -> Case:
    shape = sizes(r)
    x, y, w = (tensor(r, *thinner(r, shape)) for _ in range(3))
    by = r.choice((0, 0.5, 1, 2.0))
    if r.random() < 0.4:
        return lambda x, y: aten.lerp.Scalar(x, y, by), (x, y)
    return lambda x, y, w: aten.lerp.Tensor(x, y, w), (x, y, w)


# Repeats, slices and concatenations.


@family
def repeats(r: Random) -> Case:
    shape = sizes(r)
    x, n = tensor(r, *shape), len(shape)
    onto = wider(r, shape)
    minus = [-1 if r.random() < 0.2 and i >= len(onto) - n else s for i, s in enumerate(onto)]
    times = [r.choice((1, 1, 2, 0)) for _ in range(r.randint(0, n + 1))]
    by, at = whole(r, 3, shape[0] if shape else 1), dim(r, n)
    return r.choice((
        lambda x: aten.expand(x, minus),
        lambda x: aten.broadcast_to(x, onto),
        lambda x: aten.expand_as(x, x.new_zeros(onto)),
        lambda x: aten.repeat(x, times),
        lambda x: aten.tile(x, times),
        lambda x: aten.repeat_interleave.self_int(x, 3, at),
        lambda x: aten.repeat_interleave.self_int(x, 2),
        lambda x: aten.repeat_interleave.self_int(x, 2, dim=at),
        lambda x: aten.repeat_interleave.self_Tensor(x, by, 0, output_size=int(by.sum())),
    )), (x,)  # fmt: skip


@family
def slices(r: Random) -> Case:
    x = tensor(r, *sizes(r))
    at, n = dim(r, x.ndim), 0 if not x.ndim else x.shape[dim(r, x.ndim)]
    start, stop, step = r.choice((None, 0, 1, -2, 3)), r.choice((None, 2, -1, 100)), r.randint(1, 2)
    k = r.randrange(-max(n, 1), max(n, 1))
    rest = [a for a in (r.randint(0, n), r.randint(0, n)) if a <= n]
    parts = [min(rest), max(rest) - min(rest), n - max(rest)]
    width = r.randint(1, 3)
    return r.choice((
        lambda x: aten.slice.Tensor(x, at, start, stop, step),
        lambda x: aten.slice.Tensor(x),
        lambda x: aten.narrow(x, at, k, width),
        lambda x: aten.select.int(x, at, k),
        lambda x: aten.split.Tensor(x, width, at)[k] + 0,
        lambda x: aten.split_with_sizes.default(x, parts, at)[k] + 0,
        lambda x: aten.chunk.default(x, width, at)[k] + 0,
        lambda x: aten.unbind.int(x, at)[k] + 0,
        lambda x: aten.unfold(x, at, width, step),
    )), (x,)  # fmt: skip


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


@family
def rows_by_number(r: Random) -> Case:
    shape = sizes(r)
    x, at = tensor(r, *shape), dim(r, len(shape))
    here, many = (shape[at] if shape else 1), r.randint(0, 3)
    number = whole(r, here, *((many,) if r.random() < 0.9 else ()))
    rows = list(shape)
    if rows:
        rows[at] = many
    y, scaled = tensor(r, *rows), options(r, alpha=[2, 0])
    some = dims(r, len(shape))
    by = [r.randint(-2, 2) for _ in some]
    return r.choice((
        lambda x, y: aten.index_select(x, at, number),
        lambda x, y: aten.index_add(x, at, number, y, **scaled),
        lambda x, y: aten.index_copy(x, at, number, y),
        lambda x, y: aten.roll(x, by, some),
        lambda x, y: aten.roll(x, [2]),
        lambda x, y: aten.flip(x, some),
    )), (x, y)  # fmt: skip


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


@family
def reductions(r: Random) -> Case:
    x = tensor(r, *sizes(r))
    some, one, keep = dims(r, x.ndim), dim(r, x.ndim), r.random() < 0.5
    kind = options(r, dtype=[torch.float64, torch.float64, torch.int64])
    return r.choice((
        lambda x: aten.sum(x, **kind),
        lambda x: aten.sum.dim_IntList(x, some, keep, **kind),
        lambda x: aten.sum.dim_IntList(x, None, keep),
        lambda x: aten.mean(x),
        lambda x: aten.mean.dim(x, some, keep, **kind),
        lambda x: aten.mean.dim(x, None, keep),
        lambda x: aten.cumsum(x, one, **kind),
    )), (x,)  # fmt: skip


@family
def images(r: Random) -> Case:
    lead = sizes(r, 1, 2)
    k, stride, pad = [r.randint(1, 2)], [r.randint(1, 2)], [r.randint(0, 1)]
    three, four = tensor(r, *lead, 6), tensor(r, *lead, 4, 6)
    to, corner = [r.randint(1, 7)], r.random() < 0.5
    to2 = [*to, r.randint(1, 7)]
    k2 = [*k, r.randint(1, 2)]
    if r.random() < 0.4:
        return r.choice((
            lambda x: aten.avg_pool1d(x, k, stride, pad),
            lambda x: aten.avg_pool1d(x, k),
            lambda x: aten.adaptive_avg_pool1d(x, to),
            lambda x: aten.upsample_nearest1d(x, to),
            lambda x: aten.upsample_linear1d(x, to, corner),
            lambda x: aten.upsample_nearest1d.vec(x, None, [2.0]),
            lambda x: aten.upsample_linear1d.vec(x, to, corner, None),
        )), (three,)  # fmt: skip
    return r.choice((
        lambda x: aten.avg_pool2d(x, k2, [], pad),
        lambda x: aten.avg_pool2d(x, k, stride, pad),
        lambda x: aten.avg_pool2d(x, [2, 1], [2, 1]),
        lambda x: aten.adaptive_avg_pool2d(x, to2),
        lambda x: aten.upsample_bicubic2d(x, to2, corner),
        lambda x: aten.upsample_bilinear2d(x, to2, corner),
        lambda x: aten.upsample_nearest2d(x, to2),
        lambda x: aten._upsample_bicubic2d_aa(x, to2, corner),
        lambda x: aten._upsample_bilinear2d_aa(x, to2, corner),
    )), (four,)  # fmt: skip


@family
def paddings(r: Random) -> Case:
    shape = sizes(r)
    x = tensor(r, *shape)
    widths = [r.choice((0, 0, 1, 2, -1)) for _ in range(2 * r.randint(0, len(shape)))]
    mode, value = r.choice(("constant", "reflect", "replicate")), r.choice((None, 0, 0.0, 1.5))
    few = [max(0, w) for w in widths]
    return r.choice((
        lambda x: aten.constant_pad_nd(x, widths),
        lambda x: aten.constant_pad_nd(x, widths, value or 0),
        lambda x: aten.pad(x, widths, mode),
        lambda x: aten.pad(x, widths, "constant", value),
        lambda x: aten.replication_pad1d(x, few),
        lambda x: aten.replication_pad2d(x, few),
        lambda x: aten.replication_pad3d(x, few),
        lambda x: aten.reflection_pad1d(x, few),
        lambda x: aten.reflection_pad2d(x, few),
        lambda x: aten.reflection_pad3d(x, few),
    )), (x,)  # fmt: skip


@family
def zeros(r: Random) -> Case:
    shape = sizes(r)
    kind = options(r, dtype=[torch.float64, torch.int64])
    return r.choice((
        lambda x: aten.zeros(shape, **kind) + 0,
        lambda x: aten.new_zeros(x, shape, **kind),
        lambda x: aten.zeros_like(x, **kind),
    )), (tensor(r, *sizes(r)),)  # fmt: skip


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


@family
def spreads(r: Random) -> Case:
    """Ops over elements, which a shift may or may not change."""
    x = real(r, *sizes(r, 1))
    some, one, keep = dims(r, x.ndim), dim(r, x.ndim), r.random() < 0.5
    kind = options(r, dtype=[torch.float64, torch.float32])
    one_or_some = r.choice(([one], [one], some, None))
    return r.choice((
        lambda x: aten.softmax.int(x, one, **kind),
        lambda x: aten.log_softmax.int(x, one, **kind),
        lambda x: aten._softmax(x, one, False),
        lambda x: aten.var.dim(x, one_or_some, True, keep),
        lambda x: aten.std.correction(x, one_or_some, correction=r.choice((0, 1)), keepdim=keep),
        lambda x: aten.var.correction(x, one_or_some, correction=0, keepdim=keep),
        lambda x: aten.var_mean.correction(x, one_or_some, correction=0, keepdim=keep)[0] + 0,
        lambda x: aten.var_mean.correction(x, one_or_some, correction=0, keepdim=keep)[1] + 0,
        lambda x: aten.var(x),
        lambda x: aten.std(x, False),
        lambda x: aten.group_norm(x, r.choice((1, 2, 3))),
        lambda x: torch.tanh(x),
    )), (x,)  # fmt: skip
