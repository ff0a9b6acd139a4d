"""Small text files: written whole or not at all, and read whatever they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path``. If that fails, the file keeps its old content.

    Atomic but not durable: there is no fsync, so a power cut may lose the update.
    """
    begun = path.with_name(f"{path.name}.begun")
    begun.unlink(missing_ok=True)  # it may be a link to somewhere else
    try:
        with begun.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file is missing or contains something else."""
    try:
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
