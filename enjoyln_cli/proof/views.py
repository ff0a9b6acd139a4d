"""Follow an axis through a whole chain of views, permutations and selections at once.

``y.view(B, T, 3, H, d).unbind(2)[0]`` holds some elements of ``y``, each once, at fixed strides. A
mean over its ``d`` is a mean over elements of the last dimension of ``y`` alone, the same for every
token: ``Axis(2, 0, H, d, 1)``. Following one op at a time would fail: after the view an axis cannot
say which of the three parts is meant. This module treats the chain as a single step, and reads the
strides off the tensor that torch's own ops return on the meta device.
"""

# Arguments of fx nodes are typed as a wide union; a rule knows its op's schema.
# mypy: disable-error-code="arg-type,union-attr,misc,index,return-value,operator"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch.fx import Node

from enjoyln_cli.graph.nodes import SPLITS, aten, is_part, packet, shape_of
from enjoyln_cli.plan.axis import Axis

VIEWS = {
    aten.view,
    aten.reshape,
    aten._unsafe_view,
    aten.flatten,
    aten.unflatten,
    aten.unsqueeze,
    aten.squeeze,
    aten.view_as,
    aten.reshape_as,
}
_COPIES = {aten.clone, aten.contiguous, aten.alias}
MOVES = VIEWS | _COPIES | {
    aten.permute, aten.transpose, aten.t, aten.numpy_T, aten.mT, aten.movedim, aten.moveaxis,
    aten.swapaxes, aten.swapdims,
}  # fmt: skip
"""Ops whose result holds every element of their operand once, under other indices."""
_SELECTIONS = {aten.select, aten.slice, aten.narrow}
_SPLITTING_OPS = SPLITS | {aten.unbind}


class Factor(NamedTuple):
    """``many`` elements, ``stride`` apart; ``mean`` if the axis takes its mean over them."""

    many: int
    stride: int
    mean: bool = False


Selected = tuple[int, list[Factor]]
"""Which elements of one dimension are taken: the first, and the offsets of the others."""


def source_of(node: Node) -> Node | None:
    """The value that ``node`` is a view, permutation or part of; ``None`` for other ops."""
    op = node.args[0] if is_part(node) and node.args else node
    known = _SPLITTING_OPS if is_part(node) else MOVES | _SELECTIONS
    if not isinstance(op, Node) or packet(op) not in known or op.meta.get("written"):
        return None
    source = op.args[0]
    if node.meta.get("written") or not isinstance(source, Node) or source.meta.get("written"):
        return None
    shapes = shape_of(source), shape_of(node)
    same = None not in shapes and source.meta["val"].dtype == node.meta["val"].dtype
    return source if same else None


def pull_through_view(node: Node, axis: Axis) -> tuple[Node, Axis] | None:
    """A value that ``node`` takes elements from through a view, and ``axis`` on that value.

    It is the nearest value that holds the axis in a single dimension; ``None`` if there is none.
    """
    chain = [node]
    while (source := source_of(chain[-1])) is not None:
        if len(chain) > 1 and packet(chain[-1]) in VIEWS:
            found = axis_on_source(chain, source, axis)
            if found is not None:
                return source, found
        chain.append(source)
    return None


def push_through_view(node: Node, source: Node, axis: Axis) -> tuple[Axis, ...] | None:
    """The axis of ``node`` that a shift of ``source`` along ``axis`` becomes, as a 1-tuple.

    Empty if ``node`` holds none of the shifted elements. ``None`` if no axis of ``node`` describes
    the shift, or if ``node`` is not taken from ``source``.
    """
    found = _taken_elements(node, source)
    if found is None:
        return None
    chain, places = found
    if _is_apart(places[axis.dim], axis):
        return ()
    axes = _axes(shape_of(node), axis)
    return next(((a,) for a in axes if axis_on_source(chain, source, a) == axis), None)


def _taken_elements(node: Node, source: Node) -> tuple[list[Node], list[Selected]] | None:
    """The chain of ops from ``node`` back to ``source``, and which elements of it are taken.

    The result is cached in ``node.meta``, as it is needed for each axis of ``source``.
    """
    known = node.meta.setdefault("taken_from", {})
    if source not in known:
        known[source] = _find_taken_elements(node, source)
    return known[source]


def _find_taken_elements(node: Node, source: Node) -> tuple[list[Node], list[Selected]] | None:
    chain = [node]
    while chain[-1] is not source:
        if (above := source_of(chain[-1])) is None:
            return None
        chain.append(above)
    chain.pop()
    places = _places(chain, source)
    return None if places is None else (chain, places)


def axis_on_source(chain: list[Node], source: Node, axis: Axis) -> Axis | None:
    """The axis of ``source`` that ``axis`` of ``chain[0]`` is; ``None`` if no single axis is."""
    found, shape = _places(chain, source, axis), shape_of(source)
    return None if found is None or shape is None else _axis_of(found, shape)


def through_view(axis: Axis, shape: tuple[int, ...], into: tuple[int, ...]) -> Axis | None:
    """The axis over the same groups after a row-major reshape from ``shape`` to ``into``.

    ``None`` if the groups do not lie on a single dimension of ``into`` with a constant stride.
    """
    offset, factors = _factors(shape, _row_major(shape), axis)
    found = None if 0 in shape else _spread(factors, offset, into)
    return None if found is None else _axis_of(found, into)


def _axis_of(found: list[Selected], shape: tuple[int, ...]) -> Axis | None:
    """The axis that takes its mean over these elements of a value of this ``shape``."""
    dims = [dim for dim, (_, factors) in enumerate(found) if any(f.mean for f in factors)]
    if len(dims) != 1:
        return None
    for dim, (start, factors) in enumerate(found):
        whole = (0, [Factor(shape[dim], 1)]) if shape[dim] > 1 else (0, [])
        if dim != dims[0] and (start, factors) != whole:
            return None
    start, factors = found[dims[0]]
    return _axis(dims[0], start, factors)


def _axis(dim: int, start: int, factors: list[Factor]) -> Axis | None:
    at = next(i for i, factor in enumerate(factors) if factor.mean)
    size, inner, _ = factors[at]
    before = factors[:at]
    after = factors[at + 1 :]
    if after != ([Factor(inner, 1)] if inner > 1 else []) or len(before) > 1:
        return None
    outer, step = (before[0].many, before[0].stride) if before else (1, 0)
    side_by_side = step in (0, size * inner)
    if not side_by_side and step < size * inner:
        return None
    return Axis(dim, start, outer, size, inner, 0 if side_by_side else step)


def _places(chain: list[Node], source: Node, axis: Axis | None = None) -> list[Selected] | None:
    """For each dimension of ``source``: which of its elements ``chain[0]`` holds."""
    shape, taken = shape_of(source), _on_meta(chain, source)
    if shape is None or taken is None or 0 in shape or 0 in taken.shape:
        return None
    first, factors = _factors(taken.shape, taken.stride(), axis)
    return _spread(factors, int(taken.storage_offset()) + first, shape)


def _factors(
    shape: Sequence[int], strides: Sequence[int], axis: Axis | None
) -> tuple[int, list[Factor]]:
    """The offset of the first element of a tensor with these strides, and steps to all others."""
    offset, factors = 0, []
    for dim, (count, stride) in enumerate(zip(shape, strides, strict=True)):
        if axis is None or dim != axis.dim:
            factors.append(Factor(count, stride))
            continue
        step = axis.step or axis.size * axis.inner
        offset += axis.start * stride
        factors += [
            Factor(axis.outer, step * stride),
            Factor(axis.size, axis.inner * stride, True),
            Factor(axis.inner, stride),
        ]
    return offset, _merged([factor for factor in factors if factor.many > 1])


def _row_major(shape: Sequence[int]) -> list[int]:
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _on_meta(chain: list[Node], source: Node) -> torch.Tensor | None:
    """``chain[0]`` as a meta tensor that views a row-major ``source``; ``None`` if it is a copy."""
    whole = torch.empty(shape_of(source) or (), device="meta")
    x = whole
    for node in reversed(chain):
        op = node.args[0] if is_part(node) else node
        if packet(op) in _COPIES:
            continue
        rest = [*op.args[1:], *op.kwargs.values()]
        if packet(op) in VIEWS:
            x = x.reshape(shape_of(node))
        elif any(isinstance(value, Node) for value in rest):
            return None
        else:
            x = op.target(x, *op.args[1:], **op.kwargs)
            x = x[node.args[1]] if is_part(node) else x
    same = x.untyped_storage()._cdata == whole.untyped_storage()._cdata
    return x if same else None


def _spread(factors: list[Factor], offset: int, shape: tuple[int, ...]) -> list[Selected] | None:
    """Turn offsets into the row-major elements of ``shape`` into places along each dimension."""
    strides = _row_major(shape)
    found: list[list[Factor]] = [[] for _ in shape]
    for factor in factors:
        for dim, part in _divided(factor, shape, strides):
            if dim < 0:
                return None
            found[dim].append(part)
    starts = [offset // stride % n for stride, n in zip(strides, shape, strict=True)]
    for start, n, parts in zip(starts, shape, found, strict=True):
        if start + sum((part.many - 1) * part.stride for part in parts) >= n:
            return None
    return [(start, _merged(parts)) for start, parts in zip(starts, found, strict=True)]


def _divided(
    factor: Factor, shape: tuple[int, ...], strides: list[int]
) -> Iterator[tuple[int, Factor]]:
    """Split a factor into parts that each lie in one dimension; dimension -1 if that fails."""
    count, stride, mean = factor
    for dim in reversed(range(len(shape))):
        if count == 1 or stride >= strides[dim] * shape[dim]:
            continue
        if stride % strides[dim] or stride == 0:
            break
        step = stride // strides[dim]
        here = min(count, -(-shape[dim] // step))
        if here < count and (shape[dim] % step or count % here):
            break
        if here > 1:
            yield dim, Factor(here, step, mean)
        count, stride = count // here, stride * here
    if count > 1:
        yield -1, factor


def _merged(factors: list[Factor]) -> list[Factor]:
    """The factors by decreasing stride; neighbours without a gap are joined."""
    merged: list[Factor] = []
    for factor in sorted(factors, key=lambda f: -f.stride):
        last = merged[-1] if merged else None
        if last and not (last.mean or factor.mean) and last.stride == factor.many * factor.stride:
            merged[-1] = Factor(last.many * factor.many, factor.stride)
        else:
            merged.append(factor)
    return merged


def _is_apart(place: Selected, axis: Axis) -> bool:
    """Whether none of the elements taken of a dimension belongs to the axis."""
    first, factors = place
    last = first + sum((count - 1) * stride for count, stride, _ in factors)
    if last < axis.start or first >= axis.stop:
        return True
    if not axis.step and last - first + 1 == prod(factor.many for factor in factors):
        return False
    taken = {first}
    for count, stride, _ in factors:
        taken = {at + i * stride for at in taken for i in range(count)}
    block, step = axis.size * axis.inner, axis.step or axis.size * axis.inner
    covered = (
        range(axis.start + o * step, axis.start + o * step + block) for o in range(axis.outer)
    )
    return all(taken.isdisjoint(span) for span in covered)


def _axes(shape: tuple[int, ...] | None, axis: Axis) -> Iterator[Axis]:
    """Every axis over all of one dimension of ``shape`` whose means are over ``axis.size``."""
    for dim, n in enumerate(shape or ()):
        many = n // axis.size if n % axis.size == 0 else 0
        for inner in (i for i in range(1, many + 1) if many % i == 0):
            yield Axis(dim, 0, many // inner, axis.size, inner)
