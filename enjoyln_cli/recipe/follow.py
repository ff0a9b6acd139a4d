"""A recipe held against the plan that is proven: what it asks for, and what is refused.

A recipe chooses among proven edits and adds none. ``follow`` keeps the norms that the recipe folds
and the edits that it lists, and refuses by name whatever is not proven, names nothing, or leaves a
folded norm without an edit that it rests on. Edits that no folded norm rests on are harmless: their
shift is absorbed, which is proven for each edit by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.covered_calls import OTHER_CALLS, CallForm, Covered
from enjoyln_cli.plan.plan import (
    Centring,
    Plan,
    Scale,
    Setting,
    Untied,
    Verdict,
    Widening,
    Writer,
    sized,
)
from enjoyln_cli.recipe import merges
from enjoyln_cli.recipe.expand import PLACES, Asked, Edit, asked_for
from enjoyln_cli.recipe.from_plan import (
    CopyLine,
    NormLine,
    Recipe,
    Variant,
    as_mapping,
    copy_lines,
    other_settings,
    plan_layers,
    variant_for,
)
from enjoyln_cli.recipe.templates import Span, concrete, templated
from enjoyln_cli.recipe.widening import asked_of, before, in_words, line_of, recorded
from enjoyln_cli.text import did_you_mean

NOT_ASKED = "the recipe does not fold it"


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
    if set(variant.outputs) != set(plan.outputs):
        raise RecipeError(
            f"{where}: keeps {_outputs(variant.outputs)} the same, and the proof is for "
            f"{_outputs(plan.outputs)}; write that under outputs, or pass --outputs accordingly"
        )
    for what, ours, theirs in _beside(variant, plan):
        if ours != theirs:
            raise RecipeError(
                f"{where}: {what} {_listed(ours)}, and the proof {_listed(theirs)}; take that, or "
                "leave it and the option out"
            )
    asked = asked_for(variant, plan_layers(plan), where)
    _require_known(asked, plan, where)
    norms = tuple(_verdict(v, asked.norms.get(v.norm), where) for v in plan.norms)
    writers = tuple(w for w in plan.writers if w.parameter in asked.writers)
    ops = tuple(op for op in plan.ops if (op.module, op.place) in asked.ops)
    widened = asked_of(plan.widened, asked.widened, where)
    folded = {verdict.norm for verdict in norms if verdict.status != "kept"}
    merged, unmerged = merges.asked_of(plan.merged, plan.unmerged, asked.merged, folded, where)
    for problem in _wrong_axes(asked, plan, values):
        raise RecipeError(f"{where}: {problem}; take the proven axis")
    _require_complete(norms, writers, plan.ops, ops, widened, where)
    _require_scales(plan, asked, where)
    if folded and set(variant.entry_inputs) != set(plan.entry_inputs):
        raise RecipeError(
            f"{where}: centres {_listed(variant.entry_inputs)} on entry, and the proof needs "
            f"{_listed(plan.entry_inputs)}; write that under entry_inputs"
        )
    left = {one.attribute for one in plan.widened} - {one.attribute for one in widened}
    settings = tuple(setting for setting in plan.settings if setting.name not in left)
    return replace(
        plan,
        norms=norms,
        writers=writers,
        ops=ops,
        widened=widened,
        merged=merged,
        unmerged=unmerged,
        settings=settings,
    )


def differences(recipe: Recipe, plan: Plan, *, config: Any = None) -> tuple[str, ...]:
    """Where the edits of a recipe and those of a proven plan differ, by name; empty if nowhere.

    Reasons and culprits of kept norms are not edits. Lines that hold for several layers are one.
    """
    try:
        variant = variant_for(recipe, plan.model_type, plan.model_class, config)
        asked = asked_for(variant, plan_layers(plan), recipe.where)
    except RecipeError as error:
        return (str(error),)
    fates = {name: _fate(line.fold, line.ops) for name, line in asked.norms.items()}
    proven = {v.norm: _fate(v.status != "kept", v.ops) for v in plan.norms}
    found = _unequal(fates, proven, "does not name it", "has no such norm")
    found += _unequal(
        {name: _centred_by(edits[0].scale) for name, edits in asked.writers.items()},
        {w.parameter: _centred_by(w.scale) for w in plan.writers},
        "does not centre it",
        "does not centre it",
    )
    found += _unequal(
        {name: in_words(line) for name, line in asked.widened.items()},
        {line.name: in_words(line) for line in map(line_of, plan.widened)},
        "does not widen its MLP",
        "does not widen its MLP",
    )
    known = {one.norm: merges.in_words(one) for one in merges.lines_of(plan.merged, ())}
    found += _unequal(
        {norm: merges.in_words(line) for norm, line in asked.merged.items() if line.merge},
        known,
        "does not merge it",
        "does not merge it",
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
        ("outputs", variant.outputs, plan.outputs),
        ("entry_inputs", variant.entry_inputs, plan.entry_inputs),
        ("unproven", variant.unproven, plan.unproven),
        ("calls", _texts(variant.calls), _texts(plan.covered.forms if plan.covered else ())),
        *_beside(variant, plan),
    ):
        if set(ours) != set(theirs):
            lines.append(f"{what}: the recipe has {_listed(ours)}, the proof {_listed(theirs)}")
    return tuple(lines)


def _texts(forms: Iterable[CallForm]) -> tuple[str, ...]:
    return tuple(map(call_text.written, forms))


def _beside(variant: Variant, plan: Plan) -> Iterator[tuple[str, set[str], set[str]]]:
    """What a recipe and a proof change besides what they centre: the kind of it, and both."""
    yield (
        "unties",
        {_untied_in_words(line) for line in variant.untied},
        {_untied_in_words(line) for line in copy_lines(plan)},
    )
    yield (
        "sets",
        {f"{name}: {value}" for name, value in variant.settings.items()},
        {f"{one.name}: {one.value}" for one in other_settings(plan)},
    )


def _untied_in_words(line: CopyLine) -> str:
    names = (line.parameter, line.source)
    held = "" if names == (line.tensor, line.stored) else f" ({names[0]} from {names[1]})"
    return f"{line.tensor} from {line.stored}{held}"


def to_plan(recipe: Recipe, shapes: Mapping[str, Sequence[int]], *, config: Any = None) -> Plan:
    """The plan that a fold carried out, from the recipe written beside its result.

    ``shapes``: the stored tensors by name. The verdicts carry no ``needs`` and no ``path``. Raises
    ``RecipeError`` where the recipe has no record, or names tensors that are not stored.
    """
    where = recipe.where
    if recipe.record is None or len(recipe.variants) != 1:
        raise RecipeError(f"{where}: has no record of one fold; pass the one written beside it")
    variant, layers, values = recipe.variants[0], recipe.record.layers, _sizes(recipe, config)
    asked = asked_for(variant, layers, where)
    widened = tuple(recorded(line, shapes, where) for line in asked.widened.values())
    merged, unmerged = merges.recorded(asked.merged.values(), shapes, where)
    shapes = {**shapes, **before(widened, shapes)}
    writers = [
        _stored_writer(parameter, tensor, edit, shapes, values, where)
        for parameter, edits in asked.writers.items()
        for edit in edits
        for tensor in edit.tensors
    ]
    ops = tuple(
        Centring(module, place, _axis(span, None, values, f"{where}: {module}"), why)
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
        variant.outputs,
        widened=widened,
        merged=merged,
        unmerged=unmerged,
        untied=tuple(_stored_copy(line, shapes, where) for line in variant.untied),
        settings=(*sized(widened), *(Setting(n, v) for n, v in variant.settings.items())),
        covered=Covered(variant.calls) if OTHER_CALLS in variant.unproven else None,
    )


def _require_known(asked: Asked, plan: Plan, where: str) -> None:
    norms = [v.norm for v in plan.norms]
    parameters = [w.parameter for w in plan.writers]
    layers = plan_layers(plan)
    for name in asked.norms:
        if name not in norms:
            raise RecipeError(
                f"{where}: {name} is not a LayerNorm of {plan.model_class}{_close(name, norms)}"
            )
    for name in asked.writers:
        if name not in parameters:
            raise RecipeError(
                f"{where}: centres {name}, which is not proven to be possible"
                f"{_close(name, parameters)}"
            )
    known = {templated(name, layers)[0] for name in parameters}
    for name in asked.left:
        if templated(name, layers)[0] not in known:
            raise RecipeError(
                f"{where}: leaves {name}, which is not centred anyway{_close(name, parameters)}"
            )
    proven = {(op.module, op.place) for op in plan.ops}
    for module, place in asked.ops:
        if (module, place) not in proven:
            raise RecipeError(
                f"{where}: centres the {place} of {module}, which is not part of the proof; "
                f"proven are {_listed(f'{at} of {name}' for name, at in proven)}"
            )


def _verdict(verdict: Verdict, line: NormLine | None, where: str) -> Verdict:
    """What a recipe makes of one norm; ``line`` is ``None`` where it does not name it."""
    if line is None or not line.fold:
        if verdict.status == "kept":
            return verdict
        reason = NOT_ASKED if line is None else line.reason or merges.BY_RECIPE
        return Verdict(verdict.norm, "kept", reason=reason, culprit=line.culprit if line else "")
    if verdict.status == "kept":
        culprit = f" ({verdict.culprit})" if verdict.culprit else ""
        raise RecipeError(
            f"{where}: folds {verdict.norm}, which is not proven: {verdict.reason}{culprit}; "
            "write keep for it"
        )
    if set(line.ops) != set(verdict.ops):
        raise RecipeError(
            f"{where}: folds {verdict.norm} with the centring of {_listed(line.ops)}, and it is "
            f"proven with that of {_listed(verdict.ops)}; write that, or keep"
        )
    return verdict


def _require_complete(
    norms: Iterable[Verdict],
    writers: Iterable[Writer],
    proven: Iterable[Centring],
    ops: Iterable[Centring],
    widened: Iterable[Widening],
    where: str,
) -> None:
    centred, there = {w.parameter for w in writers}, {(op.module, op.place) for op in ops}
    lacking = {op.module: op.place for op in proven if (op.module, op.place) not in there}
    wider = {one.second.parameter for one in widened}
    for verdict in norms:
        if verdict.status == "kept":
            continue
        for name in verdict.needs:
            if name not in centred:
                raise RecipeError(
                    f"{where}: folds {verdict.norm}, which needs {name} centred; "
                    "list that under centre, or keep the norm"
                )
        for name in verdict.mlps:
            if name not in wider:
                raise RecipeError(
                    f"{where}: folds {verdict.norm}, which needs the MLP of {name} to subtract a "
                    "mean; list that under widen, or keep the norm"
                )
        for name in verdict.ops:
            if name in lacking:
                raise RecipeError(
                    f"{where}: folds {verdict.norm}, which needs the centring of {name} (its "
                    f"{lacking[name]}); list that under centring_ops, or keep the norm"
                )


def _require_scales(plan: Plan, asked: Asked, where: str) -> None:
    """A scale is merged as proven, and into all of its writers or into none."""
    merged = {w.scale for w in plan.writers if w.parameter in asked.writers}
    for writer in plan.writers:
        edits = asked.writers.get(writer.parameter, ())
        if not edits and writer.scale and writer.scale in merged:
            raise RecipeError(
                f"{where}: merges {writer.scale.parameter}, and not into {writer.parameter}; "
                "list that under centre, or leave all that it scales"
            )
        other = next((edit.scale for edit in edits if edit.scale != writer.scale), writer.scale)
        if other != writer.scale:
            names = [scale.parameter if scale else "no scale" for scale in (other, writer.scale)]
            raise RecipeError(
                f"{where}: merges {names[0]} into {writer.parameter}, and proven is {names[1]}; "
                "take that"
            )


def _wrong_axes(asked: Asked, plan: Plan, config: Mapping[str, Any]) -> list[str]:
    """Edits that are proven over another axis than the recipe says."""
    proven: dict[str, list[Axis]] = {}
    given: dict[str, list[tuple[Span, int | None]]] = {}
    for w in plan.writers:
        if w.parameter in asked.writers:
            spans = [edit.span for edit in asked.writers[w.parameter]]
            extents = [w.shape[s.dim] if s.dim < len(w.shape) else 0 for s in spans]
            proven.setdefault(w.parameter, []).append(w.axis)
            given[w.parameter] = list(zip(spans, extents, strict=True))
    for op in plan.ops:
        if (op.module, op.place) in asked.ops:
            proven.setdefault(op.module, []).append(op.axis)
            span = asked.ops[op.module, op.place][0]
            given.setdefault(op.module, []).append((span, None))
    found = []
    for name, axes in proven.items():
        try:
            here = [concrete(span, extent, config) for span, extent in given[name]]
        except RecipeError as error:
            found.append(f"{name}: {error}")
            continue
        if set(here) != set(axes):
            ours, theirs = (" and ".join(map(_shown, sorted(set(a)))) for a in (here, axes))
            found.append(f"{name} is centred over {ours}, and proven over {theirs}")
    return found


def _stored_writer(
    parameter: str,
    tensor: str,
    edit: Edit,
    shapes: Mapping[str, Sequence[int]],
    config: Mapping[str, Any],
    where: str,
) -> Writer:
    for name in (tensor, *([edit.scale.tensor] if edit.scale else [])):
        if name not in shapes:
            raise RecipeError(f"{where}: no stored tensor is named {name}{_close(name, shapes)}")
    shape = tuple(int(size) for size in shapes[tensor])
    if not 0 <= edit.span.dim < len(shape):
        raise RecipeError(f"{where}: {tensor} has shape {shape}, and no dimension {edit.span.dim}")
    axis = _axis(edit.span, shape[edit.span.dim], config, f"{where}: {tensor}")
    held = _axis(edit.held, None, config, f"{where}: {parameter}") if edit.held else None
    return Writer(parameter, tensor, axis, shape, held, edit.scale)


def _stored_copy(line: CopyLine, shapes: Mapping[str, Sequence[int]], where: str) -> Untied:
    for name in (line.tensor, line.stored):
        if name not in shapes:
            raise RecipeError(f"{where}: no stored tensor is named {name}{_close(name, shapes)}")
    shape = tuple(int(size) for size in shapes[line.stored])
    return Untied(line.parameter, line.tensor, line.source, line.stored, shape)


def _recorded(line: NormLine) -> Verdict:
    if line.fold:
        return Verdict(line.name, "centred" if line.ops else "static", line.ops)
    return Verdict(line.name, "kept", reason=line.reason or merges.BY_RECIPE, culprit=line.culprit)


def _axis(span: Span, extent: int | None, config: Mapping[str, Any], where: str) -> Axis:
    try:
        return concrete(span, extent, config)
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def _sizes(recipe: Recipe, config: Any) -> Mapping[str, Any]:
    """Where named sizes come from: the config given, else the one recorded."""
    if config is not None:
        return as_mapping(config)
    return recipe.record.config if recipe.record else {}


def _fate(fold: bool, ops: Iterable[str]) -> str:
    if not fold:
        return "keeps it"
    return f"folds it with the centring of {_listed(ops)}" if ops else "folds it in the weights"


def _centred_by(scale: Scale | None) -> str:
    return f"merges {scale.parameter} into it and centres it" if scale else "centres it"


def _unequal(
    asked: Mapping[str, str], proven: Mapping[str, str], unnamed: str, unknown: str
) -> list[tuple[str, str]]:
    """Names with what the recipe and the proof say, where these differ."""
    names = dict.fromkeys([*proven, *asked])
    pairs = [(name, asked.get(name, unnamed), proven.get(name, unknown)) for name in names]
    return [(name, f"the recipe {a}, the proof {b}") for name, a, b in pairs if a != b]


def _by_layer(found: Iterable[tuple[str, str]], layers: Mapping[str, int]) -> list[str]:
    """One line for names that differ only in the layer."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, text in found:
        grouped.setdefault((templated(name, layers)[0], text), []).append(name)
    return [
        f"{names[0]}: {text}" if len(names) == 1 else f"{template} ({len(names)} layers): {text}"
        for (template, text), names in grouped.items()
    ]


def _shown(axis: Axis) -> str:
    if (axis.start, axis.outer, axis.inner) == (0, 1, 1):
        return f"the {axis.size} elements of dimension {axis.dim}"
    step = f", one every {axis.step}" if axis.step else ""
    return (
        f"{axis.outer} groups of {axis.size} elements ({axis.inner} apart) "
        f"of dimension {axis.dim} from element {axis.start}{step}"
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _outputs(names: Sequence[str]) -> str:
    return f"the outputs {_listed(names)}" if names else "all outputs"


def _close(name: str, names: Iterable[str]) -> str:
    return f"; {did_you_mean(name, names, 1) or 'take it out, or trace the model it is for'}"
