"""Read recipes from YAML text: edits that were made to a checkpoint, or that must be proven again.

``docs/formats.md`` explains the format. The keys are the fields of ``recipe.model.Recipe``, and in
a line the fields of the plan's dataclasses. ``keep`` in any section says that a name stays as it
is. A name with ``{i}`` stands for every layer; a line with a layer number overrides it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from enjoyln_cli.checkpoint.result_files import RECIPE_FILE
from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import schema
from enjoyln_cli.recipe.model import Recipe, prefix_errors
from enjoyln_cli.recipe.yaml_text import MAX_CHARS, load, one_line


def tried_to_fuse(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` was converted with ``--merge``, by its recipe.

    If so, a norm in it that still has a weight or a bias cannot be fused.
    """
    try:
        return load_recipe(folder / RECIPE_FILE).options.merge is not None
    except RecipeError:
        return False


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe file. Raises ``RecipeError`` if it cannot be read or is not a recipe."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
    except (OSError, ValueError) as error:  # a name with a NUL character, or no text
        raise RecipeError(f"{path}: cannot be read as text: {one_line(error)}") from None
    return parse_recipe(text, where=str(path))


def parse_recipe(text: str, *, where: str) -> Recipe:
    """A recipe from its text; ``where`` names the text in messages.

    Raises ``RecipeError``: one line with the key, the value found, and what is valid there.
    """
    with prefix_errors(where):
        try:
            recipe = schema.read(Recipe, load(text))
        except ValueError as error:
            raise RecipeError(str(error)) from None
        return replace(recipe, where=where)
