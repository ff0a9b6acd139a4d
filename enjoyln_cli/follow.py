"""A recipe held against the plan that is proven: what it asks for, and what is refused.

A recipe chooses among proven edits and adds none. ``follow`` keeps the norms that the recipe folds
and the edits that it lists, and refuses by name whatever is not proven, names nothing, or leaves a
folded norm without an edit that it rests on. Edits that no folded norm rests on are harmless: their
shift is absorbed, which is proven for each edit by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from enjoyln_cli.axis import Axis
from enjoyln_cli.draft import (
    NormLine,
    Recipe,
    Variant,
    as_mapping,
    plan_layers,
)
from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import Centring, Place, Plan, Verdict, Writer
from enjoyln_cli.template import Span, concrete, expanded, filled, placeholders, templated

MOST_NAMES = 1_000_000
"""No recipe may stand for more names than this."""

PLACES: tuple[Place, ...] = ("output", "input")
NOT_ASKED = "the recipe does not fold it"
BY_RECIPE = "the recipe keeps it"


@dataclass(frozen=True)
class _Asked:
    """A variant with every layer named."""

    norms: Mapping[str, NormLine]
    writers: Mapping[str, tuple[str, Span | None]]
    """By parameter: the tensors, as the recipe names them, and what to centre."""
    ops: Mapping[tuple[str, Place], tuple[Span, str]]


def variant_for(recipe: Recipe, model_type: str, model_class: str, config: Any = None) -> Variant:
    """The variant for a class whose conditions hold; they are not looked at without a config.

    Raises ``RecipeError`` that names what does not match.
    """
    if recipe.model_type != model_type:
        raise RecipeError(
            f"{recipe.where}: made for {recipe.model_type} and the model is {model_type}; "
            "pass a recipe of its family"
        )
    found = [variant for variant in recipe.variants if variant.model_class == model_class]
    if not found:
        classes = ", ".join(dict.fromkeys(variant.model_class for variant in recipe.variants))
        raise RecipeError(
            f"{recipe.where}: made for {classes} and the plan is for {model_class}; "
            "choose the class with --model-class"
        )
    values = as_mapping(config)
    for variant in found:
        if not values or all(values.get(key) == value for key, value in variant.when.items()):
            return variant
    misses = [
        f"{key}: {value}" for key, value in found[0].when.items() if values.get(key) != value
    ]
    raise RecipeError(
        f"{recipe.where}: made for models with {', '.join(misses)}, which the config of this one "
        "does not have; pass a recipe that was written for such a model"
    )


def follow(recipe: Recipe, plan: Plan, *, config: Any = None) -> Plan:
    """The part of a proven plan that a recipe asks for.

    ``config`` (a mapping or a transformers config) gives the sizes that the recipe names and is
    held against its conditions. Norms that the recipe does not fold are kept. Raises
    ``RecipeError`` naming the first edit that is not proven, matches nothing, or is missing.
    """
    variant = variant_for(recipe, plan.model_type, plan.model_class, config)
    where, values = recipe.where, _sizes(recipe, config)
    if unknown := [name for name in variant.classes if name not in plan.classes]:
        raise RecipeError(
            f"{where}: claims the class {unknown[0]}, and the proof is for "
            f"{_listed(plan.classes)}; take it out of classes"
        )
    asked = _asked(variant, plan_layers(plan), where)
    _require_known(asked, plan, where)
    norms = tuple(_verdict(v, asked.norms.get(v.norm), where) for v in plan.norms)
    writers = tuple(w for w in plan.writers if asked.writers.get(w.parameter, ("", None))[1])
    ops = tuple(op for op in plan.ops if (op.module, op.place) in asked.ops)
    for problem in _wrong_axes(asked, plan, values):
        raise RecipeError(f"{where}: {problem}; take the proven axis")
    _require_complete(norms, writers, ops, where)
    folds = any(v.status != "kept" for v in norms)
    if folds and set(variant.entry_inputs) != set(plan.entry_inputs):
        raise RecipeError(
            f"{where}: centres {_listed(variant.entry_inputs)} on entry, and the proof needs "
            f"{_listed(plan.entry_inputs)}; write that under entry_inputs"
        )
    return replace(plan, norms=norms, writers=writers, ops=ops)


def differences(recipe: Recipe, plan: Plan, *, config: Any = None) -> tuple[str, ...]:
    """Where the edits of a recipe and those of a proven plan differ, by name; empty if nowhere.

    Reasons and culprits of kept norms are not edits. Lines that hold for several layers are one.
    """
    try:
        variant = variant_for(recipe, plan.model_type, plan.model_class, config)
        asked = _asked(variant, plan_layers(plan), recipe.where)
    except RecipeError as error:
        return (str(error),)
    fates = {name: _fate(line.fold, line.ops) for name, line in asked.norms.items()}
    proven = {v.norm: _fate(v.status != "kept", v.ops) for v in plan.norms}
    found = _unequal(fates, proven, "does not name it", "has no such norm")
    centred = {name: "centres it" for name, (_, span) in asked.writers.items() if span}
    found += _unequal(
        centred,
        {w.parameter: "centres it" for w in plan.writers},
        "does not centre it",
        "does not centre it",
    )
    for place in PLACES:
        text = f"centres its {place}"
        found += _unequal(
            {module: text for module, at in asked.ops if at == place},
            {op.module: text for op in plan.ops if op.place == place},
            f"does not centre its {place}",
            f"does not centre its {place}",
        )
    lines = _by_layer(found, plan_layers(plan))
    lines += _wrong_axes(asked, plan, _sizes(recipe, config))
    for what, ours, theirs in (
        ("classes", variant.classes, plan.classes),
        ("entry_inputs", variant.entry_inputs, plan.entry_inputs),
        ("unproven", variant.unproven, plan.unproven),
    ):
        if set(ours) != set(theirs):
            lines.append(f"{what}: the recipe has {_listed(ours)}, the proof {_listed(theirs)}")
    return tuple(lines)


def to_plan(recipe: Recipe, shapes: Mapping[str, Sequence[int]], *, config: Any = None) -> Plan:
    """The plan that a fold carried out, from the recipe written beside its result.

    ``shapes``: the stored tensors by name. The verdicts carry no ``needs`` and no ``path``. Raises
    ``RecipeError`` where the recipe has no record, or names tensors that are not stored.
    """
    where = recipe.where
    if recipe.record is None or len(recipe.variants) != 1:
        raise RecipeError(f"{where}: has no record of one fold; pass the one written beside it")
    variant, layers, values = recipe.variants[0], recipe.record.layers, _sizes(recipe, config)
    asked = _asked(variant, layers, where)
    writers: list[Writer] = []
    for parameter, tensor, span in _stored(variant, layers, where):
        if tensor not in shapes:
            raise RecipeError(
                f"{where}: {tensor} is not among the stored tensors{_close(tensor, shapes)}"
            )
        shape = tuple(int(size) for size in shapes[tensor])
        if not -len(shape) <= span.dim < len(shape):
            raise RecipeError(f"{where}: {tensor} has shape {shape} and no dimension {span.dim}")
        axis = _located(concrete, span, shape[span.dim], values, f"{where}: {tensor}")
        writers.append(Writer(parameter, tensor, axis, shape))
    ops = tuple(
        Centring(module, place, _located(concrete, span, None, values, f"{where}: {module}"), why)
        for (module, place), (span, why) in asked.ops.items()
    )
    return Plan(
        recipe.model_type,
        variant.model_class,
        variant.classes,
        tuple(_recorded(line) for line in asked.norms.values()),
        tuple(writers),
        ops,
        variant.entry_inputs,
        variant.unproven,
        tuple(recipe.record.other_norms.items()),
    )
