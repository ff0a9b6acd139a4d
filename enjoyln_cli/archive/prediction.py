"""Predict a tensor before its edit from the tensor that was written.

An edit computes ``round(append(P diag(f) W))``: multiply, centre, append, and round once. The
prediction is ``W ~ round((cut(written) + means) / f)``. Because of the rounding it is wrong for
some elements; ``residuals.py`` stores these corrections.

The prediction is computed in float64 (in float32 for 16-bit dtypes), one operation at a time, so
that every machine gets the same bits. All functions work on a run of elements in row-major order,
so that no whole tensor has to be in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from enjoyln_cli.plan.axis import Axis, centre, group_means, scale_along
from enjoyln_cli.plan.edits import Edit, EditInputs

Heads = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Undo:
    """How one tensor of the original is predicted from the one that was written for it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    axes: tuple[Axis, ...] = ()
    """The axes that the edit centred over, in this order."""
    means: tuple[torch.Tensor, ...] = ()
    """The removed means of each axis, of shape ``(lead, outer, inner, width)``.

    ``lead`` and ``width`` are the products of the dimensions before and after ``axis.dim``.
    """
    dims: tuple[int, ...] = ()
    """The dimensions that the edit multiplied along before centring, in this order."""
    factors: tuple[torch.Tensor, ...] = ()
    """For each of ``dims``, a vector of one factor for each slice, finite and not 0."""


def kind_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the prediction, the means and the factors for a tensor of ``dtype``."""
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def undo_of(edit: Edit, values: EditInputs, dtype: torch.dtype, shape: tuple[int, ...]) -> Undo:
    """How to predict a tensor of ``dtype`` and ``shape`` before ``edit``; the means are still 0.

    Edits that add to a tensor or fill it are not predicted. They concern vectors only, so the
    corrections store the whole difference.
    """
    means = tuple(no_means(shape, dtype, axis) for axis in edit.axes)
    known = ((edit.times, values.times), (edit.scale, values.scale))
    both = [(at.dim, value) for at, value in known if at is not None and value is not None]
    dims = tuple(dim for dim, _ in both)
    return Undo(dtype, shape, edit.axes, means, dims, tuple(_divisor(v, dtype) for _, v in both))


def _divisor(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` with 1 in place of zeros, NaN and Inf."""
    values = values.to(kind_of(dtype))
    return torch.where((values == 0) | ~values.isfinite(), torch.ones_like(values), values)


def no_means(shape: tuple[int, ...], dtype: torch.dtype, axis: Axis) -> torch.Tensor:
    """Zeros to hold the means over ``axis`` of a tensor that is stored in ``dtype``."""
    return torch.zeros(_shape_of_means(shape, axis), dtype=kind_of(dtype))


def _shape_of_means(shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    return prod(shape[: axis.dim]), axis.outer, axis.inner, prod(shape[axis.dim + 1 :])


def fits(undo: Undo) -> bool:
    """Whether axes, means and factors fit the shape: a check for data read from a file."""
    shape = undo.shape
    if len(undo.axes) != len(undo.means) or len(undo.dims) != len(undo.factors):
        return False
    if min(shape, default=0) < 0:
        return False
    return all(
        0 <= axis.dim < len(shape)
        and min(axis.start, axis.outer - 1, axis.size - 1, axis.inner - 1) >= 0
        and axis.step == 0
        and axis.stop <= shape[axis.dim]
        and means.shape == _shape_of_means(shape, axis)
        and means.dtype == kind_of(undo.dtype)
        for axis, means in zip(undo.axes, undo.means, strict=True)
    ) and all(
        0 <= dim < len(shape)
        and (factor.shape, factor.dtype) == ((shape[dim],), kind_of(undo.dtype))
        for dim, factor in zip(undo.dims, undo.factors, strict=True)
    )


def predict(
    undo: Undo, written: torch.Tensor, start: int, room: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Predict the original's elements from ``start`` on, block by block, in the wider dtype.

    ``written`` has the written elements for them: flat, whole groups, without appended ones. Each
    block is a view of the float64 buffer ``room``, valid until the next one is requested.
    """
    unit = _unit(undo, start, written.numel(), room.numel())
    kind = kind_of(undo.dtype)
    step, wide = max(1, room.numel() // unit) * unit, room.view(kind)
    for at in range(0, written.numel(), step):
        some = written[at : at + step]
        block = wide[: some.numel()] if some.numel() <= wide.numel() else some.to(kind)
        take_back(undo, block.copy_(some), start + at)
        yield block


def _unit(undo: Undo, start: int, count: int, most: int) -> int:
    """The number of elements that a block must be a multiple of, at most ``most`` if possible."""
    units = [1]
    for axis in undo.axes:
        width = prod(undo.shape[axis.dim + 1 :])
        item = undo.shape[axis.dim] * width
        whole = start % item == 0 and count % item == 0
        if whole and (item <= most or axis.inner > 1):
            units.append(item)
        elif any(True for _ in _runs(undo.shape, axis, start, count)):
            units.append(axis.inner * width)
    return max(units)


def take_back(undo: Undo, block: torch.Tensor, start: int) -> None:
    """Undo the edit in place on ``block``: elements from ``start`` on, in the wider dtype.

    The block holds whole slices along the dimension of each axis, or whole runs of
    ``inner * width`` elements in one of its groups, as ``rewrite.blocks`` cuts them.
    """
    for axis, means in zip(reversed(undo.axes), reversed(undo.means), strict=True):
        _add(undo.shape, axis, means, block, start)
    for dim, factor in zip(reversed(undo.dims), reversed(undo.factors), strict=True):
        _divide(undo.shape, dim, factor, block, start)


def _add(
    shape: tuple[int, ...], axis: Axis, means: torch.Tensor, block: torch.Tensor, start: int
) -> None:
    length, width = shape[axis.dim], prod(shape[axis.dim + 1 :])
    item = length * width
    if start % item == 0 and block.numel() % item == 0:
        part = block.view(-1, length, width).narrow(1, axis.start, axis.length)
        some = means.narrow(0, start // item, block.numel() // item)
        part.unflatten(1, (axis.outer, axis.size, axis.inner)).add_(some.unsqueeze(2))
        return
    for i, o, low, high in _runs(shape, axis, start, block.numel()):
        part = block[max(low - start, 0) : min(high - start, block.numel())]
        part.view(-1, axis.inner * width).add_(means[i, o].flatten())


def group_heads(undo: Undo, block: torch.Tensor, start: int) -> Iterator[Heads]:
    """For every group that begins in ``block``: views of its mean and of its first element.

    The mean is the amount by which centring changes the first element.
    """
    for axis, means in zip(undo.axes, undo.means, strict=True):
        length, width = undo.shape[axis.dim], prod(undo.shape[axis.dim + 1 :])
        item = length * width
        if start % item == 0 and block.numel() % item == 0:
            part = block.view(-1, length, width).narrow(1, axis.start, axis.length)
            first = part.unflatten(1, (axis.outer, axis.size, axis.inner)).select(2, 0)
            yield means.narrow(0, start // item, block.numel() // item), first
            continue
        for i, o, low, _ in _runs(undo.shape, axis, start, block.numel()):
            at, unit = low - start, axis.inner * width
            if at >= 0 and at + unit <= block.numel():
                yield means[i, o], block[at : at + unit].view(axis.inner, width)


def compute_means(undo: Undo, x: torch.Tensor) -> None:
    """Compute the means of ``x``, a whole tensor in float64, into ``undo.means``, axis by axis."""
    for dim, factor in zip(undo.dims, undo.factors, strict=True):
        x = scale_along(x, factor.double(), dim)
    for axis, means in zip(undo.axes, undo.means, strict=True):
        means.copy_(group_means(x, axis).reshape(means.shape))
        x = centre(x, axis)


def _runs(
    shape: tuple[int, ...], axis: Axis, start: int, count: int
) -> Iterator[tuple[int, int, int, int]]:
    """The groups with any of ``count`` elements from ``start``: ``(lead, outer, first, end)``."""
    width = prod(shape[axis.dim + 1 :])
    item, run = shape[axis.dim] * width, axis.size * axis.inner * width
    for i in range(start // item, -(-(start + count) // item)):
        for o in range(axis.outer):
            low = i * item + axis.start * width + o * run
            if low < start + count and start < low + run:
                yield i, o, low, low + run


def _divide(
    shape: tuple[int, ...], dim: int, factor: torch.Tensor, block: torch.Tensor, start: int
) -> None:
    length, width = shape[dim], prod(shape[dim + 1 :])
    if start % (length * width) == 0 and block.numel() % (length * width) == 0:
        block.view(-1, length, width).div_(factor.unsqueeze(-1))
    else:
        at = torch.arange(start, start + block.numel()).div_(width, rounding_mode="floor")
        block.div_(factor[at.remainder_(length)])
