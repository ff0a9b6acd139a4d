"""The recipes that come with enjoyln are what the proof finds today."""

from __future__ import annotations

import pytest
import write_recipes
from live_models import ROOT

RECIPES = ROOT / "recipes"


@pytest.mark.slow
@pytest.mark.parametrize("family", write_recipes.FAMILIES)
def test_regenerates_identically(family: str) -> None:
    shipped = (RECIPES / f"{family}.yaml").read_text(encoding="utf-8")
    assert write_recipes.recipe_text(family) == shipped
