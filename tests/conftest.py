"""Fixtures that several test modules ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models run faster so, above all beside other work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint directory that holds a config and no weights yet."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "gpt2"}')
    return path
