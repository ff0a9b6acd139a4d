"""From the rotation groups of a model to the tensors to rotate, and the norms to fuse first.

A group stays as it is if one of its norms cannot be fused into what reads it, if one of its
parameters is not stored, or is locked, or if a parameter would be rotated in two ways at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from enjoyln_cli.graph.nodes import readers_of
from enjoyln_cli.models.norm_probe import LayerNormSpec
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edited_tensors import RotatedTensor
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.plan import NormFusion, RotationGroup, RotationKind, UnfusedNorm
from enjoyln_cli.proof.min_cut import Parameter, Problem
from enjoyln_cli.rotation.found_group import (
    FoundGroup,
    LayerObstacle,
    NormGain,
    other_reader,
    writers_in,
)
from enjoyln_cli.rotation.rotation_groups import find_rotation_groups
from enjoyln_cli.rotation.tensor_uses import TensorUses

NORM_STAYS = "the weight of a norm acts on single features, and cannot be fused into linear layers"
"""How the reason begins if a rotation group stays because of a norm that cannot be fused."""


@dataclass(frozen=True, eq=False)
class Rotations:
    """The rotation groups of a model, before their norms are fused."""

    found: tuple[FoundGroup, ...]
    table: Parameter | None = None
    """The weight of ``get_input_embeddings()``, from which users make ``inputs_embeds``."""

    @property
    def unproven(self) -> tuple[str, ...]:
        """Embeddings that have to be passed rotated, although the table is not rotated."""
        return tuple(
            name
            for group in self.found
            if self.table is not None and _lacks(group, self.table)
            for name in group.inputs
            if name.endswith("inputs_embeds")
        )

    @property
    def specs(self) -> dict[str, LayerNormSpec]:
        """The norms whose weight has to move, in rotation groups that could be rotated."""
        return {
            gain.module: LayerNormSpec(
                -1, "1 + weight" if gain.offset else "weight", gain.bias is not None, 0.0
            )
            for group in self.found
            if group.obstacle is None
            for gain in group.gains
        }

    @property
    def weighting(self) -> dict[str, list[tuple[int, Node]]]:
        """The ops that multiply by the weight, for the norms in ``specs``."""
        return {
            gain.module: list(ops)
            for group in self.found
            if group.obstacle is None
            for gain, ops in group.gains.items()
        }

    def that_rotate(self, rotation_groups: Iterable[RotationGroup]) -> Rotations:
        """The rotation groups that rotate, in the same order."""
        pairs = zip(self.found, rotation_groups, strict=True)
        rotated = tuple(found for found, group in pairs if group.is_rotated)
        return replace(self, found=rotated)


def rotations(problem: Problem, options: Options, table: Parameter | None) -> Rotations:
    """All rotation groups of the stated model that the options allow.

    ``table`` is the weight of ``get_input_embeddings()``. If ``forward`` does not read it, it
    rotates with the group of ``inputs_embeds``, which users make from it.
    """
    found = find_rotation_groups(
        problem.flow,
        problem.groups,
        values=options.values,
        online_rotations=options.online_rotations,
    )
    if table and not any(readers_of(node) for _, node in problem.nodes.get(table.name, ())):
        for group in found:
            if "inputs_embeds" in group.inputs and _lacks(group, table):
                group.parameters[table] = TensorUses(writes=True, reads=False)
    rotated: dict[str, list[Parameter]] = {}
    for group in found:
        if group.obstacle is None:
            group.obstacle = _obstacle(group, problem, rotated)
        if group.obstacle is None:
            for parameter in group.parameters:
                rotated.setdefault(parameter.name, []).append(parameter)
    return Rotations(tuple(found), table)


def _lacks(group: FoundGroup, table: Parameter) -> bool:
    return table not in group.parameters and table.axis.size == group.size


def _obstacle(
    group: FoundGroup, problem: Problem, rotated: Mapping[str, list[Parameter]]
) -> LayerObstacle | None:
    """Why the parameters of a rotation group cannot be rotated; ``None`` if they can.

    ``rotated`` are the parameters of earlier rotation groups by name.
    """
    for gain in group.gains:
        for own_name in filter(None, (gain.weight, gain.bias)):
            if other := other_reader(own_name, group, gain, problem.nodes[own_name]):
                reason = f"the parameters of a norm are also read by {other}"
                return LayerObstacle(reason, own_name)
        usual = NormGain(gain.module, f"{gain.module}.weight", gain.bias, gain.offset)
        if gain != usual or gain.bias not in (None, f"{gain.module}.bias"):
            reason = "a vector multiplies it that is not the weight of a norm, or is tied"
            return LayerObstacle(reason, gain.weight)
    if not group.parameters:
        return LayerObstacle("no parameter writes it", "")
    for parameter in group.parameters:
        baked = parameter.name in problem.baked  # and so centred, too
        if why := problem.obstacle(parameter) if baked else problem.locked(parameter):
            return LayerObstacle(why, parameter.name)
    own: dict[str, list[Parameter]] = {}
    for parameter in group.parameters:
        others = (*rotated.get(parameter.name, ()), *own.get(parameter.name, ()))
        if any(_overlap(other.axis, parameter.axis) for other in others):
            return LayerObstacle("a parameter of it would be rotated in two ways", parameter.name)
        own.setdefault(parameter.name, []).append(parameter)
    return None


def _overlap(one: Axis, other: Axis) -> bool:
    return one.dim == other.dim and one.start < other.stop and other.start < one.stop


def planned_groups(
    known: Rotations,
    problem: Problem,
    fused: Iterable[NormFusion],
    unfused: Iterable[UnfusedNorm],
    tensors: Callable[[FoundGroup], tuple[RotatedTensor, ...]],
) -> tuple[RotationGroup, ...]:
    """The groups of a plan; ``tensors`` gives the stored tensors of a group that can be rotated."""
    moved = {one.norm for one in fused if one.weight}
    reasons = {one.norm: one.reason for one in unfused}
    places = {name: place for place, name in enumerate(problem.groups)}
    made = []
    for group in known.found:
        obstacle = group.obstacle
        for gain in group.gains if obstacle is None else ():
            if gain.module not in moved:
                reason = reasons.get(gain.module, "something else reads it")
                obstacle = LayerObstacle(f"{NORM_STAYS}: {reason}", gain.module)
                break
        names = [parameter.name for parameter in group.parameters]
        made.append(
            RotationGroup(
                name=min(names, key=places.__getitem__) if names else "",
                kind=_kind(group),
                size=group.size,
                fixes_ones=group.fixes_ones,
                tensors=() if obstacle else tensors(group),
                norms=() if obstacle else tuple(sorted({gain.module for gain in group.gains})),
                inputs=tuple(group.inputs),
                outputs=() if obstacle else _without_indices(group.outputs),
                reason=obstacle.reason if obstacle else "",
                culprit=obstacle.culprit if obstacle else "",
                online_rotation="" if obstacle else group.online_rotation,
            )
        )
    return tuple(made)


def _without_indices(fields: Iterable[str]) -> tuple[str, ...]:
    """The names of output fields, without the indices of tuples that they stand in."""
    names = (".".join(part for part in f.split(".") if not part.isdigit()) for f in fields)
    return tuple(sorted(set(names)))


def _kind(group: FoundGroup) -> RotationKind:
    if group.carries_values:
        return "values"
    written = writers_in(group)
    return "heads" if all(one.axis.outer > 1 for one in written) and written else "residual"
