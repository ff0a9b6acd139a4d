"""Centre one tensor on its way from file to file, a block at a time.

Every edit is ``W <- W - mean(W)``, the mean over the groups of an axis and in float64; the
difference is rounded once to the stored dtype. A tensor is cut into steps that depend on its shape
alone, so the bytes written are the same whoever takes which step:

* ``Copy`` and ``Convert``: a tensor that is not centred, byte for byte or in another dtype;
* ``Rows``: slices ``(length, width)`` that fit into a block hold whole groups (rows of an
  embedding or of a Conv1D weight, a bias, the heads of a small projection); one pass;
* ``Columns``: one group of ``size`` rows of ``width`` elements that is larger than a block (the
  output axis of a linear weight); one pass sums, a second subtracts;
* ``Whole``: axes that overlap or lie on different dimensions, the tensor in memory at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import torch

from enjoyln_cli.axis import Axis, centre
from enjoyln_cli.checkpoint import Stored
from enjoyln_cli.errors import BadCheckpoint

BLOCK = 1 << 18
"""Elements worked on at once: 2 MB in float64, which stays in a core's cache."""
CHUNK = 1 << 24
"""Elements of a step that can be cut, so that workers share a large tensor."""
COPY = 1 << 20
"""Bytes copied at once."""

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class Slot:
    """One tensor, where it is and where it goes. Offsets are absolute, in bytes."""

    name: str
    stored: Stored
    dtype: str
    offset: int

    @property
    def count(self) -> int:
        return prod(self.stored.shape)

    @property
    def nbytes(self) -> int:
        if self.dtype == self.stored.dtype:
            return self.stored.nbytes
        return self.count * FLOATS[self.dtype].itemsize


@dataclass(frozen=True)
class Copy:
    """``count`` bytes from byte ``start``, unchanged."""

    start: int
    count: int


@dataclass(frozen=True)
class Convert:
    """``count`` elements from element ``start``, in another dtype."""

    start: int
    count: int


@dataclass(frozen=True)
class Rows:
    """``count`` slices ``(length, width)`` from element ``start``, the axes on ``length``."""

    start: int
    count: int
    length: int
    width: int
    axes: tuple[Axis, ...]


@dataclass(frozen=True)
class Columns:
    """``size`` rows of ``width`` elements from element ``start``: each column is one group."""

    start: int
    size: int
    width: int


@dataclass(frozen=True)
class Whole:
    """The tensor at once, axis after axis."""

    axes: tuple[Axis, ...]


Step = Copy | Convert | Rows | Columns | Whole


@dataclass
class Lane:
    """What one worker owns: buffers reused from block to block, and how much it has written."""

    written: int = 0
    narrow: bytearray = field(default_factory=bytearray)
    wide: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


@dataclass(frozen=True)
class Ends:
    """A tensor on its way: an open file (or the tensor's bytes) to read, an open file to write."""

    slot: Slot
    source: int | memoryview
    target: int


def steps_of(slot: Slot, axes: tuple[Axis, ...]) -> Iterator[Step]:
    """The steps that write ``slot`` centred over ``axes``, in any order and by any worker."""
    if not axes or slot.count == 0:
        same = slot.dtype == slot.stored.dtype
        step, total = (Copy, slot.nbytes) if same else (Convert, slot.count)
        yield from (step(i, min(CHUNK, total - i)) for i in range(0, total, CHUNK))
    elif _separate(axes):
        ordered = tuple(sorted(axes, key=lambda axis: axis.start))
        shape, dim = slot.stored.shape, axes[0].dim
        lead, width = prod(shape[:dim]), prod(shape[dim + 1 :])
        yield from _centring_steps(slot, 0, lead, shape[dim], width, ordered)
    else:
        yield Whole(axes)


def _separate(axes: tuple[Axis, ...]) -> bool:
    """All on one dimension, none touching another."""
    ordered = sorted(axes, key=lambda axis: axis.start)
    apart = all(a.stop <= b.start for a, b in pairwise(ordered))
    return apart and len({axis.dim for axis in axes}) == 1


def _centring_steps(
    slot: Slot, start: int, lead: int, length: int, width: int, axes: tuple[Axis, ...]
) -> Iterator[Step]:
    """Cut ``lead`` slices ``(length, width)`` from element ``start``, axes sorted and apart."""
    item = length * width
    if item <= BLOCK:
        many = BLOCK // item * (CHUNK // BLOCK)
        for i in range(0, lead, many):
            yield Rows(start + i * item, min(many, lead - i), length, width, axes)
    elif axes == (Axis(axes[0].dim, 0, 1, length, 1),):
        yield from (Columns(start + i * item, length, width) for i in range(lead))
    else:
        for i in range(lead):
            yield from _pieces(slot, start + i * item, length, width, axes)


def _pieces(
    slot: Slot, start: int, length: int, width: int, axes: tuple[Axis, ...]
) -> Iterator[Step]:
    """Cut one slice along ``length``: what no axis covers, and the groups of each axis."""
    edges = [0, *(edge for axis in axes for edge in (axis.start, axis.stop)), length]
    for gap, (low, high) in enumerate(pairwise(edges)):
        if low == high:
            continue
        if gap % 2:
            axis = axes[gap // 2]
            rows = (axis.outer, axis.size, axis.inner * width)
            whole = (Axis(axis.dim, 0, 1, axis.size, 1),)
            yield from _centring_steps(slot, start + low * width, *rows, whole)
        else:
            first, count = start + low * width, (high - low) * width
            if slot.dtype == slot.stored.dtype:
                size = FLOATS[slot.dtype].itemsize
                yield Copy(first * size, count * size)
            else:
                yield Convert(first, count)


def run(lane: Lane, ends: Ends, step: Step) -> Iterator[None]:
    """Do ``step``, pausing after each block of it."""
    match step:
        case Copy(start, count):
            for i in range(start, start + count, COPY):
                data = _read(lane, ends, i, min(COPY, start + count - i))
                yield _write(lane, ends, i, data)
        case Convert(start, count):
            for i in range(start, start + count, BLOCK):
                yield _convert(lane, ends, i, min(BLOCK, start + count - i))
        case Rows():
            yield from _centre_rows(lane, ends, step)
        case Columns():
            yield from _centre_columns(lane, ends, step)
        case Whole(axes):
            shape = ends.slot.stored.shape
            scratch = Lane()
            x = _load(scratch, ends, 0, ends.slot.count).view(shape)
            for axis in axes:
                x = centre(x, axis)
            yield _store(scratch, ends, 0, x)
            lane.written += scratch.written


def _centre_rows(lane: Lane, ends: Ends, step: Rows) -> Iterator[None]:
    item = step.length * step.width
    for i in range(0, step.count, BLOCK // item):
        count = min(BLOCK // item, step.count - i)
        x = _load(lane, ends, step.start + i * item, count * item)
        for axis in step.axes:
            part = x.view(count, step.length, step.width).narrow(1, axis.start, axis.length)
            groups = part.unflatten(1, (axis.outer, axis.size, axis.inner))
            means = groups.mean(2, keepdim=True)
            groups.sub_(means)
        yield _store(lane, ends, step.start + i * item, x)


def _centre_columns(lane: Lane, ends: Ends, step: Columns) -> Iterator[None]:
    many = max(1, BLOCK // step.width)
    spans = [(i, min(many, step.size - i)) for i in range(0, step.size, many)]
    means = torch.zeros(step.width, dtype=torch.float64)
    for i, rows in spans:
        x = _load(lane, ends, step.start + i * step.width, rows * step.width)
        means += x.view(rows, step.width).sum(0)
        yield
    means /= step.size
    for i, rows in spans:
        x = _load(lane, ends, step.start + i * step.width, rows * step.width)
        x.view(rows, step.width).sub_(means)
        yield _store(lane, ends, step.start + i * step.width, x)


def _load(lane: Lane, ends: Ends, start: int, count: int) -> torch.Tensor:
    """``count`` elements from element ``start`` as float64, in the lane's buffer."""
    if lane.wide.numel() < count:
        lane.wide = torch.empty(count, dtype=torch.float64)
    return lane.wide[:count].copy_(_elements(lane, ends, start, count))


def _elements(lane: Lane, ends: Ends, start: int, count: int) -> torch.Tensor:
    dtype = FLOATS[ends.slot.stored.dtype]
    data = _read(lane, ends, start * dtype.itemsize, count * dtype.itemsize)
    return torch.frombuffer(data, dtype=dtype)


def _store(lane: Lane, ends: Ends, start: int, x: torch.Tensor) -> None:
    """Round once and write from element ``start``; a NaN or Inf in a group is in all of it now."""
    dtype = FLOATS[ends.slot.dtype]
    data = _room(lane, x.numel() * dtype.itemsize)
    rounded = torch.frombuffer(data, dtype=dtype).copy_(x.reshape(-1))
    low, high = rounded.aminmax()
    if not (low.isfinite() and high.isfinite()):
        if x.isfinite().all():
            raise _out_of_range(ends)
        slot = ends.slot
        raise BadCheckpoint(
            f"{slot.name} in {slot.stored.file} holds NaN or Inf and cannot be centred; "
            "repair the checkpoint"
        )
    _write(lane, ends, start * dtype.itemsize, data)


def _convert(lane: Lane, ends: Ends, start: int, count: int) -> None:
    """Another dtype for a tensor that nobody centres, in which NaN and Inf may be meant."""
    dtype = FLOATS[ends.slot.dtype]
    x = _elements(lane, ends, start, count)
    rounded = x.to(dtype)
    if (rounded.isinf() & x.isfinite()).any():
        raise _out_of_range(ends)
    data = _room(lane, count * dtype.itemsize)
    torch.frombuffer(data, dtype=dtype).copy_(rounded)
    _write(lane, ends, start * dtype.itemsize, data)


def _out_of_range(ends: Ends) -> BadCheckpoint:
    slot = ends.slot
    return BadCheckpoint(
        f"{slot.name} in {slot.stored.file} has values out of the range of {slot.dtype}; "
        "choose a wider dtype"
    )


def _room(lane: Lane, size: int) -> memoryview:
    if len(lane.narrow) < size:
        lane.narrow = bytearray(size)
    return memoryview(lane.narrow)[:size]


def _read(lane: Lane, ends: Ends, start: int, size: int) -> memoryview:
    """``size`` bytes from byte ``start`` of the tensor."""
    if isinstance(ends.source, memoryview):
        return ends.source[start : start + size]
    data = _room(lane, size)
    at, done = ends.slot.stored.offset + start, 0
    while done < size:
        got = os.preadv(ends.source, [data[done:]], at + done)
        if got == 0:
            slot = ends.slot
            raise BadCheckpoint(f"{slot.stored.file} ends inside {slot.name}; fetch it again")
        done += got
    return data


def _write(lane: Lane, ends: Ends, start: int, data: memoryview) -> None:
    """Write from byte ``start`` of the tensor."""
    write_all(ends.target, data, ends.slot.offset + start)
    lane.written += len(data)


def write_all(file: int, data: memoryview, at: int) -> None:
    """Write ``data`` to an open file from byte ``at``."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)
