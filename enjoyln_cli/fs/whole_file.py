"""Atomic writing of small text files."""

from __future__ import annotations

from pathlib import Path


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
