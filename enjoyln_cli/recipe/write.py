"""Write a recipe as YAML text; ``read`` documents the format."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.plan import (
    GrownParameter,
    Merge,
    NamedParameter,
    Reader,
    Scale,
    UnmergedNorm,
    UntiedParameter,
    Verdict,
    Widening,
)
from enjoyln_cli.recipe.model import VERSION, CentredTensor, Recipe, TurnedBasis, Variant
from enjoyln_cli.recipe.templates import axis_data
from enjoyln_cli.recipe.yaml_text import Inline, Row, dump

_HEAD = """\
# The LayerNorms of {model_type} that become RMSNorm, and the edits that keep the function the same.
# {{i}} stands for every layer; a line with the number of a layer overrides it.
# fold: in the weights alone; fold_with: with the named mean subtractions; keep: stays LayerNorm.
# To leave a norm as it is, write keep for it and pass this file with --recipe.
"""


def dump_recipe(recipe: Recipe) -> str:
    """The canonical text: the same recipe always gives the same bytes."""
    data: dict[str, Any] = {"version": VERSION, "model_type": recipe.model_type}
    data["variants"] = [_variant(variant) for variant in recipe.variants]
    if recipe.options:
        data["options"] = dict(sorted(recipe.options.items()))
    if recipe.record:
        sections = vars(recipe.record).items()
        data["record"] = {key: Inline(sorted(value.items())) for key, value in sections if value}
    return _HEAD.format(model_type=recipe.model_type) + dump(data)


def _variant(variant: Variant) -> dict[str, Any]:
    data: dict[str, Any] = {
        "model_class": variant.model_class,
        "classes": Row(variant.classes),
        "outputs": Row(variant.outputs),
        "when": Inline(sorted(variant.when.items())),
        "norms": {line.norm: _norm(line) for line in variant.norms},
        "centre": _writers(variant.writers),
        "centring_ops": [
            {"module": op.module, "place": op.place, **axis_data(op.axis), "reason": op.reason}
            for op in variant.ops
        ],
        "merge": {
            line.norm: _kept(line) if isinstance(line, UnmergedNorm) else merge_data(line)
            for line in variant.merged
        },
        "widen": {line.second.tensor: Inline(widening_data(line)) for line in variant.widened},
        "rotate": {line.parameter: _basis(line) for line in variant.bases},
        "untie": {line.tensor: Inline(untied_data(line)) for line in variant.untied},
        "config": Inline(sorted(variant.settings.items())),
        "entry_inputs": Row(variant.entry_inputs),
        "unproven": Row(variant.unproven),
        "calls": [call_text.to_text(form) for form in variant.calls],
    }
    return {key: value for key, value in data.items() if value or key == "norms"}


def _norm(line: Verdict) -> Any:
    if line.status == "kept":
        return _kept(line)
    return Inline({"fold_with": Row(line.ops)}) if line.ops else "fold"


def _kept(line: Verdict | UnmergedNorm) -> Any:
    if not line.reason:
        return "keep"
    return {"keep": line.reason} | ({"culprit": line.culprit} if line.culprit else {})


def _writers(lines: tuple[CentredTensor, ...]) -> dict[str, Any]:
    """One entry for each tensor: its axis, or a list if several parts of it are centred."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for line in lines:
        found[line.tensor].append(_writer(line))
    return {name: data[0] if len(data) == 1 else data for name, data in found.items()}


def _basis(line: TurnedBasis) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": line.kind, "size": line.size}
    data |= {"fixes_ones": True} if line.fixes_ones else {}
    data |= {"norms": Row(line.norms)} if line.norms else {}
    data |= {"inputs": Row(line.inputs)} if line.inputs else {}
    return data | {"tensors": _writers(line.tensors)}


def _writer(line: CentredTensor) -> Any:
    parameter = _parameter("parameter", line)
    if line.axis is None:
        return Inline({"leave": True} | parameter) if parameter else "leave"
    held = {"held": Inline(axis_data(line.held))} if line.held else {}
    return Inline(axis_data(line.axis) | parameter | held | _named("scale", line.scale))


def merge_data(line: Merge) -> dict[str, Any]:
    """The parameters of a norm that are merged, and the layers that they are merged into."""
    data: dict[str, Any] = {"weight": line.weight} if line.weight else {}
    data |= {"one_plus": True} if line.offset else {}
    data |= {"bias": line.bias} if line.bias else {}
    data |= {"divided": line.divided} if line.divided else {}
    return data | {"into": [_reader(reader) for reader in line.readers]}


def _reader(reader: Reader) -> Any:
    weight = _named("weight", reader.weight)
    held = {} if reader.held is None else {"held": reader.held}
    return Inline(weight | {"dim": reader.dim} | held | _named("bias", reader.bias))


def widening_data(line: Widening) -> dict[str, Any]:
    """How an MLP grows, without the key: the weight that reads its hidden units."""
    data: dict[str, Any] = {"dim": line.second.dim} | _parameter("parameter", line.second)
    data |= _named("first", line.first) | _named("bias", line.bias)
    data |= {"attribute": line.attribute, "from": line.size, "to": line.to}
    return data if line.subtracts else data | {"zeros": True}


def untied_data(line: UntiedParameter) -> dict[str, Any]:
    """The tensor that an untied tensor is a copy of."""
    source = {} if line.source == line.stored else {"source": line.source}
    return {"copy_of": line.stored} | _parameter("parameter", line) | source


def _named(key: str, one: NamedParameter | GrownParameter | Scale | None) -> dict[str, Any]:
    """A stored tensor, and its parameter name in the class if that differs."""
    return {key: one.tensor} | _parameter(f"{key}_parameter", one) if one else {}


def _parameter(
    key: str, one: NamedParameter | GrownParameter | Scale | UntiedParameter | CentredTensor
) -> dict[str, Any]:
    return {} if one.parameter == one.tensor else {key: one.parameter}
