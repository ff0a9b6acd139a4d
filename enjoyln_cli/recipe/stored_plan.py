"""The plan of a result, as JSON beside its weights: what was done, to which tensors.

Who verifies a result needs no proof and no recipe for it. The calls that are proven are in the
marker, and matrices that the user gave in a file of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.checkpoint.result_files import PLAN_FILE
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.covered_calls import CoveredCalls
from enjoyln_cli.plan.plan import EditedTensor, Merge, Plan
from enjoyln_cli.text import first_line

MAX_BYTES = 1 << 26
_LEFT_OUT = frozenset({"needs", "mlps", "path", "covered", "given"})
"""Fields that only a proof needs, or that are in other files."""

Shape = tuple[int, ...]


def plan_text(plan: Plan) -> str:
    """The JSON text of a plan."""
    return json.dumps(schema.plain(plan, _LEFT_OUT)) + "\n"


def read_plan(result: Checkpoint, covered: CoveredCalls | None) -> Plan:
    """The plan that ``result`` was made by; ``covered`` are the calls in its marker.

    Raises ``BadCheckpoint`` if the file is missing or no plan, or does not fit the stored tensors.
    """
    path = result.source.path / PLAN_FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        plan = schema.read(Plan, json.loads(path.read_text(encoding="utf-8")))
        _require_fit(plan, {name: tuple(stored.shape) for name, stored in result.tensors.items()})
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"{path}: cannot be read as the plan of this result ({first_line(error)}); "
            "convert the source again"
        ) from None
    return replace(plan, covered=covered)


def _require_fit(plan: Plan, stored: Mapping[str, Shape]) -> None:
    """Raise ``ValueError`` unless the tensors of a result have the shapes that the plan gives."""
    shapes = dict(stored)
    for mlp in plan.widened:
        for grown in mlp.parts:
            shape = _shape_of(grown.tensor, shapes)
            if len(shape) <= grown.dim or shape[grown.dim] != mlp.to:
                raise ValueError(f"{grown.tensor} of {list(shape)} has not {mlp.to} hidden units")
            before, after = shape[: grown.dim], shape[grown.dim + 1 :]
            shapes[grown.tensor] = (*before, mlp.size, *after)
    for edited in plan.edited_tensors:
        _require_axis(edited, shapes)
    for merge in plan.merged:
        _require_readers(merge, shapes)
    for untied in plan.untied:
        if _shape_of(untied.tensor, shapes) != untied.shape:
            raise ValueError(f"{untied.tensor} has not the shape {list(untied.shape)}")


def _require_axis(edited: EditedTensor, shapes: Mapping[str, Shape]) -> None:
    shape, axis, scale = _shape_of(edited.tensor, shapes), edited.axis, edited.scale
    if shape != edited.shape or not 0 <= axis.dim < len(shape) or axis.stop > shape[axis.dim]:
        raise ValueError(f"{edited.tensor} of {list(shape)} has no {axis}")
    if scale and _shape_of(scale.tensor, shapes) != (shape[axis.dim],):
        raise ValueError(f"{scale.tensor} does not scale {edited.tensor}")
    for named in (edited.baked.weight, edited.baked.bias) if edited.baked else ():
        if axis.dim != 1 or len(shape) != 2 or _shape_of(named.tensor, shapes) != shape[1:]:
            raise ValueError(f"{named.tensor} is of no norm behind {edited.tensor}")


def _require_readers(merge: Merge, shapes: Mapping[str, Shape]) -> None:
    size = _shape_of(merge.weight or merge.bias, shapes)
    for reader in merge.readers:
        matrix = _shape_of(reader.weight.tensor, shapes)
        others = matrix[: reader.dim] + matrix[reader.dim + 1 :]
        bias = _shape_of(reader.bias.tensor, shapes) if reader.bias else others
        many = tuple(n * reader.outer * reader.inner for n in size)
        if many != matrix[reader.dim : reader.dim + 1] or bias != others:
            raise ValueError(
                f"{merge.norm} of {list(size)} is not read along dimension {reader.dim} of "
                f"{reader.weight.tensor} of {list(matrix)}"
            )


def _shape_of(tensor: str, shapes: Mapping[str, Shape]) -> Shape:
    if tensor not in shapes:
        raise ValueError(f"no stored tensor is named {tensor}")
    return shapes[tensor]
