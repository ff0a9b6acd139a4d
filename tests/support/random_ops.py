"""Calls of every op that has a rule, at random: ranks, broadcasts, dtypes, keywords, empty sizes.

Each family is a function of a random generator that gives ``(function, inputs)``; torch refuses
some of these calls, which then are no cases. ``drawn`` makes a family of ops by their schemas. Ops
whose operands have to fit each other have families of their own.
"""

from __future__ import annotations

from math import prod
from random import Random

import random_layers  # noqa: F401 (adds its families)
import torch
from random_calls import (
    FAMILIES,
    Case,
    Shape,
    dim,
    dims,
    drawn,
    factored,
    family,
    mask,
    numbers,
    options,
    real,
    sizes,
    tensor,
    thinner,
    whole,
    wider,
)

aten = torch.ops.aten


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
