"""The data of a recipe: the edits of a plan, written so that they fit every model of a family.

Most edits are the plan's own dataclasses with placeholders in their names. Fields that depend on
the proof or on the tensors of one model are left out: ``needs``, ``mlps`` and ``path`` of a
verdict, ``features`` of a widening, ``shape`` of a copy. Edits with sizes have classes of their own
here, because a recipe can give a size by the name of a config attribute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.covered_calls import CallForm
from enjoyln_cli.plan.plan import (
    PLAIN,
    BasisKind,
    Merge,
    Options,
    Place,
    Scale,
    UnmergedNorm,
    UntiedParameter,
    Verdict,
    Widening,
)
from enjoyln_cli.recipe.templates import Number, Span
from enjoyln_cli.text import did_you_mean

VERSION = 1
"""Version of the recipe format."""
KEPT_BY_RECIPE = "the recipe keeps it"
"""The reason of a norm that the recipe keeps without giving a reason."""


@dataclass(frozen=True)
class CentredTensor:
    """A ``plan.Writer`` of any size. Without an axis, the tensor is not centred."""

    parameter: str
    tensor: str
    """If it has more placeholders than ``parameter``, several tensors make up the parameter."""
    axis: Span | None = None
    held: Span | None = None
    scale: Scale | None = None


@dataclass(frozen=True)
class CentredValue:
    """A ``plan.Centring`` of any size."""

    module: str
    place: Place
    axis: Span
    reason: str = ""


@dataclass(frozen=True)
class TurnedBasis:
    """A ``plan.Basis`` of any size that is turned; its tensors are those to turn."""

    parameter: str
    """The name of the basis."""
    kind: BasisKind
    size: Number
    fixes_ones: bool
    tensors: tuple[CentredTensor, ...]
    norms: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()


Line = Verdict | CentredTensor | CentredValue | Widening | Merge | UnmergedNorm | TurnedBasis
"""One edit of a recipe: for one name, or with placeholders for the same name in every layer."""


def name_of(line: Line) -> str:
    """The norm, parameter or module that a line is about."""
    if isinstance(line, (CentredTensor, TurnedBasis)):
        return line.parameter
    if isinstance(line, CentredValue):
        return line.module
    return line.second.parameter if isinstance(line, Widening) else line.norm


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The edits for one model class under some config attributes. See ``plan.Plan``."""

    model_class: str
    classes: tuple[str, ...]
    when: Mapping[str, Any] = field(default_factory=dict)
    norms: tuple[Verdict, ...]
    writers: tuple[CentredTensor, ...] = ()
    ops: tuple[CentredValue, ...] = ()
    widened: tuple[Widening, ...] = ()
    merged: tuple[Merge | UnmergedNorm, ...] = ()
    bases: tuple[TurnedBasis, ...] = ()
    untied: tuple[UntiedParameter, ...] = ()
    settings: Mapping[str, bool | int] = field(default_factory=dict)
    """New values of ``config.json`` entries, by name."""
    outputs: tuple[str, ...] = ()
    entry_inputs: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()
    calls: tuple[CallForm, ...] = ()
    """The only calls that are proven; empty if proven calls are not limited to a list."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Facts about the model that was folded: sizes, other norms, and versions of packages."""

    layers: Mapping[str, int] = field(default_factory=dict)
    config: Mapping[str, int] = field(default_factory=dict)
    other_norms: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """The recipe of a family (several variants, no record) or of a fold (one variant, a record)."""

    model_type: str
    variants: tuple[Variant, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    record: Record | None = None
    where: str = field(default="the recipe", compare=False)
    """The name of the recipe in messages."""


@contextmanager
def prefix_errors(where: str) -> Iterator[None]:
    """Prefix every ``RecipeError`` that is raised inside with ``where``."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError(f"{where}: {error}") from None


def as_mapping(config: Any) -> Mapping[str, Any]:
    """The attributes of a transformers config or a mapping; empty for ``None``."""
    if config is None or isinstance(config, Mapping):
        return config or {}
    return config.to_dict()


def sizes_by_name(recipe: Recipe, config: Any) -> Mapping[str, Any]:
    """The config that gives named sizes: ``config``, or else the recipe's record."""
    if config is not None:
        return as_mapping(config)
    return recipe.record.config if recipe.record else {}


def variant_for(recipe: Recipe, model_type: str, model_class: str, config: Any = None) -> Variant:
    """The variant for a class whose conditions (``when``) hold; without a config, the first one.

    Raises ``RecipeError`` that names the model type, class or config attribute that does not match.
    """
    if recipe.model_type != model_type:
        raise RecipeError(
            f"made for {recipe.model_type}, but the model is {model_type}; "
            f"pass a recipe for {model_type}"
        )
    found = [variant for variant in recipe.variants if variant.model_class == model_class]
    if not found:
        classes = ", ".join(dict.fromkeys(variant.model_class for variant in recipe.variants))
        raise RecipeError(
            f"made for {classes}, but the plan is for {model_class}; "
            "choose the class with --model-class"
        )
    values = as_mapping(config)
    for variant in found:
        if not values or _holds(variant, values):
            return variant
    misses = [f"{key}: {value}" for key, value in found[0].when.items() if values.get(key) != value]
    raise RecipeError(
        f"made for models with {', '.join(misses)}, but this model's config differs; "
        "pass a recipe that was written for this kind of model"
    )


def outputs_asked(recipe: Recipe, model_class: str | None, config: Any) -> tuple[str, ...]:
    """The outputs that a recipe keeps unchanged, for ``model_class`` or for all of its classes.

    Raises ``RecipeError`` if its classes keep different outputs unchanged.
    """
    values = as_mapping(config)
    found = {
        variant.outputs
        for variant in recipe.variants
        if model_class in (None, variant.model_class)
        and recipe.model_type == values.get("model_type")
        and _holds(variant, values)
    }
    if len(found) > 1:
        raise RecipeError(
            f"{recipe.where}: its classes keep different outputs unchanged; choose a class with "
            "--model-class"
        )
    return found.pop() if found else ()


def _holds(variant: Variant, config: Mapping[str, Any]) -> bool:
    return all(config.get(key) == value for key, value in variant.when.items())


def suggest(name: str, known: Iterable[str]) -> str:
    """Advice about an unknown name: a similar known one, or what to do otherwise."""
    remedy = "remove it, or use the recipe with the model it was made for"
    return did_you_mean(name, known, 1) or remedy


def options_data(options: Options) -> dict[str, Any]:
    """The options that differ from the default, as a recipe stores them."""
    return {name: value for name, value in vars(options).items() if value != vars(PLAIN)[name]}


def options_asked(recipe: Recipe) -> Options:
    """The options of a recipe. Raises ``RecipeError`` for an unknown option or value."""
    known: dict[str, Callable[[Any], bool]] = {
        "widen_mlp": lambda value: isinstance(value, bool),
        "widen_to": lambda value: type(value) is int and value > 0,
        "merge": lambda value: value in ("bias", "affine"),
        "untie": lambda value: isinstance(value, bool),
        "fold": lambda value: isinstance(value, bool),
        "rotate": lambda value: isinstance(value, bool),
        "values": lambda value: isinstance(value, bool),
        "seed": lambda value: type(value) is int,
        "matrix": lambda value: isinstance(value, str),
    }
    for name, value in recipe.options.items():
        if name not in known or not known[name](value):
            raise RecipeError(
                f"{recipe.where}: options: {name}: {value!r:.60} is not a known option with a "
                "valid value; remove it"
            )
    return replace(PLAIN, **recipe.options)
