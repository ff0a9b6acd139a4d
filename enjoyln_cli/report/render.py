"""Write a picture to a file: SVG, one self-contained HTML page, or PNG.

All three draw the same layout in the same colours. Names come from untrusted files, so text is
escaped, and characters that XML does not allow are replaced. PNG is drawn with Pillow, which has
its own font and needs no system library.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.util import find_spec
from io import BytesIO
from itertools import groupby
from math import hypot
from pathlib import Path

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import check_file, write_file
from enjoyln_cli.report.graph_layout import (
    CHARACTER,
    FONT,
    LINE,
    MARGIN,
    Box,
    Layout,
    Picture,
    PlacedBox,
    Point,
    Route,
    Tone,
    every_box,
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

SUFFIXES = (".svg", ".html", ".png")
TEXT, DIM, LINK = "#212121", "#616161", "#78909c"
FAMILY = "'DejaVu Sans', Verdana, Helvetica, Arial, sans-serif"
HEAD = 26.0
PIXELS = 2
"""PNG pixels per pixel of the layout, in each direction, so that text is sharp."""
STEPS = 24
"""Number of straight segments that draw a curve in a PNG."""
MOST_PIXELS = 100_000_000
"""Largest number of pixels of a PNG."""


def check(file: Path) -> None:
    """Raises ``OutputError`` if no picture can be saved as ``file``; called before the analysis."""
    if file.suffix.lower() not in SUFFIXES:
        raise OutputError(
            f"unsupported picture format {file.suffix or file.name!r}; use {', '.join(SUFFIXES)}"
        )
    if find_spec("grandalf") is None:
        raise OutputError("a picture needs the layout library grandalf; pip install grandalf")
    if file.suffix.lower() == ".png" and find_spec("PIL") is None:
        raise OutputError("a PNG needs Pillow; save as .svg, or pip install pillow")
    check_file(file)


def save(picture: Picture, file: Path) -> None:
    """Write a picture in the format given by the file's suffix.

    Raises ``OutputError`` if the suffix is not in ``SUFFIXES``, a library is missing, or the file
    cannot be written.
    """
    check(file)
    ways = {".svg": _svg_bytes, ".html": _html_bytes, ".png": as_png}
    write_file(file, ways[file.suffix.lower()](picture))


def _svg_bytes(picture: Picture) -> bytes:
    return as_svg(picture).encode()


def _html_bytes(picture: Picture) -> bytes:
    return as_html(picture).encode()


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


def _clean(text: str) -> str:
    """The text escaped for XML, with question marks for characters that XML does not allow."""
    allowed = "".join(
        c if c in "\n\t" or (c.isprintable() and ord(c) < 0x110000) else "?" for c in text
    )
    return escape(allowed.encode(errors="replace").decode())


# SVG and HTML.


def as_svg(picture: Picture) -> str:
    """The picture as an SVG document; reasons are tooltips (``<title>`` elements)."""
    found = layout(picture.graph)
    width, height, top, legend = _page(picture, found)
    left = (width - found.width) / 2
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FAMILY}" font-size="{FONT}">',
        f"<title>{_clean(picture.title)}</title>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{LINK}"/></marker></defs>',
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
        _text(MARGIN, HEAD - 6, picture.title, 'font-weight="bold" font-size="15"'),
    ]
    for number, note in enumerate(picture.notes):
        out.append(_text(MARGIN, HEAD + LINE * (number + 0.9), note, f'fill="{DIM}"'))
    out.append('<g class="legend">')
    for tone, (x, y) in legend:
        fill, line, meaning = COLOURS[tone]
        out.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="16" height="13" rx="3" {_ink(fill, line)}/>'
        )
        out.append(_text(x + 22, y + 11, meaning, f'fill="{DIM}"'))
    out.append(f'</g><g transform="translate({left:.1f} {top:.1f})">')
    out += [_svg_box(p) for p in found.boxes if p.box.inside]
    out += [_svg_route(route) for route in found.routes]
    out += [_svg_box(p) for p in found.boxes if not p.box.inside]
    return "\n".join([*out, "</g>", "</svg>", ""])


def _ink(fill: str, line: str) -> str:
    return f'fill="{fill}" stroke="{line}"'


def _text(x: float, y: float, text: str, how: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{_clean(text)}</text>'


def _svg_box(placed: PlacedBox) -> str:
    box = placed.box
    fill, line, _ = COLOURS[box.tone]
    round_ = placed.height / 2 if box.shape == "dot" else 6
    parts = [f'<g class="box {box.tone}">']
    if box.title:
        parts.append(f"<title>{_clean(box.title)}</title>")
    where = f'x="{placed.x:.1f}" y="{placed.y:.1f}"'
    size = f'width="{placed.width:.1f}" height="{placed.height:.1f}"'
    parts.append(f'<rect {where} {size} rx="{round_:.0f}" {_ink(fill, line)}/>')
    for text, (x, y), bold in _lines(placed):
        weight = ' font-weight="bold"' if bold else ""
        colour = TEXT if bold else line
        parts.append(_text(x, y, text, f'text-anchor="middle" fill="{colour}"{weight}'))
    return "".join([*parts, "</g>"])


def _lines(placed: PlacedBox) -> Iterable[tuple[str, Point, bool]]:
    """Each line of a box: its text, the middle of its baseline, and whether it is in the name."""
    box: Box = placed.box
    x, y = placed.x + placed.width / 2, placed.y + MARGIN / 2 + FONT
    if box.shape == "dot":
        y = placed.y + placed.height / 2 + FONT * 0.36
    for number, text in enumerate(box.lines):
        yield text, (x, y + LINE * number), number < box.names and box.shape == "box"


def _svg_route(route: Route) -> str:
    path = ""
    for number, (x, y) in enumerate(route.points):
        if number and route.points[number - 1] == (x, y):
            continue
        if number % 2 or not number:
            path += f"{'L' if number else 'M'}{x:.1f} {y:.1f}"
        else:
            px, py = route.points[number - 1]
            middle = (py + y) / 2
            path += f"C{px:.1f} {middle:.1f} {x:.1f} {middle:.1f} {x:.1f} {y:.1f}"
    how = 'stroke-dasharray="5 4" ' if route.link.seen else ""
    colour = COLOURS["observer"][1] if route.link.seen else LINK
    ink = f'fill="none" stroke="{colour}" {how}marker-end="url(#arrow)"'
    return f'<path class="link" d="{path}" {ink}/>'


def as_html(picture: Picture) -> str:
    """The picture as an HTML page; a list repeats the reasons, for devices without tooltips."""
    boxes = (b for b in every_box(picture.graph) if b.title and b.shape == "box")
    said = dict.fromkeys((box.tone, box.title) for box in boxes if COLOURS[box.tone][2])
    rows = "".join(
        f'<li><span style="background:{COLOURS[tone][0]};border-color:{COLOURS[tone][1]}"></span>'
        f"<pre>{_clean(title)}</pre></li>"
        for tone, title in said
    )
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_clean(picture.title)}</title>
<style>
body {{ font-family: {FAMILY}; font-size: 13px; margin: 1em; color: {TEXT}; }}
figure {{ margin: 0; overflow-x: auto; }}
svg .box:hover > rect {{ stroke-width: 3; }}
ul {{ list-style: none; padding: 0; }}
li {{ display: flex; gap: .6em; margin: .3em 0; }}
li span {{ flex: none; width: 14px; height: 12px; border: 1px solid; border-radius: 3px; }}
pre {{ margin: 0; font: inherit; white-space: pre-wrap; overflow-wrap: anywhere; }}
</style></head><body>
<figure>{as_svg(picture)}</figure>
<details><summary>All parts and reasons</summary><ul>{rows}</ul></details>
</body></html>
"""


# PNG.


def as_png(picture: Picture) -> bytes:
    """The picture as a PNG. Raises ``OutputError`` if it is too large."""
    from PIL import Image, ImageDraw, ImageFont

    found = layout(picture.graph)
    width, height, top, legend = _page(picture, found)
    if width * height * PIXELS**2 > MOST_PIXELS:
        raise OutputError("this picture is too large for a PNG; save it as .svg or .html")
    image = Image.new("RGB", (round(width * PIXELS), round(height * PIXELS)), "#ffffff")
    pen = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT * PIXELS)
    large = ImageFont.load_default(15 * PIXELS)

    def scaled(x: float, y: float) -> Point:
        return x * PIXELS, y * PIXELS

    def rectangle(x: float, y: float, w: float, h: float, tone: Tone, corner: float) -> None:
        fill, line, _ = COLOURS[tone]
        ends = (*scaled(x, y), *scaled(x + w, y + h))
        pen.rounded_rectangle(ends, corner * PIXELS, fill, line, PIXELS)

    pen.text(scaled(MARGIN, HEAD - 6), picture.title, TEXT, large, "ls")
    for number, note in enumerate(picture.notes):
        pen.text(scaled(MARGIN, HEAD + LINE * (number + 0.9)), note, DIM, font, "ls")
    for tone, (x, y) in legend:
        rectangle(x, y, 16, 13, tone, 3)
        pen.text(scaled(x + 22, y + 11), COLOURS[tone][2], DIM, font, "ls")
    left = (width - found.width) / 2

    def boxes(groups: bool) -> None:
        for placed in found.boxes:
            if bool(placed.box.inside) is groups:
                x, y, box = placed.x + left, placed.y + top, placed.box
                corner = placed.height / 2 if box.shape == "dot" else 6
                rectangle(x, y, placed.width, placed.height, box.tone, corner)
                for text, (tx, ty), name in _lines(placed):
                    colour = TEXT if name else COLOURS[box.tone][1]
                    pen.text(scaled(tx + left, ty + top), text, colour, font, "ms")

    boxes(True)
    for route in found.routes:
        points = [scaled(x + left, y + top) for x, y in _straight(route)]
        colour = COLOURS["observer"][1] if route.link.seen else LINK
        if route.link.seen:
            for dash in _dashes(points):
                pen.line(dash, colour, PIXELS)
        else:
            pen.line(points, colour, PIXELS, "curve")
        pen.polygon(_arrow(*points[-2:]), colour)
    boxes(False)
    data = BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


def _straight(route: Route) -> list[Point]:
    """The points of a route, with curves as straight segments, without repeated points."""
    points: list[Point] = []
    for number, (x, y) in enumerate(route.points):
        if number % 2 or not number:
            points.append((x, y))
            continue
        px, py = route.points[number - 1]
        for step in range(1, STEPS + 1):
            t = step / STEPS
            ease = 3 * t * t * (1 - t) + t**3
            rise = 1.5 * t * (1 - t) + t**3
            points.append((px + (x - px) * ease, py + (y - py) * rise))
    return [point for point, _ in groupby(points)]


def _arrow(start: Point, end: Point) -> list[Point]:
    """The corners of an arrowhead at the end of a line."""
    (ax, ay), (bx, by) = start, end
    length = hypot(bx - ax, by - ay) or 1.0
    dx, dy = (bx - ax) / length * PIXELS, (by - ay) / length * PIXELS
    left, right = ((bx - 7 * dx - s * dy, by - 7 * dy + s * dx) for s in (-3.5, 3.5))
    return [end, left, right]


def _dashes(points: list[Point]) -> Iterable[tuple[Point, Point]]:
    """The dashes of a dashed line: every second segment, all segments of equal length."""
    piece, at = 5.0 * PIXELS, 0.0
    for (ax, ay), (bx, by) in zip(points, points[1:], strict=False):
        length, done = hypot(bx - ax, by - ay), 0.0
        while length - done > 1e-6:
            step = min(piece - at % piece, length - done)
            if at // piece % 2 < 1:
                start, end = done / length, (done + step) / length
                yield (
                    (ax + (bx - ax) * start, ay + (by - ay) * start),
                    (ax + (bx - ax) * end, ay + (by - ay) * end),
                )
            at, done = at + step + 1e-9, done + step
