"""Write a plan as a recipe, with one line for all layers that agree.

The lines are the plan's own edits as plain data. Left out is what the next proof finds again, and
how the checkpoint's files store a parameter: names on disk, sizes and shapes are in the stored
plan. So a recipe fits every size of its family.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from enjoyln_cli.calls import call_text
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.edited_tensors import EditedTensor
from enjoyln_cli.plan.fold_options import CENTRING_ONLY, Options
from enjoyln_cli.plan.plan import (
    MeanSubtraction,
    NormFusion,
    Plan,
    RotationGroup,
    UnfusedNorm,
    Verdict,
    size_settings,
)
from enjoyln_cli.recipe.model import VERSION, Recipe, as_mapping
from enjoyln_cli.recipe.templates import KEEP, join_layers, layers_of
from enjoyln_cli.version import versions

DEPENDS = ("tie_word_embeddings",)
"""Config attributes that every recipe records as a condition, if the config has them."""

MOVES = {"weight": "weight", "bias": "bias", "divided": "bias"}
"""Fields of a ``NormFusion`` with the stored name of a norm's parameter, and that parameter."""

_LEFT_OUT = frozenset(
    {
        "needs",
        "mlps",
        "path",
        "tensor",
        "stored",
        "module_axis",
        "shape",
        "tensors",
        "norms",
        "given",
    }
)


def recipe_of(
    plan: Plan,
    *,
    config: Any = None,
    options: Options = CENTRING_ONLY,
    source: str = "",
    depends: Sequence[str] = DEPENDS,
) -> Recipe:
    """The recipe of one plan, with its ``source`` and the versions of the packages that made it.

    ``config`` is a mapping or a transformers config. The plan holds only for its values of the
    attributes ``depends``.
    """
    sections = {
        "norms": _section(plan.norms, "norm"),
        "centred_weights": _section(plan.centred_weights, "parameter"),
        "subtractions": _section(plan.subtractions, "module"),
        "fused": _section((*plan.fused, *plan.unfused), "norm"),
        "widened": _section(plan.widened, "second"),
        "rotation_groups": _section(plan.rotated, "name"),
        "scaled": _section(plan.scaled, "name"),
        "untied": _section(plan.untied, "parameter"),
    }
    layers = layers_of(name for lines in sections.values() for name in lines)
    values, sizes = as_mapping(config), size_settings(plan.widened)  # which are in these lines
    joined: dict[str, Any] = {
        name: join_layers(lines, layers, gaps=name != "norms") for name, lines in sections.items()
    }
    return Recipe(
        **joined,
        version=VERSION,
        model_type=plan.model_type,
        model_class=plan.model_class,
        classes=plan.classes,
        outputs=plan.outputs,
        when={name: values[name] for name in sorted(depends) if name in values},
        settings={entry.name: entry.value for entry in plan.settings if entry not in sizes},
        entry_inputs=plan.entry_inputs,
        unproven=plan.unproven,
        calls=tuple(map(call_text.to_text, plan.covered.signatures)) if plan.covered else (),
        source=source,
        options=options,
        versions=versions("torch", "transformers"),
    )


def _section(edits: Iterable[Any], key: str) -> dict[str, Any]:
    """The data of each edit by its name, without the field ``key`` that has the name.

    It is a list if several edits have the same name.
    """
    lines: dict[str, list[Any]] = {}
    for edit in edits:
        name = getattr(edit, key)
        name = name if isinstance(name, str) else name.parameter
        lines.setdefault(name, []).append(_line(edit, key))
    unique = {name: _without_repeats(parts) for name, parts in lines.items()}
    return {name: parts[0] if len(parts) == 1 else parts for name, parts in unique.items()}


def _line(edit: Any, key: str) -> Any:
    if isinstance(edit, Verdict | UnfusedNorm):
        word, needed = (edit.status, edit.subtractions) if isinstance(edit, Verdict) else (KEEP, ())
        culprit = {"culprit": edit.culprit} if edit.culprit else {}
        said = list(needed) or edit.reason
        return {word: said, **culprit} if said or culprit else word
    line: dict[str, Any] = {}
    for field, item in schema.plain(edit, _LEFT_OUT).items():
        if field == key:
            continue
        if field == "axis":
            line |= _axis(edit)
        elif isinstance(edit, NormFusion) and field in MOVES:
            line[field] = f"{edit.norm}.{MOVES[field]}"
        elif not (isinstance(edit, RotationGroup) and field == "size"):
            line[field] = _short(item)
    return line


def _axis(edit: EditedTensor | MeanSubtraction) -> dict[str, Any]:
    """The dimension, whether it has a mean for each of several groups, and if only a part has."""
    if isinstance(edit, MeanSubtraction):
        axis, length = edit.axis, edit.axis.length
    else:
        axis = edit.module_axis or edit.axis
        length = axis.length if edit.module_axis else edit.shape[axis.dim]
    line: dict[str, Any] = {"dim": axis.dim}
    if axis.outer > 1 or axis.inner > 1:
        line["groups"] = True
    if axis.start or axis.step or axis.length < length:
        line["part"] = True
    return line


def _short(data: Any) -> Any:
    """The data without repeats, and with the name alone for a parameter with nothing else said."""
    if isinstance(data, Mapping):
        only_name = data.keys() == {"parameter"}
        return data["parameter"] if only_name else {k: _short(item) for k, item in data.items()}
    return _without_repeats(map(_short, data)) if isinstance(data, list) else data


def _without_repeats(items: Iterable[Any]) -> list[Any]:
    unique: list[Any] = []
    for item in items:
        unique += [] if item in unique else [item]
    return unique
