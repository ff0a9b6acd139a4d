"""Random models: each folds exactly, or stays as it is and says why.

``scripts/random_modules.py`` checks any number of them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_check import check
from random_models import Written, odd_productions, write, write_alone
from torch.fx import Node

from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.proof import pullback

aten = torch.ops.aten
QUICK = range(4)


@pytest.mark.slow
def test_random_models_fold_exactly_or_stay() -> None:
    results = [check(write(seed)) for seed in QUICK]
    assert [r for r in results if r.failed or r.outcome == "invalid"] == []
    assert sum(r.folded > 0 for r in results) >= len(results) // 3


@pytest.mark.slow
@pytest.mark.parametrize("number", range(0, len(odd_productions()), 80))
def test_what_is_odd_alone_folds_exactly_or_stays(number: int) -> None:
    """One odd production in a usual model: every eightieth (the script: all, ``--alone``)."""
    result = check(write_alone(number))
    assert not result.failed and result.outcome != "invalid", result


def test_one_number_is_one_model() -> None:
    assert write(7) == write(7)
    assert write(7).source != write(8).source


def test_a_production_is_taken_back_alone() -> None:
    """A usual production at one place changes no other place."""
    written = next(w for w in map(write, range(50)) if len(w.odd) > 3)
    place = list(written.odd)[-1]
    smaller = write(written.seed, without=[place])
    assert [*smaller.odd] == [p for p in written.odd if p != place]


WRONG_RULES = {
    "tanh": aten.tanh,
    "features summed up": aten.cumsum,
    "divided by a LayerScale": aten.div,
    "grouped Conv1d": aten.conv1d,
}
"""Odd productions, and the ops in them that a wrong rule would say to keep every mean."""


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_RULES)
def test_a_wrong_rule_is_noticed(name: str) -> None:
    def keeps_every_mean(node: Node, axis: Axis) -> pullback.Pull:
        if name == "grouped Conv1d":
            return ((node.args[1], replace(axis, dim=0)),)
        return ((node.args[0], axis),)

    def outcome(model: Written) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(pullback._RULES, WRONG_RULES[name], keeps_every_mean)
            return check(model).outcome

    production = next(p for p in odd_productions() if p.name == name)
    models = (write(seed, only=production) for seed in range(8))
    wrong = next(model for model in models if outcome(model) == "wrong")
    assert not check(wrong).failed
