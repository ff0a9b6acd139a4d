"""The training experiments in small, and the page that is written from their results."""

from __future__ import annotations

import json
import re
from typing import Any

import paper_training
import pytest
import torch
from paper_training import BEGIN, DOCS, END, EXPERIMENTS, as_text, replace_section, rounded
from rounding import TIMES
from torch import nn
from training_equivalence import ROUNDING, run_together
from training_page import ALT, SECTIONS, page
from training_plots import PICTURES, draw_all
from training_runs import (
    CBWC,
    LAYER_NORM,
    METHODS,
    RMS_NORM,
    Method,
    largest_difference,
    load_weights,
    move_state,
    reverse_rows,
    share_beyond,
    train,
)
from training_spread import input_norms
from training_tasks import PACKAGES, Task, digits_epoch, digits_task, mlp, pieces

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def task() -> Task:
    """Three layers whose weights have means, and whose norms have weights and biases."""
    made = digits_task(3, 17, torch.float64, made_up=True)

    def build() -> nn.Module:
        model = made.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter) + 0.2)
        return model

    return Task(build, made.batches, made.unseen)


@pytest.mark.parametrize("method", [METHODS[3], METHODS[4]], ids=lambda method: method.name)
def test_cbwc_follows_layer_norm_and_rms_norm_alone_does_not(task: Task, method: Method) -> None:
    models = {name: task.model(0, name) for name in (LAYER_NORM, CBWC, RMS_NORM)}
    models[ROUNDING] = task.model(0, LAYER_NORM)
    found = run_together(models, task.draw(1, 12), method, 4)
    started = task.model(0, LAYER_NORM)
    assert largest_difference(started, models[LAYER_NORM])[0] > 1e-3
    for name in (CBWC, ROUNDING):
        assert max(found.loss_differences(name)) < 1e-12 and max(found.weights[name]) < 1e-12
        assert share_beyond(models[LAYER_NORM], models[name], 1e-12) == 0
    assert max(found.loss_differences(RMS_NORM)) > 1e-3 and found.weights[RMS_NORM][-1] > 1e-4
    assert share_beyond(models[LAYER_NORM], models[RMS_NORM], 1e-12) > 0.5


def test_a_run_goes_on_in_cbwc_with_the_state_of_its_optimizer(task: Task) -> None:
    method, batches = METHODS[2], task.draw(1, 8)
    stays = task.model(0, LAYER_NORM)
    expected = train(stays, iter(batches), 8, method)
    first = task.model(0, LAYER_NORM)
    optimizer = method.optimizer(first.parameters())
    train(first, iter(batches[:4]), 4, method, optimizer=optimizer)

    def goes_on(with_state: bool) -> tuple[list[float], nn.Module]:
        moved = task.model(7, CBWC)
        load_weights(first, moved)
        into = method.optimizer(moved.parameters())
        if with_state:
            move_state(first, optimizer, moved, into)
        return train(moved, iter(batches[4:]), 4, method, optimizer=into), moved

    losses, moved = goes_on(True)
    assert losses == pytest.approx(expected[4:], abs=1e-12)
    assert largest_difference(stays, moved)[0] < 1e-12
    assert goes_on(False)[0] != pytest.approx(expected[4:], abs=1e-6)


def test_a_batch_in_reverse_is_the_same_batch(task: Task) -> None:
    (batch,) = task.draw(3, 1)
    (reverse,) = reverse_rows([batch])
    assert not torch.equal(batch["pixels"], reverse["pixels"])
    assert torch.equal(batch["pixels"].sort(0)[0], reverse["pixels"].sort(0)[0])


def test_held_out_rows_are_not_trained_on(task: Task) -> None:
    (test,) = task.unseen()
    epoch = task.draw(0, digits_epoch(made_up=True))
    trained = torch.cat([batch["pixels"] for batch in epoch])
    assert len(trained) + len(test["pixels"]) == 160 and len(trained) == 128
    assert not (trained[:, None] == test["pixels"]).all(-1).any()
    tokens = torch.arange(103)
    both = [pieces(tokens, 10, held_out) for held_out in (False, True)]
    assert [len(rows) for rows in both] == [8, 2]
    assert torch.equal(torch.cat(both).flatten().sort()[0], torch.arange(100))


def test_the_norm_of_the_input_of_each_linear_layer() -> None:
    torch.manual_seed(0)
    model = mlp(2, 5)
    batch = {"pixels": torch.randn(6, 64), "labels": torch.zeros(6, dtype=torch.int64)}
    found = input_norms(model, [{name: v[rows] for name, v in batch.items()}
                                for rows in (slice(4), slice(4, 6))])  # fmt: skip
    with torch.no_grad():
        inputs = batch["pixels"], model[:3](batch["pixels"])
    step = torch.finfo(torch.float32).eps  # sums of the same numbers in another order
    expected = [float(x.double().norm(dim=1).mean()) for x in inputs]
    assert found == pytest.approx(expected, rel=2 * TIMES * step)


# Results and the page.


def test_results_are_stored_with_six_digits_on_one_line_for_each_list() -> None:
    given = {"a": {"curves": [[1.23456789, 2.0], (3e-17, True)], "b": "text [1]"}, "n": None}
    stored = as_text(rounded(given))
    assert json.loads(stored) == {
        "a": {"curves": [[1.23457, 2.0], [3e-17, True]], "b": "text [1]"}, "n": None
    }  # fmt: skip
    assert "[ 1.23457, 2.0 ]" in stored


def test_the_section_is_replaced_and_the_rest_of_the_page_stays() -> None:
    once = replace_section("# Training\n\nHow.\n", "## What\n")
    assert once == f"# Training\n\nHow.\n\n{BEGIN}\n## What\n{END}\n"
    again = replace_section(once + "\n## More\n", "## Else\n")
    assert again == f"# Training\n\nHow.\n\n{BEGIN}\n## Else\n{END}\n\n## More\n"


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    """All that docs/paper_training.json holds."""
    found: dict[str, Any] = json.loads((DOCS / "paper_training.json").read_text("utf-8"))
    return found


@pytest.fixture(scope="module")
def results(known: dict[str, Any]) -> dict[str, Any]:
    return {name: one["results"] for name, one in known.items()}


def test_the_page_is_the_one_that_the_results_give(known: dict[str, Any]) -> None:
    text = (DOCS / "training.md").read_text("utf-8")
    assert list(known) == list(EXPERIMENTS) == list(SECTIONS)
    assert replace_section(text, page(known)) == text


def test_the_page_counts_the_runs_outside_of_the_bounds(known: dict[str, Any]) -> None:
    found = json.loads(json.dumps({"equality": known["equality"]}))
    rows = found["equality"]["results"]["rows"]
    for row in rows:
        row["loss"] = {CBWC: 0.0, ROUNDING: 0.0}
        row["weights"] = {CBWC: [0.0, row["bound"] / 2], ROUNDING: [0.0]}

    def counts() -> list[str]:
        text = page(found).replace("\n", " ")
        return re.findall(r"outside of it in (\d+), and LayerNorm against itself in (\d+)", text)

    assert counts() == [("0", "0"), ("0", "0")]
    single = next(row for row in rows if row["dtype"] == "float32")
    double = next(row for row in rows if row["dtype"] == "float64")
    single["weights"][CBWC][0] = 2e-5
    double["loss"][ROUNDING] = 2e-11
    assert counts() == [("0", "1"), ("1", "0")]


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((1.01, 1.2), "slower"),
        ((0.8, 0.99), "faster"),
        ((0.9, 1.1), "neither faster nor slower"),
        (None, "neither faster nor slower"),
    ],
)
def test_the_page_claims_a_difference_only_if_the_interval_shows_it(
    known: dict[str, Any], ends: tuple[float, float] | None, verdict: str
) -> None:
    found = json.loads(json.dumps({"step_times": known["step_times"]}))
    for one in found["step_times"]["results"]["cases"].values():
        one[CBWC]["ratio_interval"] = ends
    assert f"a step with CBWC is {verdict} with 128 tokens" in page(found).replace("\n", " ")


def test_the_promised_equalities_hold_in_the_results(results: dict[str, Any]) -> None:
    for row in results["equality"]["rows"]:
        exact = row["dtype"] == "float64"  # in float32 LayerNorm drifts from itself, see the page
        assert row["loss"][CBWC] < row["bound"] + (0 if exact else 5 * row["loss"][ROUNDING])
        assert row["beyond"][CBWC] <= (0 if exact else 1e-4 + 2 * row["beyond"][ROUNDING])
        if exact:
            assert max(row["weights"][CBWC]) < row["bound"]
    for one in results["transformer"]["cases"].values():
        assert len(one["curves"][LAYER_NORM]) == 200
        assert max(max(distances) for distances in one["distances"].values()) < 1e-9
    for row in results["moving"]["rows"]:
        assert row["loss"]["loaded"] < 1e-9
    for runs in (results["dropout"][name] for name in ("language model", "classification")):
        assert {len(one["test"]) for one in runs["variants"].values()} == {5}
    tested = results["dropout"]["classification"]["variants"][LAYER_NORM]["test"]
    assert max(curve[-1]["accuracy"] for curve in tested) > 2 / len(PACKAGES)


def test_every_picture_is_there_and_redrawing_it_gives_the_same(
    known: dict[str, Any], tmp_path: Any
) -> None:
    pytest.importorskip("matplotlib")
    assert ALT.keys() == PICTURES.keys()
    assert all((DOCS / "pictures" / f"training_{name}.svg").exists() for name in PICTURES)
    (drawn,) = draw_all({"fine_tuning": known["fine_tuning"]}, tmp_path)
    text = drawn.read_text("utf-8")
    assert all(f">{name}<" in text for name in known["fine_tuning"]["results"]["variants"])


@pytest.mark.slow
def test_a_quick_run_reaches_every_line(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    monkeypatch.setattr("sys.argv", ["paper_training.py", "--quick", "--json", str(file)])
    paper_training.main()
    found = json.loads(file.read_text("utf-8"))
    assert list(found) == list(EXPERIMENTS)
    shown = capsys.readouterr()
    assert shown.out == page(found) and "left" in shown.err
    rows = found["equality"]["results"]["rows"]
    assert rows[0]["loss"][CBWC] < 1e-12
    for one in found["transformer"]["results"]["cases"].values():
        assert max(max(distances) for distances in one["distances"].values()) < 1e-12
