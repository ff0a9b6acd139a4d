"""The plan of a result, as JSON beside its weights: what was done, to which tensors.

Verifying a result needs no proof and no recipe. The calls that are proven are in the
marker, and matrices that the user gave in a file of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.checkpoint.result_files import PLAN_FILE
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.needed_tensors import fitting_edits
from enjoyln_cli.edits.planned_edits import edits_of
from enjoyln_cli.edits.step import Shape
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.covered_calls import CoveredCalls
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.text import first_line

MAX_BYTES = 1 << 26
_LEFT_OUT = frozenset({"needs", "mlps", "path", "covered", "given"})
"""Fields that only a proof needs, or that are in other files."""


def plan_text(plan: Plan) -> str:
    """The JSON text of a plan."""
    return json.dumps(schema.plain(plan, _LEFT_OUT)) + "\n"


def read_plan(result: Checkpoint, covered: CoveredCalls | None, *, fits: bool = True) -> Plan:
    """The plan that ``result`` was made by; ``covered`` are the calls in its marker.

    Without ``fits``, the result is stored as another class, so its tensors may have other names.

    Raises ``BadCheckpoint`` if the file is missing or no plan, or does not fit the stored tensors.
    """
    path = result.source.path / PLAN_FILE
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        plan = schema.read(Plan, json.loads(path.read_text(encoding="utf-8")))
        shapes = {name: tuple(stored.shape) for name, stored in result.tensors.items()}
        if fits:
            _require_fit(plan, shapes)
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"{path}: cannot be read as the plan of this result ({first_line(error)}); "
            "convert the source again"
        ) from None
    return replace(plan, covered=covered)


def _require_fit(plan: Plan, stored: Mapping[str, Shape]) -> None:
    """Raise ``ValueError`` unless the tensors of a result have the shapes that the plan gives."""
    if not all(fusion.readers for fusion in plan.fused):
        raise ValueError("a norm is fused, but into no readers")
    edits = edits_of(plan)
    fitting_edits(
        plan, {name: _before(shape, edits.get(name, Edit())) for name, shape in stored.items()}
    )
    for untied in plan.untied:
        if stored.get(untied.tensor) != untied.shape:
            raise ValueError(f"{untied.tensor} has not the shape {list(untied.shape)}")


def _before(shape: Shape, edit: Edit) -> Shape:
    """The shape of a tensor before slices were appended."""
    if edit.append is None or edit.append.dim >= len(shape):
        return shape
    dim, added = edit.append.dim, len(edit.append.values)
    return (*shape[:dim], shape[dim] - added, *shape[dim + 1 :])
