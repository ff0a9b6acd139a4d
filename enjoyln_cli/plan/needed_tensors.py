"""Which tensors a plan reads or edits, and the sizes that they must have.

The same list holds for a checkpoint and for a model in memory: a tensor has one name in the files
and one in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

from enjoyln_cli.plan.edits import Edit, Product, Vector, edits_of, slices_of
from enjoyln_cli.plan.plan import Plan


@dataclass(frozen=True)
class NeededTensor:
    """A tensor that has to be there before a plan is carried out."""

    parameter: str
    """Its name in the model."""
    tensor: str
    """Its name in the checkpoint."""
    shape: tuple[int, ...] | None = None
    """Its shape in the checkpoint; ``None`` if that does not matter."""
    sizes: Mapping[int, int] = field(default_factory=dict)
    """Sizes by dimension, if they alone matter."""
    is_converted: bool = False
    """Whether the model holds it in another layout, so that its shape there is another one."""

    def expected(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that it should have, for a tensor that has ``shape``."""
        whole = shape if self.shape is None else self.shape
        return tuple(self.sizes.get(dim, size) for dim, size in enumerate(whole))


def needed_tensors(plan: Plan) -> Iterator[NeededTensor]:
    """The tensors of ``plan``; those that become copies of others are taken from these."""
    copies = {copy.tensor: copy.stored for copy in plan.untied}
    for copy in plan.untied:
        yield NeededTensor(copy.source, copy.stored, copy.shape)
    for w in plan.edited_tensors:
        stored = copies.get(w.tensor, w.tensor)
        yield NeededTensor(w.parameter, stored, w.shape, is_converted=w.held is not None)
    for norm in plan.baked.values():
        for named in (norm.weight, norm.bias):
            yield NeededTensor(named.parameter, named.tensor)
    for mlp in plan.widened:
        for part in mlp.parts:
            yield NeededTensor(part.parameter, part.tensor, sizes={part.dim: mlp.size})
    for named in (name for merge in plan.merged for name in merge.names):
        yield NeededTensor(named.parameter, copies.get(named.tensor, named.tensor))


def fitting_edits(
    plan: Plan, shapes: Mapping[str, tuple[int, ...]], *, held: bool = False
) -> Mapping[str, Edit]:
    """The edits of ``plan`` for tensors of these ``shapes``, which are those before the edits.

    The names are those in the checkpoint, or with ``held`` those in the model. Raises
    ``ValueError`` that names the first tensor that is missing or has another shape.
    """
    for needed in needed_tensors(plan):
        name = needed.parameter if held else needed.tensor
        if name not in shapes:
            raise ValueError(f"{name}: there is no such tensor, but the plan needs it")
        shape = shapes[name]
        expected = shape if held and needed.is_converted else needed.expected(shape)
        if expected != shape:
            raise ValueError(
                f"{name}: shape {list(shape)} before the edit, but the plan has {list(expected)}"
            )
    edits = edits_of(plan, held=held)
    require_fit(edits, shapes)
    return edits


def require_fit(edits: Mapping[str, Edit], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``ValueError`` unless every edit fits the tensors that it is for and that it takes.

    ``shapes`` are those of the tensors before the edits.
    """

    def shape_of(name: str, purpose: str) -> tuple[int, ...]:
        if name not in shapes:
            raise ValueError(f"{name}: {purpose}, but there is no such tensor")
        return shapes[name]

    for name, edit in edits.items():
        shape = shape_of(edit.source or name, f"to become {name}")
        others = {other: shape_of(other, f"to change {name}") for other in edit.needs}
        for axis in (*edit.axes, *(turn.axis for turn in edit.turns)):
            if not 0 <= axis.dim < len(shape) or axis.stop > shape[axis.dim]:
                raise ValueError(f"{name}: shape {list(shape)} does not contain {axis}")
        for vector in (*edit.times, *([edit.scale] if edit.scale else [])):
            length = slices_of(vector, others[vector.tensor])
            if vector.dim >= len(shape) or length != shape[vector.dim]:
                raise ValueError(
                    f"{vector.tensor}: has {length} elements, too few or too many for {name}"
                )
            _require_outputs(name, shape, vector)
        if baked := edit.bake or edit.level:
            table = others[baked.table]
            for norm in (baked.weight, baked.bias):
                if len(table) != 2 or others[norm] != table[1:]:
                    raise ValueError(
                        f"{norm}: shape {list(others[norm])} is of no norm behind {baked.table}"
                    )
        if edit.bake and edit.mixed_dims != {1}:
            raise ValueError(f"{name}: a table with a norm is edited along dimension 1 only")
        for product in edit.plus:
            matrix, many = others[product.matrix], slices_of(product, others[product.by])
            if product.dim >= len(matrix) or matrix[product.dim] != many:
                raise ValueError(
                    f"{product.matrix}: shape {list(matrix)} cannot be multiplied by {many} "
                    "elements"
                )
            if prod(matrix) != prod(shape) * many:
                raise ValueError(
                    f"{name}: shape {list(shape)} does not fit the product of {list(matrix)} and "
                    f"{many}"
                )
            _require_outputs(product.matrix, matrix, product)


def _require_outputs(name: str, shape: tuple[int, ...], by: Vector | Product) -> None:
    """Raise ``ValueError`` unless ``by.outputs`` is a range of outputs of a matrix of ``shape``."""
    if by.outputs is None:
        return
    first, stop = by.outputs
    if len(shape) != 2 or not 0 <= first < stop <= shape[1 - by.dim]:
        raise ValueError(f"{name}: shape {list(shape)} has no outputs from {first} to {stop}")
