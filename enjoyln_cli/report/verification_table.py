"""The results of a verification as rows of text, for the terminal and the model card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from enjoyln_cli.text import number

Texts = tuple[str, str, str, str]

NONE = "-"
"""Shown for a number that was not measured."""

FEW_TOKENS = 256
"""A perplexity over fewer tokens (less than one window of text) is marked as unreliable."""


HELPS = 0.95
"""A rotation helps a quantisation whose error is less than this times that of the original."""


def verification_heads(found: Mapping[str, Any]) -> Texts:
    """The heads of the columns."""
    return ("", "rotated" if found.get("quantised") else "folded", "original", "")


def verification_rows(found: Mapping[str, Any]) -> list[Texts]:
    """Each error next to the original's own rounding error, under ``verification_heads``.

    ``found`` has the fields of a ``Verification``, from the object or from ``enjoyln_verify.json``.
    A number that was not measured is shown as ``NONE``.
    """
    rows: list[Texts] = [
        ("identity error", number(found["identity_error"]), "", "the algebra, in float64"),
        ("storage error", number(found["storage_error"]), "", "rounding the new weights"),
        *_run_rows(found),
        _ratio_row(found),
        ("KL divergence", number(found["kl"]), "", "from the original"),
        ("top-1 agreement", number(found["top1_agreement"]), "", "with the original"),
    ]
    if scores := found["perplexity"]:
        before, after = (f"{scores[key]:.4f}" for key in ("original", "folded"))
        count = scores["tokens"]
        doubt = ": too few to be reliable" if count < FEW_TOKENS else ""
        rows.append(("perplexity", after, before, f"over {count:.0f} tokens{doubt}"))
    return rows + quantisation_rows(found)


def _run_rows(found: Mapping[str, Any]) -> list[Texts]:
    """The errors of the model as it runs; without RMSNorm there is only the stock class."""
    before, dtype = number(found["original_error"]), found["compute_dtype"]
    stock = ("stock error", number(found["stock_error"]), before, "plain transformers class")
    if not found["norm_input_mean"]:
        return [("runtime error", stock[1], before, f"plain class, in {dtype}")]
    return [
        ("runtime error", number(found["runtime_error"]), before, f"RMSNorm, in {dtype}"),
        stock,
    ]


def quantisation_rows(found: Mapping[str, Any]) -> list[Texts]:
    """The error of each quantisation that was simulated; empty for a model that was not rotated.

    Only inputs of the user's own can show that a rotation does not help.
    """
    rows: list[Texts] = []
    has_user_inputs = bool(found["own_rows"])
    for name, errors in found["quantised"].items():
        before, after = errors["original"], errors["converted"]
        note = "simulated" if has_user_inputs else "simulated, made-up inputs"
        if has_user_inputs and after >= HELPS * before:
            note += "; rotating does not help"
        rows.append((f"{name} error"[:20], number(after), number(before), note))
    return rows


def quantisation_notes(found: Mapping[str, Any]) -> list[str]:
    """What the errors of simulated quantisation rest on; empty if none was simulated."""
    notes: list[str] = []
    if not found.get("quantised"):
        return notes
    if not found["own_rows"]:
        notes.append(
            "made-up inputs say little about quantising; pass texts of your own: --samples FILE"
        )
    dtype = found.get("compute_dtype")
    if dtype in ("float16", "bfloat16"):
        again = f"the rotation rounded every weight to {dtype} once more"
        notes.append(f"{again}; rotate with --dtype float32 if you quantise the result")
    return notes


def reader_rows(found: Mapping[str, Any]) -> list[Texts]:
    """What the linear layers that read each basis get as inputs; ``found`` is a verification."""
    rows: list[Texts] = []
    for what, bases in _by_label(found["readers"]).items():
        for key, note in (("largest", "feature over rms"), ("kurtosis", "3 if normal")):
            before, after = (_mean([one[key][side] for one in bases]) for side in (0, 1))
            rows.append((f"{key} in {what}", number(after), number(before), note))
    return rows


def _by_label(readers: Iterable[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The bases by a short name; the values of all attentions have one."""
    labelled: dict[str, list[Mapping[str, Any]]] = {}
    streams = [one for one in readers if one["kind"] == "stream"]
    for one in readers:
        label = "stream"
        if one["kind"] != "stream":
            label = str(one["kind"])
        elif len(streams) > 1:
            label = f"stream {streams.index(one) + 1}"
        labelled.setdefault(label, []).append(one)
    return labelled


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _ratio_row(found: Mapping[str, Any]) -> Texts:
    """The ratio and its limits: that for the true ratio, and what few inputs allow by chance."""
    limit = found["max_ratio"]
    note = f"limit {number(limit)}, by chance {number(limit * found['chance'])}"
    return ("ratio", number(found["ratio"]), "1", note)
