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
from enjoyln_cli.plan.fold_options import PLAIN, Options
from enjoyln_cli.plan.plan import (
    Centring,
    EditedTensor,
    NormFusion,
    Plan,
    RotationGroup,
    UnfusedNorm,
    Verdict,
    size_settings,
)
from enjoyln_cli.recipe.model import SECTIONS, VERSION, EditLines, Recipe, as_mapping
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
    options: Options = PLAIN,
    source: str = "",
    depends: Sequence[str] = DEPENDS,
) -> Recipe:
    """The recipe of one plan, with its ``source`` and the versions of the packages that made it.

    ``config`` is a mapping or a transformers config. The plan holds only for its values of the
    attributes ``depends``.
    """
    values = as_mapping(config)
    lines = lines_of(plan)
    layers = layers_in(lines)
    joined: dict[str, Any] = {
        name: join_layers(getattr(lines, name), layers, gaps=name != "norms") for name in SECTIONS
    }
    when = {name: values[name] for name in sorted(depends) if name in values}
    return Recipe(
        **{**vars(lines), "when": when, **joined},
        version=VERSION,
        model_type=plan.model_type,
        source=source,
        options=options,
        versions=versions("torch", "transformers"),
    )


def lines_of(plan: Plan) -> EditLines:
    """The edits of a plan, with a line for each norm, parameter and module."""
    sizes = size_settings(plan.widened)  # they are in the lines of the MLPs
    return EditLines(
        model_class=plan.model_class,
        classes=plan.classes,
        outputs=plan.outputs,
        norms=_section(plan.norms, "norm"),
        centre=_section(plan.writers, "parameter"),
        centring_ops=_section(plan.ops, "module"),
        merge=_section((*plan.fused, *plan.unfused), "norm"),
        widen=_section(plan.widened, "second"),
        rotate=_section(plan.rotated, "name"),
        untie=_section(plan.untied, "parameter"),
        config={entry.name: entry.value for entry in plan.settings if entry not in sizes},
        entry_inputs=plan.entry_inputs,
        unproven=plan.unproven,
        calls=tuple(map(call_text.to_text, plan.covered.forms)) if plan.covered else (),
    )


def layers_in(lines: EditLines) -> dict[str, int]:
    """The number of layers under each prefix of the names of the lines."""
    return layers_of(name for section in SECTIONS for name in getattr(lines, section))


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
    if isinstance(edit, Verdict) and edit.status != "kept":
        return {"fold_with": list(edit.ops)} if edit.ops else "fold"
    if isinstance(edit, (Verdict, UnfusedNorm)):
        culprit = {"culprit": edit.culprit} if edit.culprit else {}
        return {KEEP: edit.reason, **culprit} if edit.reason or culprit else KEEP
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


def _axis(edit: EditedTensor | Centring) -> dict[str, Any]:
    """The dimension, whether it has a mean for each of several groups, and if only a part has."""
    if isinstance(edit, Centring):
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
