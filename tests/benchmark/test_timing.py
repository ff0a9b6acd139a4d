"""Rounds, and a run that ends in time, on a clock that only moves when it is told to."""

from __future__ import annotations

import math
from itertools import product

import pytest

from enjoyln_cli.benchmark.baselines import COLUMNS
from enjoyln_cli.benchmark.cases import GRID, SHORT, Case, run_each
from enjoyln_cli.benchmark.results import Row
from enjoyln_cli.benchmark.timing import ENOUGH, FEWEST, SHORTEST, WARM_UP, Task, time_rounds
from enjoyln_cli.benchmark.workload import STEPS, Size
from enjoyln_cli.clock import Clock, duration
from enjoyln_cli.errors import UnsupportedModel


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

    tasks = {name: task(name) for name in "abc"}
    times, least = time_rounds(tasks, 4, Clock(hands, math.inf), now=hands)
    assert times == {name: [0.25] * 4 for name in "abc"}
    assert least == 3 * (WARM_UP + 4)
    assert "".join(calls) == "aabbcc" + "abccbaabccba"


@pytest.mark.parametrize(
    ("limit", "share", "rounds"),
    [
        (math.inf, math.inf, 20),
        (60.0, 60.0, 20),
        (60.0, 22.0, 9),
        (60.0, 0.0, ENOUGH),
        (16.0, math.inf, ENOUGH),
        (15.5, math.inf, 0),
    ],
)
def test_time_that_is_up_leaves_fewer_rounds(limit: float, share: float, rounds: int) -> None:
    """A round of two tasks takes two seconds, and warming up takes four."""
    hands = Hands()
    tasks = {name: hands.taking(1.0) for name in "ab"}
    times, least = time_rounds(tasks, 20, Clock(hands, limit), share, hands)
    assert times == ({"a": [1.0] * rounds, "b": [1.0] * rounds} if rounds else {})
    assert hands.at <= limit and least == 16


@pytest.mark.parametrize(("rounds", "kept"), [(5, 5), (3, 3), (2, 0)])
def test_rounds_that_become_slower_end_in_time(rounds: int, kept: int) -> None:
    """After ``rounds`` rounds each takes as long as all the time that was left."""
    hands, calls = Hands(), []

    def run(prepared: object) -> None:
        calls.append(1)
        hands.at += 1.0 if len(calls) < WARM_UP + rounds else 60.0 - hands.at

    times, _ = time_rounds({"a": Task(run)}, 20, Clock(hands, 60.0), now=hands)
    assert len(times.get("a", [])) == kept and hands.at == 60


def test_a_short_call_is_repeated() -> None:
    hands = Hands()
    time_rounds({"a": hands.taking(SHORTEST / 3.5)}, FEWEST, Clock(hands, 9.0), now=hands)
    assert hands.at == pytest.approx(SHORTEST / 3.5 * (WARM_UP + 4 * FEWEST))


def test_a_slow_first_run_is_not_taken_for_the_time_of_each() -> None:
    hands = Hands()
    tasks = {"a": hands.taking(0.1, first=20.0), "b": hands.taking(0.1)}
    times, _ = time_rounds(tasks, 20, Clock(hands, 60.0), now=hands)
    assert len(times["a"]) == 20 and times["a"] == pytest.approx([0.1] * 20)


@pytest.mark.parametrize("first", [4.0, 30.0, 70.0])
def test_no_call_begins_that_may_take_longer_than_is_left(first: float) -> None:
    """Compiling takes long for each of them."""
    hands = Hands()
    tasks = {name: hands.taking(0.5, first) for name in COLUMNS}
    times, least = time_rounds(tasks, 20, Clock(hands, 60.0), now=hands)
    assert hands.at <= max(60, first + 1) and bool(times) == (first == 4)
    assert least >= len(COLUMNS) * first


# All cases.

CASES = [
    Case("eager", Size({}, *pair), phase)
    for pair, phase in product(
        sorted((SHORT, *GRID), key=lambda pair: math.prod(pair)), ("prefill", "decode")
    )
]


def run_on(hands: Hands, clock: Clock, second: float, first: float) -> tuple[list[Row], list[str]]:
    """All cases of a model that reads 128 tokens in ``second``, or decodes as many rows.

    A short input takes twice as long for each token.
    """
    an_item = 2 * second / 128

    def run(case: Case, share: float) -> tuple[Row | str, float]:
        size, begin, steps = case.size, clock.spent, 1
        seconds = second * size.items / 128
        if case.phase == "decode":
            hands.at += seconds
            seconds, steps = STEPS * second * size.rows / 128, STEPS
        tasks = {name: hands.taking(seconds, first, steps) for name in COLUMNS}
        before = clock.spent - begin
        times, least = time_rounds(tasks, 15, clock, share - before, hands)
        made = Row(str(size), size.rows, size.tokens, case.phase, case.mode, size.items, times)
        return (made if times else ""), before + least

    return run_each(run, CASES, an_item, clock, lambda level, text: None)


@pytest.mark.parametrize("first", [0.0, 0.3, 5.0])
@pytest.mark.parametrize("limit", [20.0, 60.0, 120.0, 600.0])
@pytest.mark.parametrize("second", [0.01, 0.1, 1.0, 3.0, 10.0, 40.0])
def test_a_run_ends_in_time_and_names_what_was_not_reached(
    second: float, limit: float, first: float
) -> None:
    told: list[tuple[float, float]] = []
    while True:
        hands = Hands()
        clock = Clock(hands, limit, lambda done, total: told.append((done, total)))
        try:
            rows, left_out = run_on(hands, clock, second, first)
            break
        except UnsupportedModel as error:
            words = f"no case fits into {duration(limit)}: 1 x 32 tokens, prefill, eager needs"
            assert str(error).startswith(words) and hands.at <= 1.1 * limit
            advised = float(str(error).rpartition(" ")[2])
            assert 1.5 * limit < advised < 200 * second + 20 * first
            limit = advised
    assert hands.at <= 1.1 * limit
    assert rows and rows[0].case == "1 x 32 tokens, prefill, eager"
    assert all(FEWEST <= row.rounds <= 15 for row in rows)
    assert len(rows) + len(left_out) == len(CASES)
    measured = {row.case for row in rows}
    for line in left_out:
        case, _, reason = line.partition(": ")
        assert reason.startswith("no time was left; it needs about ")
        measured.add(case)
    assert measured == {str(case) for case in CASES}
    assert all(0 <= done <= total for done, total in told)


def test_a_single_call_that_does_not_fit_is_not_begun() -> None:
    def run(case: Case, share: float) -> tuple[Row | str, float]:
        raise AssertionError(f"{case} was begun")

    words = "no case fits into 30 s: 8 x 512 tokens, prefill, eager needs about 21 min with loading"
    with pytest.raises(UnsupportedModel, match=f"{words}; allow it with --seconds 26"):
        case = Case("eager", Size({}, 8, 512), "prefill")
        run_each(run, [case], 0.01, Clock(Hands(), 30.0), lambda level, text: None)


def test_time_that_one_case_does_not_use_is_left_for_the_others() -> None:
    for limit in (math.inf, 12000.0):
        hands = Hands()
        rows, left_out = run_on(hands, Clock(hands, limit), 1.0, 0.0)
        assert [row.rounds for row in rows] == [15] * len(CASES) and left_out == []


def test_a_case_that_does_not_run_leaves_the_others() -> None:
    hands = Hands()

    def run(case: Case, share: float) -> tuple[Row | str, float]:
        if case.phase == "decode":
            return f"{case}: does not fit in the memory of cuda", 0.0
        times = {name: [1.0] * 6 for name in COLUMNS}
        return Row(str(case.size), 1, 8, case.phase, case.mode, 8, times), 1.0

    rows, left_out = run_each(run, CASES[:4], 0.0, Clock(hands, 60.0), lambda level, text: None)
    assert [row.case for row in rows] == [str(CASES[0]), str(CASES[2])]
    assert left_out[0] == "1 x 32 tokens, decode, eager: does not fit in the memory of cuda"
