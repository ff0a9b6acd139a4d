"""Names that differ only in layer numbers, written as one name: ``h.0-11.ln_1``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from math import prod

_PATH = re.compile(r"\w+(?:\.\w+)+")
_LAYER = re.compile("(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9])")
"""A layer number without leading zeros: ``01`` would be lost when the number is written again."""


def compact(names: Iterable[str]) -> list[str]:
    """Join names that differ only in layer numbers: ``h.0-11.ln_1``. Keeps the order."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        pattern, numbers = layers_in(name)
        groups.setdefault(pattern, []).append(numbers)
    return [_with_ranges(pattern, numbers) for pattern, numbers in groups.items()]


def layers_in(text: str) -> tuple[str, tuple[int, ...]]:
    """``text`` with ``\\0`` for every layer number, and the list of these numbers.

    Layer numbers stand in dotted paths that contain a name, such as ``h.3.ln_1``. The numbers in
    ``0.05`` and ``1e-05`` are none.
    """
    numbers: list[int] = []

    def without(number: re.Match[str]) -> str:
        numbers.append(int(number[0]))
        return "\0"

    def in_path(path: re.Match[str]) -> str:
        named = [part.isidentifier() for part in path[0].split(".")]
        return _LAYER.sub(without, path[0]) if any(named) else path[0]

    return _PATH.sub(in_path, text), tuple(numbers)


def _with_ranges(pattern: str, numbers: list[tuple[int, ...]]) -> str:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    exact = prod(len(column) for column in columns) == len(set(numbers))
    for column in columns:
        shown = _ranges(column) if exact or len(column) == 1 else "*"
        pattern = pattern.replace("\0", shown, 1)
    return pattern


def _ranges(values: list[int]) -> str:
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
