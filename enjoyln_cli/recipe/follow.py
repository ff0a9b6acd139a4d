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
from enjoyln_cli.plan.plan import Basis, Plan, UnmergedNorm, Verdict
from enjoyln_cli.recipe.compare import KEEPS, Comparison, compare, list_names
from enjoyln_cli.recipe.expand import expand
from enjoyln_cli.recipe.from_plan import plan_layers
from enjoyln_cli.recipe.model import (
    KEPT_BY_RECIPE,
    Recipe,
    Variant,
    as_mapping,
    name_of,
    prefix_errors,
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
        for comparison in compare(expanded, plan, as_mapping(config)):
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
        if edits.kind in ("untie", "config"):
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
    if edits.kind == "centre":
        return f"centres {name}, which is not proven to be possible; {near}"
    if edits.kind == "widen":
        remedy = "remove it, or write widen_mlp: true under options"
        return f"widens the MLP of {name}, which is not part of the proof; {remedy}"
    if edits.kind == "merge":
        reasons = {one.norm: f": {one.reason}" for one in plan.unmerged}
        why = reasons.get(name, "; see --merge")
        return f"merges {name}, which is not part of the proof{why}; write keep for it"
    proven = list_names(f"{op.place} of {op.module}" for op in plan.ops)
    if edits.kind == "rotate":
        reasons = {one.name: f": {one.reason}" for one in plan.bases if one.reason}
        why = reasons.get(name, "; see enjoyln rotate")
        return f"turns {name}, which is not part of the proof{why}"
    return (
        f"centres the {edits.kind} of {name}, which is not part of the proof; proven are {proven}"
    )


def _require_effect(recipe: Variant, plan: Plan) -> None:
    """Raise ``RecipeError`` if a line excludes an edit that the proof does not have."""
    layers, parameters = plan_layers(plan), [writer.parameter for writer in plan.writers]
    known = {to_template(name, layers)[0] for name in parameters}
    for name in (line.parameter for line in recipe.centre if line.dim is None):
        if to_template(name, layers)[0] not in known:
            raise RecipeError(
                f"leaves {name}, which is not centred anyway; {suggest(name, parameters)}"
            )
    norms = {one.norm for one in plan.merged} | {one.norm for one in plan.unmerged}
    for line in recipe.merge:
        if isinstance(line, UnmergedNorm) and line.norm not in norms:
            raise RecipeError(f"keeps {line.norm} unmerged, which is not merged anyway; remove it")


def _chosen(recipe: Variant, plan: Plan) -> Plan:
    """The plan with those proven edits that a recipe names."""
    lines = {line.norm: line for line in recipe.norms}
    norms = tuple(_verdict(verdict, lines.get(verdict.norm)) for verdict in plan.norms)
    folded = {verdict.norm for verdict in norms if verdict.status != "kept"}
    unmerged = {line.norm: line for line in recipe.merge if isinstance(line, UnmergedNorm)}
    merged = {line.norm for line in recipe.merge if not isinstance(line, UnmergedNorm)}
    for name in sorted(merged - folded) if not plan.bases else ():
        raise RecipeError(
            f"merges {name}, which it does not fold; also write keep for it under merge"
        )
    stay = [one for one in plan.unmerged if one.norm in folded or plan.bases]
    for move in plan.merged:
        if (move.norm in folded or plan.bases) and move.norm not in merged:
            line = unmerged.get(move.norm)
            reason = (line.reason or KEPT_BY_RECIPE) if line else "the recipe does not merge it"
            stay.append(UnmergedNorm(move.norm, reason, line.culprit if line else ""))
    grown = set(map(name_of, recipe.widen))
    widened = tuple(one for one in plan.widened if one.second.parameter in grown)
    centred = {line.parameter for line in recipe.centre if line.dim is not None}
    added = {(line.module, line.place) for line in recipe.centring_ops}
    turned = {line.parameter for line in recipe.rotate}
    sizes = {one.attribute for one in plan.widened} - {one.attribute for one in widened}
    return replace(
        plan,
        norms=norms,
        writers=tuple(writer for writer in plan.writers if writer.parameter in centred),
        ops=tuple(op for op in plan.ops if (op.module, op.place) in added),
        widened=widened,
        merged=tuple(one for one in plan.merged if one.norm in merged),
        unmerged=tuple(stay),
        bases=tuple(_basis(basis, basis.name in turned) for basis in plan.bases),
        settings=tuple(setting for setting in plan.settings if setting.name not in sizes),
    )


def _basis(proven: Basis, turned: bool) -> Basis:
    """The basis, kept if the recipe does not turn it."""
    if proven.reason or turned:
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
