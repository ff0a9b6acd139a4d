"""A picture as data (nested boxes and links), and the layout of its parts.

``model_graph`` decides what a box means, ``render`` how it is drawn in a file. Links run from top
to bottom. The graph inside a box is laid out on its own; outside, that box is placed like any
other. grandalf places the boxes in layers (Sugiyama's method).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
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
"""Font size, line height and an upper estimate of a character's width, in pixels."""
MARGIN, DOT, SPACE_X, SPACE_Y = 12.0, 18.0, 26.0, 22.0
"""Padding of a box, size of a dot, horizontal and vertical gap between boxes, in pixels."""
MAX_LINE_CHARS = 44
"""Longest line in a box, in characters."""


@dataclass(frozen=True)
class Box:
    """One box of a picture. Its first lines are its name."""

    key: str
    """Identifies the box in its graph."""
    lines: tuple[str, ...]
    tone: Tone = "plain"
    shape: Shape = "box"
    inside: Graph | None = None
    """The graph drawn inside the box, if any."""
    names: int = 1
    """Number of lines of the name."""


@dataclass(frozen=True)
class Link:
    """An arrow from one box to another box of the same graph, by their keys."""

    start: str
    end: str
    seen: bool = False
    """Whether the end observes the start's mean (a dashed arrow), instead of computing from it."""


@dataclass(frozen=True)
class Graph:
    """Boxes in the order of computation, and links between them."""

    boxes: tuple[Box, ...]
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Picture:
    """A graph with the title and notes above it."""

    title: str
    notes: tuple[str, ...]
    graph: Graph


@dataclass(frozen=True)
class PlacedBox:
    """A box with its upper left corner and its size, in pixels."""

    box: Box
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Route:
    """The drawn path of a link.

    ``points`` come in pairs. Straight lines join the two points of a pair, curves join the pairs.
    """

    link: Link
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Layout:
    """All boxes and routes of a graph and of the graphs inside it, outermost first."""

    width: float
    height: float
    boxes: tuple[PlacedBox, ...]
    routes: tuple[Route, ...]


def shorten(text: str, most: int = MAX_LINE_CHARS) -> str:
    """The text in at most ``most`` characters; the middle of a longer text is replaced by dots."""
    return text if len(text) <= most else f"{text[: most // 2 - 2]}...{text[-(most // 2 - 1) :]}"


def wrap_name(text: str) -> list[str]:
    """Split a name into lines, after a dot where possible."""
    lines = [""]
    for piece in re.findall(rf"[^. ,]{{1,{MAX_LINE_CHARS - 1}}}[. ,]?|[. ,]", text):
        if len(lines[-1] + piece) > MAX_LINE_CHARS:
            lines.append("")
        lines[-1] += piece
    return lines


def every_box(graph: Graph) -> Iterator[Box]:
    """The boxes of a graph, each before those inside it."""
    for box in graph.boxes:
        yield box
        if box.inside:
            yield from every_box(box.inside)


def tones(graph: Graph) -> set[Tone]:
    """The tones that occur in a graph."""
    return {box.tone for box in every_box(graph)}


def layout(graph: Graph) -> Layout:
    """Compute the positions of all boxes and the routes of all links, inner graphs included."""
    inner = {box.key: layout(box.inside) for box in graph.boxes if box.inside}
    sizes = {box.key: _size(box, inner.get(box.key)) for box in graph.boxes}
    whole = _arrange(graph, sizes)
    routes = whole.routes
    boxes: list[PlacedBox] = []
    for box in graph.boxes:
        x, y = whole.at[box.key]
        boxes.append(PlacedBox(box, x, y, *sizes[box.key]))
        if box.key in inner:
            part = inner[box.key]
            left, top = x + (sizes[box.key][0] - part.width) / 2, y + LINE * len(box.lines) + MARGIN
            boxes += [replace(p, x=p.x + left, y=p.y + top) for p in part.boxes]
            routes += [_shift(route, left, top) for route in part.routes]
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


def _shift(route: Route, x: float, y: float) -> Route:
    return Route(route.link, tuple((px + x, py + y) for px, py in route.points))


Links = dict[tuple[str, str], list[Link]]
"""Links by the keys of the two boxes, the one that is computed earlier first."""


@dataclass
class _Arrangement:
    """Upper left corners of boxes, routes of links, and the size of the whole graph."""

    at: dict[str, Point] = field(default_factory=dict)
    routes: list[Route] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0

    def add(self, links: list[Link], first: str, points: tuple[Point, ...]) -> None:
        """Add the route ``points``, which begins at the box ``first``, for all ``links``."""
        for link in links:
            self.routes.append(Route(link, points if link.start == first else points[::-1]))


def _arrange(graph: Graph, sizes: Mapping[str, Point]) -> _Arrangement:
    order = {box.key: place for place, box in enumerate(graph.boxes)}
    links: Links = {}
    for link in graph.links:
        if link.start != link.end:
            first, second = sorted((link.start, link.end), key=order.__getitem__)
            links.setdefault((first, second), []).append(link)
    whole = _by_grandalf(links, sizes)
    for box in graph.boxes:
        if box.inside:
            _spread_ends(whole, box.key, sizes[box.key][0])
    return whole


def _spread_ends(whole: _Arrangement, key: str, width: float) -> None:
    """Let links end side by side on a box that contains others.

    Links that meet in one point would look as if their values were added there.
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


@dataclass
class _View:
    """The size and position of a vertex, as grandalf expects them."""

    w: float
    h: float
    xy: Point = (0.0, 0.0)


def _by_grandalf(links: Links, sizes: Mapping[str, Point]) -> _Arrangement:
    """The arrangement that grandalf finds, with the connected components side by side."""
    from grandalf.graphs import Edge, Vertex
    from grandalf.graphs import Graph as Vertices
    from grandalf.layouts import SugiyamaLayout

    vertices = {key: Vertex(key) for key in sizes}
    for key, vertex in vertices.items():
        vertex.view = _View(*sizes[key])
    edges = [Edge(vertices[a], vertices[b], data=(a, b)) for a, b in links]
    whole = _Arrangement()
    for component in Vertices(list(vertices.values()), edges).C:
        found = SugiyamaLayout(component)
        found.xspace, found.yspace = SPACE_X, SPACE_Y
        found.dw = DOT
        roots = [vertex for vertex in component.sV if not vertex.e_in()]
        found.init_all(roots=roots, inverted_edges=[], optimize=True)
        found.draw(3)
        _add_component(whole, found, links, sizes)
    return whole


def _add_component(
    whole: _Arrangement, found: Any, links: Links, sizes: Mapping[str, Point]
) -> None:
    """Add a component, with grandalf's layers and x positions.

    The height of a layer is that of its tallest box.
    """
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
    for edge in sorted(found.g.sE, key=lambda edge: edge.data):  # grandalf's order varies
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
