"""What an index would get: a wheel of Python files alone, and nothing that is missing in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from live_models import ROOT

SOURCE = ("pyproject.toml", "README.md", "LICENSE")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a wheel is built from."""
    folder = tmp_path / "source"
    for name in ("enjoyln_cli", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCE:
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.slow
def test_a_wheel_is_pure_and_has_every_file(source: Path, tmp_path: Path) -> None:
    """It is built without torch, for every version of Python and every machine."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=source, check=True, capture_output=True, text=True,
    )  # fmt: skip
    name = done.stdout.splitlines()[-1]
    assert name.startswith("enjoyln-") and name.endswith("-py3-none-any.whl")
    package = {
        str(file.relative_to(ROOT))
        for file in (ROOT / "enjoyln_cli").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    found = {
        file for file in zipfile.ZipFile(tmp_path / name).namelist() if ".dist-info" not in file
    }
    assert found == package
