"""Errors about a refused model say what its code does, and where."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from folding_live import VOCAB, D, ids, randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.errors import TraceFailed


class Unwilling(nn.Module):
    """Does something with a computed value that no graph can show."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.emb, self.norm, self.how = nn.Embedding(VOCAB, D), nn.LayerNorm(D), how

    def forward(self, tokens: torch.Tensor) -> Any:
        h = self.emb(tokens)
        match self.how:
            case "float":
                h = h * float(h.mean())
            case "if":
                h = -h if h.mean() > 0 else h
            case "numpy":
                h = h + torch.from_numpy(h.detach().cpu().numpy())
            case "data":
                h.data = h * 2
            case "storage":
                h = h * h.untyped_storage().tolist()[0]
            case "raised":
                self.require(h.shape[-1])
            case "assert":
                assert tokens.dim() == 5, "five dimensions"
            case "called":
                h = h * self.norm.weight(h)  # type: ignore[operator]
        return self.norm(h)

    def require(self, width: int) -> None:
        raise ValueError(f"{width} is no good width for numpy, storage and item()")


NUMBER = r"needs a tensor's value as a Python number, .*; compute with the tensor itself"
SAID = {
    "float": NUMBER,
    "if": NUMBER,
    "numpy": "makes a NumPy array of a tensor; use the functions of torch",
    "storage": "reads or replaces the memory of a tensor; compute with the tensor itself",
    "called": "fails with these inputs; make sure that the model runs with them",
    "assert": "raises an error with these inputs; .*AssertionError: five dimensions",
}


@pytest.mark.parametrize("how", SAID)
def test_the_message_says_what_the_code_does(how: str) -> None:
    with pytest.raises(TraceFailed, match=SAID[how]) as caught:
        analyze_module(randomised(Unwilling(how)), ids())
    assert re.search(r": Unwilling\.forward, line \d+, ", str(caught.value))
    assert re.search(r"\((\w+): .{1,130}\)$", str(caught.value))


def test_an_error_of_the_model_is_its_own_whatever_it_says() -> None:
    with pytest.raises(TraceFailed, match=r"Unwilling\.require, line \d+, raises an error with"):
        analyze_module(randomised(Unwilling("raised")), ids())


def test_a_refusal_of_the_analysis_stays_as_it_is() -> None:
    with pytest.raises(TraceFailed, match=r"\.data of a tensor, which no graph shows$"):
        analyze_module(randomised(Unwilling("data")), ids())


def test_without_any_of_this_it_is_traced() -> None:
    (verdict,) = analyze_module(randomised(Unwilling("")), ids()).plan.norms
    assert not verdict.reason
