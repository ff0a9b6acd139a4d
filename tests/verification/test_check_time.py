"""Checks with a limit of time or inputs: which parts are left out, which never, and the report."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from commands import enjoyln
from live_models import CHECKPOINTS
from sentence_encoder import sentence_encoder
from stored_files import changed

from enjoyln_cli import fold, verify
from enjoyln_cli.clock import Clock
from enjoyln_cli.comparison.data_files import read_user_data
from enjoyln_cli.comparison.metrics import COARSE
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.comparison.user_data import runnable
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel

SOON = 1e-9
"""A time limit so short that a check does only the minimum."""


class Hands:
    """A clock that moves only when its ``time`` is set."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        return self.time


# The time.

LOADS, RUNS = 4, 6


def paced(limit: float, costs: list[int], hands: Hands) -> Pace:
    pace = Pace(Clock(hands, limit), LOADS, RUNS)
    pace.costs = costs
    return pace


def takes(hands: Hands, *seconds: float) -> Callable[[], None]:
    """A call that takes the next of these times, and the last time from then on."""
    left = list(seconds)

    def call() -> None:
        hands.time += left.pop(0) if len(left) > 1 else left[0]

    return call


def test_the_first_call_does_not_decide_how_many_inputs_fit() -> None:
    """It is slower: memory is mapped then, and libraries choose how to compute."""
    hands = Hands()
    pace = paced(60.0, [], hands)
    assert pace.fitting(takes(hands, 24.0, 0.5))[1] == 11, "a sixth of the 35.5 s left"


def test_a_slow_first_batch_does_not_end_a_run() -> None:
    hands = Hands()
    pace = paced(RUNS * 10.0, [2] * 8, hands)
    call = takes(hands, 4.0, 0.5)
    assert len(pace.run(lambda at: call())) == 8
    assert hands.time == 7.5


def test_a_run_stops_before_the_batch_that_does_not_fit() -> None:
    hands = Hands()
    pace = paced(RUNS * 10.0, [2, 2, 2, 8, 2], hands)

    def one(at: int) -> int:
        hands.time += pace.costs[at] * 1.2
        return at

    assert pace.run(one) == [0, 1, 2], "the fourth would end after 16.8 of 10 seconds"
    assert pace.costs == [2, 2, 2]
    assert pace.run(one) == [0, 1, 2], "what is left is shared among fewer runs"


def test_a_run_in_a_slower_dtype_does_less() -> None:
    hands = Hands()
    pace = paced(60.0, [1] * 8, hands)
    seconds = [1.0, 1.0, 1.0, 9.0, 1.0, 1.0]
    counts = []
    for each in seconds:

        def one(at: int, each: float = each) -> None:
            hands.time += each

        counts.append(len(pace.run(one)))
    assert counts == [8, 8, 8, 1, 1, 1]
    assert hands.time <= 60.0


def test_one_batch_runs_however_short_the_time_is() -> None:
    hands = Hands()
    pace = paced(SOON, [5, 5], hands)
    assert pace.fitting(takes(hands, 3.0)) == (None, 1)
    assert [pace.run(lambda at: at) for _ in range(RUNS)] == [[0]] * RUNS


def test_without_a_limit_everything_runs() -> None:
    hands = Hands()
    pace = paced(math.inf, [1, 2, 3], hands)
    assert pace.fitting(takes(hands, 1e9)) == (None, None)
    assert pace.run(lambda at: at) == [0, 1, 2]


def test_time_is_kept_for_the_models_that_are_still_to_be_loaded() -> None:
    hands = Hands()
    pace = paced(100.0, [1], hands)
    with pace.loading():
        hands.time += 10.0
    assert pace.share == pytest.approx((100.0 - 10.0 - (LOADS - 1) * 10.0) / RUNS)


def test_the_progress_counts_up_to_the_time_that_is_expected(
    outs: dict[str, Path],
) -> None:
    told: list[tuple[float, float]] = []
    verify(outs["gpt2"], write=False, on_progress=lambda *both: told.append(both))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    known = [(done, total) for done, total in told if total]
    assert known and all(done <= total for done, total in known)
    assert known[-1][0] == pytest.approx(known[-1][1]), "at the end nothing is left"


# What a short check never leaves out.


def test_a_short_check_says_how_much_it_ran(outs: dict[str, Path]) -> None:
    found = verify(outs["gpt2"], write=False, seconds=SOON)
    assert found.passed and found.identity_error < 1e-12
    assert found.rows == 1 and found.full_rows == 16 and found.is_partial
    said = "same function in float64 (error {error:.1e}), checked on 1 of 16 inputs; the float32 "
    assert found.summary.startswith(said.format(error=found.identity_error))
    assert found.summary.endswith("needs more inputs, so raise --seconds or --samples")
    assert found.to_json()["rows"] == 1 and found.to_json()["full_rows"] == 16
    whole = verify(outs["gpt2"], write=False, seconds=1e6)
    assert whole == verify(outs["gpt2"], write=False)
    assert whole.rows == whole.full_rows == 16 and "inputs" not in whole.summary


def test_a_short_check_compares_every_stored_tensor(outs: dict[str, Path], tmp_path: Path) -> None:
    name = "transformer.h.2.mlp.c_proj.bias"
    wrong = changed(outs["gpt2"], tmp_path / "wrong", lambda t: t[name].mul_(1.001))
    found = verify(wrong, write=False, seconds=SOON)
    assert not found.passed and f"{name}: not the original's tensor" in found.summary


# Too few inputs.


@pytest.mark.slow
def test_too_few_inputs_for_a_ratio_are_said_and_not_judged(outs: dict[str, Path]) -> None:
    """The model has few logits, whose errors have one cause in each image."""
    few = verify(outs["vit"], write=False, samples=2)
    assert few.passed and few.undecided_outputs == {"logits": max(few.chance, few.stock_chance)}
    assert few.chance > COARSE
    assert few.summary.startswith("same function in float64 (error ")
    assert "the float32 rounding of logits is not judged: that needs more inputs" in few.summary
    assert few.to_json()["chance"] == few.chance and "2 of 128 images" in few.summary
    whole = verify(outs["vit"], write=False)
    assert not whole.undecided_outputs and whole.ratio < 1.25 and whole.chance < COARSE
    assert whole.summary.startswith("same outputs up to float32 rounding (error ")


def test_an_error_beyond_chance_fails_with_few_inputs(
    outs: dict[str, Path], tmp_path: Path
) -> None:
    name = "classifier.weight"
    wrong = changed(outs["vit"], tmp_path / "wrong", lambda t: t[name].mul_(1.01))
    for samples in (1, 4):
        found = verify(wrong, write=False, samples=samples)
        assert len(found.failures) == 2 and "limit 1.25 x, or " in found.failures[1]


def test_one_input_is_no_sample_and_says_so(outs: dict[str, Path]) -> None:
    found = verify(outs["gpt2"], write=False, samples=1)
    assert found.passed and set(found.undecided_outputs) == {"logits"}
    assert found.summary.startswith("same function in float64 (error ")
    assert "), checked on 1 of 16 inputs; " in found.summary


# The user's own data.


def sentences(folder: Path, count: int = 3) -> Path:
    file = folder / "sentences.txt"
    words = ["The licence is short.", "", "A longer text, with more words in it than the first."]
    file.write_text("\n".join((words * count)[: count + count // 2]) + "\n")
    return file


def test_every_line_of_a_longer_file_is_run(outs: dict[str, Path], tmp_path: Path) -> None:
    found = verify(outs["gpt2"], write=False, samples=sentences(tmp_path, 20))
    assert found.passed and found.rows == found.own_rows == found.full_rows == 20


def test_a_text_for_a_model_that_takes_images_too() -> None:
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 1}
        | {"intermediate_size": 8, "num_attention_heads": 2, "eos_token_id": 59},
        vision_config={"hidden_size": 16, "num_hidden_layers": 1, "image_size": 8}
        | {"patch_size": 4, "intermediate_size": 8, "num_attention_heads": 2},
        projection_dim=8,
    )
    model = transformers.CLIPModel(config).eval()
    own = [{"input_ids": torch.tensor([[5, 6, 59], [7, 8, 59]])}]

    def run(batch: dict[str, torch.Tensor]) -> Any:
        with torch.no_grad():
            return model(**batch)

    with pytest.warns(UserWarning, match="your data do not have attention_mask, pixel_values"):
        (batch,) = runnable(model, own, torch.float32, run)
    assert batch["pixel_values"].shape == (2, 3, 8, 8)
    assert torch.equal(batch["input_ids"], own[0]["input_ids"])
    assert batch["attention_mask"].all()
    with pytest.raises(UnsupportedModel, match="CLIPModel cannot run on input_ids alone"):
        runnable(model, [{"input_ids": torch.zeros(1, 900, dtype=torch.int64)}], torch.float32, run)


def test_sentence_embeddings_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers")
    out = tmp_path / "out"
    fold(sentence_encoder(tmp_path / "in"), out)
    text = sentences(tmp_path)
    few = verify(out, write=False, samples=2)
    assert "sentence_embedding" in few.undecided_outputs, "9 numbers of each of 2 texts"
    found = verify(out, write=False, samples=text)
    assert found.passed and not found.undecided_outputs and found.own_rows == 3
    assert found.rows > 3, "made-up inputs fill up"


@pytest.mark.slow
def test_sentence_embeddings_without_their_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    monkeypatch.setitem(sys.modules, "sentence_transformers.models", None)
    fold(sentence_encoder(tmp_path / "in"), tmp_path / "out", verify=False)
    with pytest.warns(UserWarning, match="comparing token embeddings, not sentence"):
        assert verify(tmp_path / "out", write=False).passed


# What is refused.


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": 0},
        {"seconds": math.nan},
        {"seconds": "soon"},
        {"samples": 0},
        {"samples": True},
        {"samples": "no/such/file.txt"},
        {"samples": 1.5},
    ],
    ids=str,
)
def test_bad_values_are_one_line_before_any_work(wrong: dict[str, Any], tmp_path: Path) -> None:
    stages: list[str] = []
    for call in (verify, lambda out, **how: fold(CHECKPOINTS / "gpt2", out, **how)):
        with pytest.raises(UnsupportedModel) as caught:
            call(tmp_path / "out", on_event=lambda _, text: stages.append(text), **wrong)
        assert "\n" not in str(caught.value) and next(iter(wrong)) in str(caught.value)
    assert stages == []
    assert not (tmp_path / "out").exists()


def test_a_file_without_texts(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n  \n")
    with pytest.raises(UnsupportedModel, match="contains no text; write one text on each line"):
        read_user_data(samples=tmp_path / "empty.txt")
    with pytest.raises(UnsupportedModel, match="--text and --samples with a file cannot be comb"):
        read_user_data(text=sentences(tmp_path), samples=sentences(tmp_path))
    assert read_user_data(text=sentences(tmp_path), samples=5).number == 5


@pytest.mark.parametrize(
    "wrong",
    [
        ("--seconds", "0"),
        ("--seconds", "soon"),
        ("--samples", "0"),
        ("--samples", "no/such/file.txt"),
    ],
    ids=" ".join,
)
def test_bad_options_are_usage_errors(wrong: tuple[str, str], tmp_path: Path) -> None:
    for words in (("fold", CHECKPOINTS / "gpt2", "-o", tmp_path / "out"), ("verify", tmp_path)):
        done = enjoyln(*words, *wrong)
        assert done.exit_code == 2 and done.stderr.splitlines()[-1].startswith("Error: Invalid")
    assert not (tmp_path / "out").exists()


def test_options_of_a_check_that_does_not_run(tmp_path: Path) -> None:
    for words in (("--samples", "2"), ("--seconds", "9")):
        done = enjoyln("fold", CHECKPOINTS / "gpt2", "-o", tmp_path / "out", "--no-verify", *words)
        assert done.exit_code == 2 and f"{words[0]} needs the check" in done.stderr


# What is said.


def test_a_fold_that_checks_some_inputs_says_so_everywhere(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = enjoyln("fold", CHECKPOINTS / "gpt2", "-o", out, "--samples", "4")
    assert done.exit_code == 0, done.output
    assert "checked on 4 of 16 inputs in " in done.stdout
    assert done.stdout.splitlines()[-1] == f"next: enjoyln verify {out} (runs all 16 inputs)"
    stored = json.loads((out / "enjoyln_verify.json").read_text())
    assert (stored["rows"], stored["full_rows"]) == (4, 16)
    assert "on 4 of 16 inputs" in stored["summary"]
    assert "over 4 of 16 inputs" in " ".join((out / "README.md").read_text().split())
    done = enjoyln("verify", out)
    assert "verifying" in done.stderr and "\n16 inputs; errors are relative" in done.stdout
    with pytest.raises(EnjoyLNError, match="samples"):
        verify(out, samples=0)
