"""Do the tensors of a checkpoint, or of a model in memory, fit the edits of a plan?

The files and the model may name a tensor differently.
"""

from __future__ import annotations

from collections.abc import Mapping

from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.planned_edits import edits_of
from enjoyln_cli.plan.plan import Plan


def fitting_edits(
    plan: Plan, shapes: Mapping[str, tuple[int, ...]], *, in_memory: bool = False
) -> Mapping[str, Edit]:
    """The edits of ``plan`` for tensors that have these ``shapes`` before the edits.

    Tensors are named as in the checkpoint, or with ``in_memory`` as in the model. Raises
    ``ValueError``, which names the first tensor that is missing or has another shape.
    """
    copies = {copy.tensor: copy.stored for copy in plan.untied}
    planned = [(copy.source if in_memory else copy.stored, copy.shape) for copy in plan.untied]
    planned += [
        (tensor.parameter if in_memory else copies.get(tensor.tensor, tensor.tensor), tensor.shape)
        for tensor in plan.edited_tensors
        if not (in_memory and tensor.module_axis)  # which has another layout in the model
    ]
    for mlp in plan.widened:
        for part in mlp.parts:
            name = part.parameter if in_memory else part.tensor
            sizes = list(shapes.get(name, ()))
            sizes[part.dim : part.dim + 1] = [mlp.size]
            planned.append((name, tuple(sizes)))
    for name, expected in planned:
        if name not in shapes:
            raise ValueError(f"{name}: there is no such tensor, but the plan needs it")
        if shapes[name] != expected:
            raise ValueError(
                f"{name}: shape {list(shapes[name])} before the edit, but the plan has "
                f"{list(expected)}"
            )
    edits = edits_of(plan, in_memory=in_memory)
    for name, edit in edits.items():
        edit.require_fit(name, shapes)
    return edits
