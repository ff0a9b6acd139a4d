"""The time budget of a long job, its progress, and durations as text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

MINUTE = 60

Progress = Callable[[float, float], None]
"""Called with the seconds that a run has taken so far, and with its expected total in seconds."""


def no_progress(done: float, total: float) -> None:
    """The ``Progress`` that tells nobody."""


@dataclass
class Clock:
    """The time that a run has used, and how much of its limit is left."""

    now: Callable[[], float]
    limit: float
    """Seconds that the whole run may take, ``inf`` without a limit."""
    on_progress: Progress = no_progress

    def __post_init__(self) -> None:
        self.begin = self.now()

    @property
    def spent(self) -> float:
        return self.now() - self.begin

    @property
    def left(self) -> float:
        """Seconds left for cases."""
        return self.limit - self.spent

    def tell(self, needed: float | None = None) -> None:
        """Report progress; ``needed`` is how many seconds the remaining cases take, if known."""
        spent = self.spent
        total = self.limit if needed is None else spent + needed
        self.on_progress(spent, total if math.isfinite(total) else 0.0)


@dataclass
class Countdown:
    """Reports the progress of a job of equal steps, and how long the remaining steps take."""

    steps: int
    on_progress: Progress
    done: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._clock = Clock(time.monotonic, math.inf, self.on_progress)

    @property
    def left(self) -> float:
        """Seconds for the remaining steps, if each takes as long as the average step before."""
        return self._clock.spent / self.done * (self.steps - self.done)

    def count(self, steps: int = 1) -> None:
        """Note that so many more steps are done."""
        self.done += steps
        self._clock.tell(self.left)


def duration(seconds: float) -> str:
    """``45 s``, ``2 min 5 s``, ``3 h 20 min``."""
    whole = round(seconds)
    if whole <= 2 * MINUTE:
        return f"{whole} s"
    minutes, rest = divmod(whole, MINUTE)
    if minutes < MINUTE:
        return f"{minutes} min {rest} s" if minutes < 10 and rest else f"{minutes} min"
    hours, minutes = divmod(minutes, MINUTE)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"
