"""MLPs with new hidden units, as lines of a recipe: written, read, and held against the proof.

A line stands for one MLP or for that of every layer, under the name of the weight that reads the
hidden units. A config has one number for many MLPs, so a recipe widens all of them or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan.mean_units import UNITS
from enjoyln_cli.plan.plan import Grown, Widening
from enjoyln_cli.recipe import validation


@dataclass(frozen=True)
class WidenLine:
    """One MLP that gets more hidden units, or that of every layer; see ``plan.Widening``."""

    first: Grown
    bias: Grown | None
    second: Grown
    size: int
    to: int
    attribute: str
    subtracts: bool

    @property
    def name(self) -> str:
        """The parameter that stands for the MLP."""
        return self.second.parameter

    @property
    def parts(self) -> tuple[Grown, ...]:
        """All parameters that grow."""
        return tuple(part for part in (self.first, self.bias, self.second) if part)

    def renamed(self, name: Callable[[str], str]) -> WidenLine:
        """The same with other names."""

        def part(old: Grown) -> Grown:
            return replace(old, parameter=name(old.parameter), tensor=name(old.tensor))

        bias = self.bias and part(self.bias)
        return replace(self, first=part(self.first), bias=bias, second=part(self.second))


def asked_of(
    widened: Iterable[Widening], asked: Mapping[str, WidenLine], where: str
) -> tuple[Widening, ...]:
    """Of the proven ones those that a recipe asks for: all that one config attribute counts.

    Raises ``RecipeError`` where it asks for anything else.
    """
    proven = {one.second.parameter: one for one in widened}
    for name, line in asked.items():
        if name not in proven:
            raise RecipeError(
                f"{where}: widens the MLP of {name}, which is not part of the proof; take it "
                "out, or write widen_mlp: true under options"
            )
        if line != line_of(proven[name]):
            right = in_words(line_of(proven[name]))
            raise RecipeError(f"{where}: {in_words(line)}, and the proof {right}; take that")
    found = tuple(one for name, one in proven.items() if name in asked)
    attributes = {one.attribute for one in found}
    for name, one in proven.items():
        if one.attribute in attributes and name not in asked:
            raise RecipeError(
                f"{where}: {one.attribute} counts the hidden units of {name}, "
                "too; list that under widen, or none of them"
            )
    return found


def line_of(one: Widening) -> WidenLine:
    """A widening without the size that its tensors tell."""
    return WidenLine(
        one.first, one.bias, one.second, one.size, one.to, one.attribute, one.subtracts
    )


def in_words(line: WidenLine) -> str:
    """What happens to the MLP."""
    zeros = "" if line.subtracts else " by zeros"
    tensors = ", ".join(f"{part.tensor} (dimension {part.dim})" for part in line.parts)
    return f"widens {tensors} from {line.size} to {line.to}{zeros}, as {line.attribute} says"


def written(line: WidenLine) -> dict[str, Any]:
    """The line as it stands in a recipe, under the name of the tensor that reads the units."""
    second, first, bias = line.second, line.first, line.bias
    data: dict[str, Any] = {"dim": second.dim} | _if_other("parameter", second)
    data |= {"first": first.tensor} | _if_other("first_parameter", first)
    if bias:
        data |= {"bias": bias.tensor} | _if_other("bias_parameter", bias)
    data |= {"attribute": line.attribute, "from": line.size, "to": line.to}
    return data if line.subtracts else data | {"zeros": True}


def _if_other(key: str, part: Grown) -> dict[str, str]:
    return {} if part.parameter == part.tensor else {key: part.parameter}


def read(name: str, value: Any, at: str) -> WidenLine:
    """What ``written`` gives, as it comes from a file. Raises ``RecipeError``."""
    needed = ("dim", "first", "attribute", "from", "to")
    allowed = ("parameter", "first_parameter", "bias", "bias_parameter", "zeros")
    data = validation.mapping(value, at, needed, allowed)
    dim = validation.number(data["dim"], f"{at}.dim", 0, 1)

    def part(tensor: Any, key: str, dim: int) -> Grown:
        named = validation.name(tensor, at)
        return Grown(validation.name(data.get(key, named), f"{at}.{key}"), named, dim)

    size = validation.number(data["from"], f"{at}.from", 1)
    if "zeros" in data and data["zeros"] is not True:
        raise RecipeError(f"{at}.zeros: {validation.shown(data['zeros'])}; only true has a meaning")
    return WidenLine(
        part(data["first"], "first_parameter", 1 - dim),
        part(data["bias"], "bias_parameter", 0) if "bias" in data else None,
        part(name, "parameter", dim),
        size,
        validation.number(data["to"], f"{at}.to", size + UNITS),
        validation.text(data["attribute"], f"{at}.attribute"),
        "zeros" not in data,
    )


def recorded(line: WidenLine, shapes: Mapping[str, Sequence[int]], where: str) -> Widening:
    """What was done to the MLP; ``shapes`` are those of the result.

    Raises ``RecipeError`` where these are not what the line says.
    """
    for part in line.parts:
        shape = shapes.get(part.tensor, ())
        if len(shape) <= part.dim or shape[part.dim] != line.to:
            raise RecipeError(
                f"{where}: {part.tensor} has shape {list(shape)}, and not {line.to} elements "
                f"along dimension {part.dim}; it belongs to another result"
            )
    features = int(shapes[line.second.tensor][1 - line.second.dim])
    first, bias, second = line.first, line.bias, line.second
    return Widening(
        first, bias, second, line.size, line.to, features, line.attribute, line.subtracts
    )


def before(
    widened: Iterable[Widening], shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[int, ...]]:
    """The shapes that the tensors of wider MLPs had."""
    found = {}
    for one in widened:
        for part in one.parts:
            shape = list(shapes[part.tensor])
            shape[part.dim] = one.size
            found[part.tensor] = tuple(shape)
    return found
