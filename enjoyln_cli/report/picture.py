"""A picture as data (boxes, frames around them, links), and its file.

``model_graph`` decides what a box means. Graphviz places and draws the boxes: its program ``dot``
reads the picture as text. Names come from untrusted files, so that text is escaped.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import count
from pathlib import Path
from typing import Literal

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import check_file, write_file

Tone = Literal[
    "in_weights",
    "with_subtraction",
    "stays_layernorm",
    "op",
    "writer",
    "left",
    "observer",
    "zero",
    "mean",
    "plain",
]
COLOURS: dict[Tone, tuple[str, str, str]] = {
    "in_weights": ("#52d1b7", "#0b3d20", "becomes RMSNorm, in the weights alone"),
    "with_subtraction": ("#addbff", "#0b4a72", "becomes RMSNorm, with an added mean subtraction"),
    "stays_layernorm": ("#e8756a", "#4a0e00", "stays LayerNorm"),
    "op": ("#4693ff", "#02182e", "added mean subtraction"),
    "writer": ("#f5ec8a", "#4f4a00", "zero-mean"),
    "zero": ("#f5ec8a", "#4f4a00", "zero-mean"),
    "left": ("#f7a440", "#4a3000", "keeps a mean"),
    "mean": ("#f7a440", "#4a3000", "keeps a mean"),
    "observer": ("#b184bc", "#34084a", "would notice a missing mean"),
    "plain": ("#ffffff", "#455a64", "input, output, or unchanged weights"),
}
"""For each tone: fill colour, colour of lines and text, and its entry in the legend.

The fills are chosen to be distinguishable with colour vision deficiency.
"""

SUFFIXES = (".svg", ".png", ".pdf", ".dot")
FRAME, FRAME_LINE, TEXT, DIM, LINK = "#f5f7f8", "#546e7a", "#212121", "#616161", "#78909c"
PNG_DPI = 192


@dataclass(frozen=True)
class Box:
    """One box of a picture."""

    key: str
    """Identifies the box."""
    name: tuple[str, ...]
    """The lines of its name."""
    lines: tuple[str, ...]
    """The lines below its name."""
    tone: Tone = "plain"
    frames: tuple[str, ...] = ()
    """The titles of the frames around it, outermost first."""
    is_sum: bool = False


@dataclass(frozen=True)
class Link:
    """An arrow from one box to another, by their keys."""

    start: str
    end: str
    seen: bool = False
    """Whether the end observes the start's mean (a dashed arrow), instead of computing from it."""


@dataclass(frozen=True)
class Picture:
    """Boxes in the order of computation and links between them, with a title and a note above."""

    title: str
    note: str
    boxes: tuple[Box, ...]
    links: tuple[Link, ...]


def check(file: Path) -> None:
    """Raise ``OutputError`` if no picture can be saved as ``file``; called before the analysis."""
    suffix = file.suffix.lower()
    if suffix not in SUFFIXES:
        raise OutputError(
            f"unsupported picture format {file.suffix or file.name!r}; use {', '.join(SUFFIXES)}"
        )
    check_file(file)
    if suffix != ".dot" and shutil.which("dot") is None:
        raise OutputError(
            f"a {suffix} picture needs Graphviz (https://graphviz.org/download); install it, or "
            "save the picture as .dot and draw it elsewhere"
        )


def save(picture: Picture, file: Path) -> None:
    """Write a picture in the format given by the file's suffix.

    Raises ``OutputError`` if the suffix is not in ``SUFFIXES``, Graphviz is missing or fails, or
    the file cannot be written.
    """
    check(file)
    write_file(file, drawn(picture, file.suffix.lower().removeprefix(".")))


def drawn(picture: Picture, kind: str) -> bytes:
    """The picture as a file of ``kind``: svg, png, pdf or dot."""
    text = dot_text(picture).encode()
    if kind == "dot":
        return text
    command = ["dot", f"-T{kind}", *[f"-Gdpi={PNG_DPI}"] * (kind == "png")]
    done = subprocess.run(command, input=text, capture_output=True, check=False)
    if done.returncode or not done.stdout:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise OutputError(f"Graphviz cannot draw this picture: {said[:200]}")
    return done.stdout


def dot_text(picture: Picture) -> str:
    """The picture in Graphviz's language."""
    keys = {box.key: f"box{number}" for number, box in enumerate(picture.boxes)}
    lines = [
        "digraph {",
        f"graph [label={_head(picture)} labelloc=t fontcolor={_quoted(TEXT)}]",
        'graph [fontname="Helvetica,Arial,sans-serif" fontsize=12 nodesep=0.3 ranksep=0.3]',
        'node [fontname="Helvetica,Arial,sans-serif" fontsize=12 style="rounded,filled" height=0]',
        f"edge [color={_quoted(LINK)} arrowsize=0.6]",
        *_framed(picture.boxes, keys, 0, count()),
    ]
    for link in picture.links:
        seen = f" [style=dashed color={_quoted(COLOURS['observer'][1])}]" if link.seen else ""
        lines.append(f"{keys[link.start]} -> {keys[link.end]}{seen}")
    return "\n".join([*lines, "}", ""])


def _framed(
    boxes: Sequence[Box], keys: Mapping[str, str], depth: int, numbers: Iterator[int]
) -> Iterator[str]:
    """The lines for boxes inside of ``depth`` frames, and for the frames around some of them."""
    inner: dict[str, list[Box]] = {}
    for box in boxes:
        if len(box.frames) > depth:
            inner.setdefault(box.frames[depth], []).append(box)
        else:
            yield f"{keys[box.key]} [{_look(box)}]"
    for title, framed in inner.items():
        yield f"subgraph cluster{next(numbers)} {{"
        yield f"graph [label=<<b>{_shown(title)}</b>> style={_quoted('rounded,filled')}"
        yield f"fillcolor={_quoted(FRAME)} color={_quoted(FRAME_LINE)}]"
        yield from _framed(framed, keys, depth + 1, numbers)
        yield "}"


def _look(box: Box) -> str:
    fill, line, _ = COLOURS[box.tone]
    shape = "ellipse width=0 margin=0.02" if box.is_sum else "box"
    names = [f'<font color="{TEXT}"><b>{_shown(text)}</b></font>' for text in box.name]
    label = "<br/>".join([*names, *map(_shown, box.lines)])
    colours = f"fillcolor={_quoted(fill)} color={_quoted(line)} fontcolor={_quoted(line)}"
    return f"label=<{label}> shape={shape} {colours}"


def _head(picture: Picture) -> str:
    """Title, note, and the legend: the meaning of each colour in the picture."""
    used = {box.tone for box in picture.boxes}
    colours = {COLOURS[tone][2]: COLOURS[tone] for tone in COLOURS if tone in used}
    rows = [f'<td align="left"><font point-size="15"><b>{_shown(picture.title)}</b></font></td>']
    rows.append(f'<td align="left"><font color="{DIM}">{_shown(picture.note)}</font></td>')
    for meaning, (fill, line, _) in colours.items():
        text = f'<font color="{line}">{meaning}</font>'
        rows.append(f'<td align="left" bgcolor="{fill}">{text}</td>')
    return f'<<table border="0">{"".join(f"<tr>{row}</tr>" for row in rows)}</table>>'


def _quoted(text: str) -> str:
    return f'"{text}"'


def _shown(text: str) -> str:
    """The text for a label, with question marks for characters that no file may contain."""
    printable = "".join(c if c.isprintable() else "?" for c in text)
    return escape(printable).replace("\\", 2 * "\\")  # Graphviz reads \\N as a name
