"""A picture as data, and where its parts go: boxes within boxes, with links between them.

What a box means is decided in ``model_graph``, what it looks like in a file in ``render``. Links
run from top to bottom. Where boxes go is decided once for each box that holds others, so that a
block is a box like any other outside: by Graphviz where that is installed, otherwise by grandalf
(both in layers, Sugiyama's method).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

Tone = Literal[
    "static",
    "centred",
    "kept",
    "op",
    "writer",
    "left",
    "observer",
    "zero",
    "mean",
    "plain",
    "group",
]
Shape = Literal["box", "dot"]
Point = tuple[float, float]

FONT, LINE, CHARACTER = 12, 16, 7.8
"""Size of text, height of a line and an upper estimate of a character's width, in pixels."""
MARGIN, DOT, SPACE_X, SPACE_Y = 12.0, 18.0, 26.0, 22.0
INCH = 72.0
"""Pixels of the unit in which Graphviz gives and takes lengths."""
PATIENCE = 20
"""Seconds that Graphviz may take."""
MAX_LINE_CHARS = 44
"""Characters of a line in a box."""


@dataclass(frozen=True)
class Box:
    """One thing in a picture. The first of its lines are its name."""

    key: str
    lines: tuple[str, ...]
    tone: Tone = "plain"
    title: str = ""
    """What is shown where the pointer rests on it."""
    shape: Shape = "box"
    inside: Graph | None = None
    names: int = 1
    """How many lines its name has."""


@dataclass(frozen=True)
class Link:
    """From one box of a graph to another of the same graph, by key."""

    start: str
    end: str
    seen: bool = False
    """Whether this is how somebody sees a mean, and no step of the computation that is drawn."""


@dataclass(frozen=True)
class Graph:
    """Boxes in the order of computation, and links between them."""

    boxes: tuple[Box, ...]
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Picture:
    """A graph with what stands above it."""

    title: str
    notes: tuple[str, ...]
    graph: Graph


@dataclass(frozen=True)
class Placed:
    """A box with its upper left corner and its size."""

    box: Box
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Route:
    """A link as points, in pairs that are joined by straight lines, with curves between pairs."""

    link: Link
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Layout:
    """All parts of a graph and of the graphs inside of it, outermost first."""

    width: float
    height: float
    boxes: tuple[Placed, ...]
    routes: tuple[Route, ...]


def shorten(text: str, most: int = MAX_LINE_CHARS) -> str:
    """Text that fits a line: its middle left out where it is longer."""
    return text if len(text) <= most else f"{text[: most // 2 - 2]}...{text[-(most // 2 - 1) :]}"


def wrap_name(text: str) -> list[str]:
    """All of a name in lines, each of which ends at a dot where that is possible."""
    lines = [""]
    for piece in re.findall(rf"[^. ,]{{1,{MAX_LINE_CHARS - 1}}}[. ,]?|[. ,]", text):
        if len(lines[-1] + piece) > MAX_LINE_CHARS:
            lines.append("")
        lines[-1] += piece
    return lines


def every_box(graph: Graph) -> Iterator[Box]:
    """The boxes of a graph, each before those inside of it."""
    for box in graph.boxes:
        yield box
        if box.inside:
            yield from every_box(box.inside)


def tones(graph: Graph) -> set[Tone]:
    """The tones that occur in a graph."""
    return {box.tone for box in every_box(graph)}


def layout(graph: Graph) -> Layout:
    """Where everything goes."""
    inner = {box.key: layout(box.inside) for box in graph.boxes if box.inside}
    sizes = {box.key: _size(box, inner.get(box.key)) for box in graph.boxes}
    whole = _arranged(graph, sizes)
    routes = whole.routes
    boxes: list[Placed] = []
    for box in graph.boxes:
        x, y = whole.at[box.key]
        boxes.append(Placed(box, x, y, *sizes[box.key]))
        if box.key in inner:
            part = inner[box.key]
            left, top = x + (sizes[box.key][0] - part.width) / 2, y + LINE * len(box.lines) + MARGIN
            boxes += [replace(p, x=p.x + left, y=p.y + top) for p in part.boxes]
            routes += [_shifted(route, left, top) for route in part.routes]
    return Layout(whole.width, whole.height, tuple(boxes), tuple(routes))


def _size(box: Box, inner: Layout | None) -> tuple[float, float]:
    if box.shape == "dot" and not box.lines:
        return DOT / 2, DOT / 2
    text = CHARACTER * max((len(line) for line in box.lines), default=0)
    if box.shape == "dot":
        return max(DOT, text + MARGIN), DOT
    width, height = text + 2 * MARGIN, LINE * len(box.lines) + MARGIN
    if inner is None:
        return width, height
    return max(width, inner.width + 2 * MARGIN), height + inner.height + MARGIN


def _shifted(route: Route, x: float, y: float) -> Route:
    return Route(route.link, tuple((px + x, py + y) for px, py in route.points))


Links = dict[tuple[str, str], list[Link]]
"""By the keys of the boxes that they join, the earlier one in the order of computation first."""


@dataclass
class _Arranged:
    """Corners of boxes and routes of links, from nought, with the size of all."""

    at: dict[str, Point] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

    def add(self, links: list[Link], first: str, points: tuple[Point, ...]) -> None:
        """The way of ``links`` from the box ``first`` on."""
        for link in links:
            self.routes.append(Route(link, points if link.start == first else points[::-1]))


def _arranged(graph: Graph, sizes: Mapping[str, Point]) -> _Arranged:
    order = {box.key: place for place, box in enumerate(graph.boxes)}
    links: Links = {}
    for link in graph.links:
        if link.start != link.end:
            first, second = sorted((link.start, link.end), key=order.__getitem__)
            links.setdefault((first, second), []).append(link)
    whole = _by_graphviz(links, sizes) or _by_grandalf(links, sizes)
    for box in graph.boxes:
        if box.inside:
            _land_apart(whole, box.key, sizes[box.key][0])
    return whole


def _land_apart(whole: _Arranged, key: str, width: float) -> None:
    """Let links end side by side on a box that holds others.

    What it computes from several values is no sum of them, as links look that meet in one point.
    """
    left, top = whole.at[key]
    ending = []
    for place, route in enumerate(whole.routes):
        old, y = route.points[-1]
        if route.link.end == key and abs(y - top) < DOT:
            last = next((n for n, (x, _) in enumerate(route.points[::-1]) if x != old), None)
            straight = len(route.points) - 1 if last is None else last
            ending.append((route.points[-1 - straight][0], place, straight))
    for number, (_, place, straight) in enumerate(sorted(ending), 1):
        route, x = whole.routes[place], left + width * number / (len(ending) + 1)
        moved = [(x, y) for _, y in route.points[-straight:]]
        whole.routes[place] = Route(route.link, (*route.points[:-straight], *moved))


def _by_graphviz(links: Links, sizes: Mapping[str, Point]) -> _Arranged | None:
    """Places and routes from the program ``dot``; ``None`` where it is not there, or fails."""
    keys = list(sizes)
    number = {key: at for at, key in enumerate(keys)}
    text = "\n".join((
        f"digraph {{ nodesep={SPACE_X / INCH} ranksep={SPACE_Y / INCH} splines=polyline",
        "node [shape=box fixedsize=true label=\"\"]",
        "edge [arrowhead=none tailport=s headport=n]",
        *(f"{number[key]} [width={w / INCH} height={h / INCH}]" for key, (w, h) in sizes.items()),
        *(f"{number[first]} -> {number[second]}" for first, second in links),
        "}",
    ))  # fmt: skip
    try:
        command = ["dot", "-Tplain"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=PATIENCE)
        return _told(done.stdout, keys, links, sizes) if done.returncode == 0 else None
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return None


def _told(text: str, keys: list[str], links: Links, sizes: Mapping[str, Point]) -> _Arranged:
    """What ``dot`` has printed, in inches from the lower left corner.

    Raises ``ValueError`` or ``LookupError`` for what makes no sense.
    """
    whole = _Arranged()
    for kind, *words in filter(None, map(str.split, text.splitlines())):
        if kind == "graph":
            whole.width, whole.height = float(words[1]) * INCH, float(words[2]) * INCH
        elif kind == "node":
            key = keys[int(words[0])]
            x, y = float(words[1]) * INCH, whole.height - float(words[2]) * INCH
            whole.at[key] = (x - sizes[key][0] / 2, y - sizes[key][1] / 2)
        elif kind == "edge":
            ends = keys[int(words[0])], keys[int(words[1])]
            numbers = [float(word) * INCH for word in words[3 : 3 + 2 * int(words[2])]]
            points = [(x, whole.height - y) for x, y in zip(*[iter(numbers)] * 2, strict=True)]
            corners = list(dict.fromkeys(points[::3]))  # between them lie the controls of splines
            straight = tuple(point for pair in pairwise(corners) for point in pair)
            whole.add(links[ends], ends[0], straight)
    if whole.at.keys() != sizes.keys() or len(whole.routes) != sum(map(len, links.values())):
        raise ValueError("boxes or links are missing")
    return whole


@dataclass
class _View:
    """What grandalf asks of a vertex."""

    w: float
    h: float
    xy: Point = (0.0, 0.0)


def _by_grandalf(links: Links, sizes: Mapping[str, Point]) -> _Arranged:
    """The connected parts side by side."""
    from grandalf.graphs import Edge, Vertex
    from grandalf.graphs import Graph as Vertices
    from grandalf.layouts import SugiyamaLayout

    vertices = {key: Vertex(key) for key in sizes}
    for key, vertex in vertices.items():
        vertex.view = _View(*sizes[key])
    edges = [Edge(vertices[a], vertices[b], data=(a, b)) for a, b in links]
    whole = _Arranged()
    for component in Vertices(list(vertices.values()), edges).C:
        found = SugiyamaLayout(component)
        found.xspace, found.yspace = SPACE_X, SPACE_Y
        found.dw = DOT
        roots = [vertex for vertex in component.sV if not vertex.e_in()]
        found.init_all(roots=roots, inverted_edges=[], optimize=True)
        found.draw(3)
        _add_component(whole, found, links, sizes)
    return whole


def _add_component(whole: _Arranged, found: Any, links: Links, sizes: Mapping[str, Point]) -> None:
    """Take the library's layers and its x; heights follow from the tallest box of each layer."""
    heights = [
        max([v.view.h for v in layer if not found.grx[v].dummy] or [0]) for layer in found.layers
    ]
    tops = [sum(heights[:rank]) + SPACE_Y * rank for rank in range(len(heights))]
    ends = [(v.view.xy[0], v.view.w / 2) for layer in found.layers for v in layer]
    shift = whole.width + (SPACE_X if whole.width else 0) - min(x - half for x, half in ends)
    for vertex in found.g.sV:
        (width, height), rank = sizes[vertex.data], found.grx[vertex].rank
        y = tops[rank] + (heights[rank] - height) / 2
        whole.at[vertex.data] = (vertex.view.xy[0] + shift - width / 2, y)
    for edge in found.g.sE:
        start, end = edge.data
        first, last = found.grx[edge.v[0]].rank, found.grx[edge.v[1]].rank
        between = found.ctrls.get(edge, {})
        points: list[Point] = []
        for rank in range(first, last + 1):
            x = (
                edge.v[0] if rank == first else edge.v[1] if rank == last else between[rank]
            ).view.xy[0]
            points += [(x + shift, tops[rank]), (x + shift, tops[rank] + heights[rank])]
        points[0] = (points[0][0], whole.at[start][1] + sizes[start][1])
        points[-1] = (points[-1][0], whole.at[end][1])
        whole.add(links[start, end], start, tuple(points))
    whole.width = shift + max(x + half for x, half in ends)
    whole.height = max(whole.height, tops[-1] + heights[-1])
