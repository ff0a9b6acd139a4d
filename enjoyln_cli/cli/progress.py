"""What a user sees of a long job while it runs: its messages, and its progress below them.

On a terminal the last line shows how far the job is and how long it takes. Elsewhere progress is
printed as plain lines. With ``quiet`` only failures to write a file are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from enjoyln_cli.cli.output_lines import console, say
from enjoyln_cli.clock import duration
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
    line = None if quiet or not console(stderr=True).is_terminal else LastLine()

    def event(level: str, text: str) -> None:
        warns = level in ("warning", "failure")
        if warns:
            warnings.append(text)
        if not quiet or level == "failure":
            shown, style = (f"warning: {text}", "yellow") if warns else (text, "dim")
            line.say(shown, style) if line else say(shown, style, stderr=True)
        if line:
            line.begin(level)

    event("stage", stage)
    if line is None:
        yield Watch(event, _ignore if quiet else _plain_lines(), _ignore, warnings)
        return
    try:
        yield Watch(event, line.count_bytes, line.count_seconds, warnings)
    finally:
        line.bar.stop()


def _ignore(done: float, total: float) -> None:
    """For a job whose progress is not shown."""


class LastLine:
    """The last line on a terminal: a bar that moves, and the time since the stage began.

    A stage that downloads has no line, since the Hub's library draws its own bars.
    """

    def __init__(self) -> None:
        columns = (SpinnerColumn(), BarColumn(), TextColumn("{task.description}"))
        shown = console(stderr=True)
        self.bar = Progress(*columns, TimeElapsedColumn(), console=shown, transient=True)
        self._task = self.bar.add_task("working", total=None)
        self._rate = Rate()
        self._is_timed = False

    def say(self, text: str, style: str) -> None:
        """Print a message above the line."""
        self.bar.console.print(Text(text, style=style), soft_wrap=True)

    def begin(self, level: str) -> None:
        """Begin a stage of unknown length; the time of a job with a time limit runs on."""
        if level == "download":
            self.bar.stop()
        elif level == "stage":
            self.bar.start()
            if not self._is_timed:
                self.bar.reset(self._task, total=None, description="working")

    def count_bytes(self, done: int, total: int) -> None:
        """Show the bytes done, their rate, and the time left until all is done."""
        text = self._rate.text(done, total, time.monotonic())
        self.bar.update(self._task, completed=done, total=total, description=text)

    def count_seconds(self, done: float, total: float) -> None:
        """Show the time left."""
        self._is_timed = True
        text = f"about {duration(total - done)} left" if total > done else ""
        self.bar.update(self._task, completed=done, total=total or None, description=text)


@dataclass
class Rate:
    """The bytes a second of a job, without those that an earlier run has written.

    An earlier run's bytes are reported first, all at once.
    """

    start: float = 0.0
    before: int = 0

    def text(self, done: int, total: int, now: float) -> str:
        """How far the job is at the time ``now``: ``950.0 MB of 1.0 GB, 5.0 MB/s, 10 s left``."""
        if not self.start or (done and not self.before and done < total):
            self.start, self.before = now, done
        rate = (done - self.before) / max(now - self.start, 1e-3)
        text = f"{size(done)} of {size(total)}"
        if rate:
            text += f", {size(rate)}/s"
        if rate and done < total:
            text += f", {(total - done) / rate:.0f} s left"
        return text


def _plain_lines() -> Callable[[int, int], None]:
    """Print a line every ``LINE_SECONDS`` at most, and one at the end."""
    rate, last = Rate(), 0.0

    def update(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not rate.start:
            last = now
        text = rate.text(done, total, now)
        if now - last >= LINE_SECONDS or done >= total:
            last = now
            say(text, stderr=True)

    return update
