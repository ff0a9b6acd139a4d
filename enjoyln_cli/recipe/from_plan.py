"""Write a plan as a recipe, with one line for all layers that agree.

If most layers agree on an edit, the recipe has one line with ``{i}``, followed by a line for each
layer that differs. A line that names a layer overrides a line with a placeholder.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.plan import (
    PLAIN,
    Basis,
    Centring,
    EditedTensor,
    Options,
    Plan,
    Verdict,
    size_settings,
)
from enjoyln_cli.recipe.model import (
    VERSION,
    CentredTensor,
    CentredValue,
    Line,
    Recipe,
    TurnedBasis,
    Variant,
    as_mapping,
    name_of,
)
from enjoyln_cli.recipe.spans import name_size, symbolic
from enjoyln_cli.recipe.templates import (
    NAMES,
    expand_name,
    fill,
    layers_of,
    names_in,
    relative,
    relative_text,
    rename_in,
    to_template,
)

DEPENDS = ("tie_word_embeddings",)
"""Config attributes that every variant records as a condition, if the config has them."""

L = TypeVar("L", bound=Line)


def recipe_of(
    plan: Plan,
    *,
    config: Any = None,
    options: Options = PLAIN,
    depends: Sequence[str] = DEPENDS,
) -> Recipe:
    """The recipe of one plan, with the versions of the packages that made it.

    ``config`` is a mapping or a transformers config, so that sizes can be given by attribute name.
    The plan holds only for its values of the attributes ``depends``.
    """
    values, layers = as_mapping(config), plan_layers(plan)
    each = line_for_each(plan, values)
    variant = replace(
        each,
        when={name: values[name] for name in sorted(depends) if name in values},
        norms=_joined_layers(each.norms, layers),
        centre=_joined_layers(each.centre, layers),
        centring_ops=_joined_layers(each.centring_ops, layers),
        widen=_joined_layers(each.widen, layers),
        merge=_joined_layers(each.merge, layers),
        rotate=_joined_layers(map(partial(_joined_tensors, layers=layers), each.rotate), layers),
    )
    return Recipe(
        version=VERSION,
        model_type=plan.model_type,
        variants=(variant,),
        options=options,
        versions=_versions(),
    )


def line_for_each(plan: Plan, config: Mapping[str, Any]) -> Variant:
    """The plan as a variant with a line for each norm, tensor and module, and no placeholders."""
    sizes = size_settings(plan.widened)  # they are in the lines of the MLPs
    tensors = (_centred_tensor(writer, config) for writer in plan.writers)
    values = (_centred_value(op, config) for op in plan.ops)
    return Variant(
        model_class=plan.model_class,
        classes=plan.classes,
        norms=tuple(map(_verdict, plan.norms)),
        centre=tuple(dict.fromkeys(tensors)),
        centring_ops=tuple(dict.fromkeys(values)),
        widen=plan.widened,
        merge=(*plan.merged, *plan.unmerged),
        rotate=tuple(_turned_basis(basis, config) for basis in plan.turned),
        untie=tuple(replace(one, shape=()) for one in plan.untied),
        config={one.name: one.value for one in plan.settings if one not in sizes},
        outputs=plan.outputs,
        entry_inputs=plan.entry_inputs,
        unproven=plan.unproven,
        calls=tuple(map(call_text.to_text, plan.covered.forms)) if plan.covered else (),
    )


def merge_recipes(recipes: Iterable[Recipe]) -> Recipe:
    """One recipe for a family: the variants of all ``recipes``, without options and versions.

    Raises ``RecipeError`` if two variants differ but have the same class and conditions, or if the
    recipes are for different model types.
    """
    found = list(recipes)
    variants: list[Variant] = []
    for variant in (variant for recipe in found for variant in recipe.variants):
        for other in variants:
            same = (other.model_class, other.when) == (variant.model_class, variant.when)
            if same and other != variant:
                raise RecipeError(
                    f"two variants for {variant.model_class} when {dict(variant.when)} differ: "
                    "name the config attribute that tells them apart"
                )
        if variant not in variants:
            variants.append(variant)
    if len({recipe.model_type for recipe in found}) != 1:
        raise RecipeError("a recipe is for one model type: pass recipes of one family")
    return Recipe(version=VERSION, model_type=found[0].model_type, variants=tuple(variants))


def plan_layers(plan: Plan) -> dict[str, int]:
    """The number of layers under each prefix of the plan's names."""
    edits = plan.norms, plan.writers, plan.ops, plan.widened, plan.merged, plan.bases
    return layers_of(names_in(edits))


def _verdict(verdict: Verdict) -> Verdict:
    """A verdict without the edits that it needs, which the next proof finds again."""
    if verdict.status != "kept":
        return Verdict(verdict.norm, verdict.status, verdict.ops)
    reason = verdict.reason or "no reason is known"
    return Verdict(verdict.norm, "kept", reason=reason, culprit=verdict.culprit)


def _turned_basis(basis: Basis, config: Mapping[str, Any]) -> TurnedBasis:
    return TurnedBasis(
        parameter=basis.name,
        kind=basis.kind,
        size=name_size(basis.size, config),
        fixes_ones=basis.fixes_ones,
        norms=basis.norms,
        inputs=basis.inputs,
        tensors=tuple(_centred_tensor(one, config) for one in basis.tensors),
    )


def _joined_tensors(basis: TurnedBasis, layers: Mapping[str, int]) -> TurnedBasis:
    """A basis that spans layers, with one line for the tensors of all layers."""
    own = to_template(basis.parameter, layers)[1]
    if own:
        return basis
    norms = dict.fromkeys(to_template(norm, layers)[0] for norm in basis.norms)
    every = {name for norm in norms for name, _ in expand_name(norm, layers)}
    return replace(
        basis,
        tensors=_joined_layers(basis.tensors, layers),
        norms=tuple(norms) if every == set(basis.norms) else basis.norms,
    )


def _centred_tensor(writer: EditedTensor, config: Mapping[str, Any]) -> CentredTensor:
    span = symbolic(writer.axis, writer.shape[writer.axis.dim], config)
    return CentredTensor(
        **vars(span),
        parameter=writer.parameter,
        tensor=writer.tensor,
        held=symbolic(writer.held, None, config) if writer.held else None,
        scale=writer.scale,
    )


def _centred_value(op: Centring, config: Mapping[str, Any]) -> CentredValue:
    span = symbolic(op.axis, None, config)
    return CentredValue(**vars(span), module=op.module, place=op.place, reason=op.reason)


# One line for every layer.


def _joined_layers(lines: Iterable[L], layers: Mapping[str, int]) -> tuple[L, ...]:
    """Replace lines of single layers by one for every layer, then lines for those that differ.

    A tensor that is centred in most layers gets lines with ``leave`` for the others. Other edits
    are joined only if all layers have them.
    """
    tensors: defaultdict[str, list[str]] = defaultdict(list)
    groups: defaultdict[tuple[str, ...], list[L]] = defaultdict(list)
    for line in dict.fromkeys(lines):
        key = [to_template(name_of(line), layers)[0]]
        if isinstance(line, CentredTensor):
            part = tensors[line.parameter].count(line.tensor)
            key += [to_template(line.tensor, layers)[0], str(part)]
            tensors[line.parameter].append(line.tensor)
        elif isinstance(line, CentredValue):
            key.append(line.place)
        groups[tuple(key)].append(line)
    found: list[Any] = []
    for (template, *_), members in groups.items():
        names = {name_of(line) for line in members}
        missing = [numbers for name, numbers in expand_name(template, layers) if name not in names]
        general = [
            _with_placeholders(line, layers, tensors.get(name_of(line), ())) for line in members
        ]
        counts = Counter(form for forms in general for form in forms)
        most = isinstance(members[0], CentredTensor) and len(missing) <= len(members)
        if not counts or (missing and not most):
            found += members
            continue
        best = max((form for forms in reversed(general) for form in forms), key=counts.__getitem__)
        others = zip(members, general, strict=True)
        found += [best, *(line for line, forms in others if best not in forms)]
        found += [
            CentredTensor(parameter=fill(best.parameter, numbers))
            for numbers in missing
            if isinstance(best, CentredTensor)
        ]
    return tuple(found)


def _with_placeholders(
    line: L, layers: Mapping[str, int], tensors: Collection[str]
) -> tuple[L, ...]:
    """The lines with placeholders that give ``line`` when its layer is filled in, best one first.

    In the best one, modules that are only mentioned (as in a reason) have placeholders too. There
    is none if the line's names are of different layers, unless they are all ``tensors`` of one
    parameter.
    """
    own = name_of(line)
    numbers = to_template(own, layers)[1]
    for name in names_in(line):
        template, others = to_template(name, layers)
        if others != numbers:
            stored = {name for name, _ in expand_name(fill(template, numbers), layers)}
            if not numbers.items() <= others.items() or not stored <= set(tensors):
                return ()

    def plain(field: str, text: str) -> str:
        return to_template(text, layers)[0] if field in NAMES else text

    def near(field: str, text: str) -> str:
        if field == "ops":
            return relative(text, own, layers)
        mentions = field in ("reason", "culprit")
        return relative_text(text, own, layers) if mentions else plain(field, text)

    return tuple(dict.fromkeys((rename_in(line, near), rename_in(line, plain))))


def _versions() -> dict[str, str]:
    found = {}
    for package in ("enjoyln", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
