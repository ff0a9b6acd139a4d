"""What the user sees: rows, trees, progress and closing lines. Shows what others found.

Results go to standard output, progress and warnings to standard error. Nothing here decides or
measures anything: counts are of a plan's own entries, numbers are printed as they arrived.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as RichTree

if TYPE_CHECKING:
    from enjoyln_cli.convert import Prepared
    from enjoyln_cli.fold import FoldResult
    from enjoyln_cli.plan import Plan
    from enjoyln_cli.why import Tree
    from enjoyln_cli.verify import Verification

FORMATS = ("table", "json", "markdown", "csv")
PIPED_WIDTH = 200
"""Columns for tables that do not go to a terminal, so that nothing is cut off in a file."""

LINE_SECONDS = 5.0
"""At most one progress line in this time, where no bar can be drawn."""


def console(stderr: bool = False) -> Console:
    """A console that prints names literally and never fails for want of a character."""
    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def say(text: str, style: str = "", stderr: bool = False) -> None:
    """One line, never hard-wrapped."""
    console(stderr).print(Text(text, style=style), soft_wrap=True)


def number(value: float | None) -> str:
    """``1.2e-16`` for small and large values, three digits in between, ``-`` for none."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 1e3 else f"{value:.0f}"
    return f"{value:.1e}"


def size(nbytes: float) -> str:
    """Bytes in decimal units, as disks count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def compact(names: Iterable[str]) -> list[str]:
    """Names that differ in a layer number only, as one: ``h.0-11.ln_1``. Order is kept."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(int(n) for n in re.findall(r"\d+", name))
        groups.setdefault(re.sub(r"\d+", "\0", name), []).append(numbers)
    return [_with_ranges(pattern, numbers) for pattern, numbers in groups.items()]


def _with_ranges(pattern: str, numbers: list[tuple[int, ...]]) -> str:
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    exact = prod(len(column) for column in columns) == len(set(numbers))
    for column in columns:
        shown = _ranges(column) if exact or len(column) == 1 else "*"
        pattern = pattern.replace("\0", shown, 1)
    return pattern


def _ranges(values: list[int]) -> str:
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def row(model: str, plan: Plan, paper: Sequence[str] | None = None) -> dict[str, Any]:
    """One model's report as plain data: what ``--format json`` prints, and all tables show.

    ``paper``: the norms that Algorithm 1 as printed would fold; without it there is no such entry.
    """
    shapes = {w.parameter: w.shape for w in plan.writers}
    found: dict[str, Any] = {
        "model": model,
        "model_type": plan.model_type,
        "model_class": plan.model_class,
        "classes": list(plan.classes),
        "norms": len(plan.norms),
        "folded_static": sum(v.status == "static" for v in plan.norms),
        "folded": len(plan.folded),
        "centering_ops": len(plan.ops),
        "writers": len(shapes),
        "parameters": sum(prod(shape) for shape in shapes.values()),
        "kept": [
            {"name": v.norm, "reason": v.reason, "culprit": v.culprit, "path": list(v.path)}
            for v in plan.kept
        ],
        "verdicts": [{"name": v.norm, "status": v.status, "ops": list(v.ops)} for v in plan.norms],
        "ops": [{"module": c.module, "place": c.place, "reason": c.reason} for c in plan.ops],
        "centred": [{"tensor": w.tensor, "shape": list(w.shape)} for w in plan.writers],
        "entry_inputs": list(plan.entry_inputs),
        "unproven": list(plan.unproven),
        "rms_norms": dict(plan.other_norms),
    }
    if paper is not None:
        found["paper"] = list(paper)
    return found


def write_rows(rows: Sequence[dict[str, Any]], form: str) -> None:
    """Print the report in one of ``FORMATS``; ``json`` is one object per line and model."""
    if form == "table":
        _table(rows)
    elif form == "json":
        for found in rows:
            print(json.dumps(found))
    elif form == "csv":
        print(_csv(rows), end="")
    else:
        print(_markdown(rows))


def _cells(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    paper = any("paper" in found for found in rows)
    head = ["model", "LNs", "in weights", "with ops", "ops", "kept", "writers", "parameters"]
    body = []
    for found in rows:
        cells = [found["model"], found["norms"], found["folded_static"], found["folded"]]
        cells += [found["centering_ops"], len(found["kept"]), found["writers"]]
        cells += [found["parameters"]]
        if paper:
            cells.append(len(found["paper"]))
        body.append([str(cell) for cell in cells])
    return head + ["paper"] * paper, body


def _reasons(found: dict[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for kept in found["kept"]:
        groups.setdefault(kept["reason"], []).append(kept)
    return list(groups.items())


def _table(rows: Sequence[dict[str, Any]]) -> None:
    shown = [found for found in rows if found["norms"]]
    head, body = _cells(shown)
    if shown:
        table = Table(caption=_legend("paper" in head), caption_justify="left")
        table.add_column(head[0], overflow="fold")
        for name in head[1:]:
            table.add_column(name, justify="right")
        for found, cells in zip(shown, body, strict=True):
            cells[-1 - ("paper" in head)] = f"{found['parameters']:,}"
            table.add_row(*cells)
        console().print(table)
    for found in rows:
        for line in notes(found):
            say(line)


def _legend(paper: bool) -> str:
    text = "in weights: LNs folded with no operation added; with ops: all that fold."
    return text + " paper: its Algorithm 1 as printed, never used to convert." * paper


def notes(found: dict[str, Any]) -> list[str]:
    """What the numbers of one row leave out: the reasons of ops and of kept norms."""
    model, total = found["model"], sum(found["rms_norms"].values())
    if not found["norms"]:
        if total:
            return [f"{model}: {total} norms are RMSNorm already, no LayerNorm to fold"]
        return [f"{model}: no LayerNorm in this model"]
    lines = [f"{model} ({found['model_class']})"]
    for op in found["ops"]:
        lines.append(f"  centre the {op['place']} of {op['module']}: {op['reason']}")
    for reason, kept in _reasons(found):
        culprits = list(dict.fromkeys(k["culprit"] for k in kept if k["culprit"]))
        blame = f" (at {', '.join(compact(culprits))})" if culprits else ""
        names = ", ".join(compact(k["name"] for k in kept))
        lines.append(f"  keep {len(kept)}: {reason}{blame}: {names}")
    if found["unproven"]:
        lines.append(f"  not read by any trace: {', '.join(compact(found['unproven']))}")
    return lines if len(lines) > 1 else []


def _csv(rows: Sequence[dict[str, Any]]) -> str:
    head, body = _cells(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*head, "kept by reason"])
    for found, cells in zip(rows, body, strict=True):
        writer.writerow([*cells, _reason_counts(found)])
    return text.getvalue()


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    head, body = _cells(rows)
    lines = ["| " + " | ".join([*head, "kept by reason"]) + " |"]
    lines.append("|---|" + "---:|" * (len(head) - 1) + "---|")
    for found, cells in zip(rows, body, strict=True):
        line = [cell.replace("|", "\\|") for cell in [*cells, _reason_counts(found)]]
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def _reason_counts(found: dict[str, Any]) -> str:
    if not found["norms"] and found["rms_norms"]:
        return "RMSNorm already"
    return "; ".join(f"{len(kept)} x {reason}" for reason, kept in _reasons(found))


def write_tree(tree: Tree) -> None:
    """Print the zero-mean graph of one norm; green where the mean is zero, red where it is not."""

    def grow(branch: RichTree, node: Tree) -> None:
        for child in node.children:
            grow(branch.add(_leaf(child)), child)

    def _leaf(node: Tree) -> Text:
        return Text(node.text, style="green" if node.zero_mean else "red")

    root = RichTree(_leaf(tree))
    grow(root, tree)
    console().print(root)


@dataclass(frozen=True)
class Watch:
    """The two ends of a long job's news: stages and warnings, and bytes done of all bytes."""

    event: Callable[[str, str], None]
    progress: Callable[[int, int], None]
    warnings: list[str] = field(default_factory=list)


@contextmanager
def watching(quiet: bool) -> Iterator[Watch]:
    """A bar with bytes, rate and time left on a terminal, plain lines elsewhere, or silence."""
    warnings: list[str] = []

    def event(level: str, text: str) -> None:
        if level == "warning":
            warnings.append(text)
        if not quiet:
            style = "yellow" if level == "warning" else "dim"
            say(f"warning: {text}" if level == "warning" else text, style, stderr=True)

    if quiet:
        yield Watch(event, lambda done, total: None, warnings)
    elif not console(stderr=True).is_terminal:
        yield Watch(event, _plain_lines(), warnings)
    else:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=console(stderr=True), transient=True)
        try:
            yield Watch(event, _bar(bar), warnings)
        finally:
            bar.stop()


def _bar(bar: Progress) -> Callable[[int, int], None]:
    def update(done: int, total: int) -> None:
        if not bar.task_ids:
            bar.add_task("writing", total=total)
            bar.start()
        bar.update(bar.task_ids[0], completed=done)
        if done >= total:
            bar.stop()

    return update


def _plain_lines() -> Callable[[int, int], None]:
    start = time.monotonic()
    last = start
    lock = threading.Lock()

    def update(done: int, total: int) -> None:
        nonlocal last
        with lock:
            now = time.monotonic()
            if now - last < LINE_SECONDS and done < total:
                return
            last = now
        rate = done / max(now - start, 1e-9)
        left = (total - done) / max(rate, 1e-9)
        text = f"{size(done)} of {size(total)}, {size(rate)}/s, {left:.0f} s left"
        say(text, stderr=True)

    return update


def counts(found: dict[str, Any]) -> str:
    """``25 of 25 LayerNorms (0 in the weights alone), 1 centring op, 26 tensors``."""
    ops = f"{found['centering_ops']} centring op" + "s" * (found["centering_ops"] != 1)
    norms = f"{found['folded']} of {found['norms']} LayerNorms"
    alone = f"({found['folded_static']} in the weights alone)"
    tensors = f"{found['writers']} tensors centred ({found['parameters']:,} parameters)"
    return f"{norms} {alone}, {ops}, {tensors}"


def fold_row(
    model: str, ready: Prepared, result: FoldResult | None, warnings: Sequence[str]
) -> dict[str, Any]:
    """What ``enjoyln fold --json`` prints: the report's row, what was written, what was verified.

    Without a ``result`` it is a dry run, and ``bytes_written`` is what would be written.
    """
    found = row(model, ready.plan) | {"dry_run": result is None, "warnings": list(warnings)}
    found["tensors"] = len(ready.checkpoint.tensors)
    if result is None:
        return found | {"bytes_written": ready.bytes_to_write()}
    found |= {"out": str(result.out), "bytes_written": result.bytes_written}
    checked = json.loads(result.verification.to_json()) if result.verification else None
    summary = result.verification.summary if result.verification else ""
    return found | {"seconds": result.seconds, "verification": checked, "summary": summary}


def write_fold(found: dict[str, Any]) -> None:
    """The closing lines of a fold, with the next command to run; for a dry run, the plan."""
    dry = found["dry_run"]
    say(f"{'would fold' if dry else 'folded'} {counts(found)}", "green")
    for line in notes(found):
        say(line)
    if dry:
        for name in compact(entry["tensor"] for entry in found["centred"]):
            say(f"  centre {name}")
        wrote = f"{found['tensors']} tensors, {size(found['bytes_written'])}"
        say(f"would write {wrote}; nothing was written (dry run)")
        return
    say(f"wrote {size(found['bytes_written'])} to {found['out']} in {found['seconds']:.1f} s")
    say(f"verified: {found['summary']}" if found["verification"] else "not verified")
    say(f"next: enjoyln verify {found['out']}")


def write_verification(found: Verification) -> None:
    """Each error beside the original's own rounding, then the means that the RMSNorms saw."""
    table = Table("measure", "value", "beside")
    own = f"the original's own rounding: {number(found.original_error)}"
    rows = [
        ("identity error (float64)", found.identity_error, "exact algebra"),
        ("storage error", found.storage_error, own),
        ("runtime error", found.runtime_error, own),
        ("ratio to the original", found.ratio, "1 is as close as the original"),
        ("KL divergence", found.kl, ""),
        ("top-1 agreement", found.top1_agreement, ""),
        ("stock loading", found.stock_error, own),
    ]
    for name, value, beside in rows:
        table.add_row(name, number(value), beside)
    console().print(table)
    say(found.summary, "green" if found.passed else "red")


def write_json(found: Any) -> None:
    """One JSON object on standard output."""
    print(json.dumps(found))
