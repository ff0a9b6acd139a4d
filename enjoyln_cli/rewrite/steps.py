"""Into which steps the work on one tensor is cut, on its way from file to file.

The steps depend on the tensor's shape and its edit alone, so the bytes written are the same whoever
takes which step:

* ``Copy`` and ``Convert``: what is not centred, byte for byte or through float64;
* ``Rows``: slices ``(length, width)`` that fit into a block hold whole groups (rows of an
  embedding or of a Conv1D weight, a bias, the heads of a small projection); one pass;
* ``Columns``: one group of ``size`` rows of ``width`` elements that is larger than a block (the
  output axis of a linear weight); one pass sums, a second subtracts;
* ``Whole``: axes that overlap or lie on different dimensions, a scale that is multiplied in before
  (``W <- P diag(s) W``), and whatever a block would cut, the tensor in memory at once;
* ``Fill``: elements that become one number.

``Before`` is what is done to a block of ``Convert``, ``Rows`` and ``Columns`` before it is centred,
``Wider`` what follows each of its rows where a tensor's rows get longer.
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
"""Elements worked on at once: 2 MB in float64, which stays in a core's cache."""
CHUNK = 1 << 24
"""Elements of a step that can be cut, so that workers share a large tensor."""

Values = Callable[[], EditInputs]
"""What an edit takes from other tensors, read when a step first asks for it."""


@dataclass(frozen=True)
class Slot:
    """One tensor to write, and the stored one that it is made from. Offsets are absolute, in bytes.

    Name, dtype and shape may all differ from those of the stored tensor.
    """

    name: str
    stored: StoredTensor
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def count(self) -> int:
        """Elements that are read."""
        return prod(self.stored.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that are written."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def stays(self) -> bool:
        """Whether a header's entry for the stored tensor holds for this one."""
        stored = self.stored
        return (self.name, self.dtype, self.shape) == (stored.name, stored.dtype, stored.shape)


@dataclass(frozen=True)
class Before:
    """``x * times + plus``; an element of ``times`` for every ``inner`` of ``x``, in turns."""

    values: Values
    inner: int

    def exact_in(self, dtype: torch.dtype) -> bool:
        """Whether the arithmetic of ``dtype`` gives what float64 gives, rounded once.

        A product of two numbers of 16 bits has at most 22 significant bits. It is computed in
        float32, which holds 24, and rounded: in bfloat16 whatever float32 cannot hold is less than
        half of the smallest number, in float16 there is no such product.
        """
        values = self.values()
        if values.times is None or values.plus is not None or dtype.itemsize != 2:
            return False
        return torch.equal(values.times.to(dtype).double(), values.times)

    def __call__(self, block: torch.Tensor, first: int) -> None:
        """On the elements from ``first``, which are whole runs of ``inner``, in place."""
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
    """Every ``width`` elements are followed by those of ``tail``, in float64."""

    width: int
    tail: torch.Tensor


@dataclass(frozen=True)
class Copy:
    """``count`` bytes from byte ``start``, unchanged."""

    start: int
    count: int


@dataclass(frozen=True)
class Convert:
    """``count`` elements from element ``start``, not centred; whole runs of ``unit`` at once."""

    start: int
    count: int
    unit: int = 1
    before: Before | None = None
    wider: Wider | None = None


@dataclass(frozen=True)
class Rows:
    """``count`` slices ``(length, width)`` from element ``start``, the axes on ``length``."""

    start: int
    count: int
    length: int
    width: int
    axes: tuple[Axis, ...]
    before: Before | None = None
    wider: Wider | None = None


@dataclass(frozen=True)
class Columns:
    """``size`` rows of ``width`` elements from element ``start``: each column is one group."""

    start: int
    size: int
    width: int
    before: Before | None = None
    wider: Wider | None = None


@dataclass(frozen=True)
class Whole:
    """The tensor at once."""

    edit: Edit
    values: Values


@dataclass(frozen=True)
class Fill:
    """``count`` elements of the new tensor from element ``start`` become ``value``."""

    start: int
    count: int
    value: float


Edited = Convert | Rows | Columns
Part = Copy | Edited
Step = Part | Whole | Fill


def steps_of(slot: Slot, edit: Edit, values: Values) -> Iterator[Step]:
    """The steps that write ``slot``, in any order and by any worker."""
    if edit.fill is not None:
        yield from _fill_steps(0, slot.count, edit.fill)
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


def _block_steps(slot: Slot, axes: tuple[Axis, ...], unit: int) -> Iterator[Part]:
    """What is not centred goes in whole runs of ``unit``."""
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
    """The step with what is done besides centring; what was copied goes through float64 then."""
    if isinstance(step, Copy):
        size = FLOATS[slot.dtype].itemsize
        step = Convert(step.start // size, step.count // size)
    if isinstance(step, Convert):
        step = replace(step, unit=unit)
    return replace(step, before=before, wider=wider)


def _fits(step: Edited, run: int, row: int) -> bool:
    """Whether its blocks hold whole runs that are multiplied by one number, and whole rows."""
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
    """Where something is appended, but to the end of the whole tensor."""
    if edit.append is None or prod(shape[: edit.append.dim]) == 1:
        return None
    width = prod(shape[edit.append.dim + 1 :])
    tail = torch.tensor(edit.append.values, dtype=torch.float64).repeat_interleave(width)
    return Wider(shape[edit.append.dim] * width, tail)


def _are_disjoint(axes: tuple[Axis, ...]) -> bool:
    """All on one dimension, none touching another; so is none at all."""
    ordered = sorted(axes, key=lambda axis: axis.start)
    apart = all(a.stop <= b.start for a, b in pairwise(ordered))
    return apart and len({axis.dim for axis in axes}) <= 1


def _centring_steps(
    slot: Slot, start: int, lead: int, length: int, width: int, axes: tuple[Axis, ...]
) -> Iterator[Part]:
    """Cut ``lead`` slices ``(length, width)`` from element ``start``, axes sorted and apart."""
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


def spans(start: int, count: int, unit: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut ``count`` from ``start`` into runs of whole units, about ``most`` long at the most."""
    length = max(1, most // unit) * unit
    for first in range(start, start + count, length):
        yield first, min(length, start + count - first)
