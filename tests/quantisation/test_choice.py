"""Which form of a model is written, and what the numbers behind the choice mean."""

from __future__ import annotations

import copy
from dataclasses import replace
from math import inf, nan

import pytest
import torch
from live_models import CHECKPOINTS
from transformers import AutoModelForCausalLM

from enjoyln_cli.checkpoint.reader import open_subject
from enjoyln_cli.comparison.text_scores import perplexity, with_predicted_tokens
from enjoyln_cli.quantisation.candidates import FloatModel, candidates, rotation_plan
from enjoyln_cli.quantisation.examples import Example
from enjoyln_cli.quantisation.measure import (
    Differences,
    ExactOutputs,
    costly_layers,
    differences,
)
from enjoyln_cli.quantisation.quantize import Compared, best
from enjoyln_cli.quantisation.schemes import SCHEMES

FLOAT_SIZE = 1000


def compared(name: str, kl: float | None, error: float = 0.1, size: int = 400) -> Compared:
    return Compared(name, Differences(error, kl, None, None), size)


def chosen_of(*candidates: Compared) -> str:
    return candidates[best(candidates, FLOAT_SIZE)].name


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        ({"original": 1.0, "rotated": 0.5, "other": 0.4}, "other"),
        ({"original": 1.0, "rotated": 0.95}, "original"),
        ({"original": 1.0, "rotated": 2.0}, "original"),
        ({"original": 0.0, "rotated": 0.0}, "original"),
    ],
)
def test_another_form_has_to_be_clearly_better(costs: dict[str, float], chosen: str) -> None:
    assert chosen_of(*(compared(name, cost) for name, cost in costs.items())) == chosen


def test_a_result_with_nan_is_never_chosen() -> None:
    assert chosen_of(compared("original", 1.0), compared("rotated", 0.0, inf)) == "original"
    assert chosen_of(compared("original", 1.0), compared("rotated", 0.0, nan)) == "original"
    assert chosen_of(compared("original", 0.0, nan), compared("rotated", 1.0)) == "rotated"


def test_models_without_logits_are_compared_by_their_error() -> None:
    assert chosen_of(compared("original", None, 0.2), compared("rotated", None, 0.1)) == "rotated"


def test_another_form_has_to_be_smaller_than_the_model_in_float32() -> None:
    original, values = compared("original", 1.0), compared("values only", 0.8)
    assert chosen_of(original, compared("rotated", 0.1, size=1000), values) == "values only"
    assert chosen_of(original, compared("rotated", 0.1, size=1000)) == "original"
    assert chosen_of(original, compared("rotated", 0.1, size=999), values) == "rotated"


@pytest.fixture(scope="module")
def gpt2() -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").eval()
    return model


def examples_for(model: torch.nn.Module, rows: int = 3) -> list[Example]:
    ids = torch.randint(3, 500, (rows, 40), generator=torch.Generator().manual_seed(1))
    return [
        Example(*with_predicted_tokens("causal", {"input_ids": row[None]}, None, 0)) for row in ids
    ]


def test_the_differences_of_a_model_whose_logits_move(gpt2: torch.nn.Module) -> None:
    examples = examples_for(gpt2)

    def exact(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            return {"logits": gpt2(**batch).logits}

    outputs = [exact(example.batch) for example in examples]
    expected = ExactOutputs(("logits",), examples, outputs)
    same = differences(exact, expected)
    assert (same.error, same.top1) == (0.0, 1.0) and same.kl == pytest.approx(0.0, abs=1e-12)
    own, count = perplexity(gpt2, [example.batch for example in examples], None, 0)
    assert count == 3 * 39 and same.perplexity == pytest.approx(own)

    def scaled(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"logits": exact(batch)["logits"] * 1.25}

    moved = differences(scaled, expected)
    assert moved.error == pytest.approx(0.25) and moved.top1 == 1.0
    p = torch.cat([one["logits"][0] for one in outputs]).double().log_softmax(-1)
    q = (1.25 * torch.cat([one["logits"][0] for one in outputs])).double().log_softmax(-1)
    assert moved.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()))

    def broken(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"logits": exact(batch)["logits"].fill_(nan)}

    assert differences(broken, expected).cost == inf


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_every_candidate_computes_the_function(name: str) -> None:
    subject = open_subject(str(CHECKPOINTS / name))
    plan = rotation_plan(subject, lambda *_: None)
    assert plan is not None
    forms = candidates(plan, (0, 5))
    names = [form.name for form in forms]
    turned = [] if name == "bert" else ["rotated, seed 0", "rotated, seed 5"]
    untied = [] if plan.untied == () else ["untied"]
    assert untied == (["untied"] if name == "gpt2" else [])
    assert names == ["original", *untied, "values only", *turned]
    inputs = {"input_ids": torch.arange(3, 43)[None]}
    outputs, weights = [], []
    for form in forms:
        model = FloatModel(subject, plan.model_class).load(form)
        with torch.no_grad():
            outputs.append(model(**inputs)[0])
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    for output in outputs[1:]:
        error = float((output - outputs[0]).norm() / outputs[0].norm())
        assert error < 1e-5  # some roundings of float32
    for form, other in zip(forms[1:], weights[1:], strict=True):
        assert form.name == "untied" or any(
            not torch.equal(value, other[name]) for name, value in weights[0].items()
        )
    if turned:
        stream = plan.turned[0].tensors[0].parameter
        *same, first, second = weights  # all but the rotations, which have two seeds
        assert all(torch.equal(other[stream], same[0][stream]) for other in same)
        assert not torch.equal(first[stream], second[stream])


def test_a_model_without_anything_to_turn_is_its_only_candidate() -> None:
    assert [form.name for form in candidates(None, (0, 1))] == ["original"]


def test_the_layer_that_rounding_hurts_most_is_named_first(gpt2: torch.nn.Module) -> None:
    model, costly = copy.deepcopy(gpt2), "transformer.h.1.mlp.c_proj"
    layer = model.get_submodule(costly)
    with torch.no_grad():  # one large weight, on a feature that is mostly small, sets the scale
        layer.weight[0] *= 200.0
    examples = examples_for(model)
    with torch.no_grad():
        outputs = [{"logits": model(**example.batch).logits} for example in examples]
    scheme = replace(SCHEMES["w4a16"], weight_bits=3)
    told: list[str] = []
    exact = ExactOutputs(("logits",), examples, outputs)
    worst = costly_layers(model, scheme, exact, lambda _, text: told.append(text))
    assert len(told) >= 2 and all(f" of {len(worst)} tried" in text for text in told)
    assert len(worst) == 12 and worst[0] == costly
