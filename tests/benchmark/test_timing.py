"""Rounds on a clock that only moves when it is told to, and calls that do not end by themselves."""

from __future__ import annotations

import math
import signal
import threading
import time
from contextlib import suppress
from typing import NoReturn

import pytest

from enjoyln_cli.benchmark.timing import (
    ENOUGH,
    FEWEST,
    SHORTEST,
    WARM_UP,
    Task,
    TimeIsUp,
    time_limit,
    time_rounds,
)

PATIENCE = 60.0
"""Seconds after which a call that should have been ended fails its test."""


class Hands:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at

    def taking(self, seconds: float, first: float = 0.0, steps: int = 1) -> Task:
        """A task that takes so long, and whose first run takes ``first`` seconds more."""
        more = [first]

        def run(prepared: object) -> None:
            self.at += seconds + (more.pop() if more else 0.0)

        return Task(run, steps=steps)


def test_every_task_runs_in_every_round_and_the_order_changes() -> None:
    hands, calls = Hands(), []

    def task(name: str) -> Task:
        def run(prepared: str) -> None:
            assert prepared == f"for {name}"
            calls.append(name)
            hands.at += 1.0

        return Task(run, lambda: f"for {name}", steps=4)

    times = time_rounds({name: task(name) for name in "abc"}, 4, now=hands)
    assert times == {name: [0.25] * 4 for name in "abc"}
    assert "".join(calls) == "aabbcc" + "abccbaabccba"


@pytest.mark.parametrize(
    ("repeats", "share", "rounds"),
    [(20, math.inf, 20), (20, 60.0, 20), (20, 22.0, 9), (20, 0.0, ENOUGH), (4, 0.0, 4), (1, 9, 3)],
)
def test_a_short_share_leaves_fewer_rounds(repeats: int, share: float, rounds: int) -> None:
    """A round of two tasks takes two seconds, and warming up takes four."""
    hands = Hands()
    times = time_rounds({name: hands.taking(1.0) for name in "ab"}, repeats, share, hands)
    assert times == {"a": [1.0] * rounds, "b": [1.0] * rounds}


def test_a_short_call_is_repeated() -> None:
    hands = Hands()
    time_rounds({"a": hands.taking(SHORTEST / 3.5)}, FEWEST, now=hands)
    assert hands.at == pytest.approx(SHORTEST / 3.5 * (WARM_UP + 4 * FEWEST))


def test_a_slow_first_run_is_not_taken_for_the_time_of_each() -> None:
    hands = Hands()
    tasks = {"a": hands.taking(0.1, first=20.0), "b": hands.taking(0.1)}
    assert time_rounds(tasks, 20, 60.0, hands)["a"] == pytest.approx([0.1] * 20)


# Ending a run.


def endless() -> NoReturn:
    """Run until it is ended from outside, whatever errors there are meanwhile."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        with suppress(Exception):
            time.sleep(0.01)
    raise AssertionError("nobody has ended this call")


def test_a_call_that_does_not_end_is_ended() -> None:
    with pytest.raises(TimeIsUp), time_limit(0.05):
        endless()


def test_code_that_catches_it_is_ended_the_next_time() -> None:
    caught = []
    with pytest.raises(TimeIsUp), time_limit(0.05):
        try:
            endless()
        except BaseException as error:
            caught.append(error)
        endless()
    assert isinstance(caught[0], TimeIsUp)


@pytest.mark.parametrize("seconds", [PATIENCE, math.inf])
def test_a_block_that_ends_in_time_leaves_nothing_behind(seconds: float) -> None:
    before = signal.getsignal(signal.SIGALRM)
    with time_limit(seconds):
        pass
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_another_thread_is_not_interrupted() -> None:
    ended = []

    def work() -> None:
        with time_limit(1e-3):
            time.sleep(0.05)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended
