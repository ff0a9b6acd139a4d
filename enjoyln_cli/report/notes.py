"""A report's row as plain text: for CSV, for Markdown, and as lines for the terminal."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from enjoyln_cli.plan import call_text
from enjoyln_cli.plan.plan import NOT_ASKED
from enjoyln_cli.report.layer_names import compact
from enjoyln_cli.report.row import Row
from enjoyln_cli.text import counted, size

UNTIED = "an engine that ignores the copy gives wrong results; docs/untied_heads.md has a check"
"""Warning for a result with untied weights."""

MOST_CALLS = 3
"""Number of proven calls that are named in one line."""

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
        lines += _because(kept)
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


def _because(rows: Sequence[Row]) -> list[str]:
    """One line with what prevents the change of all ``rows``; none if nothing is named."""
    culprits = compact(dict.fromkeys(one["culprit"] for one in rows if one["culprit"]))
    return [f"    because of {'; '.join(culprits)}"] if culprits else []


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
        lines += _because(here)
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
        lines += _because(here)
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
