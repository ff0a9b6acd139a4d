"""Compares how long several calls take, in rounds within one process.

In a round each call runs once, and every other round runs them in the opposite order. So slow
changes (clock rates, other programs) affect all calls alike. A short call is repeated within its
round until the repeats take ``SHORTEST``. Two calls are compared by their ratio within each round.

The interval of the median of such ratios needs no assumption about their distribution: of ``n``
sorted values, the true median lies between the ``k``-th smallest and the ``k``-th largest with a
probability of ``1 - 2 P(B < k)``, where B is the number of heads in ``n`` coin flips.
``median_interval`` takes the largest ``k`` for which that is at least 95 %. Fewer than six values
have no such ``k``.
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
"""Least seconds of each call in a round; a shorter call is repeated."""
WARM_UP = 3
"""Runs of each call before the first round."""
WARM_UP_SECONDS = 1.0
"""After this time no further run is needed to warm up."""
NO_GAIN = "no gain here"
"""The verdict if a difference cannot be distinguished from noise."""
FEWEST = 3
"""Rounds that quartiles need."""
ENOUGH = 6
"""Rounds that an interval at 95 % needs."""
DOUBT = 0.05
"""Probability that the true median lies outside of its interval."""


def prepare_nothing() -> None:
    """The ``prepare`` of a call that needs no preparation."""


@dataclass(frozen=True)
class Task:
    """A call to be timed: ``run`` takes the result of ``prepare``, and ``prepare`` is not timed."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = prepare_nothing
    steps: int = 1
    """How many steps one ``run`` consists of; times are given for one step."""


@dataclass(frozen=True)
class Quartiles:
    """The median of many measurements, and the quartiles around it."""

    low: float
    median: float
    high: float

    def times(self, factor: float) -> Quartiles:
        """All three multiplied by ``factor``, to change the unit."""
        return Quartiles(self.low * factor, self.median * factor, self.high * factor)

    def rounded(self, digits: int) -> list[float]:
        """All three, rounded, as a list for JSON."""
        return [round(value, digits) for value in (self.low, self.median, self.high)]


def quartiles(values: Sequence[float]) -> Quartiles:
    """The quartiles of at least two values."""
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def median_interval(values: Sequence[float]) -> tuple[float, float] | None:
    """The interval that has the true median with at least 95 %; ``None`` for too few values."""
    count, below, beyond = len(values), 0, 0.0
    while True:
        beyond += math.comb(count, below) / 2**count
        if 2 * beyond > DOUBT:
            break
        below += 1
    ordered = sorted(values)
    return (ordered[below - 1], ordered[count - below]) if below else None


def ratios(times: Mapping[str, Sequence[float]], slow: str, fast: str) -> list[float]:
    """``slow / fast`` within each round: how many times as fast the second is."""
    return [a / b for a, b in zip(times[slow], times[fast], strict=True)]


def waiter_for(device: torch.device) -> Callable[[], None]:
    """A function that waits until ``device`` has finished its work."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return torch.mps.synchronize if device.type == "mps" else prepare_nothing


def runs_per_round(seconds: float) -> int:
    """How many times a call of ``seconds`` runs in a round."""
    return max(1, math.ceil(SHORTEST / max(seconds, 1e-9)))


@dataclass(frozen=True)
class Limit:
    """When to stop before all rounds are done, in seconds."""

    seconds: float = math.inf
    """After this time, stop once there are ``ENOUGH`` rounds."""
    at_most: float = math.inf
    """After this time (at least ``seconds``), stop once there are ``FEWEST`` rounds."""


def time_rounds(
    tasks: Mapping[str, Task],
    repeats: int,
    wait: Callable[[], None] = prepare_nothing,
    limit: Limit = Limit(),  # noqa: B008  (frozen)
    on_round: Callable[[int], None] = lambda done: None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds of one step of every task in each of ``repeats`` rounds, or fewer if time is up.

    ``on_round`` receives the number of finished rounds, 0 after warming up. ``now`` is a clock.
    """
    begin = now()
    number = {}
    for name, task in tasks.items():
        since = now()
        taken = _time(task, 1, wait, now)
        for _ in range(WARM_UP - 1):
            if now() - since >= WARM_UP_SECONDS or now() - begin >= limit.at_most:
                break
            taken = _time(task, 1, wait, now)
        number[name] = runs_per_round(taken * task.steps)
    on_round(0)
    found: dict[str, list[float]] = {name: [] for name in tasks}
    for done in range(repeats):
        spent = now() - begin
        if done >= (ENOUGH if spent < limit.at_most else FEWEST) and spent >= limit.seconds:
            break
        for name in list(tasks)[:: -1 if done % 2 else 1]:
            found[name].append(_time(tasks[name], number[name], wait, now))
        on_round(done + 1)
    return found


def _time(task: Task, number: int, wait: Callable[[], None], now: Callable[[], float]) -> float:
    """Seconds of one step, the mean over ``number`` runs."""
    total = 0.0
    for _ in range(number):
        given = task.prepare()
        wait()
        begin = now()
        task.run(given)
        wait()
        total += now() - begin
    return total / (number * task.steps)
