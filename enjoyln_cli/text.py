"""How a message states sizes, counts, names and the errors of others."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MAX_QUOTED_CHARS = 300
"""Characters of another library's error that a message quotes."""


def size(nbytes: float) -> str:
    """Bytes in decimal units, as disks count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def counted(many: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{many} {noun}" + "s" * (many != 1)


def first_line(error: object) -> str:
    """The first line of an error, or of a text, as far as a message quotes it."""
    return str(error).strip().split("\n")[0][:MAX_QUOTED_CHARS]


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """``did you mean A or B?`` for the names that are nearest; empty where none is near."""
    near = get_close_matches(name, list(known), most)
    return f"did you mean {' or '.join(near)}?" if near else ""
