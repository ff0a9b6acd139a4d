"""What becomes of one tensor: its parts, their one order, and the arithmetic on tensors in memory.

    fill                                           every element becomes a number, and nothing else;
    W <- W diag(g)          b <- b + W v           merge: what a norm multiplies by and adds goes
                                                   into a linear that reads it (W as it was stored);
    W <- diag(s) W                                 scale: what a linear's output is multiplied by;
    W <- P W                                       centre, axis after axis;
    W <- [W, c 1, c' 1, ...]                       append: new slices along a dimension, each full
                                                   of one number. They come last, so no mean is
                                                   taken over them.

All of it happens in float64, with one rounding at the end. ``rewrite.blocks`` does the same on
files, a block at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from enjoyln_cli.plan.axis import Axis, blocks, centre, scale_along
from enjoyln_cli.plan.mean_units import UNITS, read_by_units, written_by_units
from enjoyln_cli.plan.plan import GrownParameter, Merge, NamedParameter, Plan, Widening

ROWS = 1 << 15
"""Elements of a matrix that are held in float64 at once, by each worker."""


@dataclass(frozen=True)
class Vector:
    """A tensor with one element for each slice of another along its dimension ``dim``."""

    tensor: str
    dim: int
    offset: float = 0.0
    """Added to it first: 1 where a class computes with ``1 + weight``."""


@dataclass(frozen=True)
class Product:
    """``W v``: the sum over the dimension ``dim`` of a matrix times the vector ``by``."""

    matrix: str
    dim: int
    by: str


@dataclass(frozen=True)
class Append:
    """New slices at the end of the dimension ``dim``, each full of one number."""

    dim: int
    values: tuple[float, ...]


@dataclass(frozen=True)
class Edit:
    """What becomes of one tensor, in the order of its fields. Names are those of other tensors."""

    source: str = ""
    """What it is made from; without it, what is stored under its own name."""
    fill: float | None = None
    times: Vector | None = None
    plus: Product | None = None
    """Of as many elements as the tensor."""
    scale: Vector | None = None
    axes: tuple[Axis, ...] = ()
    """Each over consecutive elements: one whose groups are a step apart becomes several."""
    append: Append | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple(b for axis in self.axes for b in blocks(axis)))

    @property
    def needs(self) -> tuple[str, ...]:
        """The other tensors whose values it takes."""
        vectors = [vector.tensor for vector in (self.times, self.scale) if vector]
        return (*vectors, *([self.plus.matrix, self.plus.by] if self.plus else []))

    @property
    def changes(self) -> bool:
        """Whether the values differ from those of the source."""
        return replace(self, source="") != Edit()

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What a tensor of ``shape`` grows to."""
        if self.append is None:
            return shape
        at, many = self.append.dim, len(self.append.values)
        return (*shape[:at], shape[at] + many, *shape[at + 1 :])


@dataclass(frozen=True)
class EditInputs:
    """The values that an edit takes from other tensors: float64, in memory."""

    times: torch.Tensor | None = None
    """One element for each slice along ``Edit.times.dim``."""
    plus: torch.Tensor | None = None
    """Flat, one element for each of the tensor's."""
    scale: torch.Tensor | None = None


def read_edit_inputs(
    edit: Edit,
    read: Callable[[str], torch.Tensor],
    rows: Callable[[str], Iterable[torch.Tensor]] | None = None,
) -> EditInputs:
    """What ``edit`` takes from the tensors that ``read`` returns by name, all unedited.

    ``rows`` gives the same tensors in slices along their first dimension, for large ones.
    """

    def vector(found: Vector | None) -> torch.Tensor | None:
        return None if found is None else read(found.tensor).double().flatten() + found.offset

    plus = None
    if edit.plus is not None:
        by = read(edit.plus.by).double().flatten()
        parts = in_rows(read(edit.plus.matrix)) if rows is None else rows(edit.plus.matrix)
        plus = _product(parts, edit.plus.dim, by)
    return EditInputs(vector(edit.times), plus, vector(edit.scale))


def in_rows(x: torch.Tensor) -> Iterable[torch.Tensor]:
    """``x`` in slices along its first dimension, of bounded size."""
    return x.split(max(1, ROWS * len(x) // max(x.numel(), 1)))


def _product(parts: Iterable[torch.Tensor], dim: int, by: torch.Tensor) -> torch.Tensor:
    """The sum over ``dim`` of a matrix times a vector; ``parts`` are its rows, a few at a time.

    They are converted in the same memory, one after the other.
    """
    at, rows = 0, []
    total = torch.zeros(() if dim == 0 else 0, dtype=torch.float64)
    room = torch.empty(0, dtype=torch.float64)
    for part in parts:
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
    """``x`` as float64, in the memory of ``into``. Float16 gets there faster through float32."""
    return into.copy_(x.float() if x.dtype == torch.float16 else x)


def apply_edit(x: torch.Tensor, edit: Edit, values: EditInputs) -> torch.Tensor:
    """The whole tensor ``x``, float64, edited; still float64."""
    if edit.fill is not None:
        return torch.full_like(x, edit.fill)
    if edit.times is not None and values.times is not None:
        x = scale_along(x, values.times, edit.times.dim)
    if values.plus is not None:
        x = x + values.plus.view_as(x)
    if edit.scale is not None and values.scale is not None:
        x = scale_along(x, values.scale, edit.scale.dim)
    for axis in edit.axes:
        x = centre(x, axis)
    if edit.append is not None:
        x = torch.cat([x, appended_slices(x, edit.append)], edit.append.dim)
    return x


def appended_slices(x: torch.Tensor, append: Append) -> torch.Tensor:
    """The new slices alone."""
    values = torch.tensor(append.values, dtype=x.dtype)
    shape = list(x.shape)
    shape[append.dim] = len(append.values)
    return scale_along(torch.ones(shape, dtype=x.dtype), values, append.dim)


# From a plan.


@dataclass
class _Draft:
    """What is known of one tensor's edit so far."""

    axes: dict[Axis, None] = field(default_factory=dict)
    scale: str = ""


def edits_of(plan: Plan, *, held: bool = False) -> Mapping[str, Edit]:
    """The edits of a plan, by stored tensor; with ``held`` by parameter, for a model in memory.

    There the copies of what was tied are parameters already.
    """
    drafts: dict[str, _Draft] = {}
    scales: dict[str, None] = {}
    for writer in plan.writers:
        draft = drafts.setdefault(writer.parameter if held else writer.tensor, _Draft())
        draft.axes[(writer.held or writer.axis) if held else writer.axis] = None
        if writer.scale:
            draft.scale = writer.scale.parameter if held else writer.scale.tensor
            scales[draft.scale] = None
    found = {name: Edit(fill=1.0) for name in scales}
    for name, draft in drafts.items():
        axes = tuple(draft.axes)
        scale = Vector(draft.scale, axes[0].dim) if draft.scale else None
        found[name] = Edit(scale=scale, axes=axes)
    for mlp in plan.widened:
        for part, values in _new_units(mlp):
            name, append = part.parameter if held else part.tensor, Append(part.dim, values)
            found[name] = replace(found.get(name, Edit()), append=append)
    for one in () if held else plan.untied:
        if one.stored != one.tensor:
            found[one.tensor] = replace(found.get(one.tensor, Edit()), source=one.stored)
    for norm in plan.merged:
        _merge(found, norm, held)
    return found


def _merge(found: dict[str, Edit], norm: Merge, held: bool) -> None:
    """Add what one norm hands on to the edits of its readers."""

    def known(named: NamedParameter) -> str:
        return named.parameter if held else named.tensor

    weight = f"{norm.norm}.weight" if held else norm.weight
    bias = f"{norm.norm}.bias" if held else norm.bias
    if norm.weight:
        found[weight] = Edit(fill=1.0 - norm.offset)
    if norm.bias:
        found[bias] = Edit(fill=0.0)
    for reader in norm.readers:
        matrix = known(reader.weight)
        before = found.get(matrix, Edit())
        if norm.weight:
            times = Vector(weight, reader.dim, norm.offset)
            found[matrix] = replace(before, times=times)
        if reader.bias:
            added = known(reader.bias)
            plus = Product(before.source or matrix, reader.dim, bias)
            found[added] = replace(found.get(added, Edit()), plus=plus)


def _new_units(one: Widening) -> Iterator[tuple[GrownParameter, tuple[float, ...]]]:
    """What each new hidden unit has for every feature, in each parameter of an MLP."""
    zeros = (0.0,) * (one.to - one.size)
    rest = zeros[UNITS:] if one.subtracts else zeros
    yield one.first, (*read_by_units(one.features), *rest) if one.subtracts else rest
    yield one.second, (*written_by_units(one.features), *rest) if one.subtracts else rest
    if one.bias:
        yield one.bias, zeros
