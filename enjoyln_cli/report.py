"""What the user sees: tables, trees, progress and closing lines. Shows what others found.

Results go to standard output, progress and warnings to standard error. Nothing here decides or
measures anything.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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

from enjoyln_cli.errors import size
from enjoyln_cli.rows import (
    Row,
    as_csv,
    as_markdown,
    cells,
    compact,
    counted,
    counts,
    notes,
    number,
)

if TYPE_CHECKING:
    from enjoyln_cli.hub import Upload
    from enjoyln_cli.speeds import Bench
    from enjoyln_cli.speeds import Row as SpeedRow
    from enjoyln_cli.verify import Verification
    from enjoyln_cli.why import Tree

PIPED_WIDTH = 200
"""Columns for tables that do not go to a terminal, so that nothing is cut off in a file."""

NARROW = 12
"""Columns in which the first entry of a row may be folded."""

LINE_SECONDS = 5.0
"""At most one progress line in this time, where no bar can be drawn."""

WORST = 3
"""How many of the means that the RMSNorms saw are shown."""


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


def _show(table: Table) -> None:
    """A table; where a terminal is too narrow for its words, every row as lines of its own."""
    out = console()
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    heads = [str(column.header) for column in table.columns]
    words = [
        max((len(word) for text in (head, *cells) for word in text.split()), default=0)
        for head, cells in zip(heads, columns, strict=True)
    ]
    if out.width >= min(words[0], NARROW) + sum(words[1:]) + 3 * len(words) + 1:
        out.print(table)
        return
    for first, *rest in zip(*columns, strict=True):
        say(f"{heads[0]} {first}".strip())
        for head, cell in zip(heads[1:], rest, strict=True):
            if cell:
                say(f"  {head} {cell}".rstrip() if head else f"  {cell}")


def write_json(found: Any) -> None:
    """One JSON object on one line of standard output."""
    print(json.dumps(found))


def write_rows(rows: Sequence[Row], form: str) -> None:
    """Print the report as ``table``, ``markdown``, ``csv``, or ``json``: one line per model."""
    if form == "table":
        _write_table(rows)
    elif form == "json":
        for found in rows:
            write_json(found)
    else:
        print(as_csv(rows) if form == "csv" else as_markdown(rows), end="")


def _write_table(rows: Sequence[Row]) -> None:
    shown = [found for found in rows if found["norms"]]
    if shown:
        head, body = cells(shown)
        table = Table()
        table.add_column(head[0], overflow="fold")
        for name in head[1:]:
            table.add_column(name, justify="right", overflow="fold")
        for texts in body:
            table.add_row(texts[0], *(f"{int(text):,}" for text in texts[1:]))
        _show(table)
        options = [name for found in shown[:1] for name in found.get("options", ())]
        say(_legend("paper" in head, options), "dim")
    for found in rows:
        for line in notes(found):
            say(line)


def _legend(paper: bool, options: Sequence[str]) -> str:
    text = "in weights: LayerNorms that fold with no operation added; in all: with the ops too"
    text += f"; {', '.join(options)}: in weights with that option" if options else ""
    return text + "; paper: its Algorithm 1 as printed, never used to convert" * paper


def write_tree(tree: Tree) -> None:
    """Print the zero-mean graph of one norm; green where the mean is zero, red where it is not."""

    def leaf(node: Tree) -> Text:
        return Text(node.text, style="green" if node.zero_mean else "red")

    def grow(branch: RichTree, node: Tree) -> None:
        for child in node.children:
            grow(branch.add(leaf(child)), child)

    root = RichTree(leaf(tree))
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
    start = last = 0.0
    before = 0  # bytes: what an earlier run had written comes all at once, and first
    lock = threading.Lock()

    def update(done: int, total: int) -> None:
        nonlocal start, last, before
        with lock:
            now = time.monotonic()
            if not start:
                start = last = now
            if done and not before and done < total:
                start, before = now, done
            if now - last < LINE_SECONDS and done < total:
                return
            last = now
        rate = (done - before) / max(now - start, 1e-3)
        text = f"{size(done)} of {size(total)}, {size(rate)}/s"
        if done < total:
            text += f", {(total - done) / max(rate, 1e-9):.0f} s left"
        say(text, stderr=True)

    return update


def write_fold(found: Row) -> None:
    """The closing lines of a fold, with the next command to run; for a dry run, the plan."""
    dry = found["dry_run"]
    say(f"{'would fold' if dry else 'folded'} {counts(found)}", "green")
    for line in notes(found):
        say(line)
    if dry:
        for name in compact(entry["tensor"] for entry in found["centred"]):
            say(f"  centre {name}")
        wrote = f"{found['tensors']} tensors, {size(found['bytes_written'])}"
        if "bytes_kept" in found:
            wrote += f", and about {size(found['bytes_kept'])} for the way back (an estimate)"
        say(f"would write {wrote}; nothing was written (dry run)")
        if "would_push_to" in found:
            say(f"would then push to {found['would_push_to']}")
        return
    kept = f", {size(found['bytes_kept'])} of it for the way back" if "bytes_kept" in found else ""
    wrote = f"{size(found['bytes_written'])} to {found['out']}"
    say(f"wrote {wrote} in {found['seconds']:.1f} s{kept}")
    if found["resumed"]:
        say(f"an earlier run had finished {found['resumed']} of the weight files")
    checked = found["verification"]
    unchecked = "not verified (--no-verify)"
    if found["streamed"]:
        unchecked = (
            "not verified (--stream): that takes the whole original; the next command does it"
        )
    say(f"verified: {checked['summary']}" if checked else unchecked)
    if "pushed" in found:
        done = "pushed to" if found["pushed"]["differs"] else "nothing to push:"
        say(f"{done} {found['pushed']['repo_id']}: {found['pushed']['url']}", "green")
    else:
        say(f"next: enjoyln verify {found['out']}")


def write_unfold(found: Row) -> None:
    """What the new directory holds, and where no means were kept, what that means."""
    wrote = f"{size(found['bytes_written'])} to {found['back']} in {found['seconds']:.1f} s"
    if found["restored"]:
        say(f"restored {found['tensors']} tensors bit for bit", "green")
        say(f"wrote {wrote}")
        return
    say("no means were kept (fold --keep-means), so the original cannot be restored bit for bit")
    say("the result already is a LayerNorm checkpoint that computes the same; its marker is gone")
    say(f"wrote {wrote}")


def write_verification(found: Verification) -> None:
    """Each error beside the original's own rounding, then the means that the RMSNorms saw."""
    own, dtype = number(found.original_error), found.compute_dtype
    table = Table("", "folded", "original", "")
    for column in table.columns[1:3]:
        column.justify = "right"
    table.add_row("identity error", number(found.identity_error), "", "the algebra, in float64")
    table.add_row("storage error", number(found.storage_error), "", "rounding the new weights")
    table.add_row("runtime error", number(found.runtime_error), own, f"RMSNorm, in {dtype}")
    table.add_row("stock error", number(found.stock_error), own, "plain transformers class")
    table.add_row("ratio", number(found.ratio), "1", f"passes up to {number(found.max_ratio)}")
    table.add_row("KL divergence", number(found.kl), "", "from the original")
    table.add_row("top-1 agreement", number(found.top1_agreement), "", "with the original")
    if found.perplexity:
        before, after = found.perplexity["original"], found.perplexity["folded"]
        tokens = f"over {found.perplexity['tokens']:.0f} tokens"
        table.add_row("perplexity", f"{after:.4f}", f"{before:.4f}", tokens)
    _show(table)
    say(f"{found.rows} inputs; errors are relative to the original in float64", "dim")
    for name, mean in list(found.norm_input_mean.items())[:WORST]:
        say(f"  {name} saw a mean of {number(mean)} of its input's rms")
    say(found.summary, "green" if found.passed else "red")


def write_bench(found: Bench) -> None:
    """Times of every case, what they say, what it cost, and what was left out."""
    table = Table("median time", "original", "folded", "rms_norm", "no norm")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in found.rows:
        times = (row.ms[name].median for name in ("original", "folded", "stock", "bare"))
        table.add_row(row.case, *(f"{time:.4g} ms" for time in times))
    _show(table)
    say("rms_norm: with torch's own RMSNorm; no norm: with norms that do nothing", "dim")
    for row in found.rows:
        say(_bench_line(row, found.fold_seconds), "green" if row.verdict == "faster" else "")
    before, after = (size(found.weight_bytes[name]) for name in ("original", "folded"))
    folding = "" if found.fold_seconds is None else f"; folding takes {found.fold_seconds:.1f} s"
    say(f"{found.dtype} on {found.hardware}; weights {before} before, {after} after{folding}")
    for line in found.left_out:
        say(f"left out: {line}")


def _bench_line(row: SpeedRow, fold_seconds: float | None) -> str:
    """One case in words; the brackets hold the quartiles of the ratio within a turn."""
    ratio = row.speedup
    gain = f"{ratio.median:.3f} times as fast ({ratio.low:.3f} to {ratio.high:.3f})"
    text = f"{row.case}: {gain if row.verdict == 'faster' else f'{row.verdict}, {gain}'}"
    tax = f"norms cost {row.norm_tax.median:.1%}"
    text += f"; {tax if row.taxed else 'what norms cost is within the spread'}"
    text += "" if row.recovered is None else f", of which {row.recovered:.0%} is saved"
    rates = (f"{row.throughput(name):,.0f}" for name in ("original", "folded"))
    text += f"; {' to '.join(rates)} {'tokens' if row.seq_len else 'rows'} a second"
    runs = row.break_even(fold_seconds)
    return text if runs is None else f"{text}; pays after {runs:,.0f} runs"


def write_push(found: Upload) -> None:
    """What was pushed, and where it is; of a dry run every file with its size, and what is new."""
    done = f"pushed {upload_line(found)}" if found.differs else _same_line(found)
    if found.url:
        say(done, "green")
        say(found.url)
        return
    table = Table("file", "size", "")
    table.columns[1].justify = "right"
    for file in found.files:
        table.add_row(file.name, size(file.size), file.change)
    _show(table)
    would = f"would push {upload_line(found)}" if found.differs else _same_line(found)
    say(f"{would}; nothing was sent (dry run)")


def write_doubts(found: Upload) -> None:
    """What a user may want to know before a push."""
    for warning in found.warnings:
        say(f"warning: {warning}", "yellow", stderr=True)
    if found.complaint:
        say(f"forced, as the card will say: {found.complaint}", "yellow", stderr=True)


def upload_line(found: Upload) -> str:
    """``3 new and 1 changed of 9 files, 1.6 MB, to me/model (new, private)``."""
    to, where = found.target, found.target.name
    changes = f"{found.count('new')} new and {found.count('changed')} changed"
    where = f"a pull request to {where}" if to.create_pr else where
    return f"{changes} of {len(found.files)} files, {size(found.size)}, to {where} ({to.kind})"


def _same_line(found: Upload) -> str:
    return f"nothing to push: {found.target.name} has all {len(found.files)} files as they are"


def write_environment(found: dict[str, Any]) -> None:
    """What ``kernels.environment`` found: one paragraph for every device."""
    say(f"torch {found['torch']}, {counted(found['threads'], 'thread')}")
    for kind, name in (("cpu", "C++"), ("cuda", "CUDA")):
        say(f"{name} compiler: {found['compilers'][kind]}")
    say(f"compiled libraries: {found['cache']}")
    for device in found["devices"]:
        if not device["active"]:
            say(f"{device['device']}: no kernels: {device['why']}", style="yellow")
            say(f"  folded norms compute the {device['instead']}, which is no slower than before")
            continue
        say(f"{device['device']}: {device['kernels']} kernels", style="green")
        say(f"  library: {device['library']}")
        say(f"  measured: {device['measured']}")
        if device["threads_from"]:
            say(f"  threads: from {device['threads_from']} elements")
        for way in device["other_ways"]:
            say(f"  faster there: {way}")
