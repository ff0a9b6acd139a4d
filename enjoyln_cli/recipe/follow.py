"""Apply a recipe to a proven plan: take the edits that it asks for, or refuse it.

A recipe chooses among proven edits and adds none. ``follow`` keeps the norms that the recipe folds
and the edits that it lists. It refuses the recipe, naming the line, if an edit is not proven, if a
line matches nothing, or if a folded norm lacks an edit that it needs. An edit that no folded norm
needs is harmless: it is proven for each edit by itself that no output changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.plan import Basis, Merge, Plan, UnmergedNorm, Verdict
from enjoyln_cli.recipe.compare import KEEPS, Comparison, compare, list_names
from enjoyln_cli.recipe.expand import ExpandedVariant, expand
from enjoyln_cli.recipe.from_plan import plan_layers
from enjoyln_cli.recipe.model import (
    KEPT_BY_RECIPE,
    Recipe,
    Variant,
    prefix_errors,
    sizes_by_name,
    suggest,
    variant_for,
)
from enjoyln_cli.recipe.templates import to_template


def follow(recipe: Recipe, plan: Plan, *, config: Any = None) -> Plan:
    """The part of a proven plan that a recipe asks for.

    ``config`` (a mapping or a transformers config) gives the values of named sizes, and has to
    satisfy the recipe's conditions. Norms that the recipe does not fold are kept. Raises
    ``RecipeError`` that names the first edit that is not proven, matches nothing, or is missing.
    """
    with prefix_errors(recipe.where):
        variant = variant_for(recipe, plan.model_type, plan.model_class, config)
        _require_same_model(variant, plan)
        expanded = expand(variant, plan_layers(plan))
        for comparison in compare(expanded, plan, sizes_by_name(recipe, config)):
            _require_proven(comparison, plan)
        _require_effect(expanded, plan)
        found = _chosen(expanded, plan)
        for problem in _missing_edits(found, plan):
            raise RecipeError(problem)
        if found.folded and set(variant.entry_inputs) != set(plan.entry_inputs):
            raise RecipeError(
                f"centres {list_names(variant.entry_inputs)} on entry, but the proof needs "
                f"{list_names(plan.entry_inputs)}; write these names under entry_inputs"
            )
    return found


def _require_same_model(variant: Variant, plan: Plan) -> None:
    """Raise ``RecipeError`` unless the proof holds for the recipe's classes and outputs."""
    if unknown := [name for name in variant.classes if name not in plan.classes]:
        raise RecipeError(
            f"lists the class {unknown[0]}, but the proof is for {list_names(plan.classes)}; "
            "remove it from classes"
        )
    if set(variant.outputs) != set(plan.outputs):
        raise RecipeError(
            f"keeps {_outputs(variant.outputs)} unchanged, but the proof is for "
            f"{_outputs(plan.outputs)}; correct outputs in the recipe, or pass --outputs"
        )


def _require_proven(edits: Comparison, plan: Plan) -> None:
    """Raise ``RecipeError`` if the recipe has an edit that is not proven.

    It may omit proven edits, except untied copies and config entries.
    """
    for name, text in edits.differences():
        ours, theirs = edits.recipe.get(name), edits.proof.get(name)
        if edits.kind in ("untied", "settings"):
            raise RecipeError(f"{name}: {text}; write what the proof has, or remove the option")
        if theirs is None:
            raise RecipeError(_unproven(edits, name, plan))
        if ours is None or ours == KEEPS:
            continue
        if theirs == KEEPS:
            verdict = next(verdict for verdict in plan.kept if verdict.norm == name)
            culprit = f" ({verdict.culprit})" if verdict.culprit else ""
            raise RecipeError(
                f"folds {name}, which is not proven: {verdict.reason}{culprit}; write keep for it"
            )
        raise RecipeError(f"{name}: {text}; write what the proof has, or remove the line")


def _unproven(edits: Comparison, name: str, plan: Plan) -> str:
    """The message for an edit of a name that the proof does not have."""
    near = suggest(name, edits.proof)
    if edits.kind == "norms":
        return f"{name} is not a LayerNorm of {plan.model_class}; {near}"
    if edits.kind == "writers":
        return f"centres {name}, which is not proven to be possible; {near}"
    if edits.kind == "widened":
        remedy = "remove it, or write widen_mlp: true under options"
        return f"widens the MLP of {name}, which is not part of the proof; {remedy}"
    if edits.kind == "merged":
        reasons = {one.norm: f": {one.reason}" for one in plan.unmerged}
        why = reasons.get(name, "; see --merge")
        return f"merges {name}, which is not part of the proof{why}; write keep for it"
    proven = list_names(f"{op.place} of {op.module}" for op in plan.ops)
    if edits.kind == "bases":
        reasons = {one.name: f": {one.reason}" for one in plan.bases if one.reason}
        why = reasons.get(name, "; see enjoyln rotate")
        return f"turns {name}, which is not part of the proof{why}"
    return (
        f"centres the {edits.kind} of {name}, which is not part of the proof; proven are {proven}"
    )


def _require_effect(recipe: ExpandedVariant, plan: Plan) -> None:
    """Raise ``RecipeError`` if a line excludes an edit that the proof does not have."""
    layers, parameters = plan_layers(plan), [writer.parameter for writer in plan.writers]
    known = {to_template(name, layers)[0] for name in parameters}
    for name, lines in recipe.writers.items():
        if not lines and to_template(name, layers)[0] not in known:
            raise RecipeError(
                f"leaves {name}, which is not centred anyway; {suggest(name, parameters)}"
            )
    norms = {one.norm for one in plan.merged} | {one.norm for one in plan.unmerged}
    for name, line in recipe.merged.items():
        if isinstance(line, UnmergedNorm) and name not in norms:
            raise RecipeError(f"keeps {name} unmerged, which is not merged anyway; remove it")


def _chosen(recipe: ExpandedVariant, plan: Plan) -> Plan:
    """The plan with those proven edits that a recipe names."""
    norms = tuple(_verdict(verdict, recipe.norms.get(verdict.norm)) for verdict in plan.norms)
    folded = {verdict.norm for verdict in norms if verdict.status != "kept"}
    for name in (norm for norm, line in recipe.merged.items() if isinstance(line, Merge)):
        if name not in folded and not plan.bases:
            raise RecipeError(
                f"merges {name}, which it does not fold; also write keep for it under merge"
            )
    moves = [(one, recipe.merged.get(one.norm)) for one in plan.merged]
    stay = [one for one in plan.unmerged if one.norm in folded or plan.bases]
    for move, line in moves:
        if (move.norm in folded or plan.bases) and not isinstance(line, Merge):
            reason = (line.reason or KEPT_BY_RECIPE) if line else "the recipe does not merge it"
            stay.append(UnmergedNorm(move.norm, reason, line.culprit if line else ""))
    widened = tuple(one for one in plan.widened if one.second.parameter in recipe.widened)
    sizes = {one.attribute for one in plan.widened} - {one.attribute for one in widened}
    return replace(
        plan,
        norms=norms,
        writers=tuple(w for w in plan.writers if recipe.writers.get(w.parameter)),
        ops=tuple(op for op in plan.ops if (op.module, op.place) in recipe.ops),
        widened=widened,
        merged=tuple(one for one, line in moves if isinstance(line, Merge)),
        unmerged=tuple(stay),
        bases=tuple(_basis(basis, recipe) for basis in plan.bases),
        settings=tuple(setting for setting in plan.settings if setting.name not in sizes),
    )


def _basis(proven: Basis, recipe: ExpandedVariant) -> Basis:
    """The basis, kept if the recipe does not turn it."""
    if proven.reason or proven.name in recipe.bases:
        return proven
    return replace(proven, tensors=(), norms=(), reason="the recipe does not turn it")


def _verdict(proven: Verdict, line: Verdict | None) -> Verdict:
    """The verdict on one norm; ``line`` is ``None`` if the recipe does not name it."""
    if proven.status == "kept" or (line is not None and line.status != "kept"):
        return proven
    reason = (line.reason or KEPT_BY_RECIPE) if line else "the recipe does not fold it"
    return Verdict(proven.norm, "kept", reason=reason, culprit=line.culprit if line else "")


def _missing_edits(found: Plan, plan: Plan) -> Iterator[str]:
    """A message for each omitted edit that the chosen ones need."""
    attributes = {one.attribute for one in found.widened}
    for one in plan.widened:
        if one.attribute in attributes and one not in found.widened:
            yield (
                f"{one.attribute} also sets the hidden units of {one.second.parameter}; "
                "list that under widen too, or list no MLP of this attribute"
            )
    centred = {writer.parameter for writer in found.writers}
    mlps = {one.second.parameter for one in found.widened}
    left = {op.module: op.place for op in plan.ops if op not in found.ops}
    for verdict in found.folded:
        folds = f"folds {verdict.norm}, which needs"
        for name in verdict.needs:
            if name not in centred:
                yield f"{folds} {name} centred; list that under centre, or keep the norm"
        for name in verdict.mlps:
            if name not in mlps:
                yield (
                    f"{folds} the MLP of {name} to subtract a mean; "
                    "list that under widen, or keep the norm"
                )
        for name in verdict.ops:
            if name in left:
                yield (
                    f"{folds} the centring of {name} (its {left[name]}); "
                    "list that under centring_ops, or keep the norm"
                )
    moved = {one.norm for one in found.merged}
    for basis in found.turned:
        for name in basis.norms:
            if name not in moved:
                yield f"turns {basis.name}, which needs {name} merged; list that under merge"
    scales = {writer.scale for writer in found.writers if writer.scale}
    for writer in plan.writers:
        if writer.scale in scales and writer.parameter not in centred:
            yield (
                f"merges {writer.scale.parameter}, but not into {writer.parameter}; "
                "list that under centre too, or list none of the tensors that it scales"
            )


def _outputs(names: Sequence[str]) -> str:
    return f"the outputs {list_names(names)}" if names else "all outputs"
