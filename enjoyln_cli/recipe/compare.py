"""Does a recipe have the edits of the plan that the proof gives?

A recipe adds no edit and removes none: the plan is written as a recipe too, and both are compared
name by name. Two lines are the same if they have the same text, without what only explains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.plan.schema import ABSENT
from enjoyln_cli.recipe.from_plan import layers_in, lines_of
from enjoyln_cli.recipe.model import SECTIONS, EditLines, Recipe, prefix_errors, require_for
from enjoyln_cli.recipe.templates import KEEP, expand
from enjoyln_cli.recipe.yaml_text import dump_inline

_NOTHING = "nothing"
"""The text of a name without a line."""
_LISTS = ("classes", "outputs", "entry_inputs", "unproven", "calls")
_REASONS = ("reason", "culprit")


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


def differences(recipe: EditLines, plan: Plan) -> list[str]:
    """Each name for which a recipe has another line than a proven plan, with both lines.

    Raises ``RecipeError`` for a line that matches no name, and for two lines that name the same.
    """
    proof = lines_of(plan)
    unequal = schema.differences(_texts(_line_for_each(recipe, proof)), _texts(proof))
    return [
        "{}: the recipe has {}, the proof {}".format(
            ": ".join(path), *(_NOTHING if text is ABSENT else text for text in texts)
        )
        for path, *texts in unequal
    ]


def _line_for_each(recipe: EditLines, proof: EditLines) -> EditLines:
    """A recipe with one line for each name of a proven plan's lines."""
    layers = layers_in(proof)
    sections: dict[str, Any] = {}
    for section in SECTIONS:
        with prefix_errors(section):
            sections[section] = expand(getattr(recipe, section), layers)
    return replace(recipe, **sections)


def _texts(lines: EditLines) -> dict[str, Any]:
    """The text of each line by section and name, and that of each list."""
    texts: dict[str, Any] = {
        section: {name: _text(line) for name, line in getattr(lines, section).items()}
        for section in (*SECTIONS, "config")
    }
    for section in SECTIONS:
        if section != "norms":  # where each name has a line; elsewhere "keep" is as good as none
            texts[section] = {name: text for name, text in texts[section].items() if text != KEEP}
    return texts | {field: _listed(getattr(lines, field)) for field in _LISTS}


def _text(line: Any) -> str:
    if isinstance(line, Mapping):
        if KEEP in line:
            return KEEP
        line = {key: item for key, item in line.items() if key not in _REASONS}
    return dump_inline(line)


def _listed(names: Iterable[str]) -> str:
    """Names in alphabetical order, or ``nothing``."""
    return ", ".join(sorted(names)) or _NOTHING
