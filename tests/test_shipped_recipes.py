"""The recipes that come with enjoyln are what the proof finds today."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import write_recipes  # noqa: E402


@pytest.mark.parametrize("family", write_recipes.FAMILIES)
def test_regenerates_identically(family: str) -> None:
    shipped = (ROOT / "recipes" / f"{family}.yaml").read_text(encoding="utf-8")
    assert write_recipes.recipe_text(family) == shipped
