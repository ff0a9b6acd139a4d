"""Each extra that quantises, in an environment of its own, with the tests that need it."""

from __future__ import annotations

import os
import subprocess
from importlib.metadata import requires
from pathlib import Path

import pytest
from environments import environment_beside, install
from packaging.requirements import Requirement

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TESTS = {
    "openvino": (["test_openvino_programs.py"], "openvino", ["openvino_genai"]),
    "compressed-tensors": (
        ["test_quantised_checkpoints.py", "test_llm_compressor.py"],
        "compressed or llm_compressor",
        [],
    ),
}
"""For each extra the tests that are skipped without it: files, words in their names, and packages
that only the tests need."""


@pytest.mark.slow
@pytest.mark.parametrize("extra", TESTS)
def test_an_extra_alone(extra: str, tmp_path: Path) -> None:
    """The environment sees torch and the packages for tests of the present environment."""
    python = environment_beside(tmp_path / "env")
    needed = [
        f"{requirement.name}{requirement.specifier}"
        for requirement in map(Requirement, requires("enjoyln") or [])
        if requirement.marker and requirement.marker.evaluate({"extra": extra})
    ]
    files, words, more = TESTS[extra]
    install(python, *needed, *more)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "cache")}
    command = [python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-k", words, "-rs"]
    command += ["-m", "slow or not slow", *(str(HERE / file) for file in files)]
    run = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "SKIPPED" not in run.stdout, run.stdout
