"""A plan put down as a recipe: what a recipe holds, and one line for all layers that agree.

Where most layers agree on an edit there is one line with ``{i}``, followed by a line for each layer
that differs. A line that names its layer goes before one with a placeholder.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Generic, TypeVar

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.covered_calls import CallForm
from enjoyln_cli.plan.plan import (
    PLAIN,
    Centring,
    Options,
    Place,
    Plan,
    Scale,
    Setting,
    Verdict,
    Widening,
    Writer,
    sized,
)
from enjoyln_cli.recipe.merges import MergeLine, lines_of
from enjoyln_cli.recipe.templates import (
    Span,
    attributes,
    expanded,
    filled,
    layers_of,
    numbers_of,
    relative,
    symbolic,
    templated,
)
from enjoyln_cli.recipe.widening import WidenLine, line_of

DEPENDS = ("tie_word_embeddings",)
"""Config attributes that every variant remembers, where the config has them."""


@dataclass(frozen=True)
class NormLine:
    """One norm, or one of every layer. All but its own name may lie at ``{i-1}``."""

    name: str
    fold: bool
    ops: tuple[str, ...] = ()
    reason: str = ""
    culprit: str = ""


@dataclass(frozen=True)
class WriterLine:
    """One tensor to centre, or one of every layer; without a span it is left as it is."""

    tensor: str
    """May have more placeholders than ``parameter``, which is then made of several tensors."""
    parameter: str
    span: Span | None
    held: Span | None = None
    """Over the parameter, where the class holds it in another layout."""
    scale: Scale | None = None
    """What is merged in before."""


@dataclass(frozen=True)
class OpLine:
    """One explicit centring, or one in every layer."""

    module: str
    place: Place
    span: Span
    reason: str


@dataclass(frozen=True)
class CopyLine:
    """One tensor that is stored anew, as a copy of what it was tied to."""

    tensor: str
    parameter: str
    stored: str
    """The stored tensor that is copied."""
    source: str
    """Its parameter."""


@dataclass(frozen=True)
class Variant:
    """The edits for one model class under some config attributes."""

    model_class: str
    classes: tuple[str, ...]
    when: Mapping[str, Any]
    norms: tuple[NormLine, ...]
    writers: tuple[WriterLine, ...] = ()
    ops: tuple[OpLine, ...] = ()
    entry_inputs: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    """Those that stay the same, as in ``Plan``; empty for all."""
    widened: tuple[WidenLine, ...] = ()
    merged: tuple[MergeLine, ...] = ()
    untied: tuple[CopyLine, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Entries of ``config.json`` that change, by name."""
    calls: tuple[CallForm, ...] = ()
    """Those that are proven, where any other is not."""


@dataclass(frozen=True)
class Record:
    """What belongs to the one model that was folded."""

    layers: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, int] = field(default_factory=dict)
    other_norms: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """A family's recipe has several variants and no record; that of a fold one, and a record."""

    model_type: str
    variants: tuple[Variant, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    record: Record | None = None
    where: str = field(default="the recipe", compare=False)
    """For messages."""


Line = TypeVar("Line", NormLine, WriterLine, OpLine, WidenLine, MergeLine)


# A plan as a recipe.


def recipe_of(
    plan: Plan,
    *,
    config: Any = None,
    options: Mapping[str, Any] | None = None,
    depends: Sequence[str] = DEPENDS,
) -> Recipe:
    """The recipe of one plan, with a record of the model.

    ``config``: a mapping or a transformers config, for sizes by name. ``depends``: the attributes
    of it that the plan holds for.
    """
    values = as_mapping(config)
    layers = plan_layers(plan)
    norms = [_norm_item(verdict, layers) for verdict in plan.norms]
    known: dict[str, list[Writer]] = {}
    for writer in plan.writers:
        known.setdefault(writer.parameter, []).append(writer)
    writers = [_writer_item(w, layers, values, known[w.parameter]) for w in plan.writers]
    ops = [_op_item(op, layers, values) for op in plan.ops]
    mlps = [_widen_item(one, layers) for one in plan.widened]
    merges = [_merge_item(line, layers) for line in lines_of(plan.merged, plan.unmerged)]
    spans = [span for w in writers for span in (w.line.span, w.line.held) if span]
    spans += [op.line.span for op in ops]
    numbers = numbers_of(values)
    variant = Variant(
        plan.model_class,
        plan.classes,
        {name: values[name] for name in depends if name in values},
        _collapsed(norms, layers),
        _collapsed(writers, layers, _left),
        _collapsed(ops, layers),
        plan.entry_inputs,
        plan.unproven,
        plan.outputs,
        _collapsed(mlps, layers),
        _collapsed(merges, layers),
        copy_lines(plan),
        {one.name: one.value for one in other_settings(plan)},
        plan.covered.forms if plan.covered else (),
    )
    used = sorted({name for span in spans for name in attributes(span)})
    record = Record(
        layers, {name: numbers[name] for name in used}, dict(plan.other_norms), _versions()
    )
    return Recipe(plan.model_type, (variant,), dict(options or {}), record)


def other_settings(plan: Plan) -> tuple[Setting, ...]:
    """What changes in ``config.json`` besides the sizes of MLPs, which their own lines tell."""
    sizes = sized(plan.widened)
    return tuple(setting for setting in plan.settings if setting not in sizes)


def copy_lines(plan: Plan) -> tuple[CopyLine, ...]:
    """One line for each copy."""
    return tuple(CopyLine(u.tensor, u.parameter, u.stored, u.source) for u in plan.untied)


def merged(recipes: Iterable[Recipe]) -> Recipe:
    """One recipe for a family: the variants of all, without options and records.

    Raises ``RecipeError`` where two variants differ under the same conditions.
    """
    given = list(recipes)
    variants: list[Variant] = []
    for variant in (variant for recipe in given for variant in recipe.variants):
        for other in variants:
            same = (other.model_class, other.when) == (variant.model_class, variant.when)
            if same and other != variant:
                raise RecipeError(
                    f"two variants for {variant.model_class} when {dict(variant.when)} differ: "
                    "name the config attribute that tells them apart"
                )
        if variant not in variants:
            variants.append(variant)
    if len({recipe.model_type for recipe in given}) != 1:
        raise RecipeError("a recipe is for one model type: give recipes of one family")
    return Recipe(given[0].model_type, tuple(variants))


@dataclass(frozen=True)
class _Item(Generic[Line]):
    """A line for one name, and the lines for all layers that would say the same."""

    name: str
    line: Line
    forms: tuple[Line, ...]
    group: tuple[str, ...]
    template: str


def _norm_item(verdict: Verdict, layers: Mapping[str, int]) -> _Item[NormLine]:
    template, _ = templated(verdict.norm, layers)
    fold = verdict.status != "kept"
    reason = "" if fold else verdict.reason or "no reason is known"
    line = NormLine(verdict.norm, fold, verdict.ops, reason, "" if fold else verdict.culprit)
    near = replace(
        line,
        name=template,
        ops=tuple(relative(op, verdict.norm, layers) for op in line.ops),
        reason=_near(line.reason, verdict.norm, layers),
        culprit=_near(line.culprit, verdict.norm, layers),
    )
    return _Item(verdict.norm, line, (near, replace(line, name=template)), (template,), template)


def _writer_item(
    writer: Writer,
    layers: Mapping[str, int],
    config: Mapping[str, Any],
    siblings: Sequence[Writer],
) -> _Item[WriterLine]:
    """``siblings``: all writers of this parameter. Its parts stand in lines of their own."""
    template, numbers = templated(writer.parameter, layers)
    tensor, others = templated(writer.tensor, layers)
    span = symbolic(writer.axis, writer.shape[writer.axis.dim], config)
    held = symbolic(writer.held, None, config) if writer.held else None
    line = WriterLine(writer.tensor, writer.parameter, span, held, writer.scale)
    several = {name for name, _ in expanded(filled(tensor, numbers), layers)}
    general = numbers == others or (
        numbers.items() <= others.items() and several <= {w.tensor for w in siblings}
    )
    scale = writer.scale
    if scale:
        parts = [templated(name, layers) for name in (scale.parameter, scale.tensor)]
        general = general and all(part[1] == numbers for part in parts)
        scale = Scale(*(part[0] for part in parts))
    forms = (WriterLine(tensor, template, span, held, scale),) if general else ()
    part = str([w.axis for w in siblings if w.tensor == writer.tensor].index(writer.axis))
    return _Item(writer.parameter, line, forms, (template, tensor, part), template)


def _op_item(op: Centring, layers: Mapping[str, int], config: Mapping[str, Any]) -> _Item[OpLine]:
    template, _ = templated(op.module, layers)
    line = OpLine(op.module, op.place, symbolic(op.axis, None, config), op.reason)
    form = replace(line, module=template, reason=_near(op.reason, op.module, layers))
    return _Item(op.module, line, (form,), (template, op.place), template)


def _widen_item(one: Widening, layers: Mapping[str, int]) -> _Item[WidenLine]:
    line = line_of(one)
    template, numbers = templated(line.name, layers)
    names = [name for part in line.parts for name in (part.parameter, part.tensor)]
    same = all(templated(name, layers)[1] == numbers for name in names)
    forms = (line.renamed(lambda name: templated(name, layers)[0]),) if same else ()
    return _Item(line.name, line, forms, (template,), template)


def _merge_item(line: MergeLine, layers: Mapping[str, int]) -> _Item[MergeLine]:
    template, numbers = templated(line.norm, layers)
    if line.merge is None:
        plain = replace(line, norm=template)
        reason, culprit = (_near(text, line.norm, layers) for text in (line.reason, line.culprit))
        forms = (replace(plain, reason=reason, culprit=culprit), plain)
        return _Item(line.norm, line, forms, (template,), template)
    same = all(templated(name, layers)[1] == numbers for name in line.names)
    general = (line.renamed(lambda name: templated(name, layers)[0]),) if same else ()
    return _Item(line.norm, line, general, (template,), template)


def _near(text: str, to: str, layers: Mapping[str, int]) -> str:
    """Text with every dotted name in it made relative to the layers of ``to``."""
    return re.sub(r"[\w-]+(\.[\w-]+)+", lambda match: relative(match[0], to, layers), text)


def _collapsed(
    items: Iterable[_Item[Line]],
    layers: Mapping[str, int],
    left: Callable[[Line, Mapping[str, int]], Line] | None = None,
) -> tuple[Line, ...]:
    """One line for every layer where most layers agree, then lines for the layers that do not.

    ``left`` makes the line for a layer without an item; without it every layer needs one.
    """
    groups: dict[tuple[str, ...], list[_Item[Line]]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    lines: list[Line] = []
    for members in groups.values():
        names = {item.name for item in members}
        every = expanded(members[0].template, layers)
        missing = [numbers for name, numbers in every if name not in names]
        counts = Counter(form for item in members for form in dict.fromkeys(item.forms))
        if not counts or (missing and (left is None or len(missing) > len(members))):
            lines += [item.line for item in members]
            continue
        general = max(
            (form for item in reversed(members) for form in item.forms), key=counts.__getitem__
        )
        lines.append(general)
        lines += [item.line for item in members if general not in item.forms]
        lines += [left(general, numbers) for numbers in missing if left]
    return tuple(lines)


def _left(line: WriterLine, numbers: Mapping[str, int]) -> WriterLine:
    return WriterLine(filled(line.tensor, numbers), filled(line.parameter, numbers), None)


def variant_for(recipe: Recipe, model_type: str, model_class: str, config: Any = None) -> Variant:
    """The variant for a class whose conditions hold; they are not looked at without a config.

    Raises ``RecipeError`` that names what does not match.
    """
    if recipe.model_type != model_type:
        raise RecipeError(
            f"{recipe.where}: made for {recipe.model_type}, and the model is {model_type}; "
            f"pass a recipe for {model_type}"
        )
    found = [variant for variant in recipe.variants if variant.model_class == model_class]
    if not found:
        classes = ", ".join(dict.fromkeys(variant.model_class for variant in recipe.variants))
        raise RecipeError(
            f"{recipe.where}: made for {classes}, and the plan is for {model_class}; "
            "choose the class with --model-class"
        )
    values = as_mapping(config)
    for variant in found:
        if not values or all(values.get(key) == value for key, value in variant.when.items()):
            return variant
    misses = [f"{key}: {value}" for key, value in found[0].when.items() if values.get(key) != value]
    raise RecipeError(
        f"{recipe.where}: made for models with {', '.join(misses)}, which the config of this one "
        "does not have; pass a recipe that was written for such a model"
    )


def outputs_asked(recipe: Recipe, model_class: str | None, config: Any) -> tuple[str, ...]:
    """The outputs that a recipe keeps the same, for ``model_class`` or whichever class it is for.

    Raises ``RecipeError`` where its classes keep different ones.
    """
    values = as_mapping(config)
    asked = {
        variant.outputs
        for variant in recipe.variants
        if model_class in (None, variant.model_class)
        and recipe.model_type == values.get("model_type")
        and all(values.get(key) == value for key, value in variant.when.items())
    }
    if len(asked) > 1:
        raise RecipeError(
            f"{recipe.where}: its classes keep different outputs the same; choose one with "
            "--model-class"
        )
    return asked.pop() if asked else ()


def options_data(options: Options) -> dict[str, Any]:
    """The options that differ from the default, as a recipe has them."""
    return {name: value for name, value in vars(options).items() if value != vars(PLAIN)[name]}


def options_asked(recipe: Recipe) -> Options:
    """The options that a recipe was made with. Raises ``RecipeError`` for one that is not known."""
    known: dict[str, Callable[[Any], bool]] = {
        "widen_mlp": lambda value: isinstance(value, bool),
        "widen_to": lambda value: type(value) is int and value > 0,
        "merge": lambda value: value in ("bias", "affine"),
        "untie": lambda value: isinstance(value, bool),
    }
    for name, value in recipe.options.items():
        if name not in known or not known[name](value):
            raise RecipeError(
                f"{recipe.where}: options: {name}: {value!r:.60} is not something that "
                "this option can be; take it out"
            )
    return replace(PLAIN, **recipe.options)


def as_mapping(config: Any) -> Mapping[str, Any]:
    """The attributes of a transformers config, a mapping, or nothing."""
    if config is None or isinstance(config, Mapping):
        return config or {}
    return config.to_dict()


def plan_layers(plan: Plan) -> dict[str, int]:
    """How many layers each prefix of the plan's names has."""
    names = [verdict.norm for verdict in plan.norms] + [op.module for op in plan.ops]
    names += [name for writer in plan.writers for name in (writer.parameter, writer.tensor)]
    scales = [writer.scale for writer in plan.writers if writer.scale]
    names += [name for scale in scales for name in (scale.parameter, scale.tensor)]
    parts = [part for one in plan.widened for part in one.parts]
    names += [name for part in parts for name in (part.parameter, part.tensor)]
    names += [name for line in lines_of(plan.merged, ()) for name in line.names]
    return layers_of(names)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("enjoyln", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
