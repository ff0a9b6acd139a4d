"""What a user sees of a long job while it runs: its messages, and its progress below them.

On a terminal the last line shows how far the job is and how long it takes. Elsewhere progress is
printed as plain lines. With ``quiet`` only failures to write a file are printed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.text import Text

from enjoyln_cli.cli.output_lines import console, say
from enjoyln_cli.text import size

LINE_SECONDS = 5.0
"""Least time between two progress lines, if no bar can be drawn."""


@dataclass(frozen=True)
class Watch:
    """The functions to which a job reports."""

    event: Callable[[str, str], None]
    """Receives messages; see ``events.Event``."""
    progress: Callable[[int, int], None]
    """Receives the bytes done and the bytes in all."""
    seconds: Callable[[float, float], None]
    """Receives the seconds that have passed and those the job takes in all (0 if not known)."""
    warnings: list[str] = field(default_factory=list)


@contextmanager
def watch_job(quiet: bool, stage: str) -> Iterator[Watch]:
    """Show the messages of a job, and on a terminal a line that moves while it runs.

    ``stage`` is the first message. A command prints it before it imports torch, which takes
    seconds.
    """
    warnings: list[str] = []

    def event(level: str, text: str) -> None:
        warns = level in ("warning", "failure")
        if warns:
            warnings.append(text)
        if not quiet or level == "failure":
            say(f"warning: {text}" if warns else text, "yellow" if warns else "dim", stderr=True)

    event("stage", stage)
    if quiet:
        yield Watch(event, _ignore, _ignore, warnings)
    elif not console(stderr=True).is_terminal:
        yield Watch(event, _plain_lines(), _ignore, warnings)
    else:
        line = _LastLine()
        line.wait()
        try:
            yield Watch(line.below(event), line.count_bytes, line.count_seconds, warnings)
        finally:
            line.clear()


def _ignore(done: float, total: float) -> None:
    """For a job whose progress is not shown."""


class _LastLine:
    """The last line on a terminal: a bar if it is known how far a job is, otherwise a spinner.

    The line is cleared while something else is printed. A stage that downloads has no line, since
    the Hub's library draws its own bars.
    """

    def __init__(self) -> None:
        self._shown: Progress | None = None
        self._counts = ""
        self._seconds = (0.0, 0.0)
        self._lock = threading.Lock()

    def below(self, event: Callable[[str, str], None]) -> Callable[[str, str], None]:
        """``event``, with the last line drawn again below each message."""

        def printed(level: str, text: str) -> None:
            with self._lock:
                timed = self._counts == "seconds"
                self.clear()
                event(level, text)
                if timed:
                    self._show_seconds()
                elif level == "stage":
                    self.wait()

        return printed

    def wait(self) -> None:
        """Draw a spinner, for work whose duration is not known."""
        self._show("", SpinnerColumn(), TextColumn("working"), TimeElapsedColumn())

    def count_bytes(self, done: int, total: int) -> None:
        """Draw a bar with bytes, rate and time left until all is done."""
        with self._lock:
            if self._counts != "bytes":
                rate, left = TransferSpeedColumn(), TimeRemainingColumn()
                self._show("bytes", BarColumn(), DownloadColumn(), rate, left)
            if self._shown:
                self._shown.update(self._shown.task_ids[0], completed=done, total=total)
            if done >= total:
                self.clear()

    def count_seconds(self, done: float, total: float) -> None:
        """Draw a bar with the time that has passed and the time left."""
        with self._lock:
            self._seconds = done, total
            self._show_seconds()

    def _show_seconds(self) -> None:
        if self._counts != "seconds":
            since = _Since(time.monotonic() - self._seconds[0])
            self._show("seconds", BarColumn(), since, TextColumn("{task.description}"))
        done, total = self._seconds
        left = f"about {_clock_time(total - done)} left" if total > done else ""
        if self._shown:
            task = self._shown.task_ids[0]
            self._shown.update(task, completed=done, total=total or None, description=left)

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            self._shown.stop()
        self._shown, self._counts = None, ""

    def _show(self, counts: str, *columns: ProgressColumn) -> None:
        self.clear()
        self._shown = Progress(*columns, console=console(stderr=True), transient=True)
        self._shown.add_task("", total=None)
        self._shown.start()
        self._counts = counts


class _Since(ProgressColumn):
    """The time since ``start``, a reading of ``time.monotonic``."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self._start = start

    def render(self, task: Task) -> Text:
        """The time since ``start``; rich calls this several times a second."""
        return Text(_clock_time(time.monotonic() - self._start))


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _plain_lines() -> Callable[[int, int], None]:
    start = last = 0.0
    before = 0  # bytes that an earlier run wrote: they are reported first, all at once
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
