"""The cache has the same name in plans, whichever release of transformers made or reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from live_models import install
from support.tiny_models import GPT2, live
from torch import nn

from enjoyln_cli.errors import UnprovenCall
from enjoyln_cli.plan.cache_argument import CACHE, cache_argument, in_plans, returned_cache
from enjoyln_cli.plan.covered_calls import CallSignature, CoveredCalls, TensorSpec, call_signature

STATE = torch.ones(2, 3)


FORWARDS = {
    "Old": lambda self, x, past_key_values=None: x,
    "New": lambda self, x, cache=None: x,
    "Both": lambda self, x, past_key_values=None, cache=None: x,
    "Neither": lambda self, x: x,
}
Old, New, Both, Neither = (type(n, (nn.Module,), {"forward": f}) for n, f in FORWARDS.items())


@pytest.mark.parametrize(
    ("model", "name"), [(Old, CACHE), (New, "cache"), (Both, CACHE), (Neither, None)]
)
def test_the_argument_that_takes_the_cache(model: type[nn.Module], name: str | None) -> None:
    assert cache_argument(model().forward) == name
    assert in_plans(name or "attention_mask") == (CACHE if name else "attention_mask")


def test_the_cache_in_a_result() -> None:
    class Fields:
        def __init__(self, **given: Any) -> None:
            vars(self).update(given)

    for name in ("past_key_values", "cache"):
        assert returned_cache({"logits": 1, name: STATE}) is STATE
        assert returned_cache(Fields(logits=1, **{name: STATE})) is STATE
        assert returned_cache({name: None}) is None
    assert returned_cache((STATE,)) is None and returned_cache(Fields(logits=1)) is None


def test_a_proven_call_is_covered_under_either_name() -> None:
    form = call_signature(New(), (STATE,), {"cache": STATE})
    assert form is not None and dict(form.arguments).keys() == {"x", CACHE}
    for model, name in ((New(), "cache"), (New(), CACHE), (Old(), CACHE)):
        covered = CoveredCalls((CallSignature(type(model).__name__, form.arguments),)).calls_of(
            model
        )
        assert covered.uncovered((STATE,), {name: STATE}) == []
        assert covered.uncovered((STATE,), {name: STATE[0]}) == [CACHE]


def test_code_that_takes_both_names_means_two_things() -> None:
    arguments = (("x", TensorSpec("float", (2, 3))), ("cache", TensorSpec("float", (2, 3))))
    covered = CoveredCalls((CallSignature("Both", arguments),)).calls_of(Both())
    assert covered.uncovered((STATE,), {"cache": STATE}) == []
    assert CACHE in covered.uncovered((STATE,), {CACHE: STATE})


@pytest.mark.parametrize("written", [CACHE, "cache"])
def test_an_unproven_cache_is_noticed_under_either_name(written: str) -> None:
    model = live("GPT2LMHeadModel", transformers.GPT2Config(**GPT2))
    install(model, ["transformer.ln_f"], [], unproven=[written], fused=True)
    name = cache_argument(model.forward)
    with torch.no_grad():
        kept = returned_cache(model(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=True))
        assert kept is not None and kept.get_seq_length() == 3
        for given in (name, CACHE):
            with pytest.raises(UnprovenCall, match=f"not proven for calls with {given}"):
                model(input_ids=torch.ones(1, 1, dtype=torch.long), **{given: kept})
