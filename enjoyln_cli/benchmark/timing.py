"""Times several calls in rounds, and ends a run when its time is up.

In a round each call runs once, and every other round runs them in the opposite order. So slow
changes (clock rates, other programs) affect all calls alike, and two calls can be compared by their
ratio within each round. A short call is repeated within its round until the repeats take
``SHORTEST``. The clock is that of ``torch.utils.benchmark``, which waits for a GPU to finish.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

from torch.utils.benchmark import timer

SHORTEST = 0.01
"""Least seconds of each call in a round; a shorter call is repeated."""
WARM_UP = 2
"""Runs of each call before the first round: the first may compile, the second shows its time."""
FEWEST = 3
"""Rounds that quartiles need."""
ENOUGH = 6
"""Rounds that an interval at 95 % needs."""

AGAIN = 0.2
"""Seconds after which ``TimeIsUp`` is raised once more, if other code has caught it."""


class TimeIsUp(BaseException):
    """The time of a run is up.

    Like ``KeyboardInterrupt`` it is no ``Exception``, so that neither a model nor a compiler takes
    it for an error of its own.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeIsUp`` in the block after ``seconds``, even while a model runs or is compiled.

    Python can only be interrupted in its main thread, and not on Windows. Elsewhere nothing is
    raised here, so whatever runs in the block has to look at the time itself.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if math.isinf(seconds) or not in_main_thread or not hasattr(signal, "setitimer"):
        yield
        return

    def end(*_: object) -> NoReturn:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, end)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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
    now: Callable[[], float] = timer,
) -> dict[str, list[float]]:
    """Seconds of one step of every task in each round.

    There are ``repeats`` rounds, or as many as fit into ``seconds``, but at least ``ENOUGH`` if
    ``repeats`` allows them.
    """
    begin = now()
    number: dict[str, int] = {}
    """How often each task runs in a round."""
    for name, task in tasks.items():
        for _ in range(WARM_UP):
            taken = _time(task, 1, now)
        number[name] = max(1, math.ceil(SHORTEST / max(taken, 1e-9)))
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for done in range(max(repeats, FEWEST)):
        if done >= ENOUGH and now() - begin >= seconds:
            break
        for name in list(tasks)[:: -1 if done % 2 else 1]:
            taken = _time(tasks[name], number[name], now)
            times[name].append(taken / (number[name] * tasks[name].steps))
    return times


def _time(task: Task, number: int, now: Callable[[], float]) -> float:
    """Seconds of ``number`` runs."""
    total = 0.0
    for _ in range(number):
        prepared = task.prepare()
        begin = now()
        task.run(prepared)
        total += now() - begin
    return total
