"""Write a recipe as YAML text."""

from __future__ import annotations

from typing import Any

from enjoyln_cli.plan import schema
from enjoyln_cli.recipe.model import SECTIONS, Recipe
from enjoyln_cli.recipe.templates import KEEP
from enjoyln_cli.recipe.yaml_text import Block, Inline, dump

_HEAD = """\
# The LayerNorms of {model_type} that become RMSNorm, and the edits that keep the function the same.
# {{i}} stands for every layer; a line with the number of a layer overrides it.
# fold: in the weights alone; fold_with: with the named mean subtractions; keep: stays LayerNorm.
# To leave a norm as it is, write keep for it and pass this file with --recipe.
"""


def dump_recipe(recipe: Recipe) -> str:
    """The canonical text: the same recipe always gives the same bytes."""
    data = schema.plain(recipe, {"where"})
    for variant in data["variants"]:
        variant |= {name: Block(map(_line, variant[name].items())) for name in SECTIONS
                    if name in variant}  # fmt: skip
    return _HEAD.format(model_type=recipe.model_type) + dump(data)


def _line(item: tuple[str, Any]) -> tuple[str, Any]:
    """A line that gives a reason or has lines of its own stands on several."""
    name, data = item
    if not isinstance(data, dict):
        return name, data
    inner = [part for some in data.values() if isinstance(some, list) for part in some]
    has_lines = any(isinstance(part, dict) for part in (*data.values(), *inner))
    explains = not data.keys().isdisjoint({KEEP, "reason"})
    return name, Block(data) if has_lines or explains else Inline(data)
