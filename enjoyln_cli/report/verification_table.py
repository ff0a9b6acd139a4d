"""The results of a verification as rows of text, for the terminal and the model card."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from enjoyln_cli.report.notes import number

Texts = tuple[str, str, str, str]

HEADS: Texts = ("", "folded", "original", "")

NONE = "-"
"""Shown for a number that was not measured."""

FEW_TOKENS = 256
"""A perplexity over fewer tokens (less than one window of text) is marked as unreliable."""


def verification_rows(found: Mapping[str, Any]) -> list[Texts]:
    """Each error next to the original's own rounding error, in the columns ``HEADS``.

    ``found`` has the fields of a ``Verification``, from the object or from ``enjoyln_verify.json``.
    A number that is missing is shown as ``NONE``.
    """
    own, dtype = _number(found, "original_error"), found.get("compute_dtype")
    rows: list[Texts] = [
        ("identity error", _number(found, "identity_error"), "", "the algebra, in float64"),
        ("storage error", _number(found, "storage_error"), "", "rounding the new weights"),
        ("runtime error", _number(found, "runtime_error"), own, f"RMSNorm, in {dtype}"),
        ("stock error", _number(found, "stock_error"), own, "plain transformers class"),
        *_ratio_rows(found),
        ("KL divergence", _number(found, "kl"), "", "from the original"),
        ("top-1 agreement", _number(found, "top1_agreement"), "", "with the original"),
    ]
    scores = found.get("perplexity")
    if isinstance(scores, Mapping) and scores:
        before, after = (_number(scores, key, "{:.4f}") for key in ("original", "folded"))
        count = _value(scores, "tokens") or 0
        doubt = ": too few to be reliable" if count < FEW_TOKENS else ""
        rows.append(("perplexity", after, before, f"over {count:.0f} tokens{doubt}"))
    return rows


def _ratio_rows(found: Mapping[str, Any]) -> list[Texts]:
    """The ratio and the worst position with their limits; one row if there are too few inputs."""
    ratio = _value(found, "ratio")
    if ratio is None or math.isnan(ratio):
        return [("ratio", NONE, "", "too few inputs to judge it")]
    error, own = (_number(found, f"worst_position_{key}") for key in ("error", "original"))
    bound, at_once = (_number(found, key) for key in ("max_position_ratio", "max_ratio"))
    return [
        ("ratio", _number(found, "ratio"), "1", f"passes up to {at_once}"),
        ("worst position", error, own, f"passes up to {bound} times"),
    ]


def _number(found: Mapping[str, Any], key: str, form: str = "") -> str:
    value = _value(found, key)
    if value is None:
        return NONE
    return form.format(value) if form else number(value)


def _value(found: Mapping[str, Any], key: str) -> float | None:
    """The number at ``key``; ``None`` if there is none, for example in an edited file."""
    value = found.get(key)
    return value if isinstance(value, int | float) else None


def count_inputs(found: Mapping[str, Any]) -> str:
    """The number of inputs that were run: ``16 inputs``, or ``8 of 128 images``."""
    rows, full = found.get("rows"), found.get("full_rows")
    kind = str(found.get("inputs_are", "inputs"))[:20]
    is_partial = isinstance(rows, int) and isinstance(full, int) and rows < full
    return f"{rows} of {full} {kind}" if is_partial else f"{rows} {kind}"
