"""Divide the work on one tensor into steps that workers can do independently.

The steps depend on the tensor's shape and its edit alone, so the bytes written do not depend on
which worker does which step:

* ``Copy``: bytes that do not change;
* ``Convert``: elements that are not centred, but go through float64;
* ``Rows``: slices ``(length, width)`` that fit into a block and hold whole groups (rows of an
  embedding or of a Conv1D weight, a bias, the heads of a small projection); one pass;
* ``Columns``: one group of ``size`` rows of ``width`` elements that is larger than a block (the
  output axis of a linear weight); one pass sums, a second pass subtracts;
* ``Whole``: the whole tensor in memory, for axes that overlap or are on different dimensions, for a
  scale that is multiplied in first (``W <- P diag(s) W``), and if blocks would cut groups. A tensor
  that is turned along other dimensions than its first is divided into several of them;
* ``Fill``: elements that all become one number.

``Before`` is applied to each block of ``Convert``, ``Rows`` and ``Columns`` before centring.
``Wider`` appends elements to each of its rows if the rows of a tensor get longer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

import torch

from enjoyln_cli.checkpoint.headers import DTYPES, FLOATS, StoredTensor
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edits import Edit, EditInputs

BLOCK = 1 << 18
"""Elements to process at once: 2 MB in float64, which stays in a core's cache."""
TURNED = 1 << 22
"""Most elements of a step that turns a tensor, if that can be divided."""
CHUNK = 1 << 24
"""Most elements of a divisible step, so that workers can share a large tensor."""

Values = Callable[[], EditInputs]
"""Returns the inputs that an edit takes from other tensors; read on the first call."""


@dataclass(frozen=True)
class Slot:
    """One tensor to write, and the stored tensor that it is made from.

    Name, dtype and shape may differ from those of the stored tensor. ``offset`` is the absolute
    offset in the new file, in bytes.
    """

    name: str
    stored: StoredTensor
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        """Number of elements to read."""
        return prod(self.stored.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes to write."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def stays(self) -> bool:
        """Whether the stored tensor's header entry is valid for this one."""
        stored = self.stored
        return (self.name, self.dtype, self.shape) == (stored.name, stored.dtype, stored.shape)


@dataclass(frozen=True)
class Before:
    """``x * times + plus``, where each element of ``times`` applies to ``inner`` elements of ``x``.

    After its last element, ``times`` starts again from the first.
    """

    values: Values
    inner: int

    def exact_in(self, dtype: torch.dtype) -> bool:
        """Whether computing in ``dtype`` gives the same as float64 rounded once.

        This holds for a product of two 16-bit numbers. It has at most 22 significant bits, and
        torch computes it in float32, which has 24, before it rounds. Products too small for float32
        do not matter: they are less than half of the smallest bfloat16 number, and float16 has no
        such products.
        """
        values = self.values()
        if values.times is None or values.plus is not None or dtype.itemsize != 2:
            return False
        return torch.equal(values.times.to(dtype).double(), values.times)

    def __call__(self, block: torch.Tensor, first: int) -> None:
        """Apply to ``block`` in place: whole runs of ``inner`` from element ``first`` on."""
        values = self.values()
        by, add = values.times, values.plus
        if by is not None:
            by = by.to(block.dtype)
            rows, many = block.view(-1, self.inner), by.numel()
            at = first // self.inner % many
            begun = min(-at % many, len(rows))
            rounds = (len(rows) - begun) // many * many
            last = len(rows) - begun - rounds
            rows[:begun].mul_(by[at : at + begun].unsqueeze(1))
            whole = rows[begun : begun + rounds].view(-1, many, self.inner)
            whole.mul_(by.view(1, many, 1))
            rows[begun + rounds :].mul_(by[:last].unsqueeze(1))
        if add is not None:
            block.add_(add[first : first + block.numel()])


@dataclass(frozen=True)
class Wider:
    """Appends the float64 elements of ``tail`` after every ``width`` elements."""

    width: int
    tail: torch.Tensor


@dataclass(frozen=True)
class Copy:
    """Copy ``count`` bytes from byte ``start`` unchanged."""

    start: int
    count: int


@dataclass(frozen=True)
class Convert:
    """Convert ``count`` elements from element ``start``, in blocks of whole runs of ``unit``."""

    start: int
    count: int
    unit: int = 1
    before: Before | None = None
    wider: Wider | None = None


@dataclass(frozen=True)
class Rows:
    """Centre ``count`` slices ``(length, width)`` from element ``start`` over ``axes``."""

    start: int
    count: int
    length: int
    width: int
    axes: tuple[Axis, ...]
    before: Before | None = None
    wider: Wider | None = None


@dataclass(frozen=True)
class Columns:
    """Centre each column of ``size`` rows of ``width`` elements from element ``start``."""

    start: int
    size: int
    width: int
    before: Before | None = None
    wider: Wider | None = None


@dataclass(frozen=True)
class Whole:
    """Edit ``rows`` slices along the first dimension in memory, from slice ``first`` on.

    By default, these are all slices.
    """

    edit: Edit
    values: Values
    first: int = 0
    rows: int | None = None


@dataclass(frozen=True)
class Fill:
    """Set ``count`` elements of the new tensor from element ``start`` to ``value``."""

    start: int
    count: int
    value: float


Edited = Convert | Rows | Columns
Part = Copy | Edited
Step = Part | Whole | Fill


def steps_of(slot: Slot, edit: Edit, values: Values) -> Iterator[Step]:
    """The steps that write ``slot``; workers may do them in any order."""
    if edit.fill is not None:
        yield from _fill_steps(0, slot.count, edit.fill)
        return
    if slot.count and edit.turns:
        yield from _turning_steps(slot, edit, values)
        return
    if slot.count and (edit.scale is not None or not _are_disjoint(edit.axes)):
        yield Whole(edit, values)
        return
    before, wider = _before(edit, values, slot.stored.shape), _wider(edit, slot.stored.shape)
    if before is None and wider is None:
        yield from _block_steps(slot, edit.axes, 1)
    else:
        run, row = before.inner if before else 1, wider.width if wider else 1
        steps = _block_steps(slot, edit.axes, max(run, row))
        found = [_with_before_and_wider(slot, step, max(run, row), before, wider) for step in steps]
        if not all(_fits(step, run, row) for step in found):
            yield Whole(edit, values)
            return
        yield from found
    if edit.append is not None and wider is None:
        width = (prod(slot.shape) - slot.count) // len(edit.append.values)
        for i, value in enumerate(edit.append.values):
            yield from _fill_steps(slot.count + i * width, width, value)


def _turning_steps(slot: Slot, edit: Edit, values: Values) -> Iterator[Whole]:
    """One step, or several if no step of the edit mixes slices along the first dimension."""
    length = slot.stored.shape[0]
    if 0 in edit.mixed_dims or edit.plus is not None:
        yield Whole(edit, values)
        return
    for first, rows in spans(0, length, 1, max(1, TURNED * length // slot.count)):
        yield Whole(edit, values, first, rows)


def _block_steps(slot: Slot, axes: tuple[Axis, ...], unit: int) -> Iterator[Part]:
    """The steps without ``Before`` and ``Wider``; runs of ``unit`` elements are not cut."""
    if axes and slot.count:
        ordered = tuple(sorted(axes, key=lambda axis: axis.start))
        shape, dim = slot.stored.shape, axes[0].dim
        lead, width = prod(shape[:dim]), prod(shape[dim + 1 :])
        yield from _centring_steps(slot, 0, lead, shape[dim], width, ordered)
    elif slot.dtype == slot.stored.dtype and unit == 1:
        yield from (Copy(*span) for span in spans(0, slot.stored.nbytes, 1, CHUNK))
    else:
        yield from (Convert(*span) for span in spans(0, slot.count, unit, CHUNK))


def _fill_steps(start: int, count: int, value: float) -> Iterator[Fill]:
    yield from (Fill(*span, value) for span in spans(start, count, 1, CHUNK))


def _with_before_and_wider(
    slot: Slot, step: Part, unit: int, before: Before | None, wider: Wider | None
) -> Edited:
    """The step with ``before`` and ``wider``; a ``Copy`` becomes a ``Convert``."""
    if isinstance(step, Copy):
        size = FLOATS[slot.dtype].itemsize
        step = Convert(step.start // size, step.count // size)
    if isinstance(step, Convert):
        step = replace(step, unit=unit)
    return replace(step, before=before, wider=wider)


def _fits(step: Edited, run: int, row: int) -> bool:
    """Whether blocks of the step hold whole runs with one factor, and whole rows."""
    match step:
        case Convert():
            unit, count = step.unit, step.count
        case Rows():
            unit, count = step.length * step.width, step.count * step.length * step.width
        case Columns():
            unit, count = step.width, step.size * step.width
    return not any(n % part for n in (unit, count, step.start) for part in (run, row))


def _before(edit: Edit, values: Values, shape: tuple[int, ...]) -> Before | None:
    if edit.times is None and edit.plus is None:
        return None
    return Before(values, prod(shape[edit.times.dim + 1 :]) if edit.times else 1)


def _wider(edit: Edit, shape: tuple[int, ...]) -> Wider | None:
    """The elements to append to each row; ``None`` if there are none, or all are at the end."""
    if edit.append is None or prod(shape[: edit.append.dim]) == 1:
        return None
    width = prod(shape[edit.append.dim + 1 :])
    tail = torch.tensor(edit.append.values, dtype=torch.float64).repeat_interleave(width)
    return Wider(shape[edit.append.dim] * width, tail)


def _are_disjoint(axes: tuple[Axis, ...]) -> bool:
    """Whether all axes are on one dimension and none overlap; true if there are none."""
    ordered = sorted(axes, key=lambda axis: axis.start)
    apart = all(a.stop <= b.start for a, b in pairwise(ordered))
    return apart and len({axis.dim for axis in axes}) <= 1


def _centring_steps(
    slot: Slot, start: int, lead: int, length: int, width: int, axes: tuple[Axis, ...]
) -> Iterator[Part]:
    """Steps for ``lead`` slices ``(length, width)`` from element ``start``; axes are sorted."""
    item = length * width
    if item <= BLOCK:
        for first, count in spans(0, lead, 1, CHUNK // item):
            yield Rows(start + first * item, count, length, width, axes)
    elif axes == (Axis(axes[0].dim, 0, 1, length, 1),):
        yield from (Columns(start + i * item, length, width) for i in range(lead))
    else:
        for i in range(lead):
            yield from _slice_steps(slot, start + i * item, length, width, axes)


def _slice_steps(
    slot: Slot, start: int, length: int, width: int, axes: tuple[Axis, ...]
) -> Iterator[Part]:
    """Steps for one slice, cut along ``length`` into the axes and the elements between them."""
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


def spans(start: int, count: int, unit: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide ``count`` elements from ``start`` into runs of whole units, about ``most`` each."""
    length = max(1, most // unit) * unit
    for first in range(start, start + count, length):
        yield first, min(length, start + count - first)
