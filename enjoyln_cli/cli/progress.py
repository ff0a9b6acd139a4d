"""What a user sees of a long job while it runs: its messages, and its progress below them.

On a terminal the last line shows how far the job is and how long it takes. Elsewhere progress is
printed as plain lines. With ``quiet`` only failures to write a file are printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn
from rich.text import Text

from enjoyln_cli.cli.output_lines import console, say
from enjoyln_cli.clock import duration, no_progress
from enjoyln_cli.text import size

LINE_SECONDS = 30.0
"""If no bar can be drawn: seconds without output before a line names the present stage."""


@dataclass(frozen=True)
class Watch:
    """The functions to which a job reports."""

    event: Callable[[str, str], None]
    """Receives messages; see ``events.Event``."""
    progress: Callable[[int, int], None]
    """Receives the bytes done and the bytes in all."""
    seconds: Callable[[float, float], None]
    """Receives the seconds that have passed and the job's seconds in all (0 if not known)."""
    warnings: list[str] = field(default_factory=list)


@contextmanager
def watch_job(quiet: bool, stage: str) -> Iterator[Watch]:
    """Show the messages of a job, and on a terminal a line that moves while it runs.

    ``stage`` is the first message. A command prints it before it imports torch, which takes
    seconds.
    """
    warnings: list[str] = []
    lines = LastLine() if console(stderr=True).is_terminal and not quiet else PlainLines()

    def event(level: str, text: str) -> None:
        warns = level in ("warning", "failure")
        if warns:
            warnings.append(text)
        if not quiet or level == "failure":
            lines.say(*((f"warning: {text}", "yellow") if warns else (text, "dim")))
        lines.begin(level)

    event("stage", stage)
    if quiet:
        yield Watch(event, no_progress, no_progress, warnings)
        return
    try:
        yield Watch(event, lines.count_bytes, lines.count_seconds, warnings)
    finally:
        lines.end()


class LastLine:
    """The last line on a terminal: rich's usual bar, with the time that is left and has passed.

    A stage that downloads has no line, since the Hub's library draws its own bars.
    """

    def __init__(self) -> None:
        columns = (SpinnerColumn(), *Progress.get_default_columns(), TimeElapsedColumn())
        self.bar = Progress(*columns, console=console(stderr=True), transient=True)
        self._task = self.bar.add_task("working", total=None)
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
                self.bar.reset(self._task, description="working")
                self._forget_total()

    def count_bytes(self, done: int, total: int) -> None:
        """Show the bytes done."""
        self.bar.update(
            self._task, completed=done, total=total, description=_bytes_done(done, total)
        )

    def count_seconds(self, done: float, total: float) -> None:
        """Show the share of the time."""
        self._is_timed = True
        if not total:
            self._forget_total()
        self.bar.update(self._task, completed=done, total=total or None)

    def end(self) -> None:
        """Remove the line."""
        self.bar.stop()

    def _forget_total(self) -> None:
        """Show an unknown length: given ``None``, ``Progress`` keeps the total of before."""
        (task,) = self.bar.tasks
        task.total = task.finished_time = None


class PlainLines:
    """Messages and progress where no bar can be drawn, in lines of their own."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def say(self, text: str, style: str = "dim") -> None:
        """Print a message."""
        self._last = time.monotonic()
        say(text, style, stderr=True)

    def begin(self, level: str) -> None:
        """Begin a stage."""

    def count_bytes(self, done: int, total: int) -> None:
        """Print the bytes done."""
        if self._is_due:
            self.say(_bytes_done(done, total))

    def count_seconds(self, done: float, total: float) -> None:
        """Print the time that has passed."""
        if self._is_due:
            self.say(f"{duration(done)} of about {duration(total)}" if total else duration(done))

    def end(self) -> None:
        """End the job."""

    @property
    def _is_due(self) -> bool:
        return time.monotonic() - self._last >= LINE_SECONDS


def _bytes_done(done: int, total: int) -> str:
    return f"{size(done)} of {size(total)}"
