"""Draw a picture to a file with matplotlib: as SVG, PNG or PDF.

Names come from untrusted files. So characters that no font has are replaced, and no text is read as
a formula.
"""

from __future__ import annotations

import io
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import check_file, write_file
from enjoyln_cli.report.graph_layout import (
    CHARACTER,
    FONT,
    LINE,
    MARGIN,
    Layout,
    Picture,
    PlacedBox,
    Point,
    Route,
    Tone,
    layout,
    tones,
)

COLOURS: dict[Tone, tuple[str, str, str]] = {
    "static": ("#52d1b7", "#0b3d20", "becomes RMSNorm, in the weights alone"),
    "centred": ("#addbff", "#0b4a72", "becomes RMSNorm, with an added mean subtraction"),
    "kept": ("#e8756a", "#4a0e00", "stays LayerNorm"),
    "op": ("#4693ff", "#02182e", "added mean subtraction"),
    "writer": ("#f5ec8a", "#4f4a00", "zero-mean"),
    "zero": ("#f5ec8a", "#4f4a00", "zero-mean"),
    "left": ("#f7a440", "#4a3000", "keeps a mean"),
    "mean": ("#f7a440", "#4a3000", "keeps a mean"),
    "observer": ("#b184bc", "#34084a", "would notice a missing mean"),
    "plain": ("#ffffff", "#455a64", "input, output, or unchanged weights"),
    "group": ("#f5f7f8", "#546e7a", ""),
}
"""For each tone: fill colour, colour of lines and text, and its entry in the legend.

The fills are chosen to be distinguishable with colour vision deficiency.
"""

SUFFIXES = (".svg", ".png", ".pdf")
TEXT, DIM, LINK = "#212121", "#616161", "#78909c"
METADATA = {
    "svg": ("Date", "Creator"),
    "png": ("Software",),
    "pdf": ("CreationDate", "Creator", "Producer"),
}
"""What matplotlib would write into a file besides the picture, which no two versions agree on."""
HEAD = 26.0
PIXELS_PER_INCH = 96
SHARPNESS = 2
"""PNG pixels per pixel of the layout, in each direction."""
MOST_PIXELS = 100_000_000
"""Largest number of pixels of a PNG."""


def check(file: Path) -> None:
    """Raises ``OutputError`` if no picture can be saved as ``file``; called before the analysis."""
    if file.suffix.lower() not in SUFFIXES:
        raise OutputError(
            f"unsupported picture format {file.suffix or file.name!r}; use {', '.join(SUFFIXES)}"
        )
    missing = [library for library in ("grandalf", "matplotlib") if find_spec(library) is None]
    if missing:
        raise OutputError(f"a picture needs {missing[0]}; pip install {' '.join(missing)}")
    check_file(file)


def save(picture: Picture, file: Path) -> None:
    """Write a picture in the format given by the file's suffix.

    Raises ``OutputError`` if the suffix is not in ``SUFFIXES``, a library is missing, the picture
    is too large for a PNG, or the file cannot be written.
    """
    check(file)
    write_file(file, drawn(picture, file.suffix.lower().removeprefix(".")))


def drawn(picture: Picture, kind: str) -> bytes:
    """The picture as a file of ``kind``: svg, png or pdf."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = layout(picture.graph)
    width, height, top, legend = _page(picture, found)
    if kind == "png" and width * height * SHARPNESS**2 > MOST_PIXELS:
        raise OutputError("this picture is too large for a PNG; save it as .svg or .pdf")
    figure = Figure((width / PIXELS_PER_INCH, height / PIXELS_PER_INCH))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    _text(axes, (MARGIN, HEAD - 6), picture.title, TEXT, size=15, weight="bold")
    for number, note in enumerate(picture.notes):
        _text(axes, (MARGIN, HEAD + LINE * (number + 0.9)), note, DIM)
    for tone, (x, y) in legend:
        _rectangle(axes, (x, y), (16, 13), tone, 3)
        _text(axes, (x + 22, y + 11), COLOURS[tone][2], DIM)
    corner = ((width - found.width) / 2, top)
    for placed in found.boxes:
        _box(axes, placed, corner)
    for route in found.routes:
        _route(axes, route, corner)
    data = io.BytesIO()
    how: Any = {"svg.fonttype": "none", "svg.hashsalt": "enjoyln"}
    with matplotlib.rc_context(how), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*missing from font")
        about = dict.fromkeys(METADATA[kind])
        figure.savefig(data, format=kind, dpi=SHARPNESS * PIXELS_PER_INCH, metadata=about)
    return data.getvalue()


def _legend(picture: Picture) -> list[Tone]:
    used = tones(picture.graph)
    said = {COLOURS[tone][2]: tone for tone in reversed(COLOURS) if tone in used}
    return [tone for tone in COLOURS if tone in said.values() and COLOURS[tone][2]]


def _page(picture: Picture, found: Layout) -> tuple[float, float, float, list[tuple[Tone, Point]]]:
    """Width and height of the page, top of the graph, and the position of each legend entry."""
    text = max(len(line) for line in (picture.title, *picture.notes)) * CHARACTER
    width = max(found.width, text * 1.15, 420.0) + 2 * MARGIN
    entries: list[tuple[Tone, Point]] = []
    x, y = MARGIN, HEAD + LINE * len(picture.notes) + MARGIN
    for tone in _legend(picture):
        needed = 24 + CHARACTER * len(COLOURS[tone][2]) + MARGIN
        if x + needed > width and x > MARGIN:
            x, y = MARGIN, y + LINE + 4
        entries.append((tone, (x, y)))
        x += needed
    top = y + LINE + 2 * MARGIN
    return width, top + found.height + MARGIN, top, entries


def printable(text: str) -> str:
    """The text with question marks for control characters and lone surrogates."""
    return "".join(c if c.isprintable() and not "\ud800" <= c <= "\udfff" else "?" for c in text)


def _text(axes: Any, at: Point, text: str, colour: str, size: float = FONT, **how: Any) -> None:
    points = size * 72 / PIXELS_PER_INCH
    axes.text(*at, printable(text), color=colour, size=points, parse_math=False, zorder=3, **how)


def _rectangle(
    axes: Any, at: Point, size: Point, tone: Tone, corner: float, order: int = 2
) -> None:
    from matplotlib.patches import FancyBboxPatch

    fill, line, _ = COLOURS[tone]
    style = f"round,pad=0,rounding_size={corner}"
    axes.add_patch(
        FancyBboxPatch(at, *size, boxstyle=style, fc=fill, ec=line, lw=0.75, zorder=order)
    )


def _box(axes: Any, placed: PlacedBox, corner: Point) -> None:
    """Draw a box, below the links if it contains others."""
    box, x, y = placed.box, placed.x + corner[0], placed.y + corner[1]
    is_dot = box.shape == "dot"
    rounding = placed.height / 2 if is_dot else 6
    _rectangle(
        axes, (x, y), (placed.width, placed.height), box.tone, rounding, 0 if box.inside else 2
    )
    baseline = y + placed.height / 2 + FONT * 0.36 if is_dot else y + MARGIN / 2 + FONT
    for number, text in enumerate(box.lines):
        in_name = number < box.names and not is_dot
        _text(
            axes,
            (x + placed.width / 2, baseline + LINE * number),
            text,
            TEXT if in_name else COLOURS[box.tone][1],
            weight="bold" if in_name else "normal",
            ha="center",
        )


def _route(axes: Any, route: Route, corner: Point) -> None:
    """Draw a link: straight between the points of a pair, curved from pair to pair."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    points = [(x + corner[0], y + corner[1]) for x, y in route.points]
    vertices, codes = [points[0]], [Curve.MOVETO]
    for number, (x, y) in enumerate(points[1:], 1):
        before_x, before_y = points[number - 1]
        if (before_x, before_y) == (x, y):
            continue
        if number % 2:
            vertices.append((x, y))
            codes.append(Curve.LINETO)
        else:
            middle = (before_y + y) / 2
            vertices += [(before_x, middle), (x, middle), (x, y)]
            codes += [Curve.CURVE4] * 3
    colour = COLOURS["observer"][1] if route.link.seen else LINK
    style = (0, (4, 3)) if route.link.seen else "-"
    path = Curve(vertices, codes)
    axes.add_patch(
        FancyArrowPatch(
            path=path, arrowstyle="-|>", mutation_scale=7, ec=colour, fc=colour, ls=style, zorder=1
        )
    )
