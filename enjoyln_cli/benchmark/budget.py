"""Which cases are timed and in how many rounds, so that a run ends in time.

A first short measurement says how long one call of the original takes, by its number of tokens.
From this the cost of every case is estimated: the time to warm up, and to run each of the four
models in every round. Cases are taken from the cheapest on, as long as each can have ``GOOD``
rounds. If not even one case can, each needs only ``ENOUGH`` rounds, the least for a 95 % interval.
The remaining time is used for more rounds.

    cost      estimates the time of a case from the first calls
    choose    chooses cases and rounds, before the first case is timed
    fit       chooses again among the remaining cases, after each case
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enjoyln_cli.benchmark.baselines import COLUMNS
from enjoyln_cli.benchmark.timing import ENOUGH, FEWEST, WARM_UP, WARM_UP_SECONDS, runs_per_round
from enjoyln_cli.benchmark.workload import Size
from enjoyln_cli.clock import duration

GOOD = 9
"""Rounds that a case should have if there is time."""
MARGIN = 1.1
"""Expected time of a model divided by the original's: torch's RMSNorm is slower on a CPU."""


@dataclass(frozen=True, eq=False)
class Case:
    """The size, phase and mode of one row of the result."""

    size: Size
    phase: str
    mode: str
    steps: int = 1
    """Tokens in one run of decode."""

    def __str__(self) -> str:
        return f"{self.size}, {self.phase}, {self.mode}"


@dataclass(frozen=True)
class Calls:
    """Measured calls of the original."""

    measured: Mapping[int, float]
    """From the number of items (tokens, or rows) to the seconds of one call."""

    def seconds(self, items: int) -> float:
        """Time of a call with this many items: interpolated, or in proportion to the largest."""
        known = sorted(self.measured)
        if items <= known[0]:
            return self.measured[known[0]]
        if items > known[-1]:
            return self.measured[known[-1]] * items / known[-1]
        high = next(number for number in known if number >= items)
        low = next(number for number in reversed(known) if number < items)
        share = (items - low) / (high - low)
        return (1 - share) * self.measured[low] + share * self.measured[high]


@dataclass(frozen=True)
class Cost:
    """Seconds of a case."""

    before: float
    """Until its first round: compiling, and warming up."""
    one_round: float

    def of(self, rounds: int) -> float:
        """Seconds of the case with this many rounds."""
        return self.before + rounds * self.one_round

    def corrected(self, factor: float, added: float) -> Cost:
        """The cost corrected by earlier cases: ``factor`` times as long, and ``added`` seconds."""
        return Cost(self.before * factor + added, self.one_round * factor)


def cost(case: Case, calls: Calls) -> Cost:
    """The estimated cost of a case, without compiling."""
    first, seconds = 0.0, calls.seconds(case.size.items)
    if case.phase == "decode":
        first, seconds = seconds, case.steps * calls.seconds(case.size.rows)
    warm = min(WARM_UP, math.ceil(WARM_UP_SECONDS / seconds)) * seconds
    each = MARGIN * len(COLUMNS)
    return Cost(first + each * warm, each * runs_per_round(seconds) * seconds)


@dataclass(frozen=True)
class Choice:
    """The cases that will be timed."""

    cases: tuple[Case, ...]
    """The cases, in the order in which they are timed."""
    rounds: int
    seconds: float
    """Estimated time of all cases."""
    left_out: Mapping[Case, float]
    """From each case that is left out to the seconds that it would take."""


def fit(costs: Sequence[Cost], left: float, repeats: int, least: int) -> tuple[int, int]:
    """How many of these cases, in order, fit with ``least`` rounds each, and the rounds of each.

    The number of rounds is at most ``repeats``. If no case fits, it is ``least``.
    """
    count, total = 0, 0.0
    for one in costs:
        total += one.of(least)
        if total > left:
            break
        count += 1
    before = sum(one.before for one in costs[:count])
    a_round = sum(one.one_round for one in costs[:count])
    rounds = min((left - before) / a_round, repeats) if count else least
    return count, max(least, math.floor(rounds + 1e-9))


def choose(
    costs: Mapping[Case, Cost], left: float, repeats: int, *, all_of_them: bool = False
) -> Choice:
    """The cases that fit into ``left`` seconds, from the cheapest on; there may be none.

    With ``all_of_them`` no case is left out; if they do not fit, each has ``FEWEST`` rounds.
    """
    repeats = max(repeats, FEWEST)
    ordered = sorted(costs, key=lambda case: costs[case].of(GOOD))
    prices = [costs[case] for case in ordered]
    if all_of_them:
        count, rounds = len(ordered), FEWEST
        if fit(prices, left, repeats, FEWEST)[0] == count:
            rounds = fit(prices, left, repeats, FEWEST)[1]
    else:
        for least in (min(GOOD, repeats), min(ENOUGH, repeats)):
            count, rounds = fit(prices, left, repeats, least)
            if count:
                break
    seconds = sum(one.of(rounds) for one in prices[:count])
    least = min(ENOUGH, repeats)
    left_out = {case: costs[case].of(least) for case in ordered[count:]}
    return Choice(tuple(ordered[:count]), rounds, seconds, left_out)


def just_one(costs: Mapping[Case, Cost], repeats: int) -> Choice:
    """The cheapest case, however long it takes, with the fewest rounds that give a result."""
    rounds = max(min(ENOUGH, repeats), FEWEST)
    ordered = sorted(costs, key=lambda case: costs[case].of(rounds))
    left_out = {case: costs[case].of(rounds) for case in ordered[1:]}
    return Choice((ordered[0],), rounds, costs[ordered[0]].of(rounds), left_out)


def describe(choice: Choice, spent: float, limit: float, repeats: int) -> str:
    """One line that says what will be timed, and why.

    ``spent`` are the seconds that the run takes for everything else, ``limit`` those that it may
    take in all.
    """
    count, others = len(choice.cases), len(choice.left_out)
    total = spent + choice.seconds
    cases = f"{count} of {count + others} cases" if others else _all(count)
    text = f"measuring {cases}, {choice.rounds} rounds each"
    text += f" instead of {repeats}" * (choice.rounds < repeats)
    text += f"; the whole run takes about {duration(total)}"
    if total > limit:
        return f"{text}, more than {duration(limit)}: these are the fewest rounds possible"
    if others or choice.rounds < repeats:
        text += f", as it should end within {duration(limit)}"
        text += "; --seconds gives it more time, --full no limit"
    return text


def _all(count: int) -> str:
    return f"all {count} cases" if count > 1 else "one case"
