"""Does a recipe have the edits of the plan that the proof gives?

A recipe adds no edit and removes none: the plan is written as a recipe too, and both are compared
line by line. Two lines are the same if they have the same text, without what only explains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.plan.schema import ABSENT
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.model import SECTIONS, Recipe, prefix_errors, require_for
from enjoyln_cli.recipe.templates import KEEP, LETTERS
from enjoyln_cli.recipe.yaml_text import dump_inline

_NOTHING = "nothing"
"""The text of a name without a line."""
_LISTS = ("classes", "outputs", "entry_inputs", "unproven", "calls")
_REASONS = ("reason", "culprit")
_STAY = {KEEP, "stays_layernorm"}
"""Words that a reason follows, which is not compared."""


def require_same(recipe: Recipe, plan: Plan, *, config: Any = None) -> None:
    """Raise ``RecipeError`` that names the first difference, unless ``recipe`` is of ``plan``.

    ``config`` (a mapping or a transformers config) has to satisfy the recipe's conditions.
    """
    with prefix_errors(recipe.where):
        require_for(recipe, plan.model_type, plan.model_class, config)
        if found := differences(recipe, plan):
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise RecipeError(
                f"{found[0]}{more}; a recipe is compared with the proof: fold without --recipe, "
                "and choose the norms that stay with --keep-norms"
            )


def differences(recipe: Recipe, plan: Plan) -> list[str]:
    """Each line in which a recipe differs from the recipe of a proven plan, with both lines."""
    unequal = schema.differences(_texts(recipe), _texts(recipe_of(plan)))
    return [
        "{}: the recipe has {}, the proof {}".format(
            ": ".join(path), *(_NOTHING if text is ABSENT else text for text in texts)
        )
        for path, *texts in unequal
    ]


def _texts(lines: Recipe) -> dict[str, Any]:
    """The text of each line by section and name, and the text of each list."""
    texts: dict[str, Any] = {
        section: _without_repeats({n: _text(line) for n, line in getattr(lines, section).items()})
        for section in (*SECTIONS, "settings")
    }
    return texts | {field: ", ".join(sorted(getattr(lines, field))) or _NOTHING for field in _LISTS}


def _text(line: Any) -> str:
    if isinstance(line, Mapping):
        if word := line.keys() & _STAY:
            return str(*word)
        line = {key: item for key, item in line.items() if key not in _REASONS}
    return dump_inline(line)


def _without_repeats(texts: Mapping[str, str]) -> dict[str, str]:
    """The lines that differ, reasons aside, from the line that stands for all layers."""
    return {
        name: text
        for name, text in texts.items()
        if all(texts.get(general) != text for general in _general(name))
    }


def _general(name: str) -> Iterator[str]:
    """The names with placeholders that stand for ``name`` among others."""
    words = name.split(".")
    numbers = [at for at, word in enumerate(words) if word.isdigit()][: len(LETTERS)]
    for many in range(1, len(numbers) + 1):
        for chosen in combinations(numbers, many):
            letters = dict(zip(chosen, LETTERS, strict=False))
            filled = (f"{{{letters[at]}}}" if at in letters else w for at, w in enumerate(words))
            yield ".".join(filled)
