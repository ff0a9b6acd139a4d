"""The scripts that measure: what is compared takes turns, and what its times are made to say."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import bench
import inductor
import library_calls
import model_times
import pytest
import real_models
import torch
from live_models import CHECKPOINTS, ROOT
from model_times import median_interval, row_of, time_models
from tiny_models import one_layer


def test_tasks_take_turns_and_ratios_are_within_a_round() -> None:
    order: list[str] = []
    slow, fast = iter([2.0, 30.0, 4.0]), iter([1.0, 10.0, 8.0])

    def task(name: str, seconds: object) -> bench.Task:
        return lambda: (order.append(name), next(seconds))[1]  # type: ignore[call-overload, no-any-return]

    seconds = bench.in_rounds({"slow": task("slow", slow), "fast": task("fast", fast)}, 3)
    assert order == ["slow", "fast", "fast", "slow", "slow", "fast"]
    assert seconds == {"slow": [2.0, 30.0, 4.0], "fast": [1.0, 10.0, 8.0]}
    rows = dict(bench.compared(seconds))
    assert rows["slow"] == {"time": 4, "ratio": 1, "from": 1, "to": 1}
    assert (rows["fast"]["time"], rows["fast"]["ratio"]) == (8, 2)


@pytest.mark.slow
def test_a_fold_beside_cp(tmp_path: Path) -> None:
    """A command's memory is counted, and nothing of it is left."""
    source = shutil.copytree(CHECKPOINTS / "opt", tmp_path / "opt")
    args = argparse.Namespace(directory=source, options=[], beside=None, rounds=1)
    ((cp, fold),) = bench.fold(args, tmp_path)
    assert (cp["what"], fold["what"]) == ("cp", "fold")
    assert cp["ratio"] == 1 and "memory_mb" not in cp and fold["memory_mb"] > 0
    assert fold["ratio"] == pytest.approx(cp["time"] / fold["time"], rel=0.01)
    assert list(tmp_path.iterdir()) == [source]


def test_the_interval_of_a_median_needs_six_values() -> None:
    """At 95 %: the known table of ranks for small samples."""
    for count, rank in {6: 1, 8: 1, 9: 2, 11: 2, 12: 3, 15: 4, 20: 6, 25: 8}.items():
        values = [float(number) for number in range(1, count + 1)]
        found = median_interval([*reversed(values)])
        assert found == (values[rank - 1], values[-rank]), count
    for count in range(6):
        assert median_interval([1.0] * count) is None


FASTER = (1.2, 1.21, 1.23, 1.24, 1.25, 1.26, 1.27, 1.28, 1.3)
"""Original / folded in nine rounds: the 95 % interval of the median is 1.21 to 1.28."""
COST = (0.22, 0.23, 0.24, 0.245, 0.25, 0.255, 0.26, 0.265, 0.27)
NOISE = (0.9, 0.95, 1.0, 1.1, 1.25, 1.26, 1.27, 1.28, 1.3)
SLOWER = (0.8, 0.81, 0.85, 0.88, 0.9, 0.91, 0.92, 0.95, 1.1)
NO_COST = (-0.1, -0.02, 0.0, 0.05, 0.1, 0.12, 0.15, 0.2, 0.3)


@pytest.mark.parametrize(
    ("faster", "cost", "verdict"),
    [
        (FASTER, COST, "faster"),
        (NOISE, COST, "no gain here"),
        (SLOWER, NO_COST, "slower"),
        (FASTER, NO_COST, "no gain here"),
        (FASTER, [0.76 * share for share in COST], "no gain here"),
        ([1.25] * 6, [0.25] * 6, "faster"),
        ([0.8] * 5, [0.25] * 5, "no gain here"),
    ],
    ids=["", "", "", "norms cost nothing", "more than norms cost", "", "too few rounds"],
)
def test_a_gain_is_claimed_where_all_intervals_allow_it(
    faster: Sequence[float], cost: Sequence[float], verdict: str
) -> None:
    times = {
        "original": [0.02] * len(faster),
        "folded": [0.02 / ratio for ratio in faster],
        "no_norm": [0.02 * (1 - share) for share in cost[: len(faster)]],
    }
    row = row_of("2 x 512 tokens", 2, 512, times)
    assert row["verdict"] == verdict and row["rounds"] == len(faster)
    if faster is FASTER:
        assert row["speedup"] == pytest.approx(1.25)
        assert row["speedup_interval"] == pytest.approx([1.21, 1.28])
        assert row["models"]["folded"]["median_ms"] == pytest.approx(16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "compile"])
def test_a_model_is_timed_for_each_size(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mode == "compile" and not inductor.WORKS:
        pytest.skip("Inductor's own code does not compile here")
    settings = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 256}
    patches = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
               "intermediate_size": 32, "image_size": 32}  # fmt: skip
    kinds = {"gpt2": ("gpt2", "GPT2Model", settings), "vit": ("vit", "ViTModel", patches)}
    monkeypatch.setattr(model_times, "MODELS", kinds)
    sizes = [(1, 8), (2, 8)] if mode == "eager" else [(2, 8)]
    results = time_models([(name, sizes) for name in kinds], "cpu", "float32", 300, mode)
    cases = {"gpt2": "{} x 8 tokens", "vit": "{} images"}
    for name, found in results.items():
        assert [row["case"] for row in found["rows"]] == [
            f"{cases[name].format(rows)}, {mode}" for rows, _ in sizes
        ]
        assert not found["left_out"]
        for row in found["rows"]:
            assert list(row["models"]) == ["original", "folded", "no_norm"]


def test_a_model_without_norms_returns_what_they_read() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    without, x = model_times.without_norms(model), torch.randn(3, 4)
    assert torch.equal(without(x), model[0](x)) and not torch.equal(model(x), model[0](x))
    assert without[0].weight is model[0].weight


@pytest.mark.slow
def test_a_model_that_fails_or_gets_no_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    without = {"n_embd": 16, "n_layer": 0, "n_head": 2, "vocab_size": 50}
    kinds = {"none": ("gpt2", "GPT2Model", without), "one": ("gpt2", "GPT2Model", without)}
    kinds["one"] = ("gpt2", "GPT2Model", without | {"n_layer": 1})
    monkeypatch.setattr(model_times, "MODELS", kinds)
    results = time_models([(name, [(1, 8)]) for name in kinds], "cpu", "float32", 0)
    assert not results["none"]["rows"] and len(results["none"]["left_out"]) == 1
    assert results["one"]["left_out"] == ["1 x 8 tokens: no time was left"]


@pytest.mark.slow
def test_a_row_for_each_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(one_layer(tmp_path / "phi")), "--text", str(ROOT / "LICENSE")]
    words += ["--out", str(tmp_path / "rows"), "--formats", "onnx", "--schemes", "w8a8"]
    real_models.main([*words, "--rotations", "0", "--inputs", "4"])
    row = json.loads((tmp_path / "rows").read_text())
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.split("|")[1:3] == [" onnx ", " w8a8 "]
    assert f" {row['held_out']['kl']:.3g} | {row['plain']['kl']:.3g} " in line
    assert 0 < row["held_out"]["kl"] <= row["plain"]["kl"] < 0.01


@pytest.mark.slow
def test_calls_of_libraries_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(one_layer(tmp_path / "phi")), "--text", str(ROOT / "LICENSE"), "--inputs", "4"]
    library_calls.main([*words, "--calls", "NBits"])
    rows = [line.split("|")[1:4] for line in capsys.readouterr().out.splitlines()[2:]]
    costs = {name.strip(): float(cost) for name, cost, _ in rows}
    in_8_bits, in_4_bits, asymmetric = costs.values()
    assert 0 < 20 * in_8_bits < min(in_4_bits, asymmetric) and "asymmetric" in [*costs][-1]


def test_words_that_differ() -> None:
    said = ["the", "cat", "sat", "down"]
    assert real_models.edit_distance(said, said) == 0
    assert real_models.edit_distance(said, ["a", "cat", "down", "there"]) == 3
    assert real_models.edit_distance(said, []) == 4 == real_models.edit_distance([], said)
