"""Centre one tensor on its way from file to file, a block at a time.

Every edit is ``W <- W - mean(W)``, the mean over the groups of an axis and in float64; the
difference is rounded once to the stored dtype. A tensor is cut into steps that depend on its shape
alone, so the bytes written are the same whoever takes which step:

* ``Copy`` and ``Convert``: a tensor that is not centred, byte for byte or in another dtype;
* ``Rows``: slices ``(length, width)`` that fit into a block hold whole groups (rows of an
  embedding or of a Conv1D weight, a bias, the heads of a small projection); one pass;
* ``Columns``: one group of ``size`` rows of ``width`` elements that is larger than a block (the
  output axis of a linear weight); one pass sums, a second subtracts;
* ``Whole``: axes that overlap or lie on different dimensions, or a scale that is multiplied in
  before (``W <- P diag(s) W``), the tensor in memory at once;
* ``Ones``: the scale itself, which is 1 from then on.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from math import prod
from mmap import ACCESS_COPY, mmap

import torch

from enjoyln_cli.axis import Axis, centre, scaled
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.shards import DTYPES, Stored

BLOCK = 1 << 18
"""Elements worked on at once: 2 MB in float64, which stays in a core's cache."""
CHUNK = 1 << 24
"""Elements of a step that can be cut, so that workers share a large tensor."""
TRANSFER = 1 << 22
"""Bytes read or written at once."""
PAGE = 4096
"""Writes past the system's cache start and end at multiples of this, in the file and in memory."""

FLOATS = {code: dtype for code, dtype in DTYPES.items() if dtype.is_floating_point}


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
class Target:
    """A new file, open for writes through the system's cache and, where that works, past it."""

    cached: int
    direct: int | None

    def write(self, data: memoryview, at: int) -> None:
        """Write ``data`` from byte ``at``: whole pages past the cache, what is left through it."""
        first = min(-at % PAGE, len(data))
        last = first + (len(data) - first) // PAGE * PAGE
        _write_all(self.cached, data[:first], at)
        try:
            past = self.cached if self.direct is None else self.direct
            _write_all(past, data[first:last], at + first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _write_all(self.cached, data[first:last], at + first)
        _write_all(self.cached, data[last:], at + last)


def _write_all(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)


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
    """The tensor at once: times the scale, if there is one, then axis after axis."""

    axes: tuple[Axis, ...]
    scale: torch.Tensor | None = None
    """One float64 element for each slice along the dimension of the axes."""


@dataclass(frozen=True)
class Ones:
    """All elements become 1."""


Step = Copy | Convert | Rows | Columns | Whole | Ones


@dataclass
class Lane:
    """What one worker owns: how much it has written, and buffers that serve block after block."""

    written: int = 0
    read: mmap = field(default_factory=lambda: _pages(PAGE))
    rounded: mmap = field(default_factory=lambda: _pages(PAGE))
    wide: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


@dataclass(frozen=True)
class Ends:
    """A tensor on its way from an open file, or from its bytes in memory, to a new file."""

    slot: Slot
    source: int | memoryview
    target: Target


def steps_of(
    slot: Slot, axes: tuple[Axis, ...], scale: torch.Tensor | None = None
) -> Iterator[Step]:
    """The steps that write ``slot`` centred over ``axes``, in any order and by any worker."""
    if scale is not None:
        yield Whole(axes, scale)
    elif not axes or slot.count == 0:
        same = slot.dtype == slot.stored.dtype
        step, total = (Copy, slot.nbytes) if same else (Convert, slot.count)
        yield from (step(first, count) for first, count in _spans(0, total, 1, CHUNK))
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
        for first, count in _spans(0, lead, 1, CHUNK // item):
            yield Rows(start + first * item, count, length, width, axes)
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
    """Do ``step``, pausing after each transfer so that the caller can stop it.

    Raises ``BadCheckpoint`` for a source that ends early, for NaN or Inf in a tensor that is
    centred, and for values out of the range of the new dtype.
    """
    match step:
        case Copy(start, count):
            for first, size in _spans(start, count, 1, TRANSFER):
                data = _outgoing(lane, ends, first, size)
                _read(ends, first, data)
                _write(lane, ends, first, data)
                yield
        case Convert(start, count):
            yield from _rewrite(lane, ends, start, count, 1, None)
        case Rows(start, count, length, width):
            item = length * width
            centred = partial(_centre_rows, step)
            yield from _rewrite(lane, ends, start, count * item, item, centred)
        case Columns(start, size, width):
            means = torch.zeros(width, dtype=torch.float64)
            for first, count in _spans(start, size * width, width, _elements_at_once(ends)):
                x = _elements(lane, ends, first, count)
                for at, some in _spans(0, count, width, BLOCK):
                    means += _wide(lane, x[at : at + some]).view(-1, width).sum(0)
                yield
            means /= size
            centred = partial(_subtract, means)
            yield from _rewrite(lane, ends, start, size * width, width, centred)
        case Ones():
            yield from _rewrite(lane, ends, 0, ends.slot.count, 1, lambda block: block.fill_(1))
        case Whole(axes, scale):
            count = ends.slot.count
            scratch = Lane()
            centred = partial(_centre_whole, ends.slot.stored.shape, axes, scale)
            yield from _rewrite(scratch, ends, 0, count, count, centred)
            lane.written += scratch.written


def _rewrite(
    lane: Lane,
    ends: Ends,
    start: int,
    count: int,
    unit: int,
    edit: Callable[[torch.Tensor], object] | None,
) -> Iterator[None]:
    """Read, edit in float64, round once and write ``count`` elements from element ``start``.

    ``edit`` changes a float64 block of whole units in place.
    """
    dtype = FLOATS[ends.slot.dtype]
    for first, many in _spans(start, count, unit, _elements_at_once(ends)):
        x = _elements(lane, ends, first, many)
        data = _outgoing(lane, ends, first * dtype.itemsize, many * dtype.itemsize)
        y = torch.frombuffer(data, dtype=dtype)
        for at, some in _spans(0, many, unit, BLOCK):
            block = _wide(lane, x[at : at + some])
            if edit:
                edit(block)
            y[at : at + some].copy_(block)
        _check_range(ends.slot, x, y, edited=edit is not None)
        _write(lane, ends, first * dtype.itemsize, data)
        yield


def _centre_rows(step: Rows, block: torch.Tensor) -> None:
    for axis in step.axes:
        part = block.view(-1, step.length, step.width).narrow(1, axis.start, axis.length)
        groups = part.unflatten(1, (axis.outer, axis.size, axis.inner))
        groups.sub_(groups.mean(2, keepdim=True))


def _subtract(means: torch.Tensor, block: torch.Tensor) -> None:
    block.view(-1, means.numel()).sub_(means)


def _centre_whole(
    shape: tuple[int, ...],
    axes: tuple[Axis, ...],
    scale: torch.Tensor | None,
    block: torch.Tensor,
) -> None:
    if scale is not None:
        block.view(shape).copy_(scaled(block.view(shape), scale, axes[0].dim))
    for axis in axes:
        block.view(shape).copy_(centre(block.view(shape), axis))


def _check_range(slot: Slot, x: torch.Tensor, y: torch.Tensor, *, edited: bool) -> None:
    """NaN or Inf in a group have spread over all of it; elsewhere they may be meant."""
    low, high = y.aminmax()
    if low.isfinite() and high.isfinite():
        return
    where = f"{slot.name} in {slot.stored.file}"
    if (y.isinf() & x.isfinite()).any() and (x.isfinite().all() or not edited):
        raise BadCheckpoint(f"{where} has values beyond {slot.dtype}; choose a wider dtype")
    if edited:
        raise BadCheckpoint(f"{where} holds NaN or Inf and cannot be centred; repair it")


def _spans(start: int, count: int, unit: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut ``count`` from ``start`` into runs of whole units, about ``most`` long at the most."""
    length = max(1, most // unit) * unit
    for first in range(start, start + count, length):
        yield first, min(length, start + count - first)


def _elements_at_once(ends: Ends) -> int:
    return TRANSFER // FLOATS[ends.slot.stored.dtype].itemsize


def _elements(lane: Lane, ends: Ends, start: int, count: int) -> torch.Tensor:
    dtype = FLOATS[ends.slot.stored.dtype]
    if len(lane.read) < count * dtype.itemsize:
        lane.read = _pages(count * dtype.itemsize)
    data = memoryview(lane.read)[: count * dtype.itemsize]
    _read(ends, start * dtype.itemsize, data)
    return torch.frombuffer(data, dtype=dtype)


def _pages(size: int) -> mmap:
    """Memory of this process that starts at a page."""
    return mmap(-1, size, access=ACCESS_COPY)


def _wide(lane: Lane, x: torch.Tensor) -> torch.Tensor:
    """``x`` as float64, in the lane's buffer."""
    if lane.wide.numel() < x.numel():
        lane.wide = torch.empty(x.numel(), dtype=torch.float64)
    return lane.wide[: x.numel()].copy_(x)


def _outgoing(lane: Lane, ends: Ends, start: int, size: int) -> memoryview:
    """Room for what goes to byte ``start`` of the tensor, placed within a page as in the file."""
    if len(lane.rounded) < size + PAGE:
        lane.rounded = _pages(size + PAGE)
    shift = (ends.slot.offset + start) % PAGE
    return memoryview(lane.rounded)[shift : shift + size]


def _read(ends: Ends, start: int, data: memoryview) -> None:
    """Fill ``data`` from byte ``start`` of the tensor."""
    if isinstance(ends.source, memoryview):
        data[:] = ends.source[start : start + len(data)]
        return
    at, done = ends.slot.stored.offset + start, 0
    while done < len(data):
        got = os.preadv(ends.source, [data[done:]], at + done)
        if got == 0:
            slot = ends.slot
            raise BadCheckpoint(f"{slot.stored.file} ends inside {slot.name}; fetch it again")
        done += got


def _write(lane: Lane, ends: Ends, start: int, data: memoryview) -> None:
    """Write from byte ``start`` of the tensor."""
    ends.target.write(data, ends.slot.offset + start)
    lane.written += len(data)
