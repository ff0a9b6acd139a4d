"""Compare a recipe with a proven plan, and describe in words where their edits differ.

The plan is turned into a recipe first. Each edit is then described in a phrase, and two edits are
the same if their phrases are. A phrase gives an axis by the elements that it covers in this model,
so ``{dim: 1}`` and ``{dim: 1, size: n_embd}`` can be the same edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.plan import Merge, Plan, Verdict
from enjoyln_cli.recipe.expand import ExpandedVariant, expand
from enjoyln_cli.recipe.from_plan import line_for_each, plan_layers
from enjoyln_cli.recipe.model import (
    CentredTensor,
    Recipe,
    TurnedBasis,
    sizes_by_name,
    variant_for,
)
from enjoyln_cli.recipe.templates import Span, concrete, to_template
from enjoyln_cli.recipe.write import merge_data, untied_data, widening_data
from enjoyln_cli.recipe.yaml_text import dump_inline

Kind = Literal[
    "untied", "settings", "norms", "writers", "output", "input", "widened", "merged", "bases"
]
"""The kind of an edit: a field of the plan, or the place of an added operation."""
KEEPS = "keeps it"
"""The phrase for a norm that stays LayerNorm."""

_ABSENT: dict[Kind, tuple[str, str]] = {
    "untied": ("does not untie it", "does not untie it"),
    "settings": ("does not set it", "does not set it"),
    "norms": ("does not name it", "has no such norm"),
    "writers": ("does not centre it", "does not centre it"),
    "output": ("does not centre its output", "does not centre its output"),
    "input": ("does not centre its input", "does not centre its input"),
    "widened": ("does not widen its MLP", "does not widen its MLP"),
    "merged": ("does not merge it", "does not merge it"),
    "bases": ("does not turn it", "does not turn it"),
}
"""The phrases for a name that the recipe lacks, and for one that the proof lacks."""


@dataclass(frozen=True)
class Comparison:
    """For one kind of edit: what a recipe and a proof do to each name, as phrases."""

    kind: Kind
    recipe: Mapping[str, str]
    proof: Mapping[str, str]

    def differences(self) -> Iterator[tuple[str, str]]:
        """Each name with different phrases, and a sentence with both."""
        unnamed, unknown = _ABSENT[self.kind]
        for name in dict.fromkeys([*self.proof, *self.recipe]):
            ours, theirs = self.recipe.get(name, unnamed), self.proof.get(name, unknown)
            if ours != theirs:
                yield name, f"the recipe {ours}, the proof {theirs}"


def compare(recipe: ExpandedVariant, plan: Plan, sizes: Mapping[str, Any]) -> list[Comparison]:
    """One comparison for each kind of edit; ``sizes`` gives the values of named sizes."""
    proof = expand(line_for_each(plan, {}), plan_layers(plan))
    shapes = {one.parameter: one.shape for one in plan.edited_tensors}
    ours, theirs = (_in_words(edits, shapes, sizes) for edits in (recipe, proof))
    return [Comparison(kind, ours[kind], theirs[kind]) for kind in _ABSENT]


def differences(recipe: Recipe, plan: Plan, *, config: Any = None) -> tuple[str, ...]:
    """The differences between a recipe's edits and a proven plan, one line each.

    Reasons and culprits of kept norms are not compared. A difference that is the same in several
    layers is one line.
    """
    layers = plan_layers(plan)
    try:
        variant = variant_for(recipe, plan.model_type, plan.model_class, config)
        expanded = expand(variant, layers)
    except RecipeError as error:
        return (f"{recipe.where}: {error}",)
    found = compare(expanded, plan, sizes_by_name(recipe, config))
    lines = _by_layer((one for kind in found for one in kind.differences()), layers)
    calls = plan.covered.forms if plan.covered else ()
    for what, ours, theirs in (
        ("classes", variant.classes, plan.classes),
        ("outputs", variant.outputs, plan.outputs),
        ("entry_inputs", variant.entry_inputs, plan.entry_inputs),
        ("unproven", variant.unproven, plan.unproven),
        ("calls", map(call_text.to_text, variant.calls), map(call_text.to_text, calls)),
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
    edits: ExpandedVariant, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any]
) -> dict[Kind, dict[str, str]]:
    """The phrase for each name; ``shapes`` are those of the model's parameters."""
    values: dict[Kind, dict[str, str]] = {"output": {}, "input": {}}
    for (module, place), op in edits.ops.items():
        values[place][module] = f"centres its {place} over {_elements(op.axis, None, sizes)}"
    centred = {
        name: {_centred_in_words(line, shapes.get(name), sizes) for line in lines}
        for name, lines in edits.writers.items()
        if lines
    }
    return values | {
        "untied": {
            one.tensor: f"unties it: {dump_inline(untied_data(one))}" for one in edits.untied
        },
        "settings": {name: f"sets it to {value}" for name, value in edits.settings.items()},
        "norms": {name: _verdict_in_words(line) for name, line in edits.norms.items()},
        "writers": {name: " and ".join(sorted(texts)) for name, texts in centred.items()},
        "widened": {
            name: f"widens its MLP: {dump_inline({one.second.tensor: widening_data(one)})}"
            for name, one in edits.widened.items()
        },
        "merged": {
            name: f"merges it: {dump_inline(merge_data(one))}"
            for name, one in edits.merged.items()
            if isinstance(one, Merge)
        },
        "bases": {name: _turned_in_words(one, shapes, sizes) for name, one in edits.bases.items()},
    }


def _verdict_in_words(verdict: Verdict) -> str:
    if verdict.status == "kept":
        return KEEPS
    with_ops = f"with the centring of {list_names(set(verdict.ops))}"
    return f"folds it {with_ops if verdict.ops else 'in the weights'}"


def _centred_in_words(
    line: CentredTensor, shape: tuple[int, ...] | None, sizes: Mapping[str, Any]
) -> str:
    scale, text = line.scale, "centres it"
    if line.axis and shape is not None:
        extent = shape[line.axis.dim] if line.axis.dim < len(shape) else 0
        text += f" over {_elements(line.axis, extent, sizes)}"
    if scale is None:
        return text
    stored = "" if scale.tensor == scale.parameter else f" (stored as {scale.tensor})"
    return f"merges {scale.parameter}{stored} into it and {text}"


def _turned_in_words(
    basis: TurnedBasis, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, Any]
) -> str:
    tensors = sorted(
        f"{one.tensor}: {_centred_in_words(one, shapes.get(one.parameter), sizes)}"
        for one in basis.tensors
    )
    ones = ", which keeps the vector of ones" if basis.fixes_ones else ""
    return f"turns the {basis.kind}{ones}: {'; '.join(tensors)}"


def _elements(span: Span, extent: int | None, sizes: Mapping[str, Any]) -> str:
    try:
        axis = concrete(span, extent, sizes)
    except RecipeError as error:
        return f"an axis that does not fit this model ({error})"
    if (axis.start, axis.outer, axis.inner) == (0, 1, 1):
        return f"the {axis.size} elements of dimension {axis.dim}"
    step = f", one every {axis.step}" if axis.step else ""
    return (
        f"{axis.outer} groups of {axis.size} elements ({axis.inner} apart) "
        f"of dimension {axis.dim} from element {axis.start}{step}"
    )
