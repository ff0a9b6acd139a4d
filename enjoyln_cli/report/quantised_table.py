"""The measures of a quantised result as rows of text, for the terminal and the model card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from enjoyln_cli.report.verification_table import Texts
from enjoyln_cli.text import counted, measure, number, size

QUANTISED_HEADS = ("", "quantised", "original, quantised", "float32")


def quantised_rows(record: Mapping[str, Any]) -> list[Texts]:
    """What was measured: of the result, of the original quantised as it is, and in float32.

    ``record`` has the fields of a ``Quantised``, from ``to_json`` or ``enjoyln_precisions.json``.
    Raises ``KeyError``, ``TypeError``, ``ValueError`` or ``AttributeError`` for an edited record
    that cannot be shown.
    """
    held_out, plain = _measures(record["held_out"]), _measures(record["plain"])
    rows = [
        (name, measure(name, held_out[name]), measure(name, plain.get(name)), "")
        for name in held_out
    ]
    if record["perplexity"] is not None:
        scores = (record["held_out"]["perplexity"], record["plain"]["perplexity"])
        after, before, exact = map(number, (*scores, record["perplexity"]))
        rows.append(("perplexity", after, before, exact))
    candidates = {one["name"]: one for one in record.get("candidates", ())}
    pair = candidates.get(record.get("chosen")), next(iter(candidates.values()), None)
    as_it_is = size(pair[1]["size"]) if pair[1] else ""
    rows.append(("size", size(record["size"]), as_it_is, size(record["float_size"])))
    weights = [one["weights"] for one in pair if one and one["weights"]]
    if len(weights) == 2:
        here, there = (f"{count['in_float']:,} of {count['total']:,}" for count in weights)
        rows.append(("weights that are not quantised", here, there, ""))
    return [*rows, *_times(record)]


def _times(record: Mapping[str, Any]) -> Iterator[Texts]:
    """The rows with times, if the result was timed."""
    speed, exact = record["speed"], record["float_speed"]
    if not speed or not exact:
        return
    what = f"{speed['what']}, {counted(record['threads'], 'thread')}"
    for name, key in ((what, "milliseconds"), ("one more token", "token_milliseconds")):
        if speed.get(key):
            yield name, f"{number(speed[key])} ms", "", f"{number(exact[key])} ms"


def _measures(differences: Mapping[str, Any]) -> dict[str, float]:
    """All measures of all outputs, by their names in the table."""
    outputs = differences["outputs"]
    return {
        f"{output}: {measure}" if len(outputs) > 1 else measure: float(value)
        for output, measured in outputs.items()
        for measure, value in measured.items()
    }
