"""``Edit``: how a plan changes one tensor. Its steps apply in this order:

    fill                         every element becomes one number; no other step applies
    E <- P (g n(E) + b)          bake the norm behind an embedding table into it; the last step
                                 encodes the rows so that the new norm returns them (``baked_rows``)
    W <- W diag(g)               merge the weight g and the bias v of a norm into a linear layer
    b <- b + W v                 that reads the norm (W is the weight as stored; if other layers
                                 have a part of W, only the rows of this one)
    W <- diag(s) W               merge the vector s that multiplies a linear layer's output
    W <- P W                     centre, one axis after the other
    W <- Q W                     turn by an orthogonal matrix, one axis after the other
    W <- [W, c 1, c' 1, ...]     append slices along a dimension, each filled with one number; this
                                 step is the last, so means are taken without the new slices

All steps are computed in float64, with one rounding at the end. ``edits_of`` derives the edits from
a plan. ``apply_edit`` applies one to a float64 tensor in memory, and ``rewrite.edit_pieces`` to a
tensor of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch

from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.axis import Axis, blocks, centre, centre_in_place, scale_along
from enjoyln_cli.plan.baked_rows import baked_rows, level_of, normed_rows
from enjoyln_cli.plan.mean_units import UNITS, read_by_units, written_by_units
from enjoyln_cli.plan.orthogonal_matrices import Rotation, rotate
from enjoyln_cli.plan.plan import (
    EditedTensor,
    GrownParameter,
    Merge,
    NamedParameter,
    Plan,
    Reader,
    Widening,
)

ROWS = 1 << 15
"""About how many elements of a matrix are converted to float64 at once."""


@dataclass(frozen=True)
class Vector:
    """A tensor whose elements multiply the slices of the edited tensor along ``dim``."""

    tensor: str
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

    def part(self, x: torch.Tensor) -> torch.Tensor:
        """The view of ``x`` that it multiplies."""
        if self.outputs is None:
            return x
        first, stop = self.outputs
        return x.narrow(1 - self.dim, first, stop - first)


@dataclass(frozen=True)
class Turn:
    """``Q x`` for each group of an axis; see ``rotation``."""

    axis: Axis
    rotation: Rotation


@dataclass(frozen=True)
class Product:
    """``W v``: the sum over the dimension ``dim`` of a matrix times the vector ``by``."""

    matrix: str
    dim: int
    by: str
    outer: int = 1
    inner: int = 1
    """The vector repeats along ``dim`` as that of a ``Vector``."""
    outputs: tuple[int, int] | None = None
    """The range of elements that it is for; ``None`` for all of them."""


@dataclass(frozen=True)
class Bake:
    """An embedding table and the norm behind it, before the norm is baked into the table."""

    table: str
    weight: str
    bias: str
    eps: float


@dataclass(frozen=True)
class Append:
    """New slices at the end of dimension ``dim``, each filled with one number of ``values``."""

    dim: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Edit:
    """How one tensor changes; the fields apply in their order. Names refer to other tensors."""

    source: str = ""
    """The tensor that it starts from; empty for the one stored under its own name."""
    fill: float | None = None
    level: Bake | None = None
    """Fills the weight of a baked norm with the level of its table; no other step applies."""
    bake: Bake | None = None
    """Of the table itself, whose rows are along dimension 1."""
    times: tuple[Vector, ...] = ()
    """Several if they multiply different parts of the tensor."""
    plus: tuple[Product, ...] = ()
    """Added to the tensor; each has as many elements, or those of its ``outputs``."""
    scale: Vector | None = None
    axes: tuple[Axis, ...] = ()
    """The axes to centre over, without steps: an axis with a ``step`` is split into its blocks."""
    turns: tuple[Turn, ...] = ()
    append: Append | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(b for axis in self.axes for b in blocks(axis)))

    @property
    def needs(self) -> tuple[str, ...]:
        """The other tensors whose values the edit uses."""
        vectors = [vector.tensor for vector in (*self.times, self.scale) if vector]
        factors = [name for product in self.plus for name in (product.matrix, product.by)]
        baked = self.bake or self.level
        names = [baked.table, baked.weight, baked.bias] if baked else []
        return (*vectors, *factors, *names)

    @property
    def changes(self) -> bool:
        """Whether there is anything to change in the values of the source."""
        return replace(self, source="") != Edit()

    @property
    def mixed_dims(self) -> frozenset[int]:
        """The dimensions along which the edit computes an element from several, or appends some."""
        appended = () if self.append is None else (self.append.dim,)
        normed = () if self.bake is None else (1,)
        axes = (*self.axes, *(turn.axis for turn in self.turns))
        return frozenset((*(axis.dim for axis in axes), *appended, *normed))

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a tensor of ``shape`` has after the edit."""
        if self.append is None:
            return shape
        at, many = self.append.dim, len(self.append.values)
        return (*shape[:at], shape[at] + many, *shape[at + 1 :])


@dataclass(frozen=True)
class EditInputs:
    """The values that an edit uses from other tensors: float64, in memory."""

    times: tuple[torch.Tensor, ...] = ()
    """For each of ``Edit.times``: one element for each slice along its ``dim``."""
    plus: torch.Tensor | None = None
    """One-dimensional, with as many elements as the edited tensor."""
    scale: torch.Tensor | None = None
    """One element for each slice along ``Edit.scale.dim``."""
    gain: torch.Tensor | None = None
    """The weight of the norm that is baked, for each feature."""
    bias: torch.Tensor | None = None
    """The bias of the norm that is baked, for each feature."""
    level: float = 1.0
    """The level of the table that the norm is baked into."""

    def part(self, edit: Edit, dim: int, first: int, count: int) -> EditInputs:
        """The values for ``count`` slices of the tensor along ``dim``; ``plus`` is not cut."""

        def cut(values: torch.Tensor, by: Vector) -> torch.Tensor:
            return values.narrow(0, first, count) if by.dim == dim else values

        times = tuple(map(cut, self.times, edit.times))
        scaled = self.scale is not None and edit.scale is not None
        scale = cut(self.scale, edit.scale) if scaled else None  # type: ignore[arg-type]
        return replace(self, times=times, scale=scale)


def read_edit_inputs(edit: Edit, read: Callable[[str], torch.Tensor]) -> EditInputs:
    """The values that ``edit`` uses from other tensors; ``read`` returns them unedited, by name."""

    def factors(vector: Vector) -> torch.Tensor:
        values = read(vector.tensor).double().flatten() + vector.offset
        if vector.divides and not values.all():
            raise BadCheckpoint(
                f"{vector.tensor} has a zero, so the bias beside it cannot be divided by it; "
                "convert without --merge affine and --rotate"
            )
        return repeated(1 / values if vector.divides else values, vector)

    inputs = EditInputs(
        times=tuple(map(factors, edit.times)),
        plus=_sum_of_products(edit.plus, read),
        scale=factors(edit.scale) if edit.scale else None,
    )
    if baked := edit.bake or edit.level:
        gain, bias = (read(name).double().clone() for name in (baked.weight, baked.bias))
        level = level_of(_in_rows(read(baked.table)), gain, bias, baked.eps)
        inputs = replace(inputs, gain=gain, bias=bias, level=level)
    return inputs


def repeated(values: torch.Tensor, by: Vector | Product | Reader) -> torch.Tensor:
    """One value for each slice along ``by.dim``; ``values`` has one for each feature."""
    return values.repeat_interleave(by.inner).repeat(by.outer)


def slices_of(by: Vector | Product, shape: tuple[int, ...]) -> int:
    """How many slices along ``by.dim`` a vector of ``shape`` has a value for."""
    return prod(shape) * by.outer * by.inner


def _in_rows(x: torch.Tensor) -> Iterable[torch.Tensor]:
    """``x`` in slices along its first dimension, of bounded size."""
    return x.split(max(1, ROWS * len(x) // max(x.numel(), 1)))


def _sum_of_products(
    products: tuple[Product, ...], read: Callable[[str], torch.Tensor]
) -> torch.Tensor | None:
    """What the products add to the edited tensor, with zeros outside of their ``outputs``."""
    total = None
    for product in products:
        matrix, dim = read(product.matrix), product.dim
        by = repeated(read(product.by).double().flatten(), product)
        if product.outputs is None:
            added = _product(matrix, dim, by)
        else:
            first, stop = product.outputs
            added = torch.zeros(matrix.shape[1 - dim], dtype=torch.float64)
            added[first:stop] = _product(matrix.narrow(1 - dim, first, stop - first), dim, by)
        total = added if total is None else total + added
    return total


def _product(matrix: torch.Tensor, dim: int, by: torch.Tensor) -> torch.Tensor:
    """The sum over ``dim`` of ``matrix`` times the vector ``by``; a few rows at a time."""
    at, rows = 0, []
    total = torch.zeros(() if dim == 0 else 0, dtype=torch.float64)
    room = torch.empty(0, dtype=torch.float64)
    for part in _in_rows(matrix):
        if room.numel() < part.numel():
            room = torch.empty_like(part, dtype=torch.float64)
        wide = to_float64(part, room[: len(part)])
        if dim == 0:
            total = total + by[at : at + len(part)] @ wide.flatten(1)
        else:
            rows.append(wide.movedim(dim, -1).flatten(0, -2) @ by)
        at += len(part)
    return torch.cat(rows) if rows else total


def to_float64(x: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """``x`` as float64, in the memory of ``into``. For float16, a detour by float32 is faster."""
    return into.copy_(x.float() if x.dtype == torch.float16 else x)


def apply_edit(
    x: torch.Tensor, edit: Edit, values: EditInputs, *, in_place: bool = False
) -> torch.Tensor:
    """The float64 tensor ``x`` after ``edit``, in float64.

    With ``in_place``, ``x`` may change, and the result is not always contiguous.
    """
    if edit.fill is not None:
        return torch.full_like(x, edit.fill)
    if edit.level is not None:
        return torch.full_like(x, values.level)
    if edit.bake is not None and values.gain is not None and values.bias is not None:
        x = normed_rows(x, values.gain, values.bias, edit.bake.eps)
    for vector, factors in zip(edit.times, values.times, strict=True):
        if vector.outputs is None:
            x = scale_along(x, factors, vector.dim)
        else:
            x = x.clone()
            vector.part(x).copy_(scale_along(vector.part(x), factors, vector.dim))
    if values.plus is not None:
        x = x + values.plus.view_as(x)
    if edit.scale is not None and values.scale is not None:
        x = scale_along(x, values.scale, edit.scale.dim)
    for axis in edit.axes:
        if in_place:
            centre_in_place(x, axis)
        else:
            x = centre(x, axis)
    for turn in edit.turns:
        x = rotate(x, turn.axis, turn.rotation)
    if edit.bake is not None:
        x = baked_rows(x, values.level, edit.bake.eps)
    if edit.append is not None:
        x = torch.cat([x, appended_slices(tuple(x.shape), edit.append)], edit.append.dim)
    return x if in_place else x.contiguous()


def appended_slices(shape: tuple[int, ...], append: Append) -> torch.Tensor:
    """The new slices for a tensor of ``shape``, in float64."""
    values = torch.tensor(append.values, dtype=torch.float64)
    many = (*shape[: append.dim], len(values), *shape[append.dim + 1 :])
    return values.view(-1, *(1,) * (len(shape) - 1 - append.dim)).expand(many)


# From a plan.


def edits_of(plan: Plan, *, held: bool = False) -> Mapping[str, Edit]:
    """The edits of a plan by name of the stored tensor, or of the parameter with ``held``.

    ``held`` is for a model in memory: its axes are those of the parameters, and untied parameters
    are not copied, since there each is a parameter of its own already.
    """
    edits: dict[str, Edit] = {}
    copies = {} if held else {copy.tensor: copy.stored for copy in plan.untied}

    def add(tensor: EditedTensor, rotation: Rotation | None) -> None:
        name = tensor.parameter if held else tensor.tensor
        axis = tensor.held if held and tensor.held else tensor.axis
        edit = edits.get(name, Edit())
        if rotation is None:
            edit = replace(edit, axes=tuple(dict.fromkeys((*edit.axes, *blocks(axis)))))
        else:
            edit = replace(edit, turns=tuple(dict.fromkeys((*edit.turns, Turn(axis, rotation)))))
        if tensor.scale:
            scale = tensor.scale.parameter if held else tensor.scale.tensor
            edit = replace(edit, scale=Vector(scale, axis.dim))
            edits[scale] = Edit(fill=1.0)
        if tensor.baked:
            weight, bias = (
                named.parameter if held else named.tensor
                for named in (tensor.baked.weight, tensor.baked.bias)
            )
            bake = Bake(copies.get(name, name), weight, bias, tensor.baked.eps)
            edit = replace(edit, bake=bake)
            edits.update({weight: Edit(level=bake), bias: Edit(fill=0.0)})
        edits[name] = edit

    for writer in plan.writers:
        add(writer, None)
    for basis in plan.turned:
        rotation = basis.rotation(plan.seed)
        for turned in basis.tensors:
            add(turned, rotation)
    for mlp in plan.widened:
        for part, values in _new_units(mlp):
            name, append = part.parameter if held else part.tensor, Append(part.dim, values)
            edits[name] = replace(edits.get(name, Edit()), append=append)
    for copy, stored in copies.items():
        if copy != stored:
            edits[copy] = replace(edits.get(copy, Edit()), source=stored)
    for norm in plan.merged:
        _merge(edits, norm, held)
    return edits


def _merge(edits: dict[str, Edit], norm: Merge, held: bool) -> None:
    """Add the merge of one norm to the edits of the norm and of the layers that read it."""

    def name_of(named: NamedParameter) -> str:
        return named.parameter if held else named.tensor

    weight = f"{norm.norm}.weight" if held else norm.weight
    bias = f"{norm.norm}.bias" if held else norm.bias or norm.divided
    if norm.weight:
        edits[weight] = Edit(fill=1.0 - norm.offset)
    if norm.bias:
        edits[bias] = Edit(fill=0.0)
    if norm.divided:
        by_weight = Vector(weight, 0, norm.offset, divides=True)
        edits[bias] = replace(edits.get(bias, Edit()), times=(by_weight,))
    for reader in norm.readers:
        matrix = name_of(reader.weight)
        dim = reader.held if held and reader.held is not None else reader.dim
        before = edits.get(matrix, Edit())
        if norm.weight:
            times = Vector(
                weight,
                dim,
                norm.offset,
                outer=reader.outer,
                inner=reader.inner,
                outputs=reader.outputs,
            )
            edits[matrix] = replace(before, times=tuple(dict.fromkeys((*before.times, times))))
        if reader.bias:
            name, source = name_of(reader.bias), before.source or matrix
            plus = Product(source, dim, bias, reader.outer, reader.inner, reader.outputs)
            shifted = edits.get(name, Edit())
            edits[name] = replace(shifted, plus=tuple(dict.fromkeys((*shifted.plus, plus))))


def _new_units(mlp: Widening) -> Iterator[tuple[GrownParameter, tuple[float, ...]]]:
    """Each parameter of a widened MLP, with the value for all features of each new hidden unit."""
    zeros = (0.0,) * (mlp.to - mlp.size)
    unused = zeros[UNITS:] if mlp.subtracts else zeros
    yield mlp.first, (*read_by_units(mlp.features), *unused) if mlp.subtracts else unused
    yield mlp.second, (*written_by_units(mlp.features), *unused) if mlp.subtracts else unused
    if mlp.bias:
        yield mlp.bias, zeros
