"""The data of a recipe: the edits of a plan, written so that they fit every model of a family.

The fields are the keys of the file. Each section maps a name to the plain data of its edit (see
``recipe.from_plan``), or to ``keep``. A recipe is compared line by line with the recipe of a proven
plan (``recipe.compare``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.covered_calls import PLAIN_TYPES
from enjoyln_cli.plan.fold_options import CENTRING_ONLY, Options
from enjoyln_cli.plan.schema import NOT_STORED, checked, quote

VERSION = 1
"""Version of the recipe format."""

_TEXT_CHARS = 1000


def _version(value: int) -> int:
    if value != VERSION:
        raise ValueError(f"{value} is not {VERSION}, the only version that can be read")
    return value


def _plain_value(value: Any) -> Any:
    if type(value) not in PLAIN_TYPES:
        raise ValueError(f"{quote(value)} instead of one line of text, a number, true or false")
    return _one_line(value)


def _one_line(value: Any) -> Any:
    """``value``, if each text in it is one line."""
    if isinstance(value, (list, dict)):
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            _one_line(item)
    elif isinstance(value, str) and (len(value) > _TEXT_CHARS or not value.isprintable()):
        raise ValueError(f"{quote(value)} instead of one line of text")
    return value


Text = Annotated[str, checked(_one_line)]
PlainValues = Mapping[Text, Annotated[Any, checked(_plain_value)]]
Section = Mapping[Text, Annotated[Any, checked(_one_line)]]
"""The edits of one kind, by the name of the norm, the parameter or the module."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The edits of a fold, or of most checkpoints of a family, and the models they hold for."""

    version: Annotated[int, checked(_version)]
    model_type: Text
    model_class: Text
    classes: tuple[Text, ...] = ()
    """By default ``model_class`` alone."""
    outputs: tuple[Text, ...] = ()
    when: PlainValues = field(default_factory=dict)
    norms: Section
    """The status of each: see ``plan.Status``."""
    centred_weights: Section = field(default_factory=dict)
    """The dimension that each parameter is centred over, with the ``scale`` that is fused into it;
    a list, if there are several."""
    subtractions: Section = field(default_factory=dict)
    fused: Section = field(default_factory=dict)
    widened: Section = field(default_factory=dict)
    """By the second weight of the MLP."""
    rotation_groups: Section = field(default_factory=dict)
    scaled: Section = field(default_factory=dict)
    """By the first parameter of the stream."""
    untied: Section = field(default_factory=dict)
    settings: PlainValues = field(default_factory=dict)
    """New values of ``config.json`` entries, by name."""
    entry_inputs: tuple[Text, ...] = ()
    unproven: tuple[Text, ...] = ()
    calls: tuple[str, ...] = ()
    """The only calls that are proven; empty if proven calls are not limited to a list."""

    source: Text = ""
    """The checkpoint that was converted, as ``NAME@COMMIT``, if it is on the Hub."""
    options: Options = CENTRING_ONLY
    versions: Mapping[Text, Text] = field(default_factory=dict)
    """The versions of the packages that made it."""
    where: Annotated[str, NOT_STORED] = field(default="the recipe", compare=False)
    """The name of the recipe in messages, which no file has."""

    def __post_init__(self) -> None:
        """Set the default of ``classes``."""
        object.__setattr__(self, "classes", self.classes or (self.model_class,))


SECTIONS = (
    "untied", "norms", "centred_weights", "subtractions", "fused", "widened", "rotation_groups",
    "scaled",
)  # fmt: skip
"""The fields with an edit for each name. Differences of the first cause others."""


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


def require_for(recipe: Recipe, model_type: str, model_class: str, config: Any = None) -> None:
    """Require that a recipe is for this class, and that its conditions (``when``) hold.

    Without a config they are taken to hold. Raises ``RecipeError`` that names the model type, class
    or config attribute that does not match.
    """
    if recipe.model_type != model_type:
        raise RecipeError(
            f"made for {recipe.model_type}, but the model is {model_type}; "
            f"pass a recipe for {model_type}"
        )
    if recipe.model_class != model_class:
        raise RecipeError(
            f"made for {recipe.model_class}, but the plan is for {model_class}; "
            "choose the class with --model-class"
        )
    values = as_mapping(config)
    misses = [f"{key}: {value}" for key, value in recipe.when.items() if values.get(key) != value]
    if values and misses:
        raise RecipeError(
            f"made for models with {', '.join(misses)}, but this model's config differs; "
            "pass a recipe that was written for this kind of model"
        )
