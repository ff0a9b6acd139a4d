"""What an export needs before anything is loaded: libraries, and a place. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.fs.staging import check_place
from enjoyln_cli.publish.precisions import can_add
from enjoyln_cli.verification.verify_options import ExportOptions

PACKAGES = ("onnx", "onnxscript")
"""The libraries that ``torch.onnx`` needs."""


def require_export(folder: Path, options: ExportOptions) -> None:
    """Raise ``UnsupportedModel`` or ``OutputError`` if ``folder`` cannot be written or verified."""
    require_packages((*PACKAGES, "onnxruntime") if options.verify else PACKAGES)
    check_place(folder, source=None, force=options.force or can_add(folder, options.force))


def require_transformers(oldest: tuple[int, int], what: str) -> None:
    """Raise ``UnsupportedModel`` if transformers is older than ``what`` needs."""
    installed = version("transformers")
    if tuple(map(int, installed.split(".")[:2])) < oldest:
        needed = ".".join(map(str, oldest))
        raise UnsupportedModel(
            f"{what} needs transformers {needed} or newer, and {installed} is installed"
        )


def require_packages(
    names: Iterable[str], what: str = "exporting to ONNX", extra: str = "onnx", where: str = ""
) -> None:
    """Raise ``UnsupportedModel`` for libraries that are not installed; ``what`` needs them.

    The message names the ``extra`` of enjoyln that installs them, and ``where`` to install it.
    """
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise UnsupportedModel(
            f'{what} needs {", ".join(missing)}: pip install ".[{extra}]" in the clone of enjoyln'
            f"{where}"
        )
