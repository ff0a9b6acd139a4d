"""A result whose outputs are too far from the original's is not written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import refused
from live_models import ROOT
from tiny_models import one_layer


@pytest.mark.slow
def test_the_layers_that_cost_most_are_named(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    words = ("--text", ROOT / "LICENSE", "--rotations", 0, "--inputs", 4, "--max-error", 0.001)
    said = refused("quantize", one_layer(tmp_path / "phi"), "-o", tmp_path / "out", *words)
    error = r"error: w8a8 costs too much: error 0\.\d+ of the outputs \(limit 0\.001\), so nothing"
    layers = r"--keep model\.layers\.0\.[\w.]+(,[\w.]+){2}, or raise the limit with --max-error"
    assert re.search(rf"{error} was written; .* with {layers}", said)
    assert not (tmp_path / "out").exists()
