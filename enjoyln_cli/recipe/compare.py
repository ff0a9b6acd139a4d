"""Compare a recipe with a proven plan, and describe in words where their edits differ.

The plan is turned into a recipe first. Two edits are the same if they have the same plain data,
with sizes in numbers and without what only explains them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import call_text, schema
from enjoyln_cli.plan.plan import Plan, UnmergedNorm, Verdict
from enjoyln_cli.recipe.expand import expand
from enjoyln_cli.recipe.from_plan import line_for_each, plan_layers
from enjoyln_cli.recipe.model import (
    CentredTensor,
    CentredValue,
    Line,
    Recipe,
    TurnedBasis,
    Variant,
    as_mapping,
    name_of,
    prefix_errors,
    variant_for,
)
from enjoyln_cli.recipe.spans import in_numbers, size_value
from enjoyln_cli.recipe.templates import to_template
from enjoyln_cli.recipe.write import DERIVED
from enjoyln_cli.recipe.yaml_text import dump_inline

Kind = Literal["untie", "config", "norms", "centre", "output", "input", "widen", "merge", "rotate"]
"""The kind of an edit: a section of the recipe, or the place of an added operation."""
KEEPS = "keeps it"
"""The phrase for a norm that stays LayerNorm."""

_PHRASES: dict[Kind, tuple[str, str]] = {
    "untie": ("unties it from", "does not untie it"),
    "config": ("sets it to", "does not set it"),
    "norms": ("folds it", "does not name it"),
    "centre": ("centres it over", "does not centre it"),
    "output": ("centres its output over", "does not centre its output"),
    "input": ("centres its input over", "does not centre its input"),
    "widen": ("widens its MLP:", "does not widen its MLP"),
    "merge": ("merges it:", "does not merge it"),
    "rotate": ("turns it:", "does not turn it"),
}
"""The phrases for an edit, before its data, and for a name without one."""

_NOT_COMPARED = DERIVED | {"reason", "culprit", "place"}


@dataclass(frozen=True)
class Comparison:
    """For one kind of edit: what a recipe and a proof do to each name, as phrases."""

    kind: Kind
    recipe: Mapping[str, str]
    proof: Mapping[str, str]

    def differences(self) -> Iterator[tuple[str, str]]:
        """Each name with different phrases, and a sentence with both."""
        absent = _PHRASES[self.kind][1]
        unknown = "has no such norm" if self.kind == "norms" else absent
        for name in dict.fromkeys([*self.proof, *self.recipe]):
            ours, theirs = self.recipe.get(name, absent), self.proof.get(name, unknown)
            if ours != theirs:
                yield name, f"the recipe {ours}, the proof {theirs}"


def compare(recipe: Variant, plan: Plan, sizes: Mapping[str, Any]) -> list[Comparison]:
    """One comparison for each kind of edit of an expanded recipe.

    ``sizes`` gives the values of named sizes. Raises ``RecipeError`` for a size that does not fit.
    """
    proof = expand(line_for_each(plan, {}), plan_layers(plan))
    shapes = {one.parameter: one.shape for one in plan.edited_tensors}
    ours, theirs = (_in_words(edits, shapes, sizes) for edits in (recipe, proof))
    return [Comparison(kind, ours[kind], theirs[kind]) for kind in _PHRASES]


def differences(recipe: Recipe, plan: Plan, *, config: Any = None) -> tuple[str, ...]:
    """The differences between a recipe's edits and a proven plan, one line each.

    Reasons and culprits of kept norms are not compared. A difference that is the same in several
    layers is one line.
    """
    layers = plan_layers(plan)
    try:
        variant = variant_for(recipe, plan.model_type, plan.model_class, config)
        found = compare(expand(variant, layers), plan, as_mapping(config))
    except RecipeError as error:
        return (f"{recipe.where}: {error}",)
    lines = _by_layer((one for kind in found for one in kind.differences()), layers)
    calls = plan.covered.forms if plan.covered else ()
    for what, ours, theirs in (
        ("classes", variant.classes, plan.classes),
        ("outputs", variant.outputs, plan.outputs),
        ("entry_inputs", variant.entry_inputs, plan.entry_inputs),
        ("unproven", variant.unproven, plan.unproven),
        ("calls", variant.calls, map(call_text.to_text, calls)),
    ):
        if (here := set(ours)) != (there := set(theirs)):
            lines.append(
                f"{what}: the recipe has {list_names(here)}, the proof {list_names(there)}"
            )
    return tuple(lines)


def list_names(names: Iterable[str]) -> str:
    """Names in alphabetical order, or ``nothing``."""
    return ", ".join(sorted(names)) or "nothing"


def _by_layer(found: Iterable[tuple[str, str]], layers: Mapping[str, int]) -> list[str]:
    """Join the lines of names that differ only in the layer."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for name, text in found:
        grouped.setdefault((to_template(name, layers)[0], text), []).append(name)
    return [
        f"{names[0]}: {text}" if len(names) == 1 else f"{template} ({len(names)} layers): {text}"
        for (template, text), names in grouped.items()
    ]


# Edits in words.


def _in_words(
    edits: Variant, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any]
) -> dict[Kind, dict[str, str]]:
    """The phrase for each name; ``shapes`` are those of the model's parameters."""
    lines: dict[Kind, tuple[Any, ...]] = {
        "untie": edits.untie,
        "norms": edits.norms,
        "centre": tuple(line for line in edits.centre if line.dim is not None),
        "output": tuple(op for op in edits.centring_ops if op.place == "output"),
        "input": tuple(op for op in edits.centring_ops if op.place == "input"),
        "widen": edits.widen,
        "merge": tuple(line for line in edits.merge if not isinstance(line, UnmergedNorm)),
        "rotate": edits.rotate,
    }
    found: dict[Kind, dict[str, str]] = {}
    for kind, some in lines.items():
        texts: dict[str, set[str]] = {}
        for line in some:
            text = _verdict(line) if isinstance(line, Verdict) else _edit(line, shapes, sizes)
            texts.setdefault(name_of(line), set()).add(text)
        verb = "" if kind == "norms" else f"{_PHRASES[kind][0]} "
        found[kind] = {name: verb + " and ".join(sorted(all_)) for name, all_ in texts.items()}
    found["config"] = {name: f"sets it to {value}" for name, value in edits.config.items()}
    return found


def _verdict(verdict: Verdict) -> str:
    if verdict.status == "kept":
        return KEEPS
    with_ops = f"with the centring of {list_names(set(verdict.ops))}"
    return f"folds it {with_ops if verdict.ops else 'in the weights'}"


def _edit(line: Line, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any]) -> str:
    """The plain data of an edit on one line, without its name."""
    with prefix_errors(name_of(line)):
        if isinstance(line, CentredTensor):
            line = _with_numbers(line, shapes, sizes)
        elif isinstance(line, CentredValue):
            line = replace(line, **in_numbers(line, None, sizes))
        elif isinstance(line, TurnedBasis):
            tensors = (_with_numbers(tensor, shapes, sizes) for tensor in line.tensors)
            line = replace(
                line,
                size=size_value(line.size, sizes),
                norms=tuple(sorted(line.norms)),
                tensors=tuple(sorted(tensors, key=str)),
            )
    data = schema.plain(line, _NOT_COMPARED)
    return dump_inline({key: item for key, item in data.items() if item != name_of(line)})


def _with_numbers(
    line: CentredTensor, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any]
) -> CentredTensor:
    """The line without names of sizes, and without the stored layout, which is the proof's."""
    shape, dim = shapes.get(line.parameter), line.dim or 0
    extent = None if shape is None else shape[dim] if dim < len(shape) else 0
    return replace(line, **in_numbers(line, extent, sizes), tensor="", held=None)
