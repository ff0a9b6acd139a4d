"""Whether ``MODEL`` names a directory or a model on the Hub. Imports nothing slow."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from enjoyln_cli.checkpoint.foreign_formats import foreign_format
from enjoyln_cli.errors import ModelNotFound, UnsupportedModel
from enjoyln_cli.text import why_no_text

_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?")


def local_folder(model: str) -> Path | None:
    """The directory that ``model`` names; ``None`` if it looks like a Hub id.

    Raises ``ModelNotFound`` for a file, for a name that is neither a directory nor a Hub id, and
    for a path that cannot be stored as text; ``UnsupportedModel`` for a file of another format.
    """
    local = os.path.expanduser(model)
    if model and os.path.exists(local) and (why := why_no_text(os.path.abspath(local))):
        raise ModelNotFound(f"{os.path.abspath(local)} {why}")
    if model and os.path.isdir(local):
        return Path(local)
    if model and os.path.exists(local):
        if description := foreign_format([os.path.basename(local)]):
            raise UnsupportedModel(f"{model} {description}")
        raise ModelNotFound(f"{model} is a file; pass the directory that holds it")
    if not _HUB_ID.fullmatch(model):
        advice = similar(local) or "; pass a directory, or a Hub id such as owner/name"
        raise ModelNotFound(f"there is no directory {model!r}{advice}")
    return None


def similar(path: str, others: Iterable[str] = ()) -> str:
    """A hint to add to an error: directories with similar names, and similar names of ``others``.

    It is empty if there are none.
    """
    parent, name = os.path.split(path.rstrip("/"))
    try:
        names = [entry.name for entry in os.scandir(parent or ".") if entry.is_dir()]
    except (OSError, ValueError):
        names = []
    near = [os.path.join(parent, close) for close in _near(name, names)] + _near(path, others)
    return f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else ""


def _near(name: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(name, list(names), n=2, cutoff=0.75)
