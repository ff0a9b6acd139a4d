"""Refuses wrong names and places before a command imports torch, which takes seconds.

The library checks them again.
"""

from __future__ import annotations

from pathlib import Path

from enjoyln_cli.checkpoint import config
from enjoyln_cli.checkpoint.model_name import local_folder
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.fs.staging import check_place
from enjoyln_cli.rewrite import processes


def require_models(*names: str | Path | None) -> None:
    """Refuse names that are neither a directory nor of the form of a Hub id; skip ``None``."""
    for name in names:
        if name is not None:
            local_folder(str(name))


def require_folded(out: str | Path) -> None:
    """Refuse a directory that was not converted. A Hub id is left to the library."""
    if local_folder(str(out)) is not None:
        config.require_folded(config.raw_config(open_source(str(out))), str(out))


def require_new_folder(out: Path, model: str | Path, *, force: bool, resume: bool = False) -> None:
    """Refuse ``out`` if it cannot be made, or if it is not apart from the directory ``model``.

    Of several processes, the first one does so later, before any of them writes.
    """
    if processes.present().size == 1:
        check_place(out, source=local_folder(str(model)), force=force, resume=resume)
