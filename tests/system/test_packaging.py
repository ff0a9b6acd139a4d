"""The packages that an index would get: their contents, their metadata, and an installation."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from environments import environment_beside, install
from live_models import ROOT
from packaging.requirements import Requirement

FOLDERS = ("enjoyln_cli", "docs", "recipes", "scripts", "tests")
FILES = (
    "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml",
)  # fmt: skip
REPOSITORY = "https://github.com/enjoyln/enjoyln"
SMALL_PART = (
    "tests/cli/test_main.py",
    "tests/publish/test_card.py",
    "tests/recipe/test_recipe.py",
    "tests/runtime/test_loading.py",
)
"""Tests that use every dependency."""


def files_of(*folders: str) -> set[str]:
    """Paths of the files of the project in these folders, from its root."""
    return {
        str(file.relative_to(ROOT))
        for folder in folders
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def build(kind: str, source: Path, out: Path) -> Path:
    """A new ``sdist`` or ``wheel`` of ``source`` in ``out``, without torch."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from setuptools.build_meta import build_{kind}; print(build_{kind}(sys.argv[1]))"
    )
    command = [sys.executable, "-c", code, str(out)]
    done = subprocess.run(command, cwd=source, check=True, capture_output=True, text=True)
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for folder in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, source / folder, ignore=ignored)
    for file in FILES:
        shutil.copy(ROOT / file, source)
    return build("sdist", source, out)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an index's users may have to."""
    folder = tmp_path_factory.mktemp("wheel")
    shutil.unpack_archive(sdist, folder)  # tarfile's filters came with Python 3.11.4
    return build("wheel", folder / sdist.name.removesuffix(".tar.gz"), folder)


@pytest.mark.slow
def test_an_sdist_has_what_a_developer_needs(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = {name for name in names if ".egg-info/" in name or name in ("PKG-INFO", "setup.cfg")}
    assert names - made == files_of(*FOLDERS) | set(FILES)


@pytest.mark.slow
def test_a_wheel_is_pure_and_has_every_file(wheel: Path) -> None:
    assert wheel.name.startswith("enjoyln-") and wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name for name in names if ".dist-info/" not in name} == files_of("enjoyln_cli")


@pytest.mark.slow
def test_a_wheel_says_who_made_it_and_where_its_pages_are(wheel: Path) -> None:
    about = metadata(wheel)
    assert about["Author-email"].startswith("The enjoyln authors <")
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Keywords"] and about.get_all("Classifier")
    urls = dict(line.split(", ") for line in about.get_all("Project-URL") or [])
    assert urls.keys() >= {"Source", "Documentation", "Changelog", "Issues"}
    assert urls["Source"] == REPOSITORY
    assert about["Description-Content-Type"] == "text/markdown"


def metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(archive.read(name))


@pytest.mark.slow
def test_the_readmes_command_runs_with_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    """In the new environment that it makes, with the wheel instead of a clone."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^\$ (.* && enjoyln fold .*)$", readme, re.MULTILINE)
    assert " . && " in command
    shutil.copytree(ROOT / "tests" / "checkpoints", tmp_path / "tests" / "checkpoints")
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command.replace(" . && ", f" {wheel} && ")],
        cwd=tmp_path, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (said,) = (line for line in done.stdout.splitlines() if line.startswith("converted "))
    assert f"\n{said}\n" in readme and "\nverified: same outputs" in done.stdout


@pytest.mark.slow
def test_the_lower_bounds_of_dependencies_are_true(tmp_path: Path) -> None:
    """Except for torch, whose older builds for a CPU are on no index."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = map(Requirement, project["dependencies"])
    lowest = [str(each).replace(">=", "==") for each in needed if each.name != "torch"]
    python = environment_beside(tmp_path / "env")
    install(python, *lowest)
    command = [python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *SMALL_PART]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
