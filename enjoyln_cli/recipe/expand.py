"""A recipe's variant with every layer named: what it asks of each norm, parameter and module.

Of several lines that cover a name those with the fewest placeholders decide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.plan import Place, Scale
from enjoyln_cli.recipe.from_plan import Line, NormLine, Variant, WidenLine, WriterLine
from enjoyln_cli.recipe.merges import MergeLine
from enjoyln_cli.recipe.templates import Span, expanded, filled, placeholders

MOST_NAMES = 300_000
"""No recipe may stand for more names than this."""

PLACES: tuple[Place, ...] = ("output", "input")


@dataclass(frozen=True)
class Edit:
    """What a recipe asks of one parameter over one axis. See ``plan.Writer``."""

    tensors: tuple[str, ...]
    span: Span
    held: Span | None
    scale: Scale | None


@dataclass(frozen=True)
class Asked:
    """All that a recipe asks for."""

    norms: Mapping[str, NormLine]
    writers: Mapping[str, tuple[Edit, ...]]
    """By parameter; several where different parts of it are centred."""
    left: frozenset[str]
    """Parameters that the recipe leaves by name."""
    ops: Mapping[tuple[str, Place], tuple[Span, str]]
    widened: Mapping[str, WidenLine]
    """By ``WidenLine.name``."""
    merged: Mapping[str, MergeLine]
    """By norm."""


def asked_for(variant: Variant, layers: Mapping[str, int], where: str) -> Asked:
    """Every name that a variant stands for. Raises ``RecipeError`` for a line without any."""
    norms: dict[str, NormLine] = {}
    for name, found in _deciding(variant.norms, lambda line: line.name, layers, where).items():
        line, numbers = _only(found, name, where)
        ops = tuple(filled(op, numbers) for op in line.ops)
        reason, culprit = filled(line.reason, numbers), filled(line.culprit, numbers)
        norms[name] = NormLine(name, line.fold, ops, reason, culprit)
    writers, left = _edits(variant, layers, where)
    ops_asked: dict[tuple[str, Place], tuple[Span, str]] = {}
    for place in PLACES:
        lines_here = [line for line in variant.ops if line.place == place]
        for name, at in _deciding(lines_here, lambda op: op.module, layers, where).items():
            op, numbers = _only(at, name, where)
            ops_asked[name, place] = op.span, filled(op.reason, numbers)
    widened: dict[str, WidenLine] = {}
    for name, lines in _deciding(variant.widened, lambda line: line.name, layers, where).items():
        mlp, numbers = _only(lines, name, where)
        widened[name] = mlp.renamed(partial(filled, numbers=numbers))
    merged: dict[str, MergeLine] = {}
    total = 0
    for name, some in _deciding(variant.merged, lambda line: line.norm, layers, where).items():
        norm, numbers = _only(some, name, where)
        total += len(norm.names)
        if total > MOST_NAMES:
            raise RecipeError(f"{where}: merges into more than {MOST_NAMES} names; leave some out")
        merged[name] = norm.renamed(partial(filled, numbers=numbers))
    return Asked(norms, writers, left, ops_asked, widened, merged)


def _edits(
    variant: Variant, layers: Mapping[str, int], where: str
) -> tuple[dict[str, tuple[Edit, ...]], frozenset[str]]:
    """By parameter, what is centred; and the parameters that are left as they are."""
    edits: dict[str, tuple[Edit, ...]] = {}
    left: set[str] = set()
    total = 0
    for name, lines in _deciding(variant.writers, lambda w: w.parameter, layers, where).items():
        ways: dict[tuple[Span, Span | None, Scale | None], list[str]] = {}
        for line, numbers in lines:
            if line.span is None:
                left.add(name)
                continue
            way = line.span, line.held, _filled_scale(line.scale, numbers)
            tensors = _tensors(line, numbers, layers, where)
            total += len(tensors)
            ways.setdefault(way, []).extend(tensors)
        if name in left and ways or total > MOST_NAMES:
            problem = f"{name} is both centred and left out" if name in left else "too many tensors"
            raise RecipeError(f"{where}: {problem}; leave one of the lines out")
        if ways:
            edits[name] = tuple(Edit(tuple(found), *way) for way, found in ways.items())
    return edits, frozenset(left)


def _deciding(
    lines: Iterable[Line], name_of: Callable[[Line], str], layers: Mapping[str, int], where: str
) -> dict[str, list[tuple[Line, dict[str, int]]]]:
    """For every name the lines with the fewest placeholders that cover it, in order of the file."""
    found: dict[str, list[tuple[Line, dict[str, int]]]] = {}
    count = 0
    for line in lines:
        template = name_of(line)
        before = count
        for name, numbers in expanded(template, layers):
            count += 1
            if count > MOST_NAMES:
                raise RecipeError(f"{where}: stands for more than {MOST_NAMES} names")
            others = found.setdefault(name, [])
            fewest = placeholders(name_of(others[0][0])) if others else len(numbers)
            if len(numbers) < fewest:
                others.clear()
            if len(numbers) <= fewest:
                others.append((line, numbers))
        if count == before:
            raise RecipeError(f"{where}: {template} matches nothing; the model has no such layers")
    return found


def _filled_scale(scale: Scale | None, numbers: Mapping[str, int]) -> Scale | None:
    return scale and Scale(filled(scale.parameter, numbers), filled(scale.tensor, numbers))


def _tensors(
    line: WriterLine, numbers: Mapping[str, int], layers: Mapping[str, int], where: str
) -> list[str]:
    """The stored tensors of one parameter; several where a placeholder is left, as for experts."""
    names = [n for n, _ in islice(expanded(filled(line.tensor, numbers), layers), MOST_NAMES)]
    if not names or len(names) == MOST_NAMES:
        few = "nothing" if not names else "too many names"
        raise RecipeError(f"{where}: {line.tensor} matches {few}; the model has no such layers")
    return names


def _only(
    found: list[tuple[Line, dict[str, int]]], name: str, where: str
) -> tuple[Line, dict[str, int]]:
    if len(found) > 1:
        raise RecipeError(f"{where}: two lines name {name}; leave one of them")
    return found[0]
