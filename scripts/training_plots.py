"""The pictures of ``paper_training.py``: from its results to SVG files in docs/pictures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training_equivalence import CENTRED_DROPOUT, ROUNDING
from training_runs import CBWC, CONVERTED, LAYER_NORM, RMS_NORM

COLOURS = {
    LAYER_NORM: "#607d8b", RMS_NORM: "#e65100", CBWC: "#2e7d32", CONVERTED: "#e65100",
    ROUNDING: "#90a4ae", CENTRED_DROPOUT: "#0277bd",
}  # fmt: skip
METHOD_COLOURS = ("#607d8b", "#e65100", "#2e7d32", "#0277bd", "#6a1b9a", "#c62828")
LEAST = 1e-17
"""Stands for zero on a logarithmic axis."""
Found = Mapping[str, Any]


def draw_all(experiments: Found, folder: Path) -> list[Path]:
    """Draw each experiment that has a picture, into ``folder``. Returns the files."""
    import matplotlib
    from matplotlib.figure import Figure

    drawn = []
    # Text stays text, and the same results give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "enjoyln"}):
        for name, draw in PICTURES.items():
            if name in experiments:
                figure = Figure(layout="constrained")
                draw(figure, experiments[name]["results"])
                file = folder / f"training_{name}.svg"
                figure.savefig(file, metadata={"Date": None})
                drawn.append(file)
    return drawn


def _equality(figure: Any, found: Found) -> None:
    cases = list(dict.fromkeys((row["activation"], row["dtype"]) for row in found["rows"]))
    figure.set_size_inches(4 * len(cases), 4.2)
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for axes, (activation, dtype) in zip(panels, cases, strict=True):
        rows = [r for r in found["rows"] if (r["activation"], r["dtype"]) == (activation, dtype)]
        for row, colour in zip(rows, METHOD_COLOURS, strict=False):
            epochs = range(1, len(row["weights"][CBWC]) + 1)
            axes.plot(epochs, row["weights"][CBWC], color=colour, label=row["optimizer"])
            axes.plot(epochs, row["weights"][ROUNDING], color=colour, linestyle=":")
        axes.axhline(rows[0]["bound"], color="black", linewidth=0.8, linestyle="--")
        axes.set_yscale("log")
        _label(axes, f"{activation}, {dtype}", "epoch", "largest difference of a weight")
    panels[0].legend(
        fontsize=8, loc="center right", title="solid: CBWC, dotted: rounding", title_fontsize=8
    )


def _transformer(figure: Any, found: Found) -> None:
    cases = found["cases"]
    figure.set_size_inches(11, 6.5)
    grid = figure.subplots(2, len(cases), squeeze=False, sharex=True)
    for column, (case, one) in enumerate(cases.items()):
        curves = one["curves"]
        steps = range(1, len(curves[LAYER_NORM]) + 1)
        for name, losses in curves.items():
            if name != ROUNDING:
                style = "--" if name in (CBWC, CENTRED_DROPOUT) else "-"
                grid[0][column].plot(steps, losses, style, color=COLOURS[name], label=name)
            if name != LAYER_NORM:
                apart = [max(value, LEAST) for value in one["distances"][name]]
                grid[1][column].plot(steps, apart, color=COLOURS[name], label=name, linewidth=0.9)
        _label(grid[0][column], f"Loss, {case}", "", "training loss")
        grid[1][column].set_yscale("log")
        _label(grid[1][column], "Distance from LayerNorm's loss (none: 1e-17)", "step", "")
        for axes in grid[:, column]:
            axes.legend(fontsize=8)


def _dropout(figure: Any, found: Found) -> None:
    figure.set_size_inches(11, 7)
    grid = figure.subplots(2, len(found), squeeze=False, sharex=True)
    for column, (task, runs) in enumerate(found.items()):
        steps = range(runs["every"], runs["steps"] + 1, runs["every"])
        classes = task == "classification"
        key, label = ("accuracy", "held-out accuracy") if classes else ("loss", "held-out loss")
        for name, one in runs["variants"].items():
            tested = [[point[key] for point in curve] for curve in one["test"]]
            _band(grid[0][column], steps, one["train"], name)
            _band(grid[1][column], steps, tested, name)
        _label(grid[0][column], task.capitalize(), "", "training loss")
        _label(grid[1][column], "", "step", label)
    grid[0][0].legend(fontsize=8)


def _fine_tuning(figure: Any, found: Found) -> None:
    figure.set_size_inches(6, 4)
    axes = figure.subplots()
    steps = [0, *range(found["every"], found["steps"] + 1, found["every"])]
    for name, one in found["variants"].items():
        curves = [
            [start["loss"], *(point["loss"] for point in curve)]
            for start, curve in zip(one["start"], one["test"], strict=True)
        ]
        _band(axes, steps, curves, name)
    _label(axes, "Fine-tuning a trained GPT-2", "step", "held-out loss")
    axes.legend(fontsize=8)


def _norms(figure: Any, found: Found) -> None:
    depths = found["depths"]
    figure.set_size_inches(3.8 * len(depths), 6.5)
    above, below = figure.subplots(2, len(depths), squeeze=False)
    for one, other, (depth, runs) in zip(above, below, depths.items(), strict=True):
        for name, results in runs.items():
            _band(one, range(len(results["last_layer"][0])), results["last_layer"], name)
            count = len(results["all_layers"][0])
            _band(other, range(1, count + 1), results["all_layers"], name)
        _label(one, f"{depth} linear layers", "epoch", "input norm of the last layer")
        _label(other, "", "linear layer", "input norm after the last epoch")
    above[0].legend(fontsize=8)


def _band(axes: Any, x: Sequence[float], curves: Sequence[Sequence[float]], name: str) -> None:
    """The mean over the seeds, with one standard deviation to each side."""
    mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
    apart = [statistics.stdev(values) if len(values) > 1 else 0.0
             for values in zip(*curves, strict=True)]  # fmt: skip
    axes.plot(x, mean, color=COLOURS[name], label=name)
    axes.fill_between(
        x,
        [m - s for m, s in zip(mean, apart, strict=True)],
        [m + s for m, s in zip(mean, apart, strict=True)],
        color=COLOURS[name],
        alpha=0.2,
        linewidth=0,
    )


def _label(axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)


PICTURES: dict[str, Callable[[Any, Found], None]] = {
    "equality": _equality,
    "transformer": _transformer,
    "dropout": _dropout,
    "fine_tuning": _fine_tuning,
    "norms": _norms,
}
