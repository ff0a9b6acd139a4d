"""SHA-256 digests of files and data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def digest_of_file(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return digest_of_bytes(iter(lambda: file.read(1 << 20), b""))


def digest_of_bytes(parts: Iterable[bytes]) -> str:
    """The SHA-256 of ``parts`` one after the other, in hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def digest_of_data(value: Any) -> str:
    """The SHA-256 of plain data as JSON with sorted keys and no spaces, in hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
