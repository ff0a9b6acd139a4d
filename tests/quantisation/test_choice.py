"""Which candidate is written, and what the numbers behind the choice mean."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import CHECKPOINTS
from transformers import AutoModelForCausalLM

from enjoyln_cli.clock import no_progress
from enjoyln_cli.comparison.output_meaning import Kind, Meaning
from enjoyln_cli.comparison.text_scores import perplexity, with_predicted_tokens
from enjoyln_cli.errors import VerificationFailed
from enjoyln_cli.events import default_listener
from enjoyln_cli.quantisation.candidates import (
    GPTQ,
    ORIGINAL,
    ROTATED,
    Candidate,
    candidates,
    rotation_plan,
    rounded_by_error,
)
from enjoyln_cli.quantisation.choice import Comparison, best
from enjoyln_cli.quantisation.examples import Example
from enjoyln_cli.quantisation.layer_bits import FinerLayer
from enjoyln_cli.quantisation.measure import (
    Differences,
    ExactOutputs,
    clearly_cheaper,
    differences,
)
from enjoyln_cli.quantisation.quantised import Compared
from enjoyln_cli.quantisation.quantize import require_gain
from enjoyln_cli.quantisation.workshop import FLOAT, Measured, Workshop
from enjoyln_cli.quantisers.schemes import ONNX, SCHEMES
from enjoyln_cli.quantisers.speed import Speed
from enjoyln_cli.rewrite.opened_model import open_model

FLOAT_SIZE = 1000


def measured(costs: Sequence[float]) -> Differences:
    """Differences of logits whose KL divergences are ``costs``, a cost for each input."""
    error = 0.1 if all(map(isfinite, costs)) else nan
    return Differences(error, sum(costs) / len(costs), None, None, tuple(costs))


def compared(name: str, *costs: float, size: int = 400) -> Compared:
    return Compared(name, measured(costs), size)


def chosen_of(*candidates: Compared) -> str:
    return candidates[best(candidates, FLOAT_SIZE)].name


PLAIN = (1.0, 2.0, 0.5, 3.0, 1.5)


def times(*factors: float) -> list[float]:
    return [cost * factor for cost, factor in zip(PLAIN, factors, strict=True)]


@pytest.mark.parametrize(
    ("rotated", "chosen"),
    [
        (times(0.5, 0.4, 0.6, 0.5, 0.45), "rotated"),
        (times(0.97, 0.96, 0.97, 0.98, 0.97), "rotated"),  # little, but on every input
        (times(1.1, 1.2, 1.05, 0.3, 1.1), "original"),  # one input makes the mean smaller
        (times(0.9, 1.1, 0.8, 1.0, 1.02), "original"),
        (times(1.5, 1.4, 1.6, 1.5, 1.45), "original"),
        (times(1.0, 1.0, 1.0, 1.0, 1.0), "original"),
        (times(0.5, 0.4, 0.6, 0.5, nan), "original"),
        (times(0.5, 0.4, 0.6, 0.5, inf), "original"),
        (times(0.0, 0.0, 0.0, 0.0, 0.0), "rotated"),
    ],
)
def test_another_candidate_has_to_be_better_by_more_than_chance(
    rotated: list[float], chosen: str
) -> None:
    assert chosen_of(compared("original", *PLAIN), compared("rotated", *rotated)) == chosen


def test_the_cheapest_of_several_better_candidates_is_chosen() -> None:
    some, more = times(0.8, 0.7, 0.8, 0.7, 0.8), times(0.5, 0.4, 0.6, 0.5, 0.45)
    tried = [compared(name, *costs) for name, costs in {"some": some, "more": more}.items()]
    assert chosen_of(compared("original", *PLAIN), *tried) == "more"
    assert chosen_of(compared("original", *PLAIN)) == "original"


def test_any_candidate_is_better_than_a_nonfinite_original() -> None:
    assert chosen_of(compared("original", nan, 0.1, 0.1), compared("other", 2.0, 2, 2)) == "other"


@pytest.mark.parametrize(("scheme", "at_first"), [("w8a8", 3.0 + 2.0 + 6 * 0.5), ("w4a16", None)])
def test_what_is_left_counts_all_that_follows(
    scheme: str, at_first: float | None, tmp_path: Path
) -> None:
    original = Candidate(ORIGINAL, None)
    tried = [original, Candidate("values only", None), rounded_by_error(original)]
    work: Any = Workshop(tmp_path, ONNX, SCHEMES[scheme], {}, None)  # type: ignore[arg-type]
    exact = ExactOutputs({}, [Example({})] * 7, [])
    comparison = Comparison(work, exact, default_listener, no_progress, None, tried)
    assert comparison.left is None
    comparison.found = {(ORIGINAL, ()): compared(ORIGINAL, *PLAIN)}
    comparison.taken, comparison.running = {ORIGINAL: 2.0, ROTATED: 9.0}, 0.5
    if scheme == "w8a8":
        comparison.taken[GPTQ] = 3.0
    assert comparison.left == at_first
    comparison.taken[GPTQ] = 30.0
    assert comparison.left == 2.0 + 30.0 + 6 * 0.5  # both halves, and timing
    comparison.found |= {(one.name, ()): compared(one.name, *PLAIN) for one in tried}
    assert comparison.left == 6 * 0.5


def test_models_without_logits_are_compared_by_their_error() -> None:
    def of(name: str, *errors: float) -> Compared:
        return Compared(name, Differences(max(errors), None, None, None, errors), 400)

    assert (
        chosen_of(of("original", *PLAIN), of("other", *times(0.5, 0.4, 0.6, 0.5, 0.4))) == "other"
    )


def test_another_candidate_has_to_be_smaller_than_float32() -> None:
    original, values = compared("original", *PLAIN), compared("values", *times(*[0.8] * 5))
    least = times(*[0.1] * 5)
    assert chosen_of(original, compared("rotated", *least, size=1000), values) == "values"
    assert chosen_of(original, compared("rotated", *least, size=1000)) == "original"
    assert chosen_of(original, compared("rotated", *least, size=999), values) == "rotated"


@pytest.mark.parametrize(
    ("size", "chosen"), [(400, "rotated"), (480, "rotated"), (520, "original")]
)
def test_a_larger_candidate_has_to_earn_its_size(size: int, chosen: str) -> None:
    rotated = compared("rotated", *times(*[0.8] * 5), size=size)
    assert chosen_of(compared("original", *PLAIN), rotated) == chosen


@pytest.mark.parametrize(
    ("milliseconds", "size", "is_refused"),
    [
        (2.0, 1000, True),
        (2.0, 400, False),
        (1.01, 1000, False),
        (0.5, 1000, False),
        (None, 1000, False),
    ],
)
def test_a_slower_result_that_is_no_smaller_is_refused(
    milliseconds: float | None, size: int, is_refused: bool
) -> None:
    same = measured(PLAIN)
    times = (Speed(milliseconds), Speed(1.0)) if milliseconds else ()
    timed = Measured(same, same, *times)
    with pytest.raises(VerificationFailed, match="no smaller") if is_refused else nullcontext():
        require_gain(timed, size, FLOAT_SIZE)


@pytest.mark.parametrize(("inputs", "quantile"), [(4, 0.978), (8, 0.896), (16, 0.866)])
def test_for_one_candidate_it_is_the_t_test(inputs: int, quantile: float) -> None:
    """``quantile``: where Student's distribution with ``inputs - 1`` degrees reaches 80 %."""
    spread = torch.linspace(-1, 1, inputs, dtype=torch.float64)
    original = measured([1.0] * inputs)
    for factor, expected in ((0.93, False), (1.07, True)):
        saving = factor * quantile * spread.std() / inputs**0.5
        candidate = measured((-(spread + saving)).exp().tolist())
        assert clearly_cheaper([replace(candidate, kl=0.5)], original) == [expected]


def test_more_candidates_have_no_better_chance() -> None:
    """None of five candidates is better in truth; two of them are nearly alike."""
    generator, taken = torch.Generator().manual_seed(0), 0
    for _ in range(100):
        logs = torch.randn(6, 6, generator=generator, dtype=torch.float64)
        logs[2] = logs[1] + 0.1 * logs[2]
        original, *others = (measured(each.exp().tolist()) for each in logs)
        taken += any(
            clearly_cheaper([replace(candidate, kl=0.0) for candidate in others], original)
        )
    assert 10 <= taken <= 30


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
    expected = ExactOutputs({"logits": Meaning(Kind.ONE_OF)}, examples, outputs)
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
    subject = open_model(str(CHECKPOINTS / name))
    plan, _ = rotation_plan(subject, lambda *_: None)
    assert plan is not None
    tried = candidates(plan, (0, 5), rounds_untied_heads=True)
    names = [candidate.name for candidate in tried]
    rotated = [] if name == "bert" else ["rotated, seed 0", "rotated, seed 5"]
    untied = [] if plan.untied == () else ["untied"]
    assert untied == (["untied"] if name == "gpt2" else [])
    assert names == ["original", *untied, "values only", *rotated]
    inputs = {"input_ids": torch.arange(3, 43)[None]}
    outputs, weights = [], []
    for candidate in tried:
        model = subject.as_class(plan.model_class).load(torch.float32, candidate.plan)
        with torch.no_grad():
            outputs.append(model(**inputs)[0])
        weights.append({name: value.clone() for name, value in model.state_dict().items()})
    for output in outputs[1:]:
        error = float((output - outputs[0]).norm() / outputs[0].norm())
        assert error < 1e-5  # some roundings of float32
    for candidate, other in zip(tried[1:], weights[1:], strict=True):
        assert candidate.name == "untied" or any(
            not torch.equal(value, other[name]) for name, value in weights[0].items()
        )
    if rotated:
        stream = plan.rotated[0].tensors[0].parameter
        *same, first, second = weights  # all but the rotations, which have two seeds
        assert all(torch.equal(other[stream], same[0][stream]) for other in same)
        assert not torch.equal(first[stream], second[stream])


@pytest.mark.parametrize("factor, chosen", [(1.3, "values only"), (0.3, "rotated, seed 2")])
def test_other_seeds_are_tried_of_a_rotation_that_is_best(
    factor: float, chosen: str, tmp_path: Path
) -> None:
    """Nothing can be written here, so a candidate that is tried has to be measured already."""
    plan, _ = rotation_plan(open_model(str(CHECKPOINTS / "gpt2")), lambda *_: None)
    tried = candidates(plan, range(3), rounds_untied_heads=False)
    factors = {"original": 1.0, "values only": 0.6, "rotated, seed 0": factor}
    if chosen == "rotated, seed 2":
        factors |= {"rotated, seed 1": 0.35, "rotated, seed 2": 0.25}
    work: Any = Workshop(tmp_path, ONNX, SCHEMES["w8a8"], {}, None)  # type: ignore[arg-type]
    exact = ExactOutputs({}, [Example({})] * 5, [])
    comparison = Comparison(work, exact, default_listener, no_progress, None, tried)
    (tmp_path / FLOAT).mkdir()
    (tmp_path / FLOAT / "model.onnx").write_bytes(bytes(FLOAT_SIZE))
    comparison.found = {
        (name, ()): compared(name, *times(*[each + 0.01 * at for at in range(5)]))
        for name, each in factors.items()
    }
    assert comparison.choose().name == chosen
    assert [candidate.name for candidate in comparison.candidates] == [*factors]


def test_a_layer_with_no_room_does_not_keep_the_next_ones_out(tmp_path: Path) -> None:
    """Nothing can be written here, so what is tried has to be measured already."""
    original = Candidate(ORIGINAL, None)
    large, first, second = (
        FinerLayer(layer, 8, 0.1, size) for layer, size in (("a", 500), ("b", 100), ("c", 80))
    )
    work: Any = Workshop(tmp_path, ONNX, SCHEMES["w4a16"], {}, None)  # type: ignore[arg-type]
    comparison = Comparison(work, ExactOutputs({}, [], []), default_listener, no_progress, 600, ())
    comparison.steps = [large, first, second]
    comparison.found = {
        (ORIGINAL, ()): compared("as the scheme says", *PLAIN, size=400),
        (ORIGINAL, (first, second)): compared("two", *times(0.2, 0.2, 0.2, 0.2, 0.2), size=610),
        (ORIGINAL, (large,)): compared("one", *times(0.1, 0.1, 0.1, 0.1, 0.1), size=900),
        (ORIGINAL, (first,)): compared("one", *times(0.5, 0.5, 0.5, 0.5, 0.5), size=520),
    }
    assert comparison.filled(original, 900).finer == (large,)
    assert comparison.filled(original, 600).finer == (first,)  # the files have 30 bytes more
    assert comparison.filled(original, 470) is original


def test_a_model_with_nothing_to_rotate_is_the_candidate() -> None:
    assert [candidate.name for candidate in candidates(None, (0, 1), True)] == ["original"]
