"""The recipes that come with enjoyln are what the proof finds today."""

from __future__ import annotations

from pathlib import Path

import pytest
import write_recipes

RECIPES = Path(__file__).parent.parent / "recipes"


@pytest.mark.parametrize("family", write_recipes.FAMILIES)
def test_regenerates_identically(family: str) -> None:
    shipped = (RECIPES / f"{family}.yaml").read_text(encoding="utf-8")
    assert write_recipes.recipe_text(family) == shipped
