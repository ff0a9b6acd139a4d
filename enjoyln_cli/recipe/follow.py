"""Apply a recipe to a proven plan: take the edits that it asks for, or refuse it.

A recipe chooses among proven edits and adds none. ``follow`` keeps the norms that the recipe folds
and the edits that it lists. It refuses the recipe, naming the line, if an edit is not proven, if a
line matches nothing, or if a folded norm lacks an edit that it needs. An edit that no folded norm
needs is harmless: it is proven for each edit by itself that no output changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.plan import Basis, Plan, UnmergedNorm, Verdict
from enjoyln_cli.recipe.compare import NOTHING, Difference, compare, expanded, keeps
from enjoyln_cli.recipe.from_plan import layers_in, lines_of
from enjoyln_cli.recipe.model import (
    SECTIONS,
    EditLines,
    Recipe,
    prefix_errors,
    require_for,
    suggest,
)
from enjoyln_cli.recipe.templates import KEEP, to_template

KEPT_BY_RECIPE = "the recipe keeps it"
"""The reason of a norm that the recipe keeps without giving a reason."""

_REMEDIES = {
    "norms": "or write keep for it",
    "outputs": "or pass --outputs",
    "untie": "or remove the option",
    "config": "or remove the option",
}
"""What to do about a difference instead of writing what the proof has."""
_OPTIONS = {
    "merge": "write keep for it, or see --merge",
    "widen": "remove it, or write widen_mlp: true under options",
    "rotate": "remove it; see enjoyln rotate",
}
"""What to do about an edit of a kind that is made with an option only."""


def follow(recipe: Recipe, plan: Plan, *, config: Any = None) -> Plan:
    """The part of a proven plan that a recipe asks for.

    ``config`` (a mapping or a transformers config) has to satisfy the recipe's conditions. Norms
    that the recipe does not fold are kept. Raises ``RecipeError`` that names the first edit that is
    not proven, matches nothing, or is missing.
    """
    with prefix_errors(recipe.where):
        require_for(recipe, plan.model_type, plan.model_class, config)
        proof = lines_of(plan)
        edits = expanded(recipe, proof)
        differences = compare(edits, proof)
        for difference in differences:
            _require_proven(difference, proof, edits, plan)
        chosen = _chosen(edits, plan)
        for problem in _missing_edits(chosen, plan):
            raise RecipeError(problem)
        for difference in differences if chosen.folded else ():
            if difference.section == "entry_inputs":
                raise RecipeError(f"{difference}; write what the proof has")
    return chosen


def _require_proven(
    difference: Difference, proof: EditLines, recipe: EditLines, plan: Plan
) -> None:
    """Raise ``RecipeError`` if the recipe has an edit that is not proven.

    It may omit proven edits and classes, except untied copies and config entries.
    """
    section, name = difference.section, difference.name
    if section in ("entry_inputs", "unproven", "calls"):
        return
    if section == "classes" and set(recipe.classes) <= set(proof.classes):
        return
    if section in SECTIONS and section != "untie":
        edits = difference.recipe not in (NOTHING, KEEP)
        unknown = difference.proof == NOTHING and not _is_known(section, name, proof)
        if unknown or (edits and difference.proof in (NOTHING, KEEP)):
            why = _obstacles(plan).get((section, name), "")
            other = "write keep for it" if why else suggest(name, getattr(proof, section))
            remedy = _OPTIONS.get(section, other)
            raise RecipeError(f"{section}: {name} is not part of the proof{why}; {remedy}")
        if not edits:
            return
    remedy = _REMEDIES.get(section, "or remove the line")
    raise RecipeError(f"{difference}; write what the proof has, {remedy}")


def _is_known(section: str, name: str, proof: EditLines) -> bool:
    """Whether the proof has a line for a norm, or for a name or the same name in another layer."""
    layers, names = layers_in(proof), getattr(proof, section)
    if section == "norms":
        return name in names
    return to_template(name, layers) in {to_template(other, layers) for other in names}


def _obstacles(plan: Plan) -> dict[tuple[str, str], str]:
    """Why names of the plan are not edited, by section and name."""
    kept: list[tuple[str, str, Verdict | UnmergedNorm | Basis]] = [
        *(("norms", verdict.norm, verdict) for verdict in plan.kept),
        *(("merge", norm.norm, norm) for norm in plan.unmerged),
        *(("rotate", basis.name, basis) for basis in plan.bases if basis.reason),
    ]
    return {
        (section, name): f": {edit.reason}{f' ({edit.culprit})' if edit.culprit else ''}"
        for section, name, edit in kept
    }


def _chosen(recipe: EditLines, plan: Plan) -> Plan:
    """The plan with those proven edits that a recipe names."""
    names = {
        section: {name for name, line in getattr(recipe, section).items() if _is_edit(line)}
        for section in SECTIONS
    }
    norms = tuple(
        _verdict(verdict, recipe.norms.get(verdict.norm, NOTHING)) for verdict in plan.norms
    )
    folded = {verdict.norm for verdict in norms if verdict.status != "kept"}
    for name in sorted(names["merge"] - folded) if not plan.bases else ():
        raise RecipeError(
            f"merges {name}, which it does not fold; also write keep for it under merge"
        )
    unmerged = [norm for norm in plan.unmerged if norm.norm in folded or plan.bases]
    for merge in plan.merged:
        if (merge.norm in folded or plan.bases) and merge.norm not in names["merge"]:
            line = recipe.merge.get(merge.norm, NOTHING)
            unmerged.append(UnmergedNorm(merge.norm, *_reason(line, "merge")))
    widened = tuple(mlp for mlp in plan.widened if mlp.second.parameter in names["widen"])
    sizes = {mlp.attribute for mlp in plan.widened} - {mlp.attribute for mlp in widened}
    return replace(
        plan,
        norms=norms,
        writers=tuple(w for w in plan.writers if w.parameter in names["centre"]),
        ops=tuple(op for op in plan.ops if op.module in names["centring_ops"]),
        widened=widened,
        merged=tuple(merge for merge in plan.merged if merge.norm in names["merge"]),
        unmerged=tuple(unmerged),
        bases=tuple(_basis(basis, basis.name in names["rotate"]) for basis in plan.bases),
        settings=tuple(setting for setting in plan.settings if setting.name not in sizes),
    )


def _is_edit(line: Any) -> bool:
    return line != NOTHING and not keeps(line)


def _verdict(proven: Verdict, line: Any) -> Verdict:
    """The verdict on one norm, from its line in the recipe."""
    if proven.status == "kept" or _is_edit(line):
        return proven
    reason, culprit = _reason(line, "fold")
    return Verdict(proven.norm, "kept", reason=reason, culprit=culprit)


def _reason(line: Any, verb: str) -> tuple[str, str]:
    """Why a norm is not edited, and the culprit, by its line in the recipe."""
    if line == NOTHING:
        return f"the recipe does not {verb} it", ""
    if isinstance(line, Mapping):
        return str(line[KEEP] or KEPT_BY_RECIPE), str(line.get("culprit", ""))
    return KEPT_BY_RECIPE, ""


def _basis(proven: Basis, turned: bool) -> Basis:
    """The basis, kept if the recipe does not turn it."""
    if proven.reason or turned:
        return proven
    return replace(proven, tensors=(), norms=(), reason="the recipe does not turn it")


def _missing_edits(chosen: Plan, plan: Plan) -> Iterator[str]:
    """A message for each omitted edit that the chosen ones need."""
    attributes = {mlp.attribute for mlp in chosen.widened}
    for mlp in plan.widened:
        if mlp.attribute in attributes and mlp not in chosen.widened:
            yield (
                f"{mlp.attribute} also sets the hidden units of {mlp.second.parameter}; "
                "list that under widen too, or list no MLP of this attribute"
            )
    centred = {writer.parameter for writer in chosen.writers}
    left = {writer.parameter for writer in plan.writers} - centred
    mlps = {mlp.second.parameter for mlp in plan.widened if mlp not in chosen.widened}
    ops = {op.module for op in plan.ops if op not in chosen.ops}
    for verdict in chosen.folded:
        for section, needed, omitted, edit in (
            ("centre", verdict.needs, left, "{} centred"),
            ("widen", verdict.mlps, mlps, "the MLP of {} to subtract a mean"),
            ("centring_ops", verdict.ops, ops, "the centring of {}"),
        ):
            for name in (name for name in needed if name in omitted):
                yield (
                    f"folds {verdict.norm}, which needs {edit.format(name)}; list that under "
                    f"{section}, or keep the norm"
                )
    merged = {merge.norm for merge in chosen.merged}
    for basis in chosen.turned:
        for name in (name for name in basis.norms if name not in merged):
            yield f"turns {basis.name}, which needs {name} merged; list that under merge"
    scales = {writer.scale for writer in chosen.writers if writer.scale}
    for writer in plan.writers:
        if writer.scale in scales and writer.parameter not in centred:
            yield (
                f"merges {writer.scale.parameter}, but not into {writer.parameter}; "
                "list that under centre too, or list none of the tensors that it scales"
            )
