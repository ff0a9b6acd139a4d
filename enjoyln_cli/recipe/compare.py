"""Where the edits of a recipe differ from those of a proven plan, name by name.

The plan is turned into a recipe first. Two lines are the same if they have the same text, without
what only explains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from enjoyln_cli.plan import schema
from enjoyln_cli.plan.schema import ABSENT
from enjoyln_cli.recipe.from_plan import layers_in
from enjoyln_cli.recipe.model import (
    SECTIONS,
    EditLines,
    prefix_errors,
)
from enjoyln_cli.recipe.templates import KEEP, expand
from enjoyln_cli.recipe.yaml_text import dump_inline

NOTHING = "nothing"
"""The text of a name without a line."""

_LISTS = ("classes", "outputs", "entry_inputs", "unproven", "calls")
_REASONS = ("reason", "culprit")


@dataclass(frozen=True)
class Difference:
    """Two lines for one name, as text; ``nothing`` if there is no line."""

    section: str
    """A field of ``EditLines``."""
    name: str
    """The name of the line; empty for a field that is a list of names."""
    recipe: str
    proof: str

    def __str__(self) -> str:
        place = f"{self.section}: {self.name}" if self.name else self.section
        return f"{place}: the recipe has {self.recipe}, the proof {self.proof}"


def expanded(recipe: EditLines, proof: EditLines) -> EditLines:
    """A recipe with one line for each name of a proven plan's lines.

    Raises ``RecipeError`` for a line that matches no name, and for two lines that name the same.
    """
    layers = layers_in(proof)
    sections: dict[str, Any] = {}
    for section in SECTIONS:
        with prefix_errors(section):
            sections[section] = expand(getattr(recipe, section), layers)
    return replace(recipe, **sections)


def compare(recipe: EditLines, proof: EditLines) -> list[Difference]:
    """All differences of edits without placeholders."""
    unequal = schema.differences(_texts(recipe), _texts(proof))
    return [
        Difference(section, "".join(name), *(NOTHING if text is ABSENT else text for text in texts))
        for (section, *name), *texts in unequal
    ]


def _texts(lines: EditLines) -> dict[str, Any]:
    """The text of each line by section and name, and that of each list."""
    texts: dict[str, Any] = {
        section: {name: _text(line) for name, line in getattr(lines, section).items()}
        for section in (*SECTIONS, "config")
    }
    return texts | {field: list_names(getattr(lines, field)) for field in _LISTS}


def keeps(line: Any) -> bool:
    """Whether a line leaves its name as it is: ``keep``, or ``{keep: reason, culprit: where}``."""
    if isinstance(line, Mapping):
        return KEEP in line and line.keys() <= {KEEP, "culprit"}
    return bool(line == KEEP)


def _text(line: Any) -> str:
    if keeps(line):
        return KEEP
    if isinstance(line, Mapping):
        line = {key: item for key, item in line.items() if key not in _REASONS}
    return dump_inline(line)


def list_names(names: Iterable[str]) -> str:
    """Names in alphabetical order, or ``nothing``."""
    return ", ".join(sorted(names)) or NOTHING
