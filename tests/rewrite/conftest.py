"""A sharded checkpoint, and where its result goes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fold_cases import sharded


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return sharded(tmp_path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"
