"""Draw consecutive layers that look alike once, in a frame with their number.

Two consecutive layers look alike if they contain parts of the same names, kinds and tones. Links
between such layers are left out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from textwrap import wrap

from enjoyln_cli.recipe.templates import layers_of
from enjoyln_cli.report.layer_names import compact
from enjoyln_cli.report.picture import Box, Link, Tone

MAX_LINE_CHARS = 44
"""Longest line in a box, in characters."""


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
) -> tuple[tuple[Box, ...], tuple[Link, ...]]:
    """The boxes for ``parts`` and the links between them, with layers that look alike once.

    ``parts`` are in the order of computation. The value of a link says whether its end observes the
    mean of its start.
    """
    addresses = addresses_of(parts)
    alike: dict[str, list[ModelPart]] = {}
    for part in parts:
        alike.setdefault(f"{part.kind} {addresses[part].path}", []).append(part)
    boxes = tuple(_box(key, same, addresses[same[0]]) for key, same in alike.items())
    shown: dict[Link, None] = {}
    for (start, end), seen in links.items():
        here, there = addresses[start], addresses[end]
        link = Link(f"{start.kind} {here.path}", f"{end.kind} {there.path}", seen)
        numbers = dict(there.layers)
        is_next_layer = any(numbers.get(frame, number) != number for frame, number in here.layers)
        if link.start != link.end and not is_next_layer:
            shown[link] = None
    return boxes, tuple(shown)


def addresses_of(parts: Sequence[ModelPart]) -> dict[ModelPart, Address]:
    """The address of each part; consecutive layers that look alike get the same box name."""
    words = {part: part.path.split(".") for part in parts}
    layers = layers_of(part.path for part in parts)
    numbers: dict[ModelPart, dict[int, int]] = {part: {} for part in parts}
    """From the position of each layer number in a part's name to that number."""
    for prefix in sorted(layers, key=lambda p: -p.count(".")):
        at, under = prefix.count(".") + 1, defaultdict[int, list[ModelPart]](list)
        for part in parts:
            number = part.path.removeprefix(f"{prefix}.").partition(".")[0]
            if part.path.startswith(f"{prefix}.") and number.isdigit():
                numbers[part][at] = int(number)
                under[int(number)].append(part)
        looks = {
            number: {(p.kind, ".".join(words[p][at + 1 :]), p.tone) for p in inside}
            for number, inside in under.items()
        }
        for _, group in groupby(sorted(under), key=looks.__getitem__):
            run = list(group)
            for part in (part for number in run for part in under[number]):
                words[part][at] = f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0])
    distinct = {(part.kind, *words[part]): part for part in parts}.values()
    inside = Counter(".".join(words[part][: at + 1]) for part in distinct for at in numbers[part])
    return {
        part: Address(
            tuple(
                (name, numbers[part][at])
                for at in sorted(numbers[part])
                if inside[name := ".".join(words[part][: at + 1])] > 1
            ),
            ".".join(words[part]),
        )
        for part in parts
    }


def _box(key: str, parts: Sequence[ModelPart], address: Address) -> Box:
    """The box of a part that occurs in one or several layers."""
    part, frames = parts[0], [frame for frame, _ in address.layers]
    inside = frames[-1] if frames else ""
    name, lines = address.path.removeprefix(inside).lstrip("."), part.lines
    if part.kind == "sum":
        op = name.rpartition("(")[2].split(" ")[0]
        name = "+" if op == "add" else op
    elif part.kind == "op":
        name, lines = "centre", tuple(wrap_name(name.rpartition(".(")[0] or inside))
    elif part.kind == "source":
        name = name.partition(" (")[0] or name
    whys = compact(dict.fromkeys(p.why for p in parts if p.why))
    reasons = [line for why in whys[:2] for line in wrap(why, MAX_LINE_CHARS)]
    titles = tuple(map(_title, frames, ["", *frames]))
    is_sum = part.kind == "sum"
    return Box(key, tuple(wrap_name(name)), (*lines, *reasons), part.tone, titles, is_sum)


def _title(frame: str, outside: str) -> str:
    """The title of a frame: its name inside of the frame around it, and its number of layers."""
    first, _, last = frame.rpartition(".")[2].partition("-")
    layers = f" ({int(last) - int(first) + 1} layers)" if last else ""
    return frame.removeprefix(outside).lstrip(".") + layers


def wrap_name(text: str) -> list[str]:
    """Split a name into lines, after a dot where possible."""
    lines = [""]
    for piece in re.findall(rf"[^. ,]{{1,{MAX_LINE_CHARS - 1}}}[. ,]?|[. ,]", text):
        if len(lines[-1] + piece) > MAX_LINE_CHARS:
            lines.append("")
        lines[-1] += piece
    return lines
