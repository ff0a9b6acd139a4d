"""Draw consecutive layers that look alike as one box, with their number.

Two consecutive layers look alike if they contain parts of the same names, kinds and tones. Their
box contains a graph. A link that leaves a layer goes through a dot at the end of the box, also if
it leads to the next layer of the same box. A link that enters a layer goes through a dot at the
beginning of the box. Links that reach the same parts share one dot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap

from enjoyln_cli.recipe.templates import layers_of
from enjoyln_cli.report.graph_layout import (
    MAX_LINE_CHARS,
    Box,
    Graph,
    Link,
    Shape,
    Tone,
    shorten,
    wrap_name,
)
from enjoyln_cli.report.layer_names import compact


@dataclass(frozen=True)
class ModelPart:
    """One part of the model: its kind, its dotted name, and how it is shown."""

    kind: str
    path: str
    tone: Tone
    lines: tuple[str, ...] = ()
    """Lines below its name."""
    why: str = ""
    """The reason why a norm stays, or why a value keeps its mean; it stands below the lines."""


@dataclass(frozen=True)
class Address:
    """Where a part is drawn: the layers that contain it, outermost first, and its own name."""

    layers: tuple[tuple[str, int], ...]
    """For each layer: the name of its box (``transformer.h.0-11``), and its own number."""
    path: str
    """The part's dotted name, with the numbers of the boxes."""


def collapse_groups(
    parts: Sequence[ModelPart], links: Mapping[tuple[ModelPart, ModelPart], bool]
) -> Graph:
    """The graph of ``parts``, with layers that look alike as one box.

    ``parts`` are in the order of computation. The value of a link says whether its end observes the
    mean of its start.
    """
    addresses = addresses_of(parts)
    shown: dict[tuple[str, str], list[ModelPart]] = {}
    for part in parts:
        shown.setdefault((part.kind, addresses[part].path), []).append(part)
    tree = _Level("")
    for (kind, path), parts in shown.items():
        address = addresses[parts[0]]
        level = tree
        for drawn, _ in address.layers:
            level = level.child(drawn)
        level.boxes[kind + " " + path] = _box(kind, path, level.path, parts)
    for (start, end), seen in links.items():
        _connect(tree, start, end, addresses, seen)
    return tree.graph()


def addresses_of(parts: Sequence[ModelPart]) -> dict[ModelPart, Address]:
    """The address of each part; consecutive layers that look alike get the same box name."""
    words = {part: part.path.split(".") for part in parts}
    original = {part: tuple(w) for part, w in words.items()}
    layers = layers_of(part.path for part in parts)
    for prefix in sorted(layers, key=lambda p: -p.count(".")):
        at = prefix.count(".") + 1
        under: dict[int, set[ModelPart]] = {}
        for part, found in original.items():
            if len(found) > at and ".".join(found[:at]) == prefix and found[at].isdigit():
                under.setdefault(int(found[at]), set()).add(part)
        alike: list[list[int]] = []
        looks: list[frozenset[tuple[str, str, Tone]]] = []
        for number in sorted(under):
            look = frozenset((p.kind, ".".join(words[p][at + 1 :]), p.tone) for p in under[number])
            if looks and look == looks[-1]:
                alike[-1].append(number)
            else:
                alike.append([number])
                looks.append(look)
        for run in alike:
            shown = str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"
            for part in (part for number in run for part in under[number]):
                words[part][at] = shown
    held = Counter(
        (".".join(words[p][: at + 1]))
        for p in {(p.kind, *words[p]): p for p in parts}.values()
        for at in _levels(original[p], layers)
    )
    found_addresses = {}
    for part in parts:
        levels = [
            (".".join(words[part][: at + 1]), int(original[part][at]))
            for at in _levels(original[part], layers)
        ]
        chain = tuple((name, number) for name, number in levels if held[name] > 1)
        found_addresses[part] = Address(chain, ".".join(words[part]))
    return found_addresses


def _levels(words: Sequence[str], layers: dict[str, int]) -> list[int]:
    return [
        at for at in range(1, len(words)) if words[at].isdigit() and ".".join(words[:at]) in layers
    ]


def _box(kind: str, path: str, inside: str, parts: list[ModelPart]) -> Box:
    part = parts[0]
    name = path.removeprefix(inside).lstrip(".")
    if kind == "sum":
        op = name.rpartition("(")[2].split(" ")[0]
        names, lines = ["+" if op == "add" else op], part.lines
    elif kind == "op":
        names, lines = ["centre"], tuple(wrap_name(name.rpartition(".(")[0] or inside))
    elif kind == "source":
        names, lines = wrap_name(name.partition(" (")[0] or name), part.lines
    else:
        names, lines = wrap_name(name), part.lines
    whys = compact(dict.fromkeys(p.why for p in parts if p.why))
    reasons = [line for why in whys[:2] for line in wrap(why, MAX_LINE_CHARS)]
    shape: Shape = "dot" if kind == "sum" else "box"
    return Box(f"{kind} {path}", (*names, *lines, *reasons), part.tone, shape, names=len(names))


@dataclass
class _Level:
    """A graph under construction: that of a layer, or of the whole model."""

    path: str
    boxes: dict[str, Box] = field(default_factory=dict)
    inner: dict[str, _Level] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    links: dict[Link, None] = field(default_factory=dict)
    entries: dict[str, dict[str, None]] = field(default_factory=dict)
    """For each name outside: the boxes in this graph that are computed from it."""
    exits: dict[str, None] = field(default_factory=dict)
    """The boxes whose values are used outside."""

    def child(self, path: str) -> _Level:
        if path not in self.inner:
            self.inner[path] = _Level(path)
            self.boxes[path] = Box(path, (), "group")
        return self.inner[path]

    def graph(self) -> Graph:
        """The finished graph, with a dot for each entry and one for the exit."""
        ways: dict[tuple[str, ...], list[str]] = {}
        for name, ends in self.entries.items():
            ways.setdefault(tuple(sorted(ends)), []).append(name)
        boxes, links = [], dict(self.links)
        for following, names in ways.items():
            lines = (shorten(names[0]),) if len(ways) > 1 else ()
            boxes.append(Box(f"in {names[0]}", lines, "plain", "dot"))
            links |= {Link(boxes[-1].key, end): None for end in following}
        for key, box in self.boxes.items():
            boxes.append(self.inner[key].box(self.path) if key in self.inner else box)
        if self.exits:
            boxes.append(Box("out", (), "plain", "dot"))
            links |= {Link(start, "out"): None for start in self.exits}
        return Graph(tuple(boxes), tuple(links))

    def box(self, outside: str) -> Box:
        name = self.path.removeprefix(outside).lstrip(".")
        first, _, last = self.path.rpartition(".")[2].partition("-")
        times = int(last) - int(first) + 1 if last else 1
        name += f" ({times} layers)" if times > 1 else ""
        return Box(self.path, (name,), "group", inside=self.graph())


def _connect(
    tree: _Level, start: ModelPart, end: ModelPart, addresses: dict[ModelPart, Address], seen: bool
) -> None:
    """Add a link in the innermost graph that contains both parts.

    In the graphs inside it, ``start`` gets a link to the exit and ``end`` one from an entry.
    """
    here, there = addresses[start], addresses[end]
    depth = 0
    while depth < min(len(here.layers), len(there.layers)) and (
        here.layers[depth] == there.layers[depth]
    ):
        depth += 1
    level = tree
    for name, _ in here.layers[:depth]:
        level = level.inner[name]
    starts = [*(name for name, _ in here.layers[depth:]), f"{start.kind} {here.path}"]
    ends = [*(name for name, _ in there.layers[depth:]), f"{end.kind} {there.path}"]
    if starts[0] != ends[0]:
        level.links[Link(starts[0], ends[0], seen)] = None
    inside = level
    for name, following in zip(starts, starts[1:], strict=False):
        inside = inside.inner[name]
        inside.exits[following] = None
    inside, source = level, "the stream" if start.kind == "sum" else here.path
    for name, following in zip(ends, ends[1:], strict=False):
        inside = inside.inner[name]
        inside.entries.setdefault(source, {})[following] = None
