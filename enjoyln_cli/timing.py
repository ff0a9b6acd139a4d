"""How long several calls take beside one another: turn by turn, in one process.

In a turn every call has its go, and every other turn goes backwards, so that whatever drifts (clock
rates, other programs) drifts for all of them. A short call is repeated within its go until that
takes ``SHORTEST``. Two calls are compared by the ratios within the turns: where the quartiles of
``a / b`` lie on both sides of 1, a difference is not told from noise.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

SHORTEST = 0.01
"""Seconds that a go should take."""
WARM_UP = 3
"""Goes before the first that counts; one where even that takes long."""
NO_GAIN = "no gain here"
"""The verdict on a difference that is within the spread."""
FEWEST = 3
"""Turns that quartiles need."""


def nothing() -> None:
    """What is prepared for a call that needs nothing."""


@dataclass(frozen=True)
class Task:
    """A call to be timed: ``run`` takes what ``prepare`` returns, which is not timed."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = nothing
    steps: int = 1
    """How many times the thing that is wanted happens in ``run``."""


@dataclass(frozen=True)
class Quartiles:
    """The middle of many measurements, and the half of them around it."""

    low: float
    median: float
    high: float

    def times(self, factor: float) -> Quartiles:
        """In another unit."""
        return Quartiles(self.low * factor, self.median * factor, self.high * factor)

    def rounded(self, digits: int) -> list[float]:
        """The three, for JSON."""
        return [round(value, digits) for value in (self.low, self.median, self.high)]


def quartiles(values: Sequence[float]) -> Quartiles:
    """Of at least two values."""
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def ratios(times: Mapping[str, Sequence[float]], slow: str, fast: str) -> list[float]:
    """``slow / fast`` within each turn: how many times as fast the second is."""
    return [a / b for a, b in zip(times[slow], times[fast], strict=True)]


def waiting_for(device: torch.device) -> Callable[[], None]:
    """What makes the clock wait for a device that works on its own."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return torch.mps.synchronize if device.type == "mps" else nothing


def turns(
    tasks: Mapping[str, Task],
    repeats: int,
    wait: Callable[[], None] = nothing,
    seconds: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of one step of every task, for each of ``repeats`` turns.

    With ``seconds``, for fewer turns if they take longer in all, but at least ``FEWEST``.
    """
    number = {}
    end = time.perf_counter() + seconds
    for name, task in tasks.items():
        taken = _go(task, 1, wait)
        for _ in range(WARM_UP - 1 if time.perf_counter() < end else 0):
            taken = _go(task, 1, wait)
        number[name] = max(1, math.ceil(SHORTEST / (taken * task.steps)))
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(repeats):
        if turn >= FEWEST and time.perf_counter() > end:
            break
        for name in list(tasks)[:: -1 if turn % 2 else 1]:
            found[name].append(_go(tasks[name], number[name], wait))
    return found


def _go(task: Task, number: int, wait: Callable[[], None]) -> float:
    total = 0.0
    for _ in range(number):
        given = task.prepare()
        wait()
        begin = time.perf_counter()
        task.run(given)
        wait()
        total += time.perf_counter() - begin
    return total / (number * task.steps)
