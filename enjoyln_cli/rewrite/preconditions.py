"""Check that a plan can be carried out on a checkpoint, before anything is written.

Refused are a plan that converts no norm, and a checkpoint that lacks a tensor of the plan or stores
it in another shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.needed_tensors import fitting_edits
from enjoyln_cli.errors import BadCheckpoint, NothingToFold, UnsupportedModel
from enjoyln_cli.plan.plan import Plan


def check_edits(plan: Plan, checkpoint: Checkpoint) -> Mapping[str, Edit]:
    """The edits of ``plan``, by the names of the written tensors.

    Raises ``NothingToFold`` if the plan changes no weights, ``UnsupportedModel``
    if it adds a product, and ``BadCheckpoint`` if a tensor of the plan is not stored or has another
    shape.
    """
    for group in plan.rotated:
        if group.online_rotation:
            raise UnsupportedModel(
                f"the input of {group.online_rotation} needs an online rotation, and a checkpoint "
                "has no place for it; leave out Options.online_rotations"
            )
    if not plan.changes_weights:
        raise NothingToFold(why_nothing_changes(plan, checkpoint.source.model))
    try:
        return fitting_edits(plan, {name: t.shape for name, t in checkpoint.tensors.items()})
    except ValueError as error:
        raise BadCheckpoint(
            f"{checkpoint.source.model} does not fit {plan.model_class}: {error}; fetch the "
            "checkpoint again, or correct its config.json"
        ) from None


def why_nothing_changes(plan: Plan, model: str, ways: Sequence[str] = ()) -> str:
    """The message that ``plan`` changes nothing of ``model``, with reasons and options to try.

    ``ways`` are suggestions such as ``--widen-mlp would convert 3 of 5``.
    """
    if plan.rotation_groups:
        counted_reasons = Counter(
            f"{group.reason} (at {group.culprit})" for group in plan.rotation_groups
        )
        why = "; ".join(f"{count} x {reason}" for reason, count in counted_reasons.items())
        return f"nothing of {model} can be rotated: {why}"
    already = sum(count for _, count in plan.other_norms)
    if not plan.norms and already:
        return (
            f"{model} has nothing to convert: its {already} norms are RMSNorm already; "
            "`enjoyln rotate` and `enjoyln quantize` take such models"
        )
    if not plan.norms:
        return f"{model} has nothing to convert: there is no LayerNorm in it"
    counts = Counter(verdict.reason for verdict in plan.kept)
    why = "; ".join(f"{count} x {reason}" for reason, count in counts.items())
    help_ = f"{', '.join(ways)}; " if ways else ""
    look = f"enjoyln report {model} --why {plan.kept[0].norm}"
    return f"no LayerNorm of {model} can be converted ({why}); {help_}`{look}` shows where"
