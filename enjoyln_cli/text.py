"""Texts for users: sizes, counts, name suggestions, and errors of other libraries."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""What a terminal takes for a colour."""
MAX_QUOTED_CHARS = 300
"""A message quotes at most this many characters of another library's error."""
LARGEST = 2**63
"""A number of bytes that no file or memory reaches."""


def size(nbytes: float) -> str:
    """A number of bytes as text in decimal units, e.g. ``1.5 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def bytes_in(text: str) -> int:
    """``5GB``, ``500MB`` or plain bytes as a number of bytes (decimal units).

    Raises ``ValueError`` for any other text.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    nbytes = float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " ") if match else 0
    if not 1 <= nbytes < LARGEST:
        raise ValueError(f"{text!r} is not a size; write 5GB or 500MB")
    return int(nbytes)


def counted(many: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{many} {noun}" if many == 1 else f"{many} {noun}s"


def listed_briefly(names: Sequence[str]) -> str:
    """``a, b, c and 4 more``: up to three names, and how many are left out."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def why_no_text(path: str) -> str:
    """Why a path cannot be stored as text, as configs do and libraries need; empty if it can.

    Python reads bytes that the encoding of file names lacks as lone surrogates.
    """
    try:
        path.encode()
    except UnicodeEncodeError:
        encoding = sys.getfilesystemencoding()
        if encoding == "utf-8":
            return "is not UTF-8, and libraries that read checkpoints open no such path; rename it"
        return f"has characters that {encoding}, the encoding here, lacks; set PYTHONUTF8=1"
    return ""


def first_line(error: object) -> str:
    """The first line of an error or of a text without colours, cut to ``MAX_QUOTED_CHARS``.

    If it ends with a colon, the next line follows.
    """
    first, *rest = COLOURS.sub("", str(error)).strip().split("\n")
    line = f"{first} {rest[0].strip()}" if first.endswith(":") and rest else first
    return line[:MAX_QUOTED_CHARS]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches any of the patterns, such as ``*.fc2``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def did_you_mean(name: str, known: Iterable[str], most: int = 3) -> str:
    """``did you mean A or B?`` with up to ``most`` similar names; empty if none is similar."""
    near = get_close_matches(name, list(known), most)
    return f"did you mean {' or '.join(near)}?" if near else ""


def dtype_name(dtype: object) -> str:
    """The name of torch's dtype that transformers uses, for example ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def number(value: float | None) -> str:
    """``1.2e-16`` for small and large values, three digits in between, ``-`` for ``None``."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.0f}"
    return f"{value:.1e}"


def measure(name: str, value: float | None) -> str:
    """A measure by its name in tables; of a cosine, the digits behind 0.999 count as well."""
    if value is None:
        return ""
    return f"{value:.5f}" if "cosine" in name else number(value)
