"""Names of the files that enjoyln writes into a converted checkpoint."""

from __future__ import annotations

from enjoyln_cli.checkpoint.file_roles import CONFIG, is_housekeeping
from enjoyln_cli.checkpoint.model_name import local_folder
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.errors import UnsupportedModel

RECIPE_FILE = "enjoyln_recipe.yaml"
PLAN_FILE = "enjoyln_plan.json"
VERIFY_FILE = "enjoyln_verify.json"
QUANTISATION_FILE = "enjoyln_quantisation.json"
CARD_FILE = "README.md"
FOLDER = "enjoyln"
MATRIX_FILE = f"{FOLDER}/rotation.safetensors"
"""The matrices of a rotation that the user gave."""
ADAPTER_CONFIG = "adapter_config.json"
REPORTS = (VERIFY_FILE, CARD_FILE)
"""Files that describe a result. They may change without invalidating its verification."""
_OWN_FILES = (CONFIG, RECIPE_FILE, PLAN_FILE, VERIFY_FILE)


def verified_files(result: Source) -> list[str]:
    """The files whose digests a verification of ``result`` records: all but ``REPORTS``.

    Names are relative to the model's directory, or to the pipeline's if ``result`` is part of one.
    """
    paths = (path for path in result.root.rglob("*") if path.is_file())
    names = [path.relative_to(result.root).as_posix() for path in paths]
    reports = {*REPORTS, *(f"{result.folder}/{name}" for name in REPORTS)}
    return sorted(name for name in names if not is_housekeeping(name) and name not in reports)


def require_float(model: str) -> None:
    """Raise ``UnsupportedModel`` for a directory that ``quantize`` has written."""
    folder = local_folder(model)
    if folder is not None and (folder / QUANTISATION_FILE).is_file():
        raise UnsupportedModel(f"{model} is quantised already; pass the model it was made from")


def is_own(name: str) -> bool:
    """Whether ``enjoyln fold`` writes this file itself, so that it is never copied."""
    return name in _OWN_FILES or name.startswith(f"{FOLDER}/")
