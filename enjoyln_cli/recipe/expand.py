"""Expand a recipe's variant: one line for each norm, parameter and module of the model.

If several lines match a name, the lines with the fewest placeholders win.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.plan import Merge, Place, UnmergedNorm, UntiedParameter, Verdict, Widening
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

PLACES: tuple[Place, ...] = ("output", "input")

L = TypeVar("L", bound=Line)


@dataclass(frozen=True, kw_only=True)
class ExpandedVariant:
    """A variant in which every line is repeated for each layer that it stands for."""

    norms: Mapping[str, Verdict]
    writers: Mapping[str, tuple[CentredTensor, ...]]
    """By parameter; several lines if it has several parts or tensors, none if not centred."""
    ops: Mapping[tuple[str, Place], CentredValue]
    widened: Mapping[str, Widening]
    """By the weight of the layer that reads the hidden units."""
    merged: Mapping[str, Merge | UnmergedNorm]
    bases: Mapping[str, TurnedBasis]
    untied: tuple[UntiedParameter, ...]
    settings: Mapping[str, bool | int]


def expand(variant: Variant, layers: Mapping[str, int]) -> ExpandedVariant:
    """Expand every line of a variant. Raises ``RecipeError`` if a line matches no name."""
    return ExpandedVariant(
        norms=_one_each(variant.norms, layers),
        writers=_writers(variant.writers, layers),
        ops={
            (module, place): line
            for place in PLACES
            for module, line in _one_each(
                (op for op in variant.ops if op.place == place), layers
            ).items()
        },
        widened=_one_each(variant.widened, layers),
        merged=_one_each(variant.merged, layers),
        bases={
            name: _expanded_basis(line, layers)
            for name, line in _one_each(variant.bases, layers).items()
        },
        untied=variant.untied,
        settings=variant.settings,
    )


def _one_each(lines: Iterable[L], layers: Mapping[str, int]) -> dict[str, L]:
    """The one line for each name, with the layer numbers filled in."""
    found: dict[str, L] = {}
    for name, deciding in _winning_lines(lines, layers).items():
        if len(deciding) > 1:
            raise RecipeError(f"two lines name {name}; remove one of them")
        line, numbers = deciding[0]
        found[name] = _filled(line, numbers)
    return found


def _expanded_basis(line: TurnedBasis, layers: Mapping[str, int]) -> TurnedBasis:
    """A basis with a line for each of its tensors and norms."""
    tensors = tuple(one for lines in _writers(line.tensors, layers).values() for one in lines)
    norms = tuple(name for norm in line.norms for name, _ in expand_name(norm, layers))
    return replace(line, tensors=tensors, norms=norms)


def _writers(
    given: Iterable[CentredTensor], layers: Mapping[str, int]
) -> dict[str, tuple[CentredTensor, ...]]:
    found: dict[str, tuple[CentredTensor, ...]] = {}
    total = 0
    for name, deciding in _winning_lines(given, layers).items():
        left = [line for line, _ in deciding if line.axis is None]
        if left and len(left) < len(deciding):
            raise RecipeError(f"one line centres {name} and another leaves it; remove one of them")
        lines: list[CentredTensor] = []
        for line, numbers in deciding if not left else ():
            tensors = _tensors(line, numbers, layers)
            one = _filled(line, numbers)
            lines += [one] if tensors == [one.tensor] else [replace(one, tensor=t) for t in tensors]
        total += len(lines)
        if total > MAX_NAMES:
            raise RecipeError(f"centres more than {MAX_NAMES} tensors; remove some lines")
        found[name] = tuple(lines)
    return found


def _winning_lines(
    lines: Iterable[L], layers: Mapping[str, int]
) -> dict[str, list[tuple[L, dict[str, int]]]]:
    """For every name, the matching lines with the fewest placeholders, in the order of the file."""
    found: dict[str, list[tuple[L, dict[str, int]]]] = {}
    count = 0
    for line in lines:
        template, before = name_of(line), count
        beside = sum(len(part) for part in vars(line).values() if isinstance(part, tuple))
        for name, numbers in expand_name(template, layers):
            count += 1 + beside
            if count > MAX_NAMES:
                raise RecipeError(f"stands for more than {MAX_NAMES} names; remove some lines")
            others = found.setdefault(name, [])
            fewest = placeholders(name_of(others[0][0])) if others else len(numbers)
            if len(numbers) < fewest:
                others.clear()
            if len(numbers) <= fewest:
                others.append((line, numbers))
        if count == before:
            raise RecipeError(f"{template} matches nothing; the model has no such layers")
    return found


def _tensors(
    line: CentredTensor, numbers: Mapping[str, int], layers: Mapping[str, int]
) -> list[str]:
    """The stored tensors of one parameter: several if a placeholder remains, as for experts."""
    names = [n for n, _ in islice(expand_name(fill(line.tensor, numbers), layers), MAX_NAMES)]
    if not names or len(names) == MAX_NAMES:
        few = "nothing" if not names else "too many names"
        raise RecipeError(f"{line.tensor} matches {few}; the model has no such layers")
    return names


def _filled(line: L, numbers: Mapping[str, int]) -> L:
    return rename_in(line, lambda _, text: fill(text, numbers)) if numbers else line
