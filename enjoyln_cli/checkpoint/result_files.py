"""Names of the files that enjoyln writes into a converted checkpoint."""

from __future__ import annotations

from enjoyln_cli.checkpoint.file_roles import CONFIG
from enjoyln_cli.checkpoint.model_name import local_folder
from enjoyln_cli.errors import UnsupportedModel

RECIPE_FILE = "enjoyln_recipe.yaml"
PLAN_FILE = "enjoyln_plan.json"
VERIFY_FILE = "enjoyln_verify.json"
PRECISIONS_FILE = "enjoyln_precisions.json"
CARD_FILE = "README.md"
FOLDER = "enjoyln"
MATRIX_FILE = f"{FOLDER}/rotation.safetensors"
"""The matrices of a rotation that the user gave."""
ADAPTER_CONFIG = "adapter_config.json"
REPORTS = (VERIFY_FILE, CARD_FILE)
"""Files that describe a result. They may change without a change of the result."""
_OWN_FILES = (CONFIG, RECIPE_FILE, PLAN_FILE, VERIFY_FILE)


def require_float(model: str) -> None:
    """Raise ``UnsupportedModel`` for a directory that ``quantize`` or ``export`` has written."""
    folder = local_folder(model)
    if folder is not None and (folder / PRECISIONS_FILE).is_file():
        raise UnsupportedModel(
            f"{model} was written by `enjoyln quantize` or `export`; pass its original"
        )


def is_own(name: str) -> bool:
    """Whether ``enjoyln fold`` writes this file itself, so that it is never copied."""
    return name in _OWN_FILES or name.startswith(f"{FOLDER}/")
