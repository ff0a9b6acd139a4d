"""A plan as plain data and plain text, for JSON, CSV, Markdown and the terminal.

The numbers are counts of the plan's entries. Nothing is decided or measured here.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.plan import NOT_ASKED
from enjoyln_cli.text import counted, size

if TYPE_CHECKING:
    from enjoyln_cli.analysis.output_gains import Gain
    from enjoyln_cli.analysis.suggest import Suggestion
    from enjoyln_cli.plan.plan import Plan
    from enjoyln_cli.report.placement import Kind, Place

Row = dict[str, Any]
"""One model's report, ready for JSON."""

UNTIED = "an engine that ignores the copy gives wrong results; docs/untied_heads.md has a check"
"""Warning for a result with untied weights."""

MOST_CALLS = 3
"""Number of proven calls that are named in one line."""

_PATH = re.compile(r"\w+(?:\.\w+)+")
_LAYER = re.compile("(?<![0-9])(?:0|[1-9][0-9]*)(?![0-9])")
"""A layer number without leading zeros: ``01`` would be lost when the number is written again."""


def row(
    model: str,
    plan: Plan,
    paper: Sequence[str] | None = None,
    gains: Sequence[Gain] = (),
    options: Mapping[str, Plan] | None = None,
    suggested: Sequence[Suggestion] = (),
    places: Mapping[Kind, Mapping[Place, int]] | None = None,
) -> Row:
    """One model's report as plain data: all that ``report`` shows.

    * ``paper``: the norms that the paper's Algorithm 1 would convert; without it there is no such
      entry.
    * ``gains``: norms that could be converted too if some outputs may change.
    * ``options``: from option name to the plan with this option added.
    * ``suggested``: options of ``fold`` that convert more norms.
    * ``places``: how many norms of each kind stand where; without it there is no such entry.

    The keys are documented in ``docs/formats.md``.
    """
    shapes = {(w.parameter, w.tensor if w.held else ""): w.shape for w in plan.writers}
    found: Row = {
        "model": model,
        "model_type": plan.model_type,
        "model_class": plan.model_class,
        "classes": list(plan.classes),
        "outputs": list(plan.outputs),
        "layernorms": len(plan.norms),
        **_norm_counts(plan),
        "stay_layernorm": len(plan.kept),
        "tensors_centred": len(shapes),
        "parameters_centred": sum(prod(shape) for shape in shapes.values()),
        "suggestions": [vars(one) for one in suggested],
        "norms_that_stay": [
            {"name": v.norm, "reason": v.reason, "culprit": v.culprit, "path": list(v.path)}
            for v in plan.kept
        ],
        "verdicts": [
            {"name": v.norm, "verdict": VERDICTS[v.status], "subtractions": list(v.ops)}
            for v in plan.norms
        ],
        "subtractions": [
            {"module": c.module, "place": c.place, "reason": c.reason} for c in plan.ops
        ],
        "centred_tensors": [{"tensor": w.tensor, "shape": list(w.shape)} for w in plan.writers],
        "widened": [
            {
                "tensor": one.second.tensor,
                "attribute": one.attribute,
                "from": one.size,
                "to": one.to,
                "subtracts": one.subtracts,
            }
            for one in plan.widened
        ],
        "merged_norms": [
            {
                "name": one.norm,
                "weight": bool(one.weight),
                "bias": bool(one.bias),
                "into": [reader.weight.tensor for reader in one.readers],
            }
            for one in plan.merged
        ],
        "unmerged_norms": [
            {"name": one.norm, "reason": one.reason, "culprit": one.culprit}
            for one in plan.unmerged
        ],
        "merged_scales": list(
            dict.fromkeys(one.scale.tensor for one in plan.edited_tensors if one.scale)
        ),
        "rotated": [
            {
                "name": basis.name,
                "kind": basis.kind,
                "size": basis.size,
                "fixes_ones": basis.fixes_ones,
                "tensors": sorted({one.tensor for one in basis.tensors}),
                "inputs": list(basis.inputs),
            }
            for basis in plan.turned
        ],
        "not_rotated": [
            {
                "name": basis.name,
                "kind": basis.kind,
                "size": basis.size,
                "reason": basis.reason,
                "culprit": basis.culprit,
            }
            for basis in plan.bases
            if basis.reason
        ],
        "untied": [
            {"tensor": u.tensor, "copy_of": u.stored, "parameters": prod(u.shape)}
            for u in plan.untied
        ],
        "settings": {setting.name: setting.value for setting in plan.settings},
        "entry_inputs": list(plan.entry_inputs),
        "unproven": list(plan.unproven),
        "calls": [call_text.to_text(form) for form in plan.covered.forms] if plan.covered else None,
        "by_example": list(plan.by_example),
        "already_rmsnorm": dict(plan.other_norms),
        "gains": [
            {"without": list(g.without), "norms": g.norms, "outputs": list(g.outputs)}
            for g in gains
        ],
    }
    if paper is not None:
        found["paper"] = list(paper)
    if places is not None:
        found["norm_places"] = {kind: dict(counts) for kind, counts in places.items()}
    if options:
        found["options"] = {name: _with_old_names(_norm_counts(p)) for name, p in options.items()}
    return _with_old_names(found)


def _norm_counts(plan: Plan) -> Row:
    statuses = [verdict.status for verdict in plan.norms]
    return {
        "become_rmsnorm": len(plan.folded),
        "in_weights_alone": statuses.count("static"),
        "with_added_subtraction": statuses.count("centred"),
        "added_subtractions": len(plan.ops),
    }


VERDICTS = {
    "static": "in_weights_alone",
    "centred": "with_added_subtraction",
    "kept": "stays_layernorm",
}
"""The ``status`` of a ``plan.Verdict``, and its name in reports."""

_OLD_NAMES = {
    "norms": "layernorms",
    "folded": "become_rmsnorm",
    "folded_static": "in_weights_alone",
    "centering_ops": "added_subtractions",
    "writers": "tensors_centred",
    "parameters": "parameters_centred",
    "kept": "norms_that_stay",
    "ops": "subtractions",
    "centred": "centred_tensors",
    "merged": "merged_scales",
    "rms_norms": "already_rmsnorm",
}
_OLD_STATUSES = {verdict: status for status, verdict in VERDICTS.items()}


def _with_old_names(found: Row) -> Row:
    """``found`` with the keys of version 0.1 added, which version 0.3 will remove."""
    for one in found.get("verdicts", ()):
        one |= {"status": _OLD_STATUSES[one["verdict"]], "ops": one["subtractions"]}
    return found | {name: found[new] for name, new in _OLD_NAMES.items() if new in found}


def number(value: float | None) -> str:
    """``1.2e-16`` for small and large values, three digits in between, ``-`` for ``None``."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.0f}"
    return f"{value:.1e}"


def compact(names: Iterable[str]) -> list[str]:
    """Join names that differ only in layer numbers into one: ``h.0-11.ln_1``. Keeps the order."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        pattern, numbers = layers_in(name)
        groups.setdefault(pattern, []).append(numbers)
    return [_with_ranges(pattern, numbers) for pattern, numbers in groups.items()]


def layers_in(text: str) -> tuple[str, tuple[int, ...]]:
    """``text`` with ``\\0`` for every layer number, and the list of these numbers.

    Layer numbers are those in dotted paths that contain a name, such as ``h.3.ln_1``. The numbers
    in ``0.05`` and ``1e-05`` are none.
    """
    numbers: list[int] = []

    def without(number: re.Match[str]) -> str:
        numbers.append(int(number[0]))
        return "\0"

    def in_path(path: re.Match[str]) -> str:
        named = [part.isidentifier() for part in path[0].split(".")]
        return _LAYER.sub(without, path[0]) if any(named) else path[0]

    return _PATH.sub(in_path, text), tuple(numbers)


def _with_ranges(pattern: str, numbers: list[tuple[int, ...]]) -> str:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    exact = prod(len(column) for column in columns) == len(set(numbers))
    for column in columns:
        shown = _ranges(column) if exact or len(column) == 1 else "*"
        pattern = pattern.replace("\0", shown, 1)
    return pattern


def _ranges(values: list[int]) -> str:
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


_COLUMNS = {
    "model": "model",
    "LayerNorms": "layernorms",
    "become RMSNorm": "become_rmsnorm",
    "of these with an added mean subtraction": "with_added_subtraction",
    "stay": "stay_layernorm",
}
"""Column heads of the report's table, and the key of a ``Row`` for each."""
_FURTHER_COLUMNS = {
    "added mean subtractions": "added_subtractions",
    "tensors centred": "tensors_centred",
    "parameters centred": "parameters_centred",
}
"""Further columns of CSV and Markdown, which have no notes below the table."""


def cells(rows: Sequence[Row], further: bool = False) -> tuple[list[str], list[list[str]]]:
    """The column heads, and one list of cell texts for each row."""
    columns = _COLUMNS | (_FURTHER_COLUMNS if further else {})
    options = list(dict.fromkeys(name for found in rows for name in found.get("options", ())))
    paper = any("paper" in found for found in rows)
    head = [*columns, *(f"with --{name}" for name in options), *["paper's Algorithm 1"] * paper]
    body = []
    for found in rows:
        texts = [str(found[key]) for key in columns.values()]
        texts += [str(found["options"][name]["in_weights_alone"]) for name in options]
        texts += [str(len(found["paper"]))] if paper else []
        body.append(texts)
    return head, body


def reasons(found: Row) -> list[tuple[str, list[dict[str, Any]]]]:
    """The kept norms of a row, grouped by their reason."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for kept in found["norms_that_stay"]:
        groups.setdefault(kept["reason"], []).append(kept)
    return list(groups.items())


def notes(found: Row) -> list[str]:
    """The lines below the table for one model: what is added or merged, and why norms stay."""
    model, already = found["model"], sum(found["already_rmsnorm"].values())
    rotates = bool(found["rotated"] or found["not_rotated"])
    if not found["layernorms"] and not rotates:
        if already:
            line = f"{model}: {already} norms are RMSNorm already, no LayerNorm to convert"
            return [line, *_place_lines(found)]
        return [f"{model}: no LayerNorm in this model"]
    lines = [f"{model} ({found['model_class']})", *_place_lines(found)]
    if found["outputs"]:
        lines.append(f"  only these outputs stay the same: {', '.join(found['outputs'])}")
    for op in found["subtractions"]:
        where = f"{'result' if op['place'] == 'output' else 'input'} of {op['module']}"
        lines.append(f"  subtract the mean from the {where}: {op['reason']}")
    lines += _rotated_lines(found)
    lines += _widened_lines(found["widened"])
    lines += _merged_lines(found)
    for copy in found["untied"]:
        lines.append(f"  store {copy['tensor']} separately{_copy_of(copy)}")
    if found["untied"]:
        lines.append(f"    {UNTIED}")
    if more := _added_size(found):
        lines.append(f"  {more} more than the original")
    for reason, kept in reasons(found):
        if reason == NOT_ASKED:
            continue
        lines.append(
            f"  {'1 stays' if len(kept) == 1 else f'{len(kept)} stay'} LayerNorm: {reason}"
        )
        lines.append(f"    {', '.join(compact(k['name'] for k in kept))}")
        culprits = compact(dict.fromkeys(k["culprit"] for k in kept if k["culprit"]))
        lines += [f"    because of {culprit}" for culprit in culprits]
    lines += [f"  {suggestion(one)}" for one in found["suggestions"]]
    lines += [_gain_line(gain, found) for gain in found["gains"]]
    if found["by_example"]:
        called = ", ".join(found["by_example"])
        lines.append(f"  proven on example inputs, since shapes depend on input values: {called}")
    only_rotated = found["rotated"] and not found["become_rmsnorm"]
    if found["calls"] is not None:
        other = "may give wrong outputs" if only_rotated else "is refused"
        lines.append(_proven_calls(found["calls"], other))
    elif found["unproven"]:
        unproven = ", ".join(compact(found["unproven"]))
        what = "not proven for" if only_rotated else "LayerNorm is used in"
        lines.append(f"  {what} calls with {unproven}")
    return lines if len(lines) > 1 else []


def _place_lines(found: Row) -> list[str]:
    """Where the norms of each kind stand; ``docs/commands/report.md`` explains the places."""
    lines = []
    for kind, places in found.get("norm_places", {}).items():
        counts = (f"{count} {place.replace('_', ' ')}" for place, count in places.items())
        lines.append(f"  {kind}s: {', '.join(counts)}")
    return lines


def _proven_calls(calls: Sequence[str], other: str) -> str:
    """The proven calls in one short line; the marker and the row have them in full.

    ``other`` says what becomes of any other call.
    """
    shown = list(dict.fromkeys(call_text.summary(text) for text in calls))
    if not shown:
        return "  no call could be proven, so the model cannot be converted"
    more = f" and {len(shown) - MOST_CALLS} more" if len(shown) > MOST_CALLS else ""
    named = "; ".join(shown[:MOST_CALLS])
    return f"  proven for calls with {named}{more}; any other call {other}"


def _rotated_lines(found: Row) -> list[str]:
    """What an orthogonal matrix turns, and what it does not, and why."""
    lines = [
        f"  turn {_bases_in_words(found['rotated'], kind)}"
        for kind in ("stream", "heads", "values")
        if any(one["kind"] == kind for one in found["rotated"])
    ]
    groups: dict[tuple[str, str], list[Row]] = {}
    for one in found["not_rotated"]:
        groups.setdefault((one["kind"], one["reason"]), []).append(one)
    for (kind, reason), here in groups.items():
        lines.append(f"  not turned: {_bases_in_words(here, kind)}: {reason}")
        culprits = compact(dict.fromkeys(one["culprit"] for one in here if one["culprit"]))
        lines += [f"    because of {culprit}" for culprit in culprits]
    if inputs := list(dict.fromkeys(name for one in found["rotated"] for name in one["inputs"])):
        named = " and ".join(inputs)
        lines.append(f"  {named} must come from the rotated model itself, if they are passed")
    return lines


def _bases_in_words(bases: Sequence[Row], kind: str) -> str:
    here = [one for one in bases if one["kind"] == kind]
    sizes = ", ".join(map(str, dict.fromkeys(one["size"] for one in here)))
    if kind == "values":
        return f"the values of {counted(len(here), 'attention')}, {sizes} features in each head"
    names = ", ".join(compact(one["name"] for one in here if one["name"]))
    if kind == "heads":
        return f"the heads of {names}, {sizes} features each"
    return f"{counted(len(here), 'stream')} of {sizes} features ({names})"


def _copy_of(copy: Row) -> str:
    same = copy["tensor"] == copy["copy_of"]
    return "" if same else f", as a copy of {copy['copy_of']}"


def suggestion(one: Row) -> str:
    """The line for a ``suggest.Suggestion``, given as plain data."""
    if one["become_rmsnorm"] is None:
        return f"{one['option']} may convert more"
    return f"{one['option']} would convert {one['become_rmsnorm']} of {one['layernorms']}"


def _widened_lines(mlps: Sequence[Row]) -> list[str]:
    """One line for each config attribute that gives the width of MLPs, and each change of it."""
    groups: dict[tuple[str, int, int], list[Row]] = {}
    for one in mlps:
        groups.setdefault((one["attribute"], one["from"], one["to"]), []).append(one)
    lines = []
    for (attribute, units, to), here in groups.items():
        many = counted(len(here), "MLP")
        names = ", ".join(compact(one["tensor"] for one in here if one["subtracts"]))
        text = f"  add {to - units} hidden units to {many} ({attribute} {units} becomes {to})"
        lines.append(f"{text}, which subtract the mean of the residual stream: {names}")
    return lines


def _merged_lines(found: Row) -> list[str]:
    """Which norms are merged into the layers after them, and why others are not."""
    groups: dict[str, list[Row]] = {}
    for one in found["merged_norms"]:
        moving = " and ".join(name for name in ("weight", "bias") if one[name])
        groups.setdefault(moving, []).append(one)
    lines = []
    for moving, here in groups.items():
        norms = ", ".join(compact(one["name"] for one in here))
        into = ", ".join(compact(dict.fromkeys(name for one in here for name in one["into"])))
        lines.append(f"  merge the {moving} of {norms} into {into}")
    kept: dict[str, list[Row]] = {}
    for one in found["unmerged_norms"]:
        kept.setdefault(one["reason"], []).append(one)
    for reason, here in kept.items():
        norms = ", ".join(compact(one["name"] for one in here))
        lines.append(f"  not merged: {norms}: {reason}")
        culprits = compact(dict.fromkeys(one["culprit"] for one in here if one["culprit"]))
        lines += [f"    because of {culprit}" for culprit in culprits]
    return lines


def _added_size(found: Row) -> str:
    """How much larger a result is than the original: in bytes if known, else in parameters."""
    if "bytes_added" in found:
        return size(found["bytes_added"]) if found["bytes_added"] else ""
    parameters = sum(copy["parameters"] for copy in found["untied"])
    return f"{parameters:,} parameters" if parameters else ""


def _gain_line(gain: Row, found: Row) -> str:
    norms = f"{gain['norms']} more LayerNorm" + ("s become" if gain["norms"] != 1 else " becomes")
    alone = f"; for {found['model_class']} alone" if len(found["classes"]) > 1 else ""
    outputs = ",".join(gain["outputs"])
    changed = ", ".join(gain["without"])
    return f"  if {changed} may change: {norms} RMSNorm (--outputs {outputs}{alone})"


def counts(found: Row) -> str:
    """``25 of 25 LayerNorms, using 1 added mean subtraction; 49 tensors centred (...)``."""
    if found["rotated"] and not found["become_rmsnorm"]:
        turned = {name for one in found["rotated"] for name in one["tensors"]}
        merged = counted(len(found["merged_norms"]), "norm")
        return f"{counted(len(turned), 'tensor')}; {merged} merged into the layers that read them"
    norms = f"{found['become_rmsnorm']} of {found['layernorms']} LayerNorms"
    added = found["added_subtractions"]
    using = f"using {counted(added, 'added mean subtraction')}" if added else "in the weights alone"
    tensors = counted(found["tensors_centred"], "tensor")
    more = (
        ("merged_scales", "scale", "merged into them"),
        ("merged_norms", "norm", "merged into the layers that read them"),
        ("widened", "MLP", "widened"),
    )
    shown = [f"{counted(len(found[key]), noun)} {what}" for key, noun, what in more if found[key]]
    centred = f"{tensors} centred ({found['parameters_centred']:,} parameters)"
    return f"{norms}, {using}; {', '.join([centred, *shown])}"


def as_csv(rows: Sequence[Row]) -> str:
    """A line of column heads, then one line per model."""
    head, body = cells(rows, further=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, "why they stay"])
    for found, texts in zip(rows, body, strict=True):
        writer.writerow([*texts, _reason_counts(found)])
    return text.getvalue()


def as_markdown(rows: Sequence[Row]) -> str:
    """A Markdown table, for example for a README or a pull request."""
    head, body = cells(rows, further=True)
    lines = ["| " + " | ".join([*head, "why they stay"]) + " |"]
    lines.append("|---|" + "---:|" * (len(head) - 1) + "---|")
    for found, texts in zip(rows, body, strict=True):
        line = [text.replace("|", "\\|") for text in [*texts, _reason_counts(found)]]
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines) + "\n"


def _reason_counts(found: Row) -> str:
    if not found["layernorms"] and found["already_rmsnorm"]:
        return "RMSNorm already"
    return "; ".join(f"{len(kept)} x {reason}" for reason, kept in reasons(found))
