"""What ``bench`` measured, as the figures of Enjoy-LN for the user's own machine: PNG or SVG.

Four panels: the time of every case with its spread, the original's median being 1; the share of the
original's time that norms cost, and what of it is saved; the speed-up by sequence length and by
batch size. Matplotlib draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enjoyln_cli.errors import OutputError

SUFFIXES = (".png", ".svg")
MARKS = {
    "original": ("LayerNorm (original)", "#607d8b", "o"),
    "folded": ("RMSNorm (folded)", "#2e7d32", "D"),
    "stock": ("torch's F.rms_norm", "#e65100", "s"),
    "bare": ("no norm", "#90a4ae", "|"),
}
"""Column to label, colour and marker."""
LINES = ("#2e7d32", "#0277bd", "#e65100", "#6a1b9a", "#c62828", "#00838f", "#827717", "#4e342e")
DPI = 144
Rows = Sequence[Mapping[str, Any]]


def check(file: Path) -> None:
    """Raises ``OutputError`` for a file that cannot be drawn, before anything is measured."""
    if file.suffix.lower() not in SUFFIXES:
        raise OutputError(f"{file} says no picture format; end it in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise OutputError("--plot needs matplotlib; pip install 'enjoyln[pictures]'")
    if not file.parent.is_dir():
        raise OutputError(f"{file} cannot be written: {file.parent} is no directory")


def save(found: Mapping[str, Any], file: Path) -> None:
    """Draw what ``Bench.to_json`` gives.

    Raises ``OutputError`` for another format, without matplotlib, and for a file that cannot be
    written.
    """
    check(file)
    import matplotlib

    figure = _figure(found)
    try:
        with matplotlib.rc_context({"svg.fonttype": "none"}):  # text as text, to be found and read
            figure.savefig(file, dpi=DPI)
    except OSError as error:
        raise OutputError(f"{file} cannot be written: {error.strerror}") from error


def _figure(found: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    rows = found["rows"]
    curves = {along: _curves(rows, along) for along in ("seq_len", "batch_size")}
    drawn = {along: lines for along, lines in curves.items() if lines}
    height = 1.8 + 0.42 * len(rows)
    below = 3.6 + 0.1 * max((len(lines) for lines in drawn.values()), default=0)
    heights = (height, below) if drawn else (height,)
    figure = Figure(figsize=(12, 0.4 + sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    above = grid[0].subgridspec(1, 2, width_ratios=(3, 2))
    times = figure.add_subplot(above[0])
    _draw_times(times, rows)
    _draw_tax(figure.add_subplot(above[1], sharey=times), rows)
    if drawn:
        places = grid[1].subgridspec(1, len(drawn))
        for place, (along, lines) in enumerate(drawn.items()):
            _draw_speedup(figure.add_subplot(places[place]), lines, along)
    figure.suptitle(f"{found['model_class']}, {found['dtype']} on {found['hardware']}", fontsize=12)
    return figure


def _draw_times(axes: Any, rows: Rows) -> None:
    places = range(len(rows))
    for name, (label, colour, marker) in MARKS.items():
        low, middle, high = zip(
            *([v / row["original_ms"] for v in row["quartiles_ms"][name]] for row in rows),
            strict=True,
        )
        axes.errorbar(
            middle,
            places,
            xerr=_around(low, middle, high),
            fmt=marker,
            color=colour,
            label=label,
            capsize=3,
            markersize=10 if marker == "|" else 6,
            markeredgewidth=2 if marker == "|" else 1,
        )
    axes.axvline(1, color=MARKS["original"][1], linewidth=0.8, linestyle="--")
    axes.set_yticks(places, [row["case"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("time, the original's median being 1 (bars: quartiles)")
    _head(axes, "Normalised time", 4)
    axes.grid(axis="x", alpha=0.3)


def _draw_tax(axes: Any, rows: Rows) -> None:
    places = range(len(rows))
    tax = [100 * max(row["norm_tax"], 0.0) for row in rows]
    shares = [min(max(row["tax_recovered"] or 0.0, 0.0), 1.0) for row in rows]
    saved = [a * b for a, b in zip(tax, shares, strict=True)]
    axes.barh(places, tax, color="#cfd8dc", label="cost of norms")
    axes.barh(places, saved, color=MARKS["folded"][1], label="of it saved")
    for place, row, value in zip(places, rows, tax, strict=True):
        share = row["tax_recovered"]
        saved_part = "none" if share is None else f"{share:.0%}"
        taxed = value > 0 and row["tax_quartiles"][0] > 1
        text = f"{saved_part} of {value:.1f} %" if taxed else "within the spread"
        axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", size=8)
    axes.set_xlim(0, 1.45 * max([*tax, 0.1]))
    axes.tick_params(labelleft=False)
    axes.set_xlabel("% of the original's time")
    _head(axes, "Share of the norms", 2)


def _head(axes: Any, title: str, columns: int) -> None:
    """Title and legend above the axes, where they hide nothing."""
    axes.set_title(title, fontsize=11, pad=28)
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1), ncols=columns, fontsize=8, frameon=False
    )


def _curves(rows: Rows, along: str) -> dict[str, list[Mapping[str, Any]]]:
    """Rows that differ in ``along`` alone, of more than one value, by what they have in common."""
    other, words = {
        "seq_len": ("batch_size", "{} row"),
        "batch_size": ("seq_len", "{} token"),
    }[along]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row[along] is not None:
            which = words.format(row[other]) + "s" * (row[other] != 1) if row[other] else "images"
            groups.setdefault(f"{which}, {row['phase']}, {row['mode']}", []).append(row)
    return {
        name: sorted(group, key=lambda row: row[along])
        for name, group in groups.items()
        if len(group) > 1
    }


def _draw_speedup(axes: Any, lines: Mapping[str, Rows], along: str) -> None:
    ticks = sorted({row[along] for group in lines.values() for row in group})
    for number, (name, group) in enumerate(lines.items()):
        low, _, high = zip(*(row["speedup_quartiles"] for row in group), strict=True)
        middle = [row["speedup"] for row in group]
        axes.errorbar(
            [ticks.index(row[along]) + 0.03 * (number - (len(lines) - 1) / 2) for row in group],
            middle,
            yerr=_around(low, middle, high),
            marker="o",
            markersize=4,
            capsize=2,
            color=LINES[number % len(LINES)],
            linestyle="-" if number < len(LINES) else ":",
            label=name,
        )
    axes.axhline(1, color=MARKS["original"][1], linewidth=0.8, linestyle="--")
    axes.set_xticks(range(len(ticks)), [f"{tick:,}" for tick in ticks])
    axes.set_xlim(-0.4, len(ticks) - 0.6)
    words = {
        "seq_len": ("sequence length", "tokens of a row"),
        "batch_size": ("batch size", "rows of a run"),
    }
    title, label = words[along]
    axes.set_xlabel(label)
    axes.set_ylabel("times as fast as the original")
    axes.set_title(f"Speed-up by {title}", fontsize=11)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, fontsize=8, frameon=False)


def _around(low: Sequence[float], middle: Sequence[float], high: Sequence[float]) -> Any:
    """Lengths of error bars, none of them negative where a median lies beside its quartiles."""
    down = [max(m - v, 0.0) for m, v in zip(middle, low, strict=True)]
    up = [max(v - m, 0.0) for m, v in zip(middle, high, strict=True)]
    return [down, up]
