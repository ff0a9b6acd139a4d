"""Where two nested mappings differ: recipes and plans, or the configs of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT: Any = object()
"""Stands for an entry that one of the mappings lacks."""


def differences(
    left: Mapping[str, Any], right: Mapping[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any, Any]]:
    """The path of each entry that differs, and its value on both sides.

    A mapping is compared entry by entry, also with a side that lacks it.
    """
    for key in dict.fromkeys((*left, *right)):
        pair = left.get(key, ABSENT), right.get(key, ABSENT)
        inner = [value for value in pair if value is not ABSENT]
        if any(inner) and all(isinstance(value, Mapping) for value in inner):
            here, there = ({} if value is ABSENT else value for value in pair)
            yield from differences(here, there, (*path, key))
        elif pair[0] != pair[1]:
            yield (*path, key), *pair
