"""Rounds on a clock that only moves when it is told to."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from enjoyln_cli.comparison.timing import ENOUGH, SHORTEST, WARM_UP, time_rounds


class Hands:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self) -> float:
        return self.at

    def taking(self, seconds: float, first: float = 0.0) -> Callable[[], None]:
        """A call that takes so long, and whose first run takes ``first`` seconds more."""
        more = [first]

        def run() -> None:
            self.at += seconds + (more.pop() if more else 0.0)

        return run


def test_every_call_runs_in_every_round_and_the_order_changes() -> None:
    hands, calls = Hands(), []

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            hands.at += 1.0

        return run

    times = time_rounds({name: call(name) for name in "abc"}, 4, now=hands)
    assert times == {name: [1.0] * 4 for name in "abc"}
    assert "".join(calls) == "aabbcc" + "abccbaabccba"


@pytest.mark.parametrize(
    ("repeats", "share", "rounds"),
    [(20, math.inf, 20), (20, 60.0, 20), (20, 22.0, 9), (20, 0.0, ENOUGH), (4, 0.0, 4), (1, 9, 1)],
)
def test_a_short_share_leaves_fewer_rounds(repeats: int, share: float, rounds: int) -> None:
    """A round of two calls takes two seconds, and warming up takes four."""
    hands = Hands()
    times = time_rounds({name: hands.taking(1.0) for name in "ab"}, repeats, share, now=hands)
    assert times == {"a": [1.0] * rounds, "b": [1.0] * rounds}


def test_a_short_call_is_repeated() -> None:
    hands = Hands()
    time_rounds({"a": hands.taking(SHORTEST / 3.5)}, 3, now=hands)
    assert hands.at == pytest.approx(SHORTEST / 3.5 * (WARM_UP + 4 * 3))


def test_a_slow_first_run_is_not_taken_for_the_time_of_each() -> None:
    hands = Hands()
    calls = {"a": hands.taking(0.1, first=20.0), "b": hands.taking(0.1)}
    assert time_rounds(calls, 20, 60.0, now=hands)["a"] == pytest.approx([0.1] * 20)
