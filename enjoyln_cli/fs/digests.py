"""Digests: SHA-256 against changes by a person, 128-bit XXH3 against accidents."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def digest_of_piece(data: memoryview) -> bytes:
    """Against accidents: that nobody changed what is kept is for ``sha256`` to say."""
    return xxhash.xxh3_128_digest(data)


def digest_of_tensor(blocks: Iterable[bytes]) -> str:
    """Of a tensor's bytes, or a part of them, against accidents too."""
    digest = new_digest()
    for block in blocks:
        digest.update(block)
    return digest.hexdigest()


def new_digest() -> xxhash.xxh3_128:
    """For bytes that come one block after the other."""
    return xxhash.xxh3_128()


def digest_of(value: Any) -> str:
    """Of plain data, as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
