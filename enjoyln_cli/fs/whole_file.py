"""A small file that holds all of a text or what it held before, whoever is killed."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """A file that holds all of ``text`` or what it held before, whoever is killed.

    It is not synced: what the power takes with it costs work and misleads nobody.
    """
    begun = path.with_name(f"{path.name}.begun")
    begun.unlink(missing_ok=True)  # it may be a link to somewhere else
    try:
        with begun.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
        begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)
