"""A recipe's variant with every layer named: what it says of each norm, parameter and module.

Of several lines that cover a name those with the fewest placeholders decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.plan import Merge, Place, UnmergedNorm, UntiedParameter, Verdict, Widening
from enjoyln_cli.recipe.model import CentredTensor, CentredValue, Line, Variant, name_of
from enjoyln_cli.recipe.templates import expand_name, fill, placeholders, rename_in

MAX_NAMES = 300_000
"""No recipe may stand for more names than this."""

PLACES: tuple[Place, ...] = ("output", "input")

L = TypeVar("L", bound=Line)


@dataclass(frozen=True, kw_only=True)
class ExpandedVariant:
    """Every line, repeated for each layer that it stands for."""

    norms: Mapping[str, Verdict]
    writers: Mapping[str, tuple[CentredTensor, ...]]
    """By parameter; several where it has several parts or tensors, none where it is left."""
    ops: Mapping[tuple[str, Place], CentredValue]
    widened: Mapping[str, Widening]
    """By the parameter that reads the hidden units."""
    merged: Mapping[str, Merge | UnmergedNorm]
    untied: tuple[UntiedParameter, ...]
    settings: Mapping[str, bool | int]


def expand(variant: Variant, layers: Mapping[str, int]) -> ExpandedVariant:
    """Every name that a variant stands for. Raises ``RecipeError`` for a line without any."""
    return ExpandedVariant(
        norms=_one_each(variant.norms, layers),
        writers=_writers(variant, layers),
        ops={
            (module, place): line
            for place in PLACES
            for module, line in _one_each(
                (op for op in variant.ops if op.place == place), layers
            ).items()
        },
        widened=_one_each(variant.widened, layers),
        merged=_one_each(variant.merged, layers),
        untied=variant.untied,
        settings=variant.settings,
    )


def _one_each(lines: Iterable[L], layers: Mapping[str, int]) -> dict[str, L]:
    """By name, the one line for it, with the numbers of its layer."""
    found: dict[str, L] = {}
    for name, deciding in _deciding(lines, layers).items():
        if len(deciding) > 1:
            raise RecipeError(f"two lines name {name}; leave one of them")
        line, numbers = deciding[0]
        found[name] = _filled(line, numbers)
    return found


def _writers(variant: Variant, layers: Mapping[str, int]) -> dict[str, tuple[CentredTensor, ...]]:
    found: dict[str, tuple[CentredTensor, ...]] = {}
    total = 0
    for name, deciding in _deciding(variant.writers, layers).items():
        left = [line for line, _ in deciding if line.axis is None]
        if left and len(left) < len(deciding):
            raise RecipeError(f"{name} is both centred and left out; leave one of the lines out")
        lines: list[CentredTensor] = []
        for line, numbers in deciding if not left else ():
            tensors = _tensors(line, numbers, layers)
            one = _filled(line, numbers)
            lines += [one] if tensors == [one.tensor] else [replace(one, tensor=t) for t in tensors]
        total += len(lines)
        if total > MAX_NAMES:
            raise RecipeError(f"centres more than {MAX_NAMES} tensors; leave some out")
        found[name] = tuple(lines)
    return found


def _deciding(
    lines: Iterable[L], layers: Mapping[str, int]
) -> dict[str, list[tuple[L, dict[str, int]]]]:
    """For every name the lines with the fewest placeholders that cover it, in order of the file."""
    found: dict[str, list[tuple[L, dict[str, int]]]] = {}
    count = 0
    for line in lines:
        template, before = name_of(line), count
        beside = sum(len(part) for part in vars(line).values() if isinstance(part, tuple))
        for name, numbers in expand_name(template, layers):
            count += 1 + beside
            if count > MAX_NAMES:
                raise RecipeError(f"stands for more than {MAX_NAMES} names; leave some out")
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
    """The stored tensors of one parameter; several where a placeholder is left, as for experts."""
    names = [n for n, _ in islice(expand_name(fill(line.tensor, numbers), layers), MAX_NAMES)]
    if not names or len(names) == MAX_NAMES:
        few = "nothing" if not names else "too many names"
        raise RecipeError(f"{line.tensor} matches {few}; the model has no such layers")
    return names


def _filled(line: L, numbers: Mapping[str, int]) -> L:
    return rename_in(line, lambda _, text: fill(text, numbers)) if numbers else line
