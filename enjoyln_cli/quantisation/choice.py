"""Which candidate is written: the cheapest, with as few finer layers as limits allow.

All is decided on the calibration data, with each candidate as it is written and run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from enjoyln_cli.clock import Clock, Progress, duration
from enjoyln_cli.events import Event
from enjoyln_cli.quantisation.candidates import GPTQ, ORIGINAL, Candidate, rounded_by_error
from enjoyln_cli.quantisation.layer_bits import FinerLayer, fewer, fewest, finer_layers
from enjoyln_cli.quantisation.measure import ExactOutputs, clearly_cheaper, differences
from enjoyln_cli.quantisation.quantised import Compared
from enjoyln_cli.quantisation.workshop import FLOAT, Workshop
from enjoyln_cli.quantisers.schemes import FORMATS

HELD_OUT = 3
"""Measuring the result on the held-out data takes so many runs on the calibration data."""
TIMING = 21
"""Timing the result beside float32 takes so many runs on one input."""
SHORTEST_LEFT = 3.0
"""Fewer seconds are not printed, since whole seconds would be too coarse."""


@dataclass
class Comparison:
    """The candidates of one model on the calibration data; each is written when it is needed."""

    work: Workshop
    exact: ExactOutputs
    event: Event
    on_progress: Progress
    max_size: int | None
    candidates: Sequence[Candidate]
    """The candidates to choose from, the original first. Other seeds may never be measured."""
    found: dict[tuple[str, tuple[FinerLayer, ...]], Compared] = field(
        default_factory=dict, init=False
    )
    """What was compared, by ``Candidate.key``."""
    steps: list[FinerLayer] = field(default_factory=list, init=False)
    """To more bits for all layers, once that is needed."""
    taken: dict[str, float] = field(default_factory=dict, init=False)
    """The most seconds of a candidate of each kind (see ``Candidate.kind``)."""
    running: float = field(default=0.0, init=False)
    """The seconds that the latest candidate took to run on the calibration data."""

    def __post_init__(self) -> None:
        self.clock = Clock(time.monotonic, math.inf, self.on_progress)

    def measured(self, candidate: Candidate) -> Compared:
        """A candidate, written and compared with the original in float32."""
        if candidate.key not in self.found:
            left = 0.0 if candidate.finer else self.left or 0.0
            words = f" (about {duration(left)} left)" if left >= SHORTEST_LEFT else ""
            self.event("stage", f"quantising: {candidate.title}{words}")
            begin = self.clock.spent
            weights = self.work.write(candidate, self.exact.examples, self.on_progress)
            written = self.clock.spent
            apart = differences(self.work.load(candidate.title), self.exact)
            end = self.clock.spent
            self.taken[candidate.kind] = max(end - begin, self.taken.get(candidate.kind, 0.0))
            self.running = end - written
            size_of_files = self.work.size(candidate.title)
            self.found[candidate.key] = Compared(candidate.title, apart, size_of_files, weights)
            if candidate.finer:  # most are a step of the search only
                self.work.remove(candidate.title)
            self.clock.tell(self.left)
        return self.found[candidate.key]

    @property
    def left(self) -> float | None:
        """About how many seconds it takes until the result is measured.

        ``None`` before the first candidate is compared, and for weights of 4 bits before the first
        candidate of GPTQ.
        """
        if not self.taken or (self.work.scheme.weight_bits == 4 and GPTQ not in self.taken):
            return None
        waiting = [one.kind for one in self.candidates if one.key not in self.found]
        timing = TIMING if FORMATS[self.work.format].is_timed else 0
        last = HELD_OUT + timing / max(1, len(self.exact.examples))
        each = [self.taken.get(kind, self.taken[ORIGINAL]) for kind in waiting]
        return sum(each) + last * self.running

    def best_of(self, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate of ``candidates`` to write; the first is the original."""
        compared = [self.measured(candidate) for candidate in candidates]
        return candidates[best(compared, self.work.size(FLOAT), self.max_size)]

    def choose(self) -> Candidate:
        """The best candidate without finer layers.

        If that is a rotation, other seeds of it are tried. The best candidate is also tried with
        smoothed norms. If weights have 4 bits, GPTQ rounds it and the original: rounding to the
        nearest integer does not tell which of them GPTQ rounds better.
        """
        chosen = self.best_of([one for one in self.candidates if not one.seed])
        self.candidates = [
            one for one in self.candidates if not one.seed or one.differs_in_seed(chosen)
        ]
        chosen = self.best_of(self.candidates)
        if more := self.work.smoothed(chosen, self.exact.examples):
            self.candidates = [*self.candidates, *more]
            chosen = self.best_of(self.candidates)
        if self.work.scheme.weight_bits == 4:
            original = self.candidates[0]
            both = [original] if chosen is original else [original, chosen]
            by_error = [rounded_by_error(candidate) for candidate in both]
            self.candidates = [*self.candidates, *by_error]
            chosen = self.best_of(self.candidates)
        return chosen

    def within(self, limit: float, chosen: Candidate) -> Candidate | None:
        """The best candidate with the fewest finer layers whose error is at most ``limit``.

        Candidates that round weights in another way than ``chosen`` are not tried again. If
        ``chosen`` has finer layers, the result has more. ``None`` if all finer layers are not
        enough.
        """
        self._find_steps(chosen)
        least = len(chosen.finer) + 1
        count = fewest(len(self.steps), partial(self._is_enough, chosen, limit), least)
        if count is None:
            return None
        rivals = [one for one in self.candidates if one.rounding == chosen.rounding]
        other = self.best_of([self.finer(candidate, count) for candidate in rivals])
        if other.name == chosen.name or self.error(other) > limit:
            return self.finer(chosen, count)
        return self.finer(other, fewer(count, partial(self._is_enough, other, limit), least))

    def filled(self, chosen: Candidate, max_size: int) -> Candidate:
        """The chosen candidate with the finer layers that ``max_size`` bytes have room for.

        A step that takes too many bytes is left out, and later steps may fit. If the written files
        are larger than the steps said, the last steps are taken back.
        """
        left, steps = max_size - self.measured(chosen).size, list[FinerLayer]()
        if left <= 0:
            return chosen
        self._find_steps(chosen)
        for step in self.steps:
            if step.size <= left:
                left -= step.size
                steps.append(step)
        while steps:
            finer = replace(chosen, finer=tuple(steps))
            found, before = self.measured(finer), self.measured(chosen)
            left = max_size - found.size
            if left >= 0:
                return finer if found.differences.cost < before.differences.cost else chosen
            while steps and left < 0:
                left += steps.pop().size
        return chosen

    def error(self, candidate: Candidate) -> float:
        """The relative error of the outputs."""
        return self.measured(candidate).differences.error

    def finer(self, candidate: Candidate, count: int) -> Candidate:
        """The candidate after so many steps to more bits."""
        return replace(candidate, finer=tuple(self.steps[:count]))

    def _find_steps(self, chosen: Candidate) -> None:
        if not self.steps:
            self.event("stage", "finding the layers that need more bits")
            model = self.work.model(chosen)
            self.steps = finer_layers(
                model,
                self.work.format,
                self.work.scheme,
                [*self.work.bits],
                self.exact,
                self.on_progress,
            )

    def _is_enough(self, candidate: Candidate, limit: float, count: int) -> bool:
        return self.error(self.finer(candidate, count)) <= limit


def best(compared: Sequence[Compared], float_size: int, max_size: int | None = None) -> int:
    """Which candidate to write: the cheapest that is clearly cheaper than the original.

    The original comes first. Others have to be smaller than the model in float32, of
    ``float_size`` bytes, and no larger than ``max_size``: an untied head can take more than
    rounding saves. A candidate that is larger than the original has to earn it: at ``n`` times the
    size it may have ``1 / n`` of the cost.
    """
    first = compared[0]
    original, *others = (candidate.differences for candidate in compared)
    cheaper = [
        at
        for at, is_cheaper in enumerate(clearly_cheaper(others, original), 1)
        if is_cheaper
        and compared[at].size < float_size
        and (max_size is None or compared[at].size <= max_size)
        and compared[at].size * others[at - 1].cost <= first.size * original.cost
    ]
    return min(cheaper, key=lambda at: compared[at].differences.cost, default=0)
