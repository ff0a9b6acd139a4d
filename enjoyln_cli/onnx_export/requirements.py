"""What an export needs before anything is loaded: libraries, and a place. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.fs.staged_files import check_new_file
from enjoyln_cli.fs.staging import check_place

EXPORTERS = (5, 24)
"""The first transformers whose exporters divide a model that generates."""
PACKAGES = ("onnx", "onnxscript")
"""The libraries that ``torch.onnx`` needs."""


def weights_file(file: Path) -> Path:
    """The file beside an ONNX file that has its weights, if they are large."""
    return file.with_name(f"{file.name}.data")


def require_export(file: Path, *, force: bool, verify: bool, with_cache: bool = False) -> None:
    """Raise ``UnsupportedModel`` or ``OutputError`` if ``file`` cannot be exported, or verified.

    ``with_cache`` says that ``file`` will be a directory.
    """
    require_packages((*PACKAGES, "onnxruntime") if verify else PACKAGES)
    if with_cache:
        require_transformers(EXPORTERS, "exporting with a cache")
        check_place(file, source=None, force=force)
    else:
        check_new_file(file, (weights_file(file),), force=force)


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
            f'{what} needs {", ".join(missing)}: pip install "enjoyln[{extra}]"{where}'
        )
