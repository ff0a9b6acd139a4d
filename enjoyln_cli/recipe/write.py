"""Write a recipe as YAML text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from enjoyln_cli.plan import schema
from enjoyln_cli.recipe.model import SECTIONS, Recipe
from enjoyln_cli.recipe.yaml_text import dump_inline

_HEAD = """\
# The LayerNorms of {model_type} that become RMSNorm, and the edits that keep the function the same.
# {{i}} stands for every layer; a line with the number of a layer overrides it.
# fold: in the weights alone; fold_with: with the named mean subtractions; keep: stays LayerNorm.
# To leave a norm as it is, write keep for it and pass this file with --recipe.
"""


def dump_recipe(recipe: Recipe) -> str:
    """The canonical text: the same recipe always gives the same bytes.

    Every name of a variant's sections has a line of its own.
    """
    lines = [_HEAD.format(model_type=recipe.model_type)]
    for key, value in schema.plain(recipe, {"where"}).items():
        if key != "variants":
            lines.append(f"{key}: {dump_inline(value)}\n")
            continue
        lines.append("variants:\n")
        for variant in value:
            for number, (field, data) in enumerate(variant.items()):
                lines.append(f"{'  ' if number else '- '}{field}:")
                lines += (
                    _section(data) if data and field in SECTIONS else [f" {dump_inline(data)}\n"]
                )
    return "".join(lines)


def _section(edits: Mapping[str, Any]) -> Iterator[str]:
    yield "\n"
    for name, edit in edits.items():
        yield f"    {dump_inline(name)}: {dump_inline(edit)}\n"
