"""Random modules: each folds exactly, or stays as it is and says why.

``scripts/random_modules.py`` checks any number of them.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from random_check import Result, check, checked
from random_writer import Written, odd_parts, write, write_alone

QUICK = range(12)


def failures(results: Iterable[Result]) -> list[str]:
    found = (r for r in results if r.failed or r.outcome == "invalid" and r.seed in QUICK)
    return [f"seed {r.seed}: {r.outcome} {r.error:.2g} {r.call} {r.where[-300:]}" for r in found]


@pytest.mark.slow
def test_random_modules_fold_exactly_or_stay() -> None:
    results = [check(seed) for seed in QUICK]
    assert failures(results) == []
    assert sum(r.folded > 0 for r in results) >= len(results) // 3


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, len(odd_parts()), 20))
def test_what_is_odd_alone_folds_exactly_or_stays(number: int) -> None:
    """One odd part in an otherwise usual model: every twentieth (the script: all, ``--alone``)."""
    assert failures([checked(write_alone(number))]) == []


def test_one_number_is_one_module() -> None:
    first, again = write(7), write(7)
    assert isinstance(first, Written) and first == again
    assert first.source != write(8).source


def test_a_decision_is_taken_back_alone() -> None:
    """Leaving out a part at one place changes no other place."""
    written = next(w for w in map(write, range(50)) if len(w.decisions) > 3)
    place = list(written.decisions)[-1]
    smaller = write(written.seed, without=[place])
    assert [*smaller.decisions] == [p for p in written.decisions if p != place]
