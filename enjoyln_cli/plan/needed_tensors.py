"""Do the tensors of a checkpoint, or of a model in memory, fit the edits of a plan?

A tensor has one name in the files and one in the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from enjoyln_cli.plan.edits import Edit, Product, Vector, edits_of, slices_of
from enjoyln_cli.plan.plan import Plan

_MISSING = "there is no such tensor, but the plan needs it"


def fitting_edits(
    plan: Plan, shapes: Mapping[str, tuple[int, ...]], *, held: bool = False
) -> Mapping[str, Edit]:
    """The edits of ``plan`` for tensors of these ``shapes``, which are those before the edits.

    The names are those in the checkpoint, or with ``held`` those in the model. Raises
    ``ValueError`` that names the first tensor that is missing or has another shape.
    """
    copies = {copy.tensor: copy.stored for copy in plan.untied}
    planned = [(copy.source if held else copy.stored, copy.shape) for copy in plan.untied]
    planned += [
        (tensor.parameter if held else copies.get(tensor.tensor, tensor.tensor), tensor.shape)
        for tensor in plan.edited_tensors
        if not (held and tensor.held)  # which has another layout in the model
    ]
    for mlp in plan.widened:
        for part in mlp.parts:
            name = part.parameter if held else part.tensor
            sizes = list(shapes.get(name, ()))
            sizes[part.dim : part.dim + 1] = [mlp.size]
            planned.append((name, tuple(sizes)))
    for name, expected in planned:
        if name not in shapes:
            raise ValueError(f"{name}: {_MISSING}")
        if shapes[name] != expected:
            raise ValueError(
                f"{name}: shape {list(shapes[name])} before the edit, but the plan has "
                f"{list(expected)}"
            )
    edits = edits_of(plan, held=held)
    require_fit(edits, shapes)
    return edits


def require_fit(edits: Mapping[str, Edit], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ``ValueError`` unless every edit fits the tensors that it is for and that it takes.

    ``shapes`` are those of the tensors before the edits.
    """

    for name, edit in edits.items():
        source = edit.source or name
        for needed in (source, *edit.needs):
            if needed not in shapes:
                what = "" if needed == name else f" for {name}"
                raise ValueError(f"{needed}: {_MISSING}{what}")
        shape, others = shapes[source], {other: shapes[other] for other in edit.needs}
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
