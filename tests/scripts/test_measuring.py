"""The scripts that measure: what is compared takes turns, and the papers' figures fit together."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import bench
import paper_times
import pytest
import real_models
from live_models import CHECKPOINTS, ROOT
from paper_times import FIGURES, NORM_SHARES, paper_cases, time_models, times_page
from tiny_models import one_layer


def test_tasks_take_turns_and_ratios_are_those_within_a_round() -> None:
    order: list[str] = []
    slow, fast = iter([2.0, 30.0, 4.0]), iter([1.0, 10.0, 8.0])

    def task(name: str, seconds: object) -> bench.Task:
        return lambda: (order.append(name), next(seconds))[1]  # type: ignore[call-overload, no-any-return]

    seconds = bench.in_rounds({"slow": task("slow", slow), "fast": task("fast", fast)}, 3)
    assert order == ["slow", "fast", "fast", "slow", "slow", "fast"]
    assert seconds == {"slow": [2.0, 30.0, 4.0], "fast": [1.0, 10.0, 8.0]}
    rows = dict(bench.compared(seconds, 1e-3))
    assert rows["slow"] == {"time": 4000, "ratio": 1, "from": 1, "to": 1}
    assert (rows["fast"]["time"], rows["fast"]["ratio"]) == (8000, 2)


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


def test_the_papers_figures_fit_together() -> None:
    """What is saved follows from the times, up to the rounding of both."""
    for *_, before, after, saved in FIGURES:
        if before is not None and after is not None:
            assert 100 * (1 - after / before) == pytest.approx(saved, abs=1.6)


def test_a_cpu_runs_some_of_the_cases_and_a_gpu_all() -> None:
    on_cpu = {name: set(pairs) for name, _, pairs in paper_cases(on_gpu=False)}
    on_gpu = {name: set(pairs) for name, _, pairs in paper_cases(on_gpu=True)}
    assert on_cpu.keys() == {*NORM_SHARES, "ViT Tiny-16", "ViT Small-16", "ViT Base-16"}
    assert all(pairs <= on_gpu[name] for name, pairs in on_cpu.items())
    assert (128, 256) in on_gpu["Bert"] and (4, 16384) in on_gpu["OPT"]


@pytest.mark.slow
def test_what_is_measured_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 50, "n_positions": 256}
    cases = [("GPT2", ("gpt2", "GPT2Model", settings), [(1, 256)])]
    written: list[str] = []
    results = time_models(
        cases, "cpu", "float32", 60, write=lambda r: written.append(json.dumps(r))
    )
    assert json.loads(written[-1]) == results
    (row,) = results["GPT2"]["rows"]
    lines = [line for line in times_page(results).splitlines() if line.startswith("| GPT2 | 1 x")]
    assert len(lines) == 2
    assert all(f"| {paper_times.seconds_of(row, 'original')} |" in line for line in lines)


def test_a_model_that_fails_is_left_out() -> None:
    cases = [("GPT2", ("gpt2", "GPT2Model", {"n_embd": 16, "n_layer": 0, "n_head": 2}), [(1, 8)])]
    results = time_models(cases, "cpu", "float32", 60)
    assert not results["GPT2"]["rows"] and results["GPT2"]["left_out"]
    assert "* left out: GPT2: " in times_page(results)


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


def test_words_that_differ() -> None:
    said = ["the", "cat", "sat", "down"]
    assert real_models.edit_distance(said, said) == 0
    assert real_models.edit_distance(said, ["a", "cat", "down", "there"]) == 3
    assert real_models.edit_distance(said, []) == 4 == real_models.edit_distance([], said)
