"""The steps that multiply, centre, rotate and add.

Scale         W <- W diag(g)      the weight of a norm moves into a linear layer that reads it
AddProduct    b <- b + W v        the bias v of a norm moves into that layer's bias (W is the
                                  weight as stored; if several layers share W, only the rows
                                  of this layer)
LayerScale    W <- diag(s) W      a vector that multiplies a linear layer's output
CentreAxis    W <- P W            over an axis
RotateAxis    W <- Q W            by an orthogonal matrix, along an axis
TimesPower    W <- 2^k (c + W) - c
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Self

import torch

from enjoyln_cli.edits.step import ReadTensor, Shape, Step
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.axis import (
    Axis,
    blocks,
    centre,
    centre_in_place,
    on_dimension,
    scale_along,
)
from enjoyln_cli.plan.orthogonal_matrices import Rotation, rotate

NAN = "holds NaN or Inf"
ROWS = 1 << 15
"""About how many elements of a matrix are converted to float64 at once."""


@dataclass(frozen=True)
class Scale(Step):
    """The slices along ``dim`` times the elements of a vector."""

    order = 1
    vector: str
    dim: int
    offset: float = 0.0
    """Added to its elements first: 1 if the class computes with ``1 + weight``."""
    divides: bool = False
    """Whether the slices are divided by its elements instead."""
    outer: int = 1
    """How often its elements follow each other along ``dim``."""
    inner: int = 1
    """How many slices each element multiplies, every time."""
    outputs: tuple[int, int] | None = None
    """The range of the other dimension of a matrix that it multiplies; ``None`` for all of it."""
    factors: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """One for each slice along ``dim``; ``None`` before the step is loaded."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.vector,)

    def loaded(self, read: ReadTensor) -> Self:
        values = read(self.vector).double().flatten() + self.offset
        if self.divides and not values.all():
            raise BadCheckpoint(
                f"{self.vector} has a zero, so the bias beside it cannot be divided by it; "
                "convert without --merge affine and --rotate"
            )
        values = 1 / values if self.divides else values
        return replace(self, factors=repeated(values, self.outer, self.inner))

    def unusable(self, read: ReadTensor) -> str:
        if self._factors.isfinite().all():
            return ""
        is_finite = bool(read(self.vector).isfinite().all())
        return f"{self.vector} {'holds a number too small to divide by' if is_finite else NAN}"

    def fitted(self, name: str, shape: Shape, shapes: Mapping[str, Shape]) -> Shape:
        length = prod(shapes[self.vector]) * self.outer * self.inner
        if self.dim >= len(shape) or length != shape[self.dim]:
            raise ValueError(
                f"{self.vector}: has {length} elements, too few or too many for {name}"
            )
        require_outputs(name, shape, self.dim, self.outputs)
        return shape

    def part(self, dim: int, first: int, count: int) -> tuple[Self, ...]:
        if dim == self.dim:
            return (replace(self, factors=self._factors.narrow(0, first, count)),)
        if self.outputs is None:
            return (self,)
        start, stop = (min(max(at - first, 0), count) for at in self.outputs)
        return (replace(self, outputs=(start, stop)),)

    def along(self, dim: int, to: int) -> Step | None:
        return replace(self, dim=to) if self.dim == dim else None

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        return self._times(x, self._factors)

    def bound(self, size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._times(size, self._factors.abs())

    def largest(self, largest: float) -> float:
        factor = largest_of(self._factors)
        return largest * (factor if self.outputs is None else max(factor, 1.0))

    @property
    def _factors(self) -> torch.Tensor:
        assert self.factors is not None, "the step is not loaded"
        return self.factors

    def _times(self, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        if self.outputs is None:
            return scale_along(x, factors, self.dim)
        first, stop = self.outputs
        x = x.clone()
        part = x.narrow(1 - self.dim, first, stop - first)
        part.copy_(scale_along(part, factors, self.dim))
        return x


@dataclass(frozen=True)
class LayerScale(Scale):
    """The vector that multiplies what a linear layer returns."""

    order = 3


@dataclass(frozen=True)
class AddProduct(Step):
    """Plus ``W v``: the sum over the dimension ``dim`` of a matrix times the vector ``by``."""

    order = 2
    matrix: str
    dim: int
    by: str
    outer: int = 1
    inner: int = 1
    """The vector repeats along ``dim`` as the vector of a ``Scale``."""
    outputs: tuple[int, int] | None = None
    """The range of elements that the product is added to; ``None`` for all elements."""
    added: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """One-dimensional, with as many elements as the tensor; ``None`` before it is loaded."""
    sizes: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """The sums of the absolute values of the terms of ``added``."""
    many: int = field(default=0, compare=False, repr=False)
    """How many terms each sum has."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.matrix, self.by)

    @property
    def terms(self) -> int:
        return self.many

    def loaded(self, read: ReadTensor) -> Self:
        return replace(self, added=self._sum(read), many=read(self.matrix).shape[self.dim])

    def sized(self, read: ReadTensor) -> Self:
        return replace(self, sizes=self._sum(lambda name: read(name).abs()))

    def unusable(self, read: ReadTensor) -> str:
        if self._added.isfinite().all():
            return ""
        bad = (name for name in (self.by, self.matrix) if not read(name).isfinite().all())
        return f"{next(bad, self.matrix)} {NAN}"

    def fitted(self, name: str, shape: Shape, shapes: Mapping[str, Shape]) -> Shape:
        matrix, many = shapes[self.matrix], prod(shapes[self.by]) * self.outer * self.inner
        if self.dim >= len(matrix) or matrix[self.dim] != many:
            raise ValueError(
                f"{self.matrix}: shape {list(matrix)} cannot be multiplied by {many} elements"
            )
        if prod(matrix) != prod(shape) * many:
            raise ValueError(
                f"{name}: shape {list(shape)} does not fit the product of {list(matrix)} and {many}"
            )
        require_outputs(self.matrix, matrix, self.dim, self.outputs)
        return shape

    def unit(self, shape: Shape) -> Mapping[int, int]:
        return dict(enumerate(shape))

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        return x + self._added.view_as(x)

    def bound(self, size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert self.sizes is not None, "the step has no sizes"
        return size + self.sizes.view_as(size)

    def largest(self, largest: float) -> float:
        return largest + largest_of(self._added)

    @property
    def _added(self) -> torch.Tensor:
        assert self.added is not None, "the step is not loaded"
        return self.added

    def _sum(self, read: ReadTensor) -> torch.Tensor:
        """The product, with zeros outside of ``outputs``."""
        matrix, dim = read(self.matrix), self.dim
        by = repeated(read(self.by).double().flatten(), self.outer, self.inner)
        if self.outputs is None:
            return _product(matrix, dim, by)
        first, stop = self.outputs
        added = torch.zeros(matrix.shape[1 - dim], dtype=torch.float64)
        added[first:stop] = _product(matrix.narrow(1 - dim, first, stop - first), dim, by)
        return added


@dataclass(frozen=True)
class CentreAxis(Step):
    """Minus the mean of each group of an axis."""

    order = 4
    is_linear_map = True
    axis: Axis

    @property
    def mixed_dims(self) -> tuple[int, ...]:
        return (self.axis.dim,)

    def fitted(self, name: str, shape: Shape, shapes: Mapping[str, Shape]) -> Shape:
        if not 0 <= self.axis.dim < len(shape) or self.axis.stop > shape[self.axis.dim]:
            raise ValueError(f"{name}: shape {list(shape)} does not contain {self.axis}")
        return shape

    def unit(self, shape: Shape) -> Mapping[int, int]:
        """Whole groups, if all have the same size and begin at its multiples."""
        axis = self.axis
        group = axis.size * axis.inner
        is_regular = not (axis.start % group or axis.step % group)
        return {axis.dim: group if is_regular else shape[axis.dim]}

    def part(self, dim: int, first: int, count: int) -> tuple[Self, ...]:
        """The groups in the slices, which hold whole groups."""
        axis = self.axis
        if axis.dim != dim:
            return (self,)
        apart = axis.step or axis.size * axis.inner
        begin = max(0, -((axis.start - first) // apart))
        end = min(axis.outer, -((axis.start - first - count) // apart))
        if begin >= end:
            return ()
        start = axis.start + begin * apart - first
        step = axis.step if end - begin > 1 else 0
        return (replace(self, axis=replace(axis, start=start, outer=end - begin, step=step)),)

    def along(self, dim: int, to: int) -> Step | None:
        return replace(self, axis=on_dimension(self.axis, to)) if self.axis.dim == dim else None

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        if not in_place:
            return centre(x, self.axis)
        centre_in_place(x, self.axis)
        return x

    def computed(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.narrow(b.dim, b.start, b.length) for b in blocks(self.axis))

    def largest(self, largest: float) -> float:
        return 2.0 * largest


@dataclass(frozen=True)
class RotateAxis(CentreAxis):
    """``Q x`` for each group of an axis: see ``orthogonal_matrices``."""

    order = 5
    rotation: Rotation

    @property
    def front(self) -> int:
        return self.axis.dim

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        return rotate(x, self.axis, self.rotation)

    def largest(self, largest: float) -> float:
        return largest * math.sqrt(self.axis.size)


@dataclass(frozen=True)
class TimesPower(Step):
    """``2^power (offset + x) - offset``; without an offset nothing is rounded."""

    order = 8
    power: int
    offset: float = 0.0

    @property
    def is_linear_map(self) -> bool:  # type: ignore[override]
        return not self.offset

    @property
    def terms(self) -> int:
        return bool(self.offset)

    def along(self, dim: int, to: int) -> Step | None:
        """The first factor alone is multiplied."""
        return self if dim == 0 else None

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        return x * self._factor + self._added

    def bound(self, size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return size * self._factor + abs(self._added)

    def largest(self, largest: float) -> float:
        return largest * self._factor + abs(self._added)

    @property
    def _factor(self) -> float:
        return 2.0**self.power

    @property
    def _added(self) -> float:
        return self.offset * (self._factor - 1)


def repeated(values: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
    """One value for each slice; ``values`` has a value for each feature."""
    return values.repeat_interleave(inner).repeat(outer)


def require_outputs(name: str, shape: Shape, dim: int, outputs: tuple[int, int] | None) -> None:
    """Raise ``ValueError`` unless ``outputs`` is a range of outputs of a matrix of ``shape``."""
    if outputs is None:
        return
    first, stop = outputs
    if len(shape) != 2 or not 0 <= first < stop <= shape[1 - dim]:
        raise ValueError(f"{name}: shape {list(shape)} has no outputs from {first} to {stop}")


def largest_of(x: torch.Tensor) -> float:
    """The largest absolute value of ``x``; NaN if ``x`` holds NaN."""
    if not x.numel():
        return 0.0
    low, high = (float(number) for number in torch.aminmax(x.detach()))
    return max(-low, high) if low <= high else math.nan


def to_float64(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """``x`` as float64, in the memory of ``into``. For float16, a detour by float32 is faster."""
    return into.copy_(x.float() if x.dtype == torch.float16 else x)


def in_rows(x: torch.Tensor) -> Iterable[torch.Tensor]:
    """``x`` in slices along its first dimension, of bounded size."""
    return x.split(max(1, ROWS * len(x) // max(x.numel(), 1)))


def _product(matrix: torch.Tensor, dim: int, by: torch.Tensor) -> torch.Tensor:
    """The sum over ``dim`` of ``matrix`` times the vector ``by``; a few rows at a time."""
    at, rows = 0, []
    total = torch.zeros(() if dim == 0 else 0, dtype=torch.float64)
    buffer = torch.empty(0, dtype=torch.float64)
    for part in in_rows(matrix):
        if buffer.numel() < part.numel():
            buffer = torch.empty_like(part, dtype=torch.float64)
        wide = to_float64(part, buffer[: len(part)])
        if dim == 0:
            total = total + by[at : at + len(part)] @ wide.flatten(1)
        else:
            rows.append(wide.movedim(dim, -1).flatten(0, -2) @ by)
        at += len(part)
    return torch.cat(rows) if rows else total
