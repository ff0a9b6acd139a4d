"""Carry out the steps of one tensor, block by block: read, edit in float64, round once, write.

Memory does not grow with the tensor, except for a step that needs all of it at once (``Whole``).
torch rounds float64 to 16 bits by way of float32, so errors reach 0.5001 units in the last place
instead of 0.5.
"""

from __future__ import annotations

import errno
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from mmap import ACCESS_COPY, mmap

import torch

from enjoyln_cli.archive.archive_file import TRANSFER, TensorRecorder, record_piece
from enjoyln_cli.archive.prediction import compute_means, group_heads, predict
from enjoyln_cli.archive.residuals import corrections
from enjoyln_cli.checkpoint.headers import DTYPES, FLOATS, bytes_of, read_at
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.fs.digests import digest_of_piece
from enjoyln_cli.models.memory import available_memory
from enjoyln_cli.plan.edits import Edit, EditInputs, apply_in_pieces, to_float64
from enjoyln_cli.rewrite import steps
from enjoyln_cli.rewrite.journal import Piece, Read, note_read
from enjoyln_cli.rewrite.steps import (
    Columns,
    Convert,
    Copy,
    Edited,
    Fill,
    Rows,
    Slot,
    Step,
    Whole,
    Wider,
    spans,
)

LARGE = 1 << 26
"""Steps that need more bytes wait for one another, and keep no memory afterwards."""
COPIES = 3
"""Memory of such a step, in sizes of what it reads: that, the result, and what is in between."""
PAGE = 4096
"""Direct writes (``O_DIRECT``) need multiples of this as offset, address and size."""


@dataclass(frozen=True)
class Target:
    """A new file, open for writes through the page cache and, if possible, for direct writes."""

    cached: int
    direct: int | None
    pieces: list[Piece] | None = None
    """Every write with its digest; ``None`` if not recorded."""
    cached_lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during a cached write, since other threads would spin on the file's own lock."""

    def write(self, data: memoryview, at: int) -> None:
        """Write ``data`` from byte ``at`` on: whole pages directly, the rest through the cache."""
        if self.pieces is not None and data:
            self.pieces.append((at, len(data), digest_of_piece(data).hex()))
        first = min(-at % PAGE, len(data))
        last = first + (len(data) - first) // PAGE * PAGE
        self._write_cached(data[:first], at)
        try:
            if self.direct is None:
                self._write_cached(data[first:last], at + first)
            else:
                _write_all(self.direct, data[first:last], at + first)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._write_cached(data[first:last], at + first)
        self._write_cached(data[last:], at + last)

    def _write_cached(self, data: memoryview, at: int) -> None:
        with self.cached_lock:
            _write_all(self.cached, data, at)


def _write_all(file: int, data: memoryview, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)


@dataclass
class Lane:
    """The state of one worker: bytes written so far, and buffers that all its blocks reuse."""

    written: int = 0
    read: mmap = field(default_factory=lambda: pages(PAGE))
    rounded: mmap = field(default_factory=lambda: pages(PAGE))
    wide: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.float64))


class Room:
    """Half of the memory that is available at first, for steps that need much of it.

    A step that needs more than is left waits; one that needs more than all runs alone.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limit: float | None = None
        self._used = 0

    @contextmanager
    def taken(self, nbytes: int) -> Iterator[None]:
        with self._changed:
            if self._limit is None:
                self._limit = (available_memory() or math.inf) / 2
            limit = self._limit
            self._changed.wait_for(lambda: not self._used or self._used + nbytes <= limit)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()


_ROOM = Room()


@dataclass(frozen=True)
class Ends:
    """Source and target of one tensor: an open file or bytes in memory, and a new file."""

    slot: Slot
    source: int | memoryview
    target: Target
    recorder: TensorRecorder | None = None
    """Records the original of this tensor; ``None`` without an archive."""
    reads: list[Read] | None = None
    """Every read of a file with its digest; ``None`` if not recorded."""


def run(lane: Lane, ends: Ends, step: Step, nonfinite: bool = False) -> Iterator[None]:
    """Carry out ``step``; yields after each transfer so that the caller can stop.

    With ``nonfinite``, NaN and Inf in an edited tensor spread over their group, as the LayerNorm
    after it would spread them. Bytes that are copied are not checked.

    Raises ``BadCheckpoint`` if the source ends early, if an edited tensor holds NaN or Inf (without
    ``nonfinite``), or if values are out of the range of the new dtype.
    """
    rewrite = partial(_rewrite, nonfinite=nonfinite)
    match step:
        case Copy(start, count):
            for first, size in spans(start, count, 1, TRANSFER):
                data = output_buffer(lane, ends, first, size)
                read(ends, first, data)
                if ends.recorder:
                    record_piece(ends.recorder, first, data)
                write(lane, ends, first, data)
                yield
        case Convert(start, count, unit):
            yield from rewrite(lane, ends, start, count, unit, step, None)
        case Rows(start, count, length, width):
            item = length * width
            centred = partial(_centre_rows, step)
            yield from rewrite(lane, ends, start, count * item, item, step, centred)
        case Columns(start, size, width, before):
            means = torch.zeros(width, dtype=torch.float64)
            for first, count in spans(start, size * width, width, _elements_at_once(ends)):
                x = elements(lane, ends, first, count)
                for at, some in spans(0, count, width, steps.BLOCK):
                    block = _wide(lane, x[at : at + some])
                    if before:
                        before(block, first + at)
                    means += block.view(-1, width).sum(0)
                yield
            means /= size
            centred = partial(_subtract, means)
            yield from rewrite(lane, ends, start, size * width, width, step, centred)
        case Fill(start, count, value):
            size = DTYPES[ends.slot.dtype].itemsize
            for first, many in spans(start, count, 1, TRANSFER // size):
                data = output_buffer(lane, ends, first * size, many * size)
                y = torch.frombuffer(data, dtype=DTYPES[ends.slot.dtype]).fill_(value)
                if ends.recorder and first < ends.slot.count:
                    _record(lane, ends, first, elements(lane, ends, first, many), y)
                write(lane, ends, first * size, data)
                yield
        case Whole(edit, values, first, rows):
            _edit_in_memory(lane, ends, edit, values(), first, rows, nonfinite)
            yield


def _edit_in_memory(
    lane: Lane,
    ends: Ends,
    edit: Edit,
    values: EditInputs,
    first: int,
    rows: int | None,
    nonfinite: bool,
) -> None:
    """Read, edit and write ``rows`` slices of the tensor from slice ``first`` on, or all."""
    shape = ends.slot.stored.shape
    if rows is not None:
        values, shape = values.part(edit, 0, first, rows), (rows, *shape[1:])
    nbytes = COPIES * prod(shape) * DTYPES[ends.slot.stored.dtype].itemsize
    if nbytes <= LARGE:
        _edit_slices(lane, ends, edit, values, first, shape, nonfinite)
        return
    with _ROOM.taken(nbytes):
        _edit_slices(Lane(), ends, edit, values, first, shape, nonfinite)


def _edit_slices(
    lane: Lane,
    ends: Ends,
    edit: Edit,
    values: EditInputs,
    first: int,
    shape: tuple[int, ...],
    nonfinite: bool,
) -> None:
    """``_edit_in_memory`` for slices of ``shape`` and their ``values``, in the lane's buffers."""
    dtype, width = FLOATS[ends.slot.dtype], prod(shape[1:])
    x = elements(lane, ends, first * width, prod(shape))
    into = edit.shape(shape)
    data = output_buffer(lane, ends, first * width * dtype.itemsize, prod(into) * dtype.itemsize)
    y = torch.frombuffer(data, dtype=dtype)
    kept = y.view(into)
    try:
        apply_in_pieces(x.view(shape), edit, values, kept)
    except OverflowError:
        raise _range_error(ends.slot) from None
    if edit.append:
        kept = kept.narrow(edit.append.dim, 0, shape[edit.append.dim])
    if not nonfinite and not _finite(y):
        _check_range(ends.slot, x.view(kept.shape), kept, edited=True)
    if ends.recorder:
        compute_means(ends.recorder.undo, x.double().view(shape))
    _record(lane, ends, 0, x, kept)
    write(lane, ends, first * width * dtype.itemsize, data)


def _rewrite(
    lane: Lane,
    ends: Ends,
    start: int,
    count: int,
    unit: int,
    step: Edited,
    centred: Callable[[torch.Tensor], object] | None,
    nonfinite: bool,
) -> Iterator[None]:
    """Read, edit in float64, round once and write ``count`` elements from element ``start``.

    ``centred`` changes a float64 block of whole units in place.
    """
    dtype = FLOATS[ends.slot.dtype]
    edits = bool(centred or step.before)
    same = ends.slot.dtype == ends.slot.stored.dtype and not (centred or step.wider or nonfinite)
    narrow = same and step.before is not None and step.before.exact_in(dtype)
    for first, many in spans(start, count, unit, _elements_at_once(ends)):
        x = elements(lane, ends, first, many)
        begin, into = _output_span(step.wider, first, many)
        data = output_buffer(lane, ends, begin * dtype.itemsize, into * dtype.itemsize)
        filled = torch.frombuffer(data, dtype=dtype)
        y = _source_part(step.wider, filled, many)
        for at, some in spans(0, many, unit, steps.BLOCK):
            some_x = x[at : at + some]
            block = y[at : at + some].copy_(some_x) if narrow else _wide(lane, some_x)
            if step.before:
                step.before(block, first + at)
            if narrow:
                continue  # the block is in the output buffer already
            if centred:
                groups = group_heads(ends.recorder.undo, block, first + at) if ends.recorder else ()
                before = [(means, head, head.clone()) for means, head in groups]
                centred(block)
                for means, head, old in before:
                    means.copy_(old.sub_(head))
            if step.wider:
                rows = block.view(-1, step.wider.width)
                part = y[at // step.wider.width :][: len(rows)]
            else:
                rows, part = block, y[at : at + some]
            part.copy_(rows)
            if nonfinite:
                _check_rounded(ends.slot, rows, part)
        if not nonfinite and not _finite(filled):
            _check_range(ends.slot, x.view(y.shape), y, edited=edits)
        _record(lane, ends, first, x, y)
        write(lane, ends, begin * dtype.itemsize, data)
        yield


def _record(lane: Lane, ends: Ends, start: int, x: torch.Tensor, y: torch.Tensor) -> None:
    """Record the corrections that restore the elements ``x`` from the written elements ``y``.

    ``start`` is the index of the first element in the original. ``y`` has no other elements.
    """
    if ends.recorder:
        found = corrections(x, predict(ends.recorder.undo, y.reshape(-1), start, room(lane)))
        record_piece(ends.recorder, start * x.dtype.itemsize, bytes_of(x), found)


def _output_span(wider: Wider | None, first: int, many: int) -> tuple[int, int]:
    """The output index of element ``first``, and how many elements ``many`` of them become."""
    if wider is None:
        return first, many
    row = wider.width + wider.tail.numel()
    return first // wider.width * row, many // wider.width * row


def _source_part(wider: Wider | None, y: torch.Tensor, many: int) -> torch.Tensor:
    """Fill the appended part of the output ``y``; returns the part that the source determines."""
    if wider is None:
        return y
    rows = y.view(many // wider.width, -1)
    rows[:, wider.width :].copy_(wider.tail)
    return rows[:, : wider.width]


def _centre_rows(step: Rows, block: torch.Tensor) -> None:
    for axis in step.axes:
        part = block.view(-1, step.length, step.width).narrow(1, axis.start, axis.length)
        groups = part.unflatten(1, (axis.outer, axis.size, axis.inner))
        groups.sub_(groups.mean(2, keepdim=True))


def _subtract(means: torch.Tensor, block: torch.Tensor) -> None:
    block.view(-1, means.numel()).sub_(means)


def _finite(y: torch.Tensor) -> bool:
    """Whether all elements are finite. For contiguous tensors this takes no extra memory."""
    low, high = y.aminmax()
    return bool(low.isfinite() and high.isfinite())


def _check_range(slot: Slot, x: torch.Tensor, y: torch.Tensor, *, edited: bool) -> None:
    """Raise ``BadCheckpoint`` if rounding overflowed, or if an edited tensor has NaN or Inf.

    In tensors that are only converted, NaN and Inf of the source may be intended.
    """
    if (y.isinf() & x.isfinite()).any() and (x.isfinite().all() or not edited):
        raise _range_error(slot)
    if edited:
        raise BadCheckpoint(
            f"{slot.name} in {slot.stored.file} holds NaN or Inf and cannot be centred; repair it, "
            "or pass --allow-nonfinite"
        )


def _check_rounded(slot: Slot, wide: torch.Tensor, y: torch.Tensor) -> None:
    """Raise ``BadCheckpoint`` if rounding made a finite value infinite."""
    if (y.isinf() & wide.isfinite()).any():
        raise _range_error(slot)


def _range_error(slot: Slot) -> BadCheckpoint:
    where = f"{slot.name} in {slot.stored.file}"
    return BadCheckpoint(f"{where} has values beyond {slot.dtype}; choose a wider dtype")


def _elements_at_once(ends: Ends) -> int:
    return TRANSFER // FLOATS[ends.slot.stored.dtype].itemsize


def elements(lane: Lane, ends: Ends, start: int, count: int) -> torch.Tensor:
    """Read ``count`` elements from element ``start`` on, into the lane's buffer."""
    dtype = FLOATS[ends.slot.stored.dtype]
    if len(lane.read) < count * dtype.itemsize:
        lane.read = pages(count * dtype.itemsize)
    data = memoryview(lane.read)[: count * dtype.itemsize]
    read(ends, start * dtype.itemsize, data)
    return torch.frombuffer(data, dtype=dtype)


def pages(size: int) -> mmap:
    """Private memory of ``size`` bytes that starts at a page boundary."""
    return mmap(-1, size, access=ACCESS_COPY)


def room(lane: Lane, count: int = steps.BLOCK) -> torch.Tensor:
    """The lane's float64 buffer, for at least ``count`` elements."""
    if lane.wide.numel() < count:
        lane.wide = torch.empty(count, dtype=torch.float64)
    return lane.wide


def _wide(lane: Lane, x: torch.Tensor) -> torch.Tensor:
    """``x`` as float64, in the lane's buffer."""
    return to_float64(x, room(lane, x.numel())[: x.numel()])


def output_buffer(lane: Lane, ends: Ends, start: int, size: int) -> memoryview:
    """The lane's buffer for ``size`` bytes, at the same offset within a page as in the file."""
    if len(lane.rounded) < size + PAGE:
        lane.rounded = pages(size + PAGE)
    shift = (ends.slot.offset + start) % PAGE
    return memoryview(lane.rounded)[shift : shift + size]


def read(ends: Ends, start: int, data: memoryview) -> None:
    """Read into ``data`` from byte ``start`` of the source tensor on."""
    if isinstance(ends.source, memoryview):
        data[:] = ends.source[start : start + len(data)]
        return
    read_at(ends.source, data, ends.slot.stored, start)
    note_read(ends.reads, ends.slot.stored.name, start, data)


def write(lane: Lane, ends: Ends, start: int, data: memoryview) -> None:
    """Write ``data`` at byte ``start`` of the new tensor."""
    ends.target.write(data, ends.slot.offset + start)
    lane.written += len(data)
