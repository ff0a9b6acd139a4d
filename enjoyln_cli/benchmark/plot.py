"""Draws the results of ``bench`` as PNG or SVG, with matplotlib.

The picture shows how many times as fast as the original each model is in every case, with its 95 %
interval. The model without norms shows the most that any change to norms can gain.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import check_file, write_file

SUFFIXES = (".png", ".svg")
MARKS = {
    "folded": ("#2e7d32", "D"),
    "torch_rms_norm": ("#e65100", "s"),
    "no_norm": ("#90a4ae", "x"),
}
"""Model to colour and marker."""


def check(file: Path) -> None:
    """Raise ``OutputError`` if this file cannot be drawn, before anything is measured."""
    if file.suffix.lower() not in SUFFIXES:
        raise OutputError(
            f"unsupported picture format {file.suffix or file.name!r}; use {' or '.join(SUFFIXES)}"
        )
    if find_spec("matplotlib") is None:
        raise OutputError("--plot needs matplotlib; pip install matplotlib")
    check_file(file)


def save(result: Mapping[str, Any], file: Path) -> None:
    """Draw the result of ``Bench.to_json``.

    Raises ``OutputError`` for an unsupported format, without matplotlib, and if the file cannot be
    written.
    """
    check(file)
    import matplotlib
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(9, 2.2 + 0.5 * len(rows)), layout="constrained")
    _draw(figure.subplots(), rows)
    name = Path(result["source"]).name if Path(result["source"]).is_absolute() else result["source"]
    figure.suptitle(
        f"{name} ({result['model_class']}), {result['dtype']} on {result['hardware']}", fontsize=12
    )
    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # keeps text searchable
        figure.savefig(drawn, dpi=144, format=file.suffix.lower()[1:])
    write_file(file, drawn.getvalue())


def _draw(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    from enjoyln_cli.benchmark.baselines import LABELS

    for number, (name, (colour, marker)) in enumerate(MARKS.items()):
        for place, row in enumerate(rows):
            model = row["models"][name]
            middle = model["times_as_fast"]
            low, high = model["times_as_fast_interval"] or (middle, middle)
            axes.errorbar(
                middle,
                place + 0.2 * (number - 1),
                xerr=[[middle - low], [high - middle]],
                fmt=marker,
                color=colour,
                label="" if place else LABELS[name],
                capsize=2,
            )
    axes.axvline(1, color="#607d8b", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), [f"{row['case']}: {row['verdict']}" for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("times as fast as the original (bars: 95 % intervals)")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False)
