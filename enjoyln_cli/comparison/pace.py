"""How much of a check fits into the time that it may take.

Two models are loaded twice each and run six times on the same inputs. Every run gets an equal share
of the time that is left when it begins, after what loading the others will take. It does the inputs
in order and stops before the one that would not fit; runs after it do no more than it did. So a
check ends in time whatever dtype is slow on a machine, and with one batch at least. What is not run
on inputs (loading, and the comparison of every stored tensor) is done in any case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from enjoyln_cli.clock import Clock

LOADS = 4
"""Models that are loaded: the original and the folded one, in two dtypes each."""
RUNS = 6
"""Runs of these models: the original's weights, and centred; as stored; then in the dtype of users
the original, the folded one in the stock class, and with RMSNorm."""

Result = TypeVar("Result")


class Pace:
    """The time of one check."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.costs: list[int] = []
        """Of each batch that is still run: how many numbers it holds."""
        self._loads, self._runs = LOADS, RUNS
        self._load_seconds = 0.0
        self._of_a_number = 0.0
        """Seconds of one number of an input in the run before."""

    @property
    def share(self) -> float:
        """Seconds of the next run."""
        return (self.clock.left - self._loads * self._load_seconds) / max(self._runs, 1)

    def plan_run(self) -> None:
        """Make room for one more run: a text is scored besides."""
        self._runs += 1

    def end_run(self, was_planned: bool = True) -> None:
        """A run is over, or left out."""
        self._runs -= was_planned
        self.tell()

    def fitting(self, seconds: float) -> int | None:
        """How many inputs fit, at ``seconds`` each: at least one. ``None`` for all."""
        share = self.share
        return None if math.isinf(share) else max(1, int(share / max(seconds, 1e-9)))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Measure how long a model takes to be loaded."""
        self.tell()
        begin = self.clock.now()
        yield
        self._loads -= 1
        self._load_seconds = self.clock.now() - begin
        self.tell()

    def run(self, one: Callable[[int], Result]) -> list[Result]:
        """Call ``one`` with the number of each batch, as long as the share of this run lasts."""
        begin, share = self.clock.now(), self.share
        found: list[Result] = []
        done = 0
        for at, cost in enumerate(self.costs):
            spent = self.clock.now() - begin
            if found and spent * (1 + cost / done) > share:
                break
            found.append(one(at))
            done += cost
            self._of_a_number = (self.clock.now() - begin) / done
            self.tell(sum(self.costs[at + 1 :]))
        self.costs = self.costs[: len(found)]
        self._runs -= 1
        return found

    def tell(self, of_this_run: int = 0) -> None:
        """Tell of the progress, with so many numbers left in this run."""
        if not self.costs or not self._of_a_number:
            self.clock.tell()
            return
        others = self._runs - (of_this_run > 0)
        numbers = of_this_run + others * sum(self.costs)
        self.clock.tell(self._loads * self._load_seconds + numbers * self._of_a_number)
