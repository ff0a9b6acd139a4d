"""Write a recipe as YAML text."""

from __future__ import annotations

from typing import Any

from enjoyln_cli.plan import schema
from enjoyln_cli.plan.fold_options import CENTRING_ONLY, Options
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.model import SECTIONS, Recipe
from enjoyln_cli.recipe.yaml_text import dump_inline

_HEAD = """\
# The LayerNorms of {model_type} that become RMSNorm, and the edits that keep the function the same.
# {{i}} stands for every layer; a line with the number of a layer overrides it.
# A norm becomes RMSNorm in_weights alone, or with_subtraction of a mean at the named modules.
# fold --recipe refuses other edits than these; fold --keep-norms NAMES leaves norms as they are.
"""


def recipe_text(
    plan: Plan, config: Any = None, options: Options = CENTRING_ONLY, source: str = ""
) -> str:
    """The recipe of a plan as text; see ``recipe_of``."""
    return dump_recipe(recipe_of(plan, config=config, options=options, source=source))


def dump_recipe(recipe: Recipe) -> str:
    """The canonical text: the same recipe always gives the same bytes.

    Every name of a section has a line of its own.
    """
    lines = [_HEAD.format(model_type=recipe.model_type)]
    data = schema.plain(recipe)
    first = {key: data.pop(key) for key in ("version", "model_type")}
    for key, value in (first | data).items():
        if value and key in SECTIONS:
            lines.append(f"{key}:\n")
            lines += (
                f"  {dump_inline(name)}: {dump_inline(edit)}\n" for name, edit in value.items()
            )
        else:
            lines.append(f"{key}: {dump_inline(value)}\n")
    return "".join(lines)
