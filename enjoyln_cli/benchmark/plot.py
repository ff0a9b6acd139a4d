"""Draws the results of ``bench`` like the figures of Enjoy-LN, as PNG or SVG, with matplotlib.

The panels show how many times as fast as the original each model is in every case; the share of
the original's time that norms cost, and how much of it is saved; and the speed-up by sequence
length and by batch size, for each phase and mode. All are medians over the rounds with their 95 %
intervals, as in the table.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import check_file, write_file
from enjoyln_cli.text import counted

SUFFIXES = (".png", ".svg")
MARKS = {
    "original": ("#607d8b", "o"),
    "folded": ("#2e7d32", "D"),
    "torch_rms_norm": ("#e65100", "s"),
    "no_norm": ("#90a4ae", "x"),
}
"""Model to colour and marker."""
LINES = ("#2e7d32", "#0277bd", "#e65100", "#6a1b9a", "#c62828", "#00838f", "#827717", "#4e342e")
ALONG = {
    "seq_len": ("sequence length", "tokens of each row", "batch_size", "row"),
    "batch_size": ("batch size", "rows of one run", "seq_len", "token"),
}
"""The axes of speed-up panels: title, label, the key in which the lines differ, and its unit."""
DPI = 144
Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Panel:
    """Speed-ups of one phase and mode, as lines along one of ``ALONG``."""

    kind: tuple[str, str]
    along: str
    lines: Mapping[str, Rows]


def check(file: Path) -> None:
    """Raise ``OutputError`` if this file cannot be drawn, before anything is measured."""
    if file.suffix.lower() not in SUFFIXES:
        raise OutputError(
            f"unsupported picture format {file.suffix or file.name!r}; use {' or '.join(SUFFIXES)}"
        )
    if find_spec("matplotlib") is None:
        raise OutputError("--plot needs matplotlib; pip install matplotlib")
    check_file(file)


def save(found: Mapping[str, Any], file: Path) -> None:
    """Draw the result of ``Bench.to_json``.

    Raises ``OutputError`` for an unsupported format, without matplotlib, and if the file cannot be
    written.
    """
    check(file)
    import matplotlib

    drawn = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):  # keeps text searchable
        _figure(found).savefig(drawn, dpi=DPI, format=file.suffix.lower()[1:])
    write_file(file, drawn.getvalue())


def _figure(found: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    rows = found["rows"]
    kinds = dict.fromkeys((row["phase"], row["mode"]) for row in rows)
    panels = [_curves(rows, kind, along) for kind in kinds for along in ALONG]
    panels = [panel for panel in panels if panel.lines]
    down = list(dict.fromkeys(panel.kind for panel in panels))
    across = list(dict.fromkeys(panel.along for panel in panels))
    heights = [2.2 + 0.5 * len(rows), *[3.6] * len(down)]
    figure = Figure(figsize=(12, 0.4 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    above = grid[0].subgridspec(1, 2, width_ratios=(3, 2))
    times = figure.add_subplot(above[0])
    _draw_times(times, rows)
    _draw_norm_cost(figure.add_subplot(above[1], sharey=times), rows)
    below = [grid[1 + line].subgridspec(1, len(across)) for line in range(len(down))]
    first = None
    for panel in panels:
        place = below[down.index(panel.kind)][across.index(panel.along)]
        axes = figure.add_subplot(place, sharey=first)
        first = first or axes
        _draw_speedup(axes, panel)
    name = Path(found["source"]).name if Path(found["source"]).is_absolute() else found["source"]
    figure.suptitle(
        f"{name} ({found['model_class']}), {found['dtype']} on {found['hardware']}", fontsize=12
    )
    return figure


def _draw_times(axes: Any, rows: Rows) -> None:
    from enjoyln_cli.benchmark.baselines import LABELS

    for number, (name, (colour, marker)) in enumerate(MARKS.items()):
        found = [row["models"][name] for row in rows]
        middle = [one["times_as_fast"] for one in found]
        low, high = _ends([one["times_as_fast_interval"] for one in found], middle)
        axes.errorbar(
            middle,
            [place + 0.18 * (number - (len(MARKS) - 1) / 2) for place in range(len(rows))],
            xerr=_around(low, middle, high),
            fmt=marker,
            color=colour,
            label=LABELS[name],
            capsize=2,
            markersize=5,
        )
    axes.axvline(1, color=MARKS["original"][0], linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel("times as fast as the original (bars: 95 % intervals)")
    _head(axes, "Speed of each model", 4)
    axes.grid(axis="x", alpha=0.3)


def _draw_norm_cost(axes: Any, rows: Rows) -> None:
    places = range(len(rows))
    costs = [100 * max(row["norm_cost"], 0.0) for row in rows]
    saved = [cost * (row["saved_share"] or 0.0) for cost, row in zip(costs, rows, strict=True)]
    axes.barh(places, costs, color="#cfd8dc", label="norm cost")
    axes.barh(places, saved, color=MARKS["folded"][0], label="saved by folding")
    for place, row, value in zip(places, rows, costs, strict=True):
        text = _saved(row, value)
        axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", size=8)
    axes.set_xlim(0, 1.45 * max([*costs, 0.1]))
    axes.tick_params(labelleft=False)
    axes.set_xlabel("% of the original's time")
    _head(axes, "What norms cost", 2)


def _saved(row: Mapping[str, Any], cost: float) -> str:
    interval, share = row["norm_cost_interval"], row["saved_share"]
    if interval is None:
        return "too few rounds"
    if interval[0] <= 0:
        return "too small to measure"
    return f"no gain, of {cost:.1f} %" if share is None else f"{share:.0%} of {cost:.1f} %"


def _head(axes: Any, title: str, columns: int) -> None:
    """Draw title and legend above the axes, where they hide nothing."""
    axes.set_title(title, fontsize=11, pad=28)
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, fontsize=8, frameon=False
    )


def _curves(rows: Rows, kind: tuple[str, str], along: str) -> Panel:
    """The rows of one phase and mode, as lines along ``along`` with at least two points each."""
    other, word = ALONG[along][2:]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if (row["phase"], row["mode"]) == kind and row[along] is not None:
            which = counted(row[other], word) if row[other] else "images"
            groups.setdefault(which, []).append(row)
    lines = {
        name: sorted(group, key=lambda row: row[along])
        for name, group in groups.items()
        if len(group) > 1
    }
    return Panel(kind, along, lines)


def _draw_speedup(axes: Any, panel: Panel) -> None:
    title, label = ALONG[panel.along][:2]
    ticks = sorted({row[panel.along] for group in panel.lines.values() for row in group})
    for number, (name, group) in enumerate(panel.lines.items()):
        middle = [row["speedup"] for row in group]
        low, high = _ends([row["speedup_interval"] for row in group], middle)
        shift = 0.05 * (number - (len(panel.lines) - 1) / 2)
        axes.errorbar(
            [ticks.index(row[panel.along]) + shift for row in group],
            middle,
            yerr=_around(low, middle, high),
            marker="o",
            markersize=4,
            capsize=2,
            color=LINES[number % len(LINES)],
            label=name,
        )
    axes.axhline(1, color=MARKS["original"][0], linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(ticks)), [f"{tick:,}" for tick in ticks])
    axes.set_xlim(-0.4, len(ticks) - 0.6)
    axes.set_xlabel(label)
    axes.set_ylabel("times as fast as the original")
    axes.set_title(f"Speed-up by {title}: {', '.join(panel.kind)}", fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def _ends(
    intervals: Sequence[Sequence[float] | None], middle: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Lower and upper ends; a median without an interval is a point."""
    found = [one or (m, m) for one, m in zip(intervals, middle, strict=True)]
    return [low for low, _ in found], [high for _, high in found]


def _around(low: Sequence[float], middle: Sequence[float], high: Sequence[float]) -> Any:
    """Lengths of the error bars around ``middle``."""
    down = [m - v for m, v in zip(middle, low, strict=True)]
    up = [v - m for m, v in zip(middle, high, strict=True)]
    return [down, up]
