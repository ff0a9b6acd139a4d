"""``enjoyln rotate --search`` and ``--learn``: matrices chosen on the user's data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import GPT2, enjoyln, good, ignore, refused
from live_models import ROOT
from safetensors.torch import load_file
from sentence_encoder import sentence_encoder
from transformers import BertModel, GPT2LMHeadModel, GPT2Model

from enjoyln_cli.comparison.data_files import read_user_data
from enjoyln_cli.comparison.simulated_rounding import Scheme, simulated
from enjoyln_cli.conversion.fold import FoldJob, prepare
from enjoyln_cli.plan.fold_options import FoldOptions, Options
from enjoyln_cli.plan.orthogonal_matrices import GivenMatrix
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rotation_search.learned_matrices import learn_matrices
from enjoyln_cli.rotation_search.seed_search import search_seeds
from enjoyln_cli.rotation_search.trials import MatrixChoice, Trials, trials

ROWS = 16
TOKENS = 24


def rows_of(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 500, (ROWS, TOKENS), generator=generator).tolist()


def write_rows(file: Path, rows: list[list[int]]) -> Path:
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "tokens.jsonl", rows_of(0))


@pytest.fixture(scope="module")
def ready() -> FoldJob:
    options = Options(fold=False, rotate=True, untie=True)
    return prepare(GPT2, None, folding=FoldOptions(options=options), on_event=ignore)


def searched(tokens: Path, *more: object) -> dict[str, Any]:
    shown = good("rotate", GPT2, "--untie", "--search", 4, "--tokens", tokens, "--json", *more)
    found: dict[str, Any] = json.loads(shown)["matrices"]
    return found


def kl_of(model: Any, original: Any, rows: list[list[int]], scheme: Scheme) -> float:
    """The mean KL divergence of the rounded model's logits from the original's."""
    ids = torch.tensor(rows)
    with torch.no_grad():
        p = original(ids).logits.double().log_softmax(-1)
        total = 0.0
        for row, exact in zip(ids, p, strict=True):
            with simulated(model, scheme):
                q = model(row[None]).logits[0].double().log_softmax(-1)
            total += float((exact.exp() * (exact - q)).sum())
    return total / ids.numel()


@pytest.mark.slow
def test_the_seed_that_is_best_on_calibration_data_is_written(tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    found = searched(tokens, "-o", out, "--scheme", "w4a8", "--seconds", 5)
    costs = {name: each["kl"] for name, each in found["calibration"].items()}
    assert list(costs) == ["original", *(f"seed {seed}" for seed in range(4))]
    assert found["chosen"] == min(list(costs)[1:], key=lambda name: costs[name])
    seed = int(found["chosen"].removeprefix("seed "))
    assert json.loads((out / "enjoyln_plan.json").read_text()).get("seed", 0) == seed
    assert f"--seed {seed}" in (out / "README.md").read_text() or not seed
    original = GPT2LMHeadModel.from_pretrained(GPT2).eval()
    model = GPT2LMHeadModel.from_pretrained(out).eval()
    halves = {"calibration": rows_of(0)[: ROWS // 2], "held_out": rows_of(0)[ROWS // 2 :]}
    for half, rows in halves.items():
        for name, each in (("original", original), (found["chosen"], model)):
            expected = kl_of(each, original, rows, Scheme(4, 8))
            assert found[half][name]["kl"] == pytest.approx(expected, rel=1e-3), (half, name)
    assert found["calibration"]["original"] != found["held_out"]["original"]


def test_the_other_half_of_the_data_does_not_choose(tokens: Path, tmp_path: Path) -> None:
    rows = [*rows_of(0)[: ROWS // 2], *rows_of(1)[ROWS // 2 :]]
    others = write_rows(tmp_path / "others.jsonl", rows)
    one, other = (searched(data, "--scheme", "w4a4", "--dry-run") for data in (tokens, others))
    assert one["calibration"] == other["calibration"] and one["chosen"] == other["chosen"]
    assert one["held_out"] != other["held_out"]
    shown = "\n".join(one["summary"])
    for part in ("simulated w4a4, KL divergence", "4 seeds: best ", "median", "worst", "original"):
        assert part in shown


@pytest.mark.slow
def test_seeds_take_the_place_of_the_matrices_of_a_recipe(ready: FoldJob, tokens: Path) -> None:
    rotation_groups = tuple(
        replace(group, given=GivenMatrix("", torch.eye(group.size, dtype=torch.float64)))
        for group in ready.plan.rotation_groups
    )
    given = replace(ready, plan=replace(ready.plan, rotation_groups=rotation_groups))
    with trials(ready, read_user_data(tokens=tokens), "w4a4", 8, ignore) as tried:
        expected = search_seeds(tried, 1, ignore, ignore)
        found = search_seeds(replace(tried, job=given), 1, ignore, ignore)
    assert found.calibration == expected.calibration
    again = given.with_plan(found.plan)
    assert (again.plan, again.options) == (ready.plan, ready.options)


def learned(
    tried: Trials, steps: int, state: Path, progress: Any = ignore, resume: bool = False
) -> MatrixChoice:
    return learn_matrices(tried, steps, state, ignore, progress, resume=resume)


def matrices_of(plan: Plan) -> dict[str, torch.Tensor]:
    return {group.name: group.given.values for group in plan.rotated if group.given}


@pytest.mark.slow
def test_learning_goes_on_where_it_was_interrupted(ready: FoldJob, tmp_path: Path) -> None:
    state = tmp_path / "state"
    steps = 0

    def stop(done: float, total: float) -> None:
        nonlocal steps
        steps += 1
        if steps == 11:
            raise KeyboardInterrupt

    with trials(ready, read_user_data(text=ROOT / "LICENSE"), "w4a8", 32, ignore) as tried:
        whole = learned(tried, 32, tmp_path / "other")
        with pytest.raises(KeyboardInterrupt):
            learned(tried, 32, state, stop)
        assert steps == 11
        again = learned(tried, 32, state, lambda *_: stop(0, 0), resume=True)
    assert steps == 11 + 22  # the state was written after step 10
    one, same = (matrices_of(choice.plan) for choice in (whole, again))
    assert len(one) == 4 and one.keys() == same.keys()
    assert all(torch.equal(one[name], same[name]) for name in one)
    for half in (whole.calibration, whole.held_out):
        assert half["learned"].cost < 0.9 * half["seed 0"].cost


@pytest.mark.slow
def test_a_learned_result_is_exact_and_keeps_its_matrices(tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    learns = ("rotate", GPT2, "-o", out, "--untie", "--learn", 16, "--tokens", tokens)
    shown = good(*learns, "--scheme", "w4a4", "--seconds", 5)
    assert "verified: " in shown
    assert re.search(r"held-out data, 8 inputs: original \S+, seed 0 \S+, learned \S+", shown)
    kept = load_file(out / "enjoyln" / "rotation.safetensors")
    assert len(kept) == 4
    for name, matrix in kept.items():
        one = torch.eye(len(matrix), dtype=torch.float64)
        assert (matrix @ matrix.T - one).abs().max() < 1e-12, name
        moved = (matrix.sum(1) - 1).abs().max()
        assert moved < 1e-12 if len(matrix) == 96 else moved > 1e-3
    assert "--matrix enjoyln/rotation.safetensors" in (out / "README.md").read_text()
    assert not list(tmp_path.glob(".out*"))
    assert json.loads(good("verify", out, "--seconds", 5, "--json"))["identity_error"] < 1e-12


@pytest.mark.slow
def test_what_an_interrupted_run_left_is_kept(tokens: Path, tmp_path: Path) -> None:
    out, state = tmp_path / "out", tmp_path / ".out.learning"
    learns = ("rotate", GPT2, "-o", out, "--learn", 3, "--tokens", tokens, "--no-verify")
    state.write_bytes(b"of another run")
    said = refused(*learns, "--scheme", "w4a8")
    assert f"{state} belongs to an interrupted run; continue it with --resume" in said
    said = refused(*learns, "--scheme", "w4a8", "--resume")
    assert f"{state} belongs to other data or options" in said
    assert state.read_bytes() == b"of another run"
    good(*learns, "--scheme", "w4a8", "--force")
    assert out.is_dir() and not state.exists()


@pytest.mark.slow
def test_a_model_without_logits_is_compared_by_its_outputs(tokens: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    chooses = ("rotate", GPT2, "-o", out, "--model-class", "GPT2Model", "--tokens", tokens)
    shown = good(*chooses, "--learn", 8, "--scheme", "w4a4", "--no-verify", "--json")
    found = json.loads(shown)["matrices"]
    assert found["outputs"] == ["last_hidden_state"] and found["chosen"] == "learned"
    assert all(each["kl"] is None for each in found["held_out"].values())
    assert found["held_out"]["learned"]["error"] < found["held_out"]["seed 0"]["error"]
    model, original = (GPT2Model.from_pretrained(place).eval() for place in (out, GPT2))
    ids = torch.tensor(rows_of(0)[ROWS // 2 :])
    with torch.no_grad():
        exact = original(ids).last_hidden_state
        rounded = []
        for row in ids:
            with simulated(model, Scheme(4, 4)):
                rounded.append(model(row[None]).last_hidden_state)
    error = float((torch.cat(rounded) - exact).norm() / exact.norm())
    assert found["held_out"]["learned"]["error"] == pytest.approx(error, rel=1e-3)


@pytest.mark.slow
def test_sentence_embeddings_are_compared(tokens: Path, tmp_path: Path) -> None:
    """The gradient of the loss passes the modules behind the transformer."""
    pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    model, out = sentence_encoder(tmp_path / "model"), tmp_path / "out"
    chooses = ("rotate", model, "-o", out, "--tokens", tokens, "--learn", 16, "--scheme", "w4a4")
    found = json.loads(good(*chooses, "--no-verify", "--json"))["matrices"]
    assert found["outputs"] == ["sentence_embedding"] and found["chosen"] == "learned"
    dense = load_file(model / "2_Dense" / "model.safetensors")

    def embedded(hidden: torch.Tensor) -> torch.Tensor:
        return (hidden.mean(1) @ dense["linear.weight"].T + dense["linear.bias"]).tanh()

    original, rotated = (BertModel.from_pretrained(place).eval() for place in (model, out))
    rounded, exact = [], []
    with torch.no_grad():
        for row in torch.tensor(rows_of(0)[ROWS // 2 :]):
            exact.append(embedded(original(row[None]).last_hidden_state))
            with simulated(rotated, Scheme(4, 4)):
                rounded.append(embedded(rotated(row[None]).last_hidden_state))
    error = float((torch.cat(rounded) - torch.cat(exact)).norm() / torch.cat(exact).norm())
    assert found["held_out"]["learned"]["error"] == pytest.approx(error, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--search", 2, "--scheme", "w4a8"], "--search needs one of --text, --image, --audio"),
        (["--search", 0, "--scheme", "w4a8"], "0 is not in the range x>=1"),
        (["--learn", 2, "--scheme", "w3a3"], "'w3a3' is not one of 'w8a8'"),
        (["--search", 2], "--search needs --scheme, such as --scheme w4a8"),
        (["--scheme", "w4a8"], "--scheme needs --search or --learn"),
        (["--search", 2, "--learn", 2], "--search cannot be combined with --learn"),
        (["--search", 2, "--seed", 3], "--search cannot be combined with --seed"),
        (["--learn", 2, "--dry-run"], "--learn cannot be combined with --dry-run"),
        (["--learn", 2, "--like", GPT2], "--learn cannot be combined with --like"),
    ],
)
def test_bad_combinations_are_refused_at_once(
    options: list[object], said: str, tmp_path: Path
) -> None:
    found = enjoyln("rotate", GPT2, "-o", tmp_path / "out", *options)
    assert found.exit_code == 2 and said in found.stderr, found.output


def test_too_little_data_is_refused(tmp_path: Path) -> None:
    few = write_rows(tmp_path / "few.jsonl", rows_of(0)[:3])
    said = refused("rotate", GPT2, "--dry-run", "--search", 2, "--scheme", "w4a8", "--tokens", few)
    assert "too little data: 3 inputs, but 8 are needed" in said
