"""Digests of files and data.

SHA-256 also detects deliberate changes. 128-bit XXH3 is faster, and detects accidents only.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fast_digest(data: memoryview | bytes) -> str:
    """The 128-bit XXH3 of ``data``, in hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_data(value: Any) -> str:
    """The SHA-256 of plain data as JSON with sorted keys and no spaces, in hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
