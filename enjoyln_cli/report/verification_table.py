"""The results of a verification as rows of text, for the terminal and the model card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from enjoyln_cli.text import number

Texts = tuple[str, str, str, str]

NONE = "-"
"""Shown for a number that was not measured."""

FEW_TOKENS = 256
"""A perplexity over fewer tokens (less than one window of text) is marked as unreliable."""


def verification_heads(verification: Mapping[str, Any]) -> Texts:
    """The heads of the columns; a result without RMSNorm was only rotated."""
    return ("", "folded" if verification.get("norm_input_mean") else "rotated", "original", "")


def verification_rows(verification: Mapping[str, Any]) -> list[Texts]:
    """Each error next to the original's own rounding error, under ``verification_heads``.

    ``verification`` has the fields of a ``Verification``, from the object or from
    ``enjoyln_verify.json``. A number that was not measured has no row.
    """
    rows: list[Texts] = [
        ("identity error", number(verification["identity_error"]), "", "the algebra, in float64"),
        ("storage error", number(verification["storage_error"]), "", "rounding the new weights"),
        *_run_rows(verification),
        _ratio_row(verification),
        ("KL divergence", number(verification["kl"]), "", "from the original"),
        ("top-1 agreement", number(verification["top1_agreement"]), "", "with the original"),
    ]
    if scores := verification["perplexity"]:
        before, after = (f"{scores[key]:.4f}" for key in ("original", "folded"))
        count = scores["tokens"]
        doubt = ": too few to be reliable" if count < FEW_TOKENS else ""
        rows.append(("perplexity", after, before, f"over {count:.0f} tokens{doubt}"))
    return [row for row in rows if row[1] != NONE]


def _run_rows(verification: Mapping[str, Any]) -> list[Texts]:
    """The errors of the model as it runs; without RMSNorm there is only the stock class."""
    before = number(verification["original_error"])
    dtype = verification["compute_dtype"]
    stock = ("stock error", number(verification["stock_error"]), before, "plain transformers class")
    if not verification["norm_input_mean"]:
        return [("runtime error", stock[1], before, f"plain class, in {dtype}")]
    return [
        ("runtime error", number(verification["runtime_error"]), before, f"RMSNorm, in {dtype}"),
        stock,
    ]


def _ratio_row(verification: Mapping[str, Any]) -> Texts:
    """The ratio and its limits: the limit for the true ratio, and what few inputs allow."""
    limit = verification["max_ratio"]
    allowed = number(limit * verification["chance"])
    note = f"limit {number(limit)} ({allowed} for so few inputs)"
    return ("ratio", number(verification["ratio"]), "1", note)
