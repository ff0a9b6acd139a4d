"""The experiments that tell a true reason from a missing rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audit import audited
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.proof import pullback

WIDTH = 12


class Stream(nn.Module):
    """A writer, an op that may or may not keep a zero mean, a norm, and somebody else who reads."""

    def __init__(self, op: Any, read: float = 0.0) -> None:
        super().__init__()
        self.write, self.norm = nn.Linear(5, WIDTH), nn.LayerNorm(WIDTH)
        self.op = op
        self.reader = nn.Linear(WIDTH, 2)
        nn.init.constant_(self.reader.weight, read)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = self.write(x)
        return self.norm(self.op(stream)), self.reader(stream).sin()


def answer(model: nn.Module, x: torch.Tensor) -> tuple[str, str]:
    model.double()
    analysis = analyze_module(model, x)
    (kept,) = analysis.plan.kept

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            return list(model(x))

    return kept.reason, audited(analysis, model, [(outputs, outputs())])["norm"]


def test_an_activation_is_a_true_obstacle() -> None:
    reason, found = answer(Stream(nn.functional.gelu), torch.randn(3, 5).double())
    assert reason == "gelu does not keep a zero mean" and found == "true"


def test_a_clamp_is_no_identity_though_it_acts_so_near_zero() -> None:
    reason, found = answer(Stream(lambda x: x.clamp(-50, 50)), torch.randn(3, 5).double())
    assert reason == "clamp does not keep a zero mean" and found == "true"


def test_a_rule_that_is_taken_away_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(pullback._RULES, torch.ops.aten.neg)
    reason, found = answer(Stream(torch.neg), torch.randn(3, 5).double())
    assert reason == "neg does not keep a zero mean" and found == "missing rule: neg"


@pytest.mark.parametrize("read", [0.7, 0.0])
def test_an_observer_has_to_observe(read: float) -> None:
    reason, found = answer(Stream(nn.Identity(), read), torch.randn(3, 5).double())
    assert reason.startswith("a weight that produces its input is also read by a layer")
    assert found == ("true" if read else "unseen: write.weight")


def test_an_observer_behind_a_clamp_is_seen_by_a_large_shift() -> None:
    model = Stream(lambda x: x, read=1e-5)
    reader = model.reader
    model.reader = nn.Sequential(reader, Beyond())  # type: ignore[assignment]
    reason, found = answer(model, torch.randn(3, 5).double())
    assert reason.endswith("whose output would change") and found == "true"


class Beyond(nn.Module):
    """Shows nothing of what is below a threshold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs().clamp(min=1e-2)


class CutOff(nn.Module):
    """The first token is not there any more where the mean of the others is read."""

    def __init__(self) -> None:
        super().__init__()
        self.write, self.norm = nn.Linear(5, WIDTH), nn.LayerNorm(WIDTH)
        self.first, self.reader = nn.Parameter(torch.randn(1, WIDTH)), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = torch.cat((self.first, self.write(x)))
        return self.norm(stream), self.reader(stream[1:])


def test_another_source_may_be_seen_than_the_named_source() -> None:
    reason, found = answer(CutOff(), torch.randn(3, 5).double())
    assert reason.endswith("whose output would change") and found == "true of another source"
