"""Check that a plan can be carried out on a checkpoint, before anything is written.

A plan that converts no norm is refused, and so is a checkpoint that lacks a tensor of the plan or
stores it in another shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.errors import BadCheckpoint, NothingToFold
from enjoyln_cli.plan.edits import Edit, edits_of
from enjoyln_cli.plan.plan import Plan


def check_edits(plan: Plan, checkpoint: Checkpoint) -> Mapping[str, Edit]:
    """The edits of ``plan``, by the names of the written tensors.

    Raises ``NothingToFold`` if the plan converts no norm and turns nothing, and ``BadCheckpoint``
    if a tensor of the plan is not stored or has another shape.
    """
    if not plan.folded and not plan.turned:
        raise NothingToFold(why_nothing_changes(plan, checkpoint.source.model))
    copies = {one.tensor: one.stored for one in plan.untied}
    needed = [(one.stored, one.source, one.shape) for one in plan.untied]
    needed += [(copies.get(w.tensor, w.tensor), w.parameter, w.shape) for w in plan.edited_tensors]
    for part, size in ((part, mlp.size) for mlp in plan.widened for part in mlp.parts):
        stored = checkpoint.tensors.get(part.tensor)
        found = stored.shape if stored else ()
        shape = (*found[: part.dim], size, *found[part.dim + 1 :])
        needed.append((part.tensor, part.parameter, shape))
    for named in (name for one in plan.merged for name in one.names):
        tensor = copies.get(named.tensor, named.tensor)
        stored = checkpoint.tensors.get(tensor)
        needed.append((tensor, named.parameter, stored.shape if stored else ()))
    for tensor, parameter, shape in needed:
        _require_stored(checkpoint, plan, tensor, parameter, shape)
    return edits_of(plan)


def _require_stored(
    checkpoint: Checkpoint, plan: Plan, tensor: str, parameter: str, shape: tuple[int, ...]
) -> None:
    stored = checkpoint.tensors.get(tensor)
    if stored is None:
        raise BadCheckpoint(
            f"{tensor}: {checkpoint.source.model} does not store this tensor, which "
            f"{plan.model_class} needs as {parameter}; fetch the checkpoint again"
        )
    if tuple(stored.shape) != tuple(shape):
        raise BadCheckpoint(
            f"{tensor}: stored with shape {list(stored.shape)} in {stored.file}, but "
            f"{plan.model_class} holds {list(shape)}; check config.json"
        )


def why_nothing_changes(plan: Plan, model: str, ways: Sequence[str] = ()) -> str:
    """The message that ``plan`` changes nothing of ``model``, with the reasons and what to try.

    ``ways`` are suggestions such as ``--widen-mlp would convert 3 of 5``.
    """
    if plan.bases:
        found = Counter(f"{basis.reason} (at {basis.culprit})" for basis in plan.bases)
        why = "; ".join(f"{count} x {reason}" for reason, count in found.items())
        return f"nothing of {model} can be rotated: {why}"
    already = sum(count for _, count in plan.other_norms)
    if not plan.norms and already:
        return f"{model} has nothing to convert: its {already} norms are RMSNorm already"
    if not plan.norms:
        return f"{model} has nothing to convert: there is no LayerNorm in it"
    counts = Counter(verdict.reason for verdict in plan.kept)
    why = "; ".join(f"{count} x {reason}" for reason, count in counts.items())
    help_ = f"{', '.join(ways)}; " if ways else ""
    look = f"enjoyln report {model} --why {plan.kept[0].norm}"
    return f"no LayerNorm of {model} can be converted ({why}); {help_}`{look}` shows where"
