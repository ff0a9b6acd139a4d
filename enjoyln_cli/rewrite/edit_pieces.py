"""Apply an edit to a tensor of any size, for example a mapped file: piece by piece.

``divide`` cuts a tensor along a dimension for which the edit changes each part independently of
the others. ``apply_in_pieces`` has only a piece in float64 at a time, which fits into a core's
cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import TypeVar

import torch

from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import to_float64

T = TypeVar("T")
PIECE = 1 << 16
"""About how many elements ``apply_in_pieces`` converts at once; they stay in a core's cache."""
SINGLE_PASS = 1 << 19
"""Most elements of a piece that is edited along all its dimensions at once."""
RUN = 32
"""Least elements of a piece that lie side by side in memory, if the tensor has as many."""


def apply_in_pieces(
    x: torch.Tensor, edit: Edit, out: torch.Tensor, *, allow_nonfinite: bool
) -> None:
    """Write ``x`` after the loaded ``edit``, which appends nothing, to ``out``, rounded once.

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
        _apply_pass(x, some, wide, allow_nonfinite)
        x = wide
    _apply_pass(x, passes[-1], out, allow_nonfinite)


def _passes(edit: Edit) -> list[Edit]:
    """The edit as several edits, to be applied in order; each mixes at most one dimension.

    Steps that mix different dimensions commute.
    """

    def mixing(*dims: tuple[int, ...]) -> Edit:
        return edit.only(lambda step: step.mixed_dims in dims)

    first, *others = sorted(edit.mixed_dims) or [0]
    return [mixing((), (first,)), *(mixing((dim,)) for dim in others)]


def _cut(shape: tuple[int, ...], edit: Edit) -> tuple[int, int]:
    """The dimension along which ``edit`` applies to small pieces of a tensor, and their length.

    It is the first dimension that allows pieces of ``PIECE`` elements, or else the dimension that
    allows the smallest. A dimension that the edit mixes is cut between groups, if all have the same
    size and begin at its multiples; otherwise it stays whole.
    """
    units = [1] * len(shape)
    for dim, unit in (pair for step in edit.steps for pair in step.unit(shape).items()):
        units[dim] = unit if units[dim] in (1, unit) else shape[dim]
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


def _apply_pass(x: torch.Tensor, edit: Edit, out: torch.Tensor, allow_nonfinite: bool) -> None:
    """Apply a loaded edit that appends nothing, in pieces along one dimension."""
    buffer = torch.empty(0, dtype=torch.float64)
    for dim, first, count in divide(edit, tuple(x.shape), PIECE):
        part = edit.part(dim, first, count)
        front = next((step.front for step in part.steps if step.front is not None), 0)
        source = x.narrow(dim, first, count).movedim(front, 0).contiguous()
        if buffer.numel() < source.numel():
            buffer = torch.empty(source.numel(), dtype=torch.float64)
        wide = to_float64(source, buffer[: source.numel()].view(source.shape)).movedim(0, front)
        wide = part.apply(wide, in_place=True)
        wide = wide.movedim(front, 0)
        rounded = wide.to(out.dtype)
        out.narrow(dim, first, count).copy_(rounded.movedim(0, front))
        if math.isfinite(rounded.sum(dtype=torch.promote_types(out.dtype, torch.float32))):
            continue  # an infinite or undefined element would make the sum one
        if not allow_nonfinite and not _is_finite(part, wide.movedim(0, front)):
            raise FloatingPointError
        if (rounded.isinf() & wide.isfinite()).any():
            raise OverflowError


def _is_finite(edit: Edit, x: torch.Tensor) -> bool:
    """Whether the elements of ``x`` that the edit computes are finite."""
    return all(bool(y.isfinite().all()) for step in edit.steps for y in step.computed(x))


def in_threads(calls: Sequence[Callable[[], T]], threads: int) -> Iterator[T]:
    """Make all calls in ``threads`` threads. Yields the results in the order of the calls.

    Each call computes with one thread of torch: the pieces of an edit are too small for several,
    which would mostly wait for each other. An error in a call, or where the results are used, ends
    all: no further call begins.
    """
    before = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool:
            yield from pool.map(lambda call: call(), calls)
    finally:
        torch.set_num_threads(before)
