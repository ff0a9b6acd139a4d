"""The data of a recipe: the edits of a plan, written so that they fit every model of a family.

The fields are the keys of the file (see ``read``). Most edits are the plan's own dataclasses with
placeholders in their names. Edits with axes have classes of their own here, because a recipe can
give a size by the name of a config attribute.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.covered_calls import PLAIN_TYPES
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
from enjoyln_cli.plan.schema import NOT_STORED, Discriminator, Tag, checked, number, quote
from enjoyln_cli.recipe.spans import Size, Span
from enjoyln_cli.text import did_you_mean

VERSION = 1
"""Version of the recipe format."""
KEPT_BY_RECIPE = "the recipe keeps it"
"""The reason of a norm that the recipe keeps without giving a reason."""


def _version(value: int) -> int:
    if value != VERSION:
        raise ValueError(f"{value} is not {VERSION}, the only version that can be read")
    return value


def _word(value: str) -> str:
    if not re.fullmatch(r"[\w-]{1,200}", value, re.ASCII):
        raise ValueError(f"{quote(value)} is not a name of letters, digits, _ and -")
    return value


def _plain_value(value: Any) -> Any:
    if type(value) not in PLAIN_TYPES:
        raise ValueError(f"{quote(value)} instead of one line of text, a number, true or false")
    return value


def _setting(value: Any) -> Any:
    if type(value) not in (bool, int):
        raise ValueError(f"{quote(value)} instead of a whole number, true or false")
    return value


def _call(value: str) -> str:
    call_text.from_text(value)
    return value


Word = Annotated[str, checked(_word)]
Words = tuple[Word, ...]


@dataclass(frozen=True, kw_only=True)
class CentredTensor(Span):
    """A ``plan.Writer`` of any size. Without ``dim``, the parameter is left as it is."""

    dim: Annotated[int, number(0, 7)] | None = None  # type: ignore[assignment]
    parameter: str
    tensor: str = ""
    """The stored name, by default ``parameter``. If it has more placeholders than that, several
    tensors make up the parameter."""
    held: Span | None = None
    scale: Scale | None = None

    def __post_init__(self) -> None:
        """Set the default of ``tensor``. Raise ``ValueError`` for an axis without ``dim``."""
        object.__setattr__(self, "tensor", self.tensor or self.parameter)
        if self.dim is None and (self.size or self.outer or self.start or self.scale or self.held):
            raise ValueError("the key dim is missing")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """Where a centring operation is added: to what a module returns, or to its first input."""

    module: str
    place: Place


@dataclass(frozen=True, kw_only=True)
class CentredValue(Span, Operation):
    """A ``plan.Centring`` of any size."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class TurnedBasis:
    """A ``plan.Basis`` of any size that is turned; its tensors are those to turn."""

    parameter: str
    """The name of the basis."""
    kind: BasisKind
    size: Size
    fixes_ones: bool = False
    norms: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    tensors: tuple[CentredTensor, ...]

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if a tensor has no axis."""
        if not self.tensors or any(tensor.dim is None for tensor in self.tensors):
            raise ValueError("it needs tensors, each with a dim")


Line = (
    Verdict
    | CentredTensor
    | CentredValue
    | Widening
    | Merge
    | UnmergedNorm
    | TurnedBasis
    | UntiedParameter
)
"""One edit of a recipe: for one name, or with placeholders for the same name in every layer."""


def name_of(line: Line) -> str:
    """The norm, parameter or module that a line is about."""
    if isinstance(line, (CentredTensor, TurnedBasis, UntiedParameter)):
        return line.parameter
    if isinstance(line, CentredValue):
        return line.module
    return line.second.parameter if isinstance(line, Widening) else line.norm


def _merged_or_not(data: Any) -> str:
    return "UnmergedNorm" if isinstance(data, dict) and "reason" in data else "Merge"


MergeLine = Annotated[
    Annotated[Merge, Tag("Merge")] | Annotated[UnmergedNorm, Tag("UnmergedNorm")],
    Discriminator(_merged_or_not),
]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The edits for one model class under some config attributes. See ``plan.Plan``."""

    model_class: Word
    classes: Words = ()
    """By default ``model_class`` alone."""
    outputs: tuple[str, ...] = ()
    when: Mapping[str, Annotated[Any, checked(_plain_value)]] = field(default_factory=dict)
    norms: tuple[Verdict, ...]
    centre: tuple[CentredTensor, ...] = ()
    centring_ops: tuple[CentredValue, ...] = ()
    merge: tuple[MergeLine, ...] = ()
    widen: tuple[Widening, ...] = ()
    rotate: tuple[TurnedBasis, ...] = ()
    untie: tuple[UntiedParameter, ...] = ()
    config: Mapping[str, Annotated[Any, checked(_setting)]] = field(default_factory=dict)
    """New values of ``config.json`` entries, by name."""
    entry_inputs: Words = ()
    unproven: tuple[str, ...] = ()
    calls: tuple[Annotated[str, checked(_call)], ...] = ()
    """The only calls that are proven; empty if proven calls are not limited to a list."""

    def __post_init__(self) -> None:
        """Set the default of ``classes``."""
        object.__setattr__(self, "classes", self.classes or (self.model_class,))


def _some(variants: tuple[Variant, ...]) -> tuple[Variant, ...]:
    if not variants:
        raise ValueError("it is empty; a recipe has at least one")
    return variants


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The recipe of a family (several variants) or of a fold (one variant)."""

    version: Annotated[int, checked(_version)]
    model_type: Word
    variants: Annotated[tuple[Variant, ...], checked(_some)]
    options: Options = PLAIN
    versions: Mapping[str, str] = field(default_factory=dict)
    """The versions of the packages that made it."""
    where: Annotated[str, NOT_STORED] = field(default="the recipe", compare=False)
    """The name of the recipe in messages; it is not in the file."""


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
