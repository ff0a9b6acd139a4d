"""The files of a converted checkpoint that this program writes, by their names."""

from __future__ import annotations

from enjoyln_cli.checkpoint.file_roles import CONFIG, is_housekeeping
from enjoyln_cli.checkpoint.source import Source

RECIPE_FILE = "enjoyln_recipe.yaml"
VERIFY_FILE = "enjoyln_verify.json"
BENCH_FILE = "enjoyln_bench.json"
CARD_FILE = "README.md"
FOLDER = "enjoyln"
FILE = "original.safetensors"
"""In ``FOLDER``: what it takes to restore the original (``archive``)."""
REPORTS = (VERIFY_FILE, BENCH_FILE, CARD_FILE)
"""Files that tell of a result, and may change without changing it."""
_OWN_FILES = (CONFIG, RECIPE_FILE, VERIFY_FILE)


def verified_files(result: Source) -> list[str]:
    """The files that a verification of ``result`` holds for: all but ``REPORTS``.

    Relative to the directory of the whole pipeline, where ``result`` is part of one.
    """
    found = (path for path in result.root.rglob("*") if path.is_file())
    names = [path.relative_to(result.root).as_posix() for path in found]
    reports = {*REPORTS, *(f"{result.folder}/{name}" for name in REPORTS)}
    return sorted(name for name in names if not is_housekeeping(name) and name not in reports)


def is_own(name: str) -> bool:
    """Whether a file of a model's directory is written by a fold, and so never comes along."""
    return name in _OWN_FILES or name.startswith(f"{FOLDER}/")
