"""SHA-256 digests of files and data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def digest_of_data(value: Any) -> str:
    """The SHA-256 of plain data as JSON with sorted keys and no spaces, in hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
