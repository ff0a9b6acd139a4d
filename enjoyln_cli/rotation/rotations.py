"""From the bases of a model to the tensors to turn, and to the norms that have to be merged first.

A basis stays as it is if one of its norms cannot be merged into what reads it, if one of its
parameters is not stored, or is locked, or if a parameter would be rotated in two ways at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch.fx import Node

from enjoyln_cli.graph.nodes import readers_of
from enjoyln_cli.models.norm_probe import LayerNormForm
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.plan import Basis, BasisKind, Merge, Options, TurnedTensor, UnmergedNorm
from enjoyln_cli.proof.min_cut import Parameter, Problem
from enjoyln_cli.rotation.bases import find_bases
from enjoyln_cli.rotation.found_basis import (
    FoundBasis,
    LayerObstacle,
    NormGain,
    is_read_elsewhere,
    writers_in,
)
from enjoyln_cli.rotation.tensor_uses import TensorUses

NORM_STAYS = "the weight of a norm acts on single features, and cannot be merged into linear layers"
"""How the reason begins if a basis stays because of a norm that cannot be merged."""


@dataclass(frozen=True, eq=False)
class Rotations:
    """The bases of a model, before their norms are merged."""

    found: tuple[FoundBasis, ...]
    table: Parameter | None = None
    """The weight of ``get_input_embeddings()``, from which users make ``inputs_embeds``."""

    @property
    def unproven(self) -> tuple[str, ...]:
        """Embeddings that have to be given in a basis in which the table is not turned."""
        return tuple(
            name
            for basis in self.found
            if self.table is not None and _lacks(basis, self.table)
            for name in basis.inputs
            if name.endswith("inputs_embeds")
        )

    @property
    def forms(self) -> dict[str, LayerNormForm]:
        """The norms whose weight has to move, in bases that could be turned."""
        return {
            gain.module: LayerNormForm(
                -1, "1 + weight" if gain.offset else "weight", gain.bias is not None, 0.0
            )
            for basis in self.found
            if basis.obstacle is None
            for gain in basis.gains
        }

    @property
    def products(self) -> dict[str, list[tuple[int, Node]]]:
        """For the norms in ``forms``: the ops that multiply by the weight."""
        return {
            gain.module: list(products)
            for basis in self.found
            if basis.obstacle is None
            for gain, products in basis.gains.items()
        }

    def that_turn(self, bases: Iterable[Basis]) -> Rotations:
        """Those of the bases, listed in the same order, that turn."""
        pairs = zip(self.found, bases, strict=True)
        turned = tuple(found for found, basis in pairs if basis.is_rotated)
        return replace(self, found=turned)


def rotations(problem: Problem, options: Options, table: Parameter | None) -> Rotations:
    """All bases of the stated model that the options allow.

    ``table`` is the weight of ``get_input_embeddings()``. If ``forward`` does not read it, it turns
    with the basis of ``inputs_embeds``, which users make from it.
    """
    found = find_bases(
        problem.flow, problem.groups, values=options.values, products=options.products
    )
    if table and not any(readers_of(node) for _, node in problem.nodes.get(table.name, ())):
        for basis in found:
            if "inputs_embeds" in basis.inputs and _lacks(basis, table):
                basis.parameters[table] = TensorUses(writes=True, reads=False)
    turned: dict[str, list[Parameter]] = {}
    for basis in found:
        if basis.obstacle is None:
            basis.obstacle = _obstacle(basis, problem, turned)
        if basis.obstacle is None:
            for parameter in basis.parameters:
                turned.setdefault(parameter.name, []).append(parameter)
    return Rotations(tuple(found), table)


def _lacks(basis: FoundBasis, table: Parameter) -> bool:
    return table not in basis.parameters and table.axis.size == basis.size


def _obstacle(
    basis: FoundBasis, problem: Problem, turned: Mapping[str, list[Parameter]]
) -> LayerObstacle | None:
    """Why the parameters of a basis cannot be turned; ``None`` if they can.

    ``turned`` are the parameters of earlier bases by name.
    """
    for gain in basis.gains:
        for own_name in filter(None, (gain.weight, gain.bias)):
            if is_read_elsewhere(own_name, basis, gain, problem.nodes[own_name]):
                return LayerObstacle("the parameters of a norm are also used elsewhere", own_name)
        usual = NormGain(gain.module, f"{gain.module}.weight", gain.bias, gain.offset)
        if gain != usual or gain.bias not in (None, f"{gain.module}.bias"):
            reason = "a vector multiplies it that is not the weight of a norm, or is tied"
            return LayerObstacle(reason, gain.weight)
    if not basis.parameters:
        return LayerObstacle("no parameter writes it", "")
    for parameter in basis.parameters:
        baked = parameter.name in problem.baked  # and so centred, too
        if why := problem.obstacle(parameter) if baked else problem.locked(parameter):
            return LayerObstacle(why, parameter.name)
    own: dict[str, list[Parameter]] = {}
    for parameter in basis.parameters:
        others = (*turned.get(parameter.name, ()), *own.get(parameter.name, ()))
        if any(_overlap(other.axis, parameter.axis) for other in others):
            return LayerObstacle("a parameter of it would be rotated in two ways", parameter.name)
        own.setdefault(parameter.name, []).append(parameter)
    return None


def _overlap(one: Axis, other: Axis) -> bool:
    return one.dim == other.dim and one.start < other.stop and other.start < one.stop


def bases_of(
    known: Rotations,
    problem: Problem,
    merged: Iterable[Merge],
    unmerged: Iterable[UnmergedNorm],
    tensors: Callable[[FoundBasis], tuple[TurnedTensor, ...]],
) -> tuple[Basis, ...]:
    """The bases of a plan; ``tensors`` gives the stored tensors of one that can be turned."""
    moved = {one.norm for one in merged if one.weight}
    reasons = {one.norm: one.reason for one in unmerged}
    places = {name: place for place, name in enumerate(problem.groups)}
    made = []
    for basis in known.found:
        obstacle = basis.obstacle
        for gain in basis.gains if obstacle is None else ():
            if gain.module not in moved:
                reason = reasons.get(gain.module, "something else reads it")
                obstacle = LayerObstacle(f"{NORM_STAYS}: {reason}", gain.module)
                break
        names = [parameter.name for parameter in basis.parameters]
        made.append(
            Basis(
                name=min(names, key=places.__getitem__) if names else "",
                kind=_kind(basis),
                size=basis.size,
                fixes_ones=basis.fixes_ones,
                tensors=() if obstacle else tensors(basis),
                norms=() if obstacle else tuple(sorted({gain.module for gain in basis.gains})),
                inputs=tuple(basis.inputs),
                outputs=() if obstacle else _without_indices(basis.outputs),
                reason=obstacle.reason if obstacle else "",
                culprit=obstacle.culprit if obstacle else "",
                product="" if obstacle else basis.product,
            )
        )
    return tuple(made)


def _without_indices(fields: Iterable[str]) -> tuple[str, ...]:
    """The names of output fields, without the indices of tuples that they stand in."""
    names = (".".join(part for part in f.split(".") if not part.isdigit()) for f in fields)
    return tuple(sorted(set(names)))


def _kind(basis: FoundBasis) -> BasisKind:
    if basis.carries_values:
        return "values"
    written = writers_in(basis)
    return "heads" if all(one.axis.outer > 1 for one in written) and written else "stream"
