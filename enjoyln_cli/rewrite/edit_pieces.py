"""Apply an edit to a tensor of any size, for example a mapped file: piece by piece.

Decides along which dimension a tensor is divided, so that the edit changes each part independently
of the others (``divide``), what the edit of one part is (``edit_of_part``), and that only a piece
that fits into a core's cache is in float64 at a time (``apply_in_pieces``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import prod

import torch

from enjoyln_cli.plan.axis import Axis, blocks
from enjoyln_cli.plan.edits import (
    Edit,
    EditInputs,
    Vector,
    apply_edit,
    to_float64,
)

PIECE = 1 << 16
"""About how many elements ``apply_in_pieces`` converts at once; they stay in a core's cache."""
SINGLE_PASS = 1 << 19
"""Most elements of a piece that is edited along all its dimensions at once."""
RUN = 32
"""Least elements of a piece that lie side by side in memory, if the tensor has as many."""


def apply_in_pieces(
    x: torch.Tensor,
    edit: Edit,
    values: EditInputs,
    out: torch.Tensor,
    *,
    allow_nonfinite: bool,
) -> None:
    """Write ``x`` after ``edit``, which appends nothing, to ``out``, rounded once.

    Both tensors have the same shape, and any floating dtype. Only a piece of ``x`` is in float64 at
    a time. An edit that mixes several dimensions may need much of ``x`` in each piece: then one
    dimension after the other is mixed, and the result in between is in float64 as a whole.

    Raises ``OverflowError`` if rounding makes a finite value infinite. Without ``allow_nonfinite``,
    raises ``FloatingPointError`` if the edit computes NaN or Inf.
    """
    dim, unit = _cut(tuple(x.shape), edit)
    passes = [edit] if unit * x.numel() <= SINGLE_PASS * x.shape[dim] else _passes(edit)
    for some in passes[:-1]:
        wide = torch.empty(x.shape, dtype=torch.float64)
        _apply_pass(x, some, values, wide, allow_nonfinite)
        x, values = wide, EditInputs()
    _apply_pass(x, passes[-1], values, out, allow_nonfinite)


def _passes(edit: Edit) -> list[Edit]:
    """The edit as several that apply one after the other; each mixes at most one dimension.

    Steps that mix different dimensions commute.
    """
    first, *others = sorted(edit.mixed_dims) or [0]
    alone = replace(edit, times=(), plus=(), scale=None, bake=None)
    return [_on_dimension(edit, first), *(_on_dimension(alone, dim) for dim in others)]


def _on_dimension(edit: Edit, dim: int) -> Edit:
    """The edit without the steps that mix other dimensions."""
    return _with_axes(edit, lambda axis: [axis] if axis.dim == dim else [])


def _with_axes(edit: Edit, change: Callable[[Axis], list[Axis]]) -> Edit:
    """The edit with each axis replaced by those that ``change`` returns for it."""
    axes = [new for axis in edit.axes for new in change(axis)]
    turns = [replace(turn, axis=new) for turn in edit.turns for new in change(turn.axis)]
    return replace(edit, axes=tuple(axes), turns=tuple(turns))


def _cut(shape: tuple[int, ...], edit: Edit) -> tuple[int, int]:
    """The dimension along which ``edit`` applies to small pieces of a tensor, and their length.

    It is the first dimension that allows pieces of ``PIECE`` elements, or else the one that allows
    the smallest. A dimension that the edit mixes is cut between groups, if all have the same size
    and begin at its multiples; otherwise it stays whole.
    """
    units = list(shape) if edit.plus else [1] * len(shape)
    if edit.bake is not None:
        units[1] = shape[1]
    for axis in (*edit.axes, *(turn.axis for turn in edit.turns)):
        group, dim = axis.size * axis.inner, axis.dim
        regular = units[dim] in (1, group) and not (axis.start % group or axis.step % group)
        units[dim] = group if regular else shape[dim]
    count = prod(shape)
    dim = next(
        (d for d, unit in enumerate(units) if unit * count <= PIECE * shape[d]),
        min(range(len(shape)), key=lambda d: units[d] / max(shape[d], 1)),
    )
    return dim, units[dim]


def divide(edit: Edit, shape: tuple[int, ...], most: int) -> Iterator[tuple[int, int, int]]:
    """Parts of a tensor, each of which ``edit`` changes independently of the others.

    Each is ``(dim, first, count)``: ``count`` slices along ``dim`` from slice ``first`` on, of
    about ``most`` elements in all. The edit appends nothing, and the tensor is not a scalar.
    """
    dim, unit = _cut(shape, edit)
    length, inner = shape[dim], prod(shape[dim + 1 :])
    count = max(1, most * length // max(prod(shape) * unit, 1), -(-RUN // max(inner * unit, 1)))
    for first in range(0, length, count * unit):
        yield dim, first, min(count * unit, length - first)


def edit_of_part(edit: Edit, dim: int, first: int, count: int) -> Edit:
    """The edit of a part from ``divide``."""

    def multiplied(vector: Vector) -> Vector:
        if vector.outputs is None or vector.dim == dim:
            return vector
        start, stop = (min(max(at - first, 0), count) for at in vector.outputs)
        return replace(vector, outputs=(start, stop))

    if any(vector.outputs for vector in edit.times):
        edit = replace(edit, times=tuple(map(multiplied, edit.times)))
    if dim not in edit.mixed_dims:
        return edit
    return _with_axes(edit, partial(_within, dim=dim, first=first, count=count))


def _within(axis: Axis, dim: int, first: int, count: int) -> list[Axis]:
    """The groups of ``axis`` in ``count`` slices along ``dim``, which hold whole groups."""
    if axis.dim != dim:
        return [axis]
    apart = axis.step or axis.size * axis.inner
    begin = max(0, -((axis.start - first) // apart))
    end = min(axis.outer, -((axis.start - first - count) // apart))
    if begin >= end:
        return []
    start, step = axis.start + begin * apart - first, axis.step if end - begin > 1 else 0
    return [replace(axis, start=start, outer=end - begin, step=step)]


def _apply_pass(
    x: torch.Tensor, edit: Edit, values: EditInputs, out: torch.Tensor, allow_nonfinite: bool
) -> None:
    """Apply an edit that appends nothing, in pieces along one dimension."""
    room = torch.empty(0, dtype=torch.float64)
    for dim, first, count in divide(edit, tuple(x.shape), PIECE):
        part = edit_of_part(edit, dim, first, count)
        inputs = values.part(edit, dim, first, count)
        front = part.turns[0].axis.dim if part.turns else 0  # the first dimension turns fastest
        source = x.narrow(dim, first, count).movedim(front, 0).contiguous()
        if room.numel() < source.numel():
            room = torch.empty(source.numel(), dtype=torch.float64)
        wide = to_float64(source, room[: source.numel()].view(source.shape)).movedim(0, front)
        wide = apply_edit(wide, part, inputs, in_place=True)
        wide = wide.movedim(front, 0)
        rounded = wide.to(out.dtype)
        out.narrow(dim, first, count).copy_(rounded.movedim(0, front))
        if math.isfinite(rounded.sum(dtype=torch.promote_types(out.dtype, torch.float32))):
            continue  # an infinite or undefined element would make the sum one
        if not allow_nonfinite and not _computed(part, wide.movedim(0, front)).isfinite().all():
            raise FloatingPointError
        if (rounded.isinf() & wide.isfinite()).any():
            raise OverflowError


def _computed(edit: Edit, x: torch.Tensor) -> torch.Tensor:
    """The elements of ``x`` that the edit computes; flat."""
    if edit.times or edit.plus or edit.scale or edit.bake or edit.level:
        return x.flatten()
    axes = (*edit.axes, *(block for turn in edit.turns for block in blocks(turn.axis)))
    parts = [x.narrow(axis.dim, axis.start, axis.length).flatten() for axis in axes]
    return torch.cat(parts or [x.new_empty(0)])
