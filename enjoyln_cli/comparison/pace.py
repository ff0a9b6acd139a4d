"""How many inputs a check can run in the time that it may take.

A check loads two models twice each, and makes six runs on the same inputs. The remaining time,
minus the time for the models that are still to be loaded, is shared equally among the remaining
runs. A run takes the batches in order and stops before one that would not fit into its share. Later
runs use no more batches than it did. So a check ends in time, even if one dtype is slow on this
machine, and every run has at least one batch. Loading, and the comparison of every stored tensor,
are never skipped.
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
"""Runs of these models. In float64: the original, the original with centred weights, the folded
model as stored. In the compute dtype: the original, the folded model in the stock class, and the
folded model with RMSNorm."""

Result = TypeVar("Result")


class Pace:
    """Shares the time of one check among its runs."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.costs: list[int] = []
        """For each batch that is still run: its number of input elements."""
        self._loads, self._runs = LOADS, RUNS
        self._load_seconds = 0.0
        self._seconds_per_element = 0.0
        """Time per input element in the last run."""

    @property
    def share(self) -> float:
        """Seconds that the next run may take."""
        return (self.clock.left - self._loads * self._load_seconds) / max(self._runs, 1)

    def plan_run(self) -> None:
        """Reserve time for one more run, which scores a text."""
        self._runs += 1

    def end_run(self, was_planned: bool = True) -> None:
        """Note that a run is over or was left out."""
        self._runs -= was_planned
        self.tell()

    def fitting(self, seconds: float) -> int | None:
        """How many inputs of ``seconds`` each fit into a run, at least 1; ``None`` for no limit."""
        share = self.share
        return None if math.isinf(share) else max(1, int(share / max(seconds, 1e-9)))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Measure how long the block takes to load a model."""
        self.tell()
        begin = self.clock.now()
        yield
        self._loads -= 1
        self._load_seconds = self.clock.now() - begin
        self.tell()

    def run(self, one: Callable[[int], Result]) -> list[Result]:
        """Call ``one`` with the index of each batch while the run's share of the time lasts.

        At least once. Returns the results; later runs are limited to the same batches.
        """
        begin, share = self.clock.now(), self.share
        found: list[Result] = []
        done = 0
        for at, cost in enumerate(self.costs):
            spent = self.clock.now() - begin
            if found and spent * (1 + cost / done) > share:
                break
            found.append(one(at))
            done += cost
            self._seconds_per_element = (self.clock.now() - begin) / done
            self.tell(sum(self.costs[at + 1 :]))
        self.costs = self.costs[: len(found)]
        self._runs -= 1
        return found

    def tell(self, elements_left: int = 0) -> None:
        """Report the progress; ``elements_left`` input elements are left in the current run."""
        if not self.costs or not self._seconds_per_element:
            self.clock.tell()
            return
        others = self._runs - (elements_left > 0)
        elements = elements_left + others * sum(self.costs)
        self.clock.tell(self._loads * self._load_seconds + elements * self._seconds_per_element)
