"""Times several calls in rounds.

In a round each call runs once, and every other round runs them in the opposite order. So slow
changes (clock rates, other programs) affect all calls alike, and two calls can be compared by their
ratio within each round. A short call is repeated within its round until the repeats take
``SHORTEST``. The clock is that of ``torch.utils.benchmark``, which waits for a GPU to finish.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.benchmark import timer

SHORTEST = 0.01
"""Least seconds of each call in a round; a shorter call is repeated."""
WARM_UP = 2
"""Runs of each call before the first round: the first may compile, the second shows its time."""
ENOUGH = 6
"""Rounds that an interval at 95 % needs."""


class TimeIsUp(Exception):
    """The time of a run is up before enough was measured."""


def prepare_nothing() -> None:
    """The ``prepare`` of a call that needs no preparation."""


@dataclass(frozen=True)
class Task:
    """A call to be timed: ``run`` takes the result of ``prepare``, and ``prepare`` is not timed."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = prepare_nothing
    steps: int = 1
    """How many steps one ``run`` consists of; times are given for one step."""


def time_rounds(
    tasks: Mapping[str, Task],
    repeats: int,
    seconds: float = math.inf,
    limit: float = math.inf,
    now: Callable[[], float] = timer,
) -> dict[str, list[float]]:
    """Seconds of one step of every task in each round.

    There are ``repeats`` rounds, or as many as fit into ``seconds``, but at least ``ENOUGH`` if
    ``repeats`` allows them. Raises ``TimeIsUp`` if these take more than ``limit`` seconds; a run
    that has begun is finished.
    """
    begin = now()
    number: dict[str, int] = {}
    """How often each task runs in a round."""
    times: dict[str, list[float]] = {name: [] for name in tasks}

    def time(task: Task, runs: int) -> float:
        total = 0.0
        for _ in range(runs):
            if now() - begin >= limit:
                raise TimeIsUp
            prepared = task.prepare()
            start = now()
            task.run(prepared)
            total += now() - start
        return total

    for name, task in tasks.items():
        for _ in range(WARM_UP):
            taken = time(task, 1)
        number[name] = max(1, math.ceil(SHORTEST / max(taken, 1e-9)))
    for done in range(repeats):
        if done >= ENOUGH and now() - begin >= min(seconds, limit):
            break
        for name in list(tasks)[:: -1 if done % 2 else 1]:
            taken = time(tasks[name], number[name])
            times[name].append(taken / (number[name] * tasks[name].steps))
    return times
