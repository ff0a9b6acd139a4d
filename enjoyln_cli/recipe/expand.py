"""Expand a recipe's variant: one line for each norm, parameter and module of the model.

If several lines match a name, the lines with the fewest placeholders win.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import TypeVar

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.recipe.model import (
    CentredTensor,
    CentredValue,
    Line,
    TurnedBasis,
    Variant,
    name_of,
)
from enjoyln_cli.recipe.templates import expand_name, fill, placeholders, rename_in

MAX_NAMES = 300_000
"""Limit of the names that a recipe expands to."""

L = TypeVar("L", bound=Line)


def expand(variant: Variant, layers: Mapping[str, int]) -> Variant:
    """The variant with every line repeated for each layer that it stands for.

    Raises ``RecipeError`` if a line matches no name, or if two lines name the same.
    """
    return replace(
        variant,
        norms=tuple(_one_each(variant.norms, layers)),
        centre=tuple(_tensors(variant.centre, layers)),
        centring_ops=tuple(_one_each(variant.centring_ops, layers)),
        widen=tuple(_one_each(variant.widen, layers)),
        merge=tuple(_one_each(variant.merge, layers)),
        rotate=tuple(_all_tensors(line, layers) for line in _one_each(variant.rotate, layers)),
    )


def _one_each(lines: Iterable[L], layers: Mapping[str, int]) -> Iterator[L]:
    """The one line for each name, with the layer numbers filled in."""
    for (name, _), deciding in _winning_lines(lines, layers).items():
        if len(deciding) > 1:
            raise RecipeError(f"two lines name {name}; remove one of them")
        yield _filled(*deciding[0])


def _all_tensors(line: TurnedBasis, layers: Mapping[str, int]) -> TurnedBasis:
    """A basis with a line for each of its tensors and norms."""
    norms = tuple(name for norm in line.norms for name, _ in expand_name(norm, layers))
    return replace(line, tensors=tuple(_tensors(line.tensors, layers)), norms=norms)


def _tensors(lines: Iterable[CentredTensor], layers: Mapping[str, int]) -> Iterator[CentredTensor]:
    total = 0
    for (name, _), deciding in _winning_lines(lines, layers).items():
        if len({line.dim is None for line, _ in deciding}) > 1:
            raise RecipeError(f"one line centres {name} and another leaves it; remove one of them")
        for line, numbers in deciding:
            stored = fill(line.tensor, numbers)
            tensors = [tensor for tensor, _ in islice(expand_name(stored, layers), MAX_NAMES)]
            total += len(tensors)
            if not tensors:
                raise RecipeError(f"{line.tensor} matches nothing; the model has no such layers")
            if total >= MAX_NAMES:
                raise RecipeError(f"centres {MAX_NAMES} tensors or more; remove some lines")
            for tensor in tensors:
                yield replace(_filled(line, numbers), tensor=tensor)


def _winning_lines(
    lines: Iterable[L], layers: Mapping[str, int]
) -> dict[tuple[str, str], list[tuple[L, dict[str, int]]]]:
    """For every name (and place), the matching lines with the fewest placeholders."""
    found: dict[tuple[str, str], list[tuple[L, dict[str, int]]]] = {}
    count = 0
    for line in lines:
        template, before = name_of(line), count
        place = line.place if isinstance(line, CentredValue) else ""
        beside = sum(len(part) for part in vars(line).values() if isinstance(part, tuple))
        for name, numbers in expand_name(template, layers):
            count += 1 + beside
            if count > MAX_NAMES:
                raise RecipeError(f"stands for more than {MAX_NAMES} names; remove some lines")
            others = found.setdefault((name, place), [])
            fewest = placeholders(name_of(others[0][0])) if others else len(numbers)
            if len(numbers) < fewest:
                others.clear()
            if len(numbers) <= fewest:
                others.append((line, numbers))
        if count == before:
            raise RecipeError(f"{template} matches nothing; the model has no such layers")
    return found


def _filled(line: L, numbers: Mapping[str, int]) -> L:
    return rename_in(line, lambda _, text: fill(text, numbers)) if numbers else line
