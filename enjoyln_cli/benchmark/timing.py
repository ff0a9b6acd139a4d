"""Times several calls in rounds, within a given time.

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

from enjoyln_cli.clock import Clock

SHORTEST = 0.01
"""Least seconds of each call in a round; a shorter call is repeated."""
WARM_UP = 2
"""Runs of each call before the first round: the first may compile, the second shows its time."""
FEWEST = 3
"""Rounds that quartiles need."""
ENOUGH = 6
"""Rounds that an interval at 95 % needs."""


def prepare_nothing() -> None:
    """The ``prepare`` of a call that needs no preparation."""


@dataclass(frozen=True)
class Task:
    """A call to be timed: ``run`` takes the result of ``prepare``, and ``prepare`` is not timed."""

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = prepare_nothing
    steps: int = 1
    """How many steps one ``run`` consists of; times are given for one step."""


Times = dict[str, list[float]]


def time_rounds(
    tasks: Mapping[str, Task],
    repeats: int,
    clock: Clock,
    share: float = math.inf,
    now: Callable[[], float] = timer,
) -> tuple[Times, float]:
    """Seconds of one step of every task in each round, and the seconds that the run needs at least.

    There are ``repeats`` rounds, or fewer if they take more than ``share`` seconds, but then at
    least ``ENOUGH``. A round is only begun if the time left on ``clock`` suffices for it. What is
    needed at least is the time to warm up and to run ``ENOUGH`` rounds. If there is no time for
    that, no times are returned, and the seconds are an estimate.
    """
    begin, repeats = clock.spent, max(repeats, FEWEST)
    enough = min(repeats, ENOUGH)
    number: dict[str, int] = {}
    """How often each task that is warm runs in a round."""
    first = second = 0.0
    """The longest first run of a task so far, and the longest second run."""

    def needed() -> float:
        """Seconds for what is still to run; a first run may take longer than the others."""
        runs = len(tasks) - len(number) + enough * len(tasks)
        return max(runs * second, first if len(number) < len(tasks) else 0.0)

    for name, task in tasks.items():
        if clock.left >= needed():
            first = max(first, _time(task, 1, now))
        if clock.left < needed():
            break
        taken = _time(task, 1, now)
        second = max(second, taken)
        number[name] = max(1, math.ceil(SHORTEST / max(taken, 1e-9)))
    if clock.left < needed():
        compiling = (len(tasks) - len(number)) * first
        return {}, clock.spent - begin + max(needed(), compiling)
    times: Times = {name: [] for name in tasks}
    warm, a_round, done = clock.spent, 0.0, 0
    while done < repeats and a_round <= clock.left:
        if done >= enough and clock.spent - begin >= share:
            break
        start = clock.spent
        for name in list(tasks)[:: -1 if done % 2 else 1]:
            seconds = _time(tasks[name], number[name], now)
            times[name].append(seconds / (number[name] * tasks[name].steps))
        a_round, done = clock.spent - start, done + 1
    least = warm - begin + enough * (clock.spent - warm) / done
    return (times if done >= FEWEST else {}), least


def _time(task: Task, number: int, now: Callable[[], float]) -> float:
    """Seconds of ``number`` runs."""
    total = 0.0
    for _ in range(number):
        prepared = task.prepare()
        begin = now()
        task.run(prepared)
        total += now() - begin
    return total
