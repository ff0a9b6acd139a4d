"""How many inputs a check can run in the time that it may take.

A check loads several models and makes several runs on the same inputs. The remaining time, minus
the time for the models that are still to be loaded, is shared equally among the remaining runs. A
run takes the batches in order and stops before a batch that would not fit into its share. Later
runs use no more batches. So a check ends in time, even if one dtype is slow on this machine, and
every run has at least one batch. Loading, and the comparison of every stored tensor, are never
skipped.

The first run of a model is slower than later runs (memory is mapped, libraries choose algorithms).
So the first input is timed twice. The time of a run's first batch predicts only the second batch;
from then on, later batches do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from enjoyln_cli.clock import Clock

Result = TypeVar("Result")


class Pace:
    """Shares the time of one check among its runs."""

    def __init__(self, clock: Clock, loads: int = 0, runs: int = 0) -> None:
        self.clock = clock
        self.loads = loads
        """Models that are still to be loaded."""
        self.runs = runs
        """Runs that are still to be made."""
        self.costs: list[int] = []
        """For each batch that is still run: its number of input elements."""
        self._load_seconds = 0.0
        self._seconds_per_element = 0.0
        """Time per input element in the last run."""

    @property
    def share(self) -> float:
        """Seconds that the next run may take."""
        return (self.clock.left - self.loads * self._load_seconds) / max(self.runs, 1)

    def end_run(self, was_planned: bool = True) -> None:
        """Note that a run is over or was left out."""
        self.runs -= was_planned
        self.tell()

    def fitting(self, try_one: Callable[[], Result]) -> tuple[Result, int | None]:
        """The result of ``try_one``, which runs an input, and how many such inputs fit into a run.

        At least 1; ``None`` for no limit.
        """
        result = try_one()
        if math.isinf(self.clock.limit):
            return result, None
        begin = self.clock.now()
        try_one()
        seconds = self.clock.now() - begin
        return result, max(1, int(self.share / max(seconds, 1e-9)))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Measure how long the block takes to load a model."""
        self.tell()
        begin = self.clock.now()
        yield
        self.loads -= 1
        self._load_seconds = self.clock.now() - begin
        self.tell()

    def run(self, one: Callable[[int], Result]) -> list[Result]:
        """Call ``one`` with the index of each batch while the run's share of the time lasts.

        At least once. Returns the results; later runs are limited to the same batches.
        """
        begin, share = self.clock.now(), self.share
        results: list[Result] = []
        since, timed, rate = begin, 0, 0.0
        for at, cost in enumerate(self.costs):
            if results and self.clock.now() - begin + cost * rate > share:
                break
            results.append(one(at))
            timed += cost
            rate = (self.clock.now() - since) / timed
            if at == 0:
                since, timed = self.clock.now(), 0
            self._seconds_per_element = rate
            self.tell(sum(self.costs[at + 1 :]))
        self.costs = self.costs[: len(results)]
        self.end_run()
        return results

    def tell(self, elements_left: int = 0) -> None:
        """Report the progress; ``elements_left`` input elements are left in the current run."""
        if not self.costs or not self._seconds_per_element:
            self.clock.tell()
            return
        others = self.runs - (elements_left > 0)
        elements = elements_left + others * sum(self.costs)
        self.clock.tell(self.loads * self._load_seconds + elements * self._seconds_per_element)
