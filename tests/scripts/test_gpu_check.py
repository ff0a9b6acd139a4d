"""The check of a GPU: a step that fails does not stop it, and the page is made of what there is."""

from __future__ import annotations

import json
import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_check import STEPS, check, page, with_bandwidth
from model_times import row_of

from enjoyln_cli.kernels import gpu
from enjoyln_cli.kernels.gpu import Choice, Norms, Times

SIMULATED = "SIMULATED, NOT A MEASUREMENT"
KIND = Norms(torch.float32, torch.float32, True, True, 768)
CHOICE = Choice(KIND, 32, "kernel", {"layer_norm": Times(10, 12), "kernel": Times(4, 9)}, {})


def test_the_steps_take_nine_minutes_at_most() -> None:
    assert sum(seconds for seconds, _ in STEPS.values()) == gpu_check.MINUTES * 60 == 540


def test_minutes_are_shared_and_a_failed_step_leaves_its_error() -> None:
    written: list[dict[str, Any]] = []

    def fails(seconds: float) -> None:
        raise RuntimeError(f"no memory after {seconds:.0f} s")

    steps = {"first": (30.0, fails), "second": (60.0, lambda seconds: seconds)}
    found = check(steps, lambda some: written.append(dict(some)), times=2)
    assert found["first"] == {"error": "RuntimeError: no memory after 60 s"}
    assert found["second"] == 120 and found["torch"] == torch.__version__
    assert ["second" in some for some in written] == [False, True]


def test_norms_are_measured_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Norms, int]] = []

    def measure(device: torch.device, norms: Norms, rows: int) -> Choice:
        asked.append((norms, rows))
        return replace(CHOICE, norms=norms, rows=rows)

    monkeypatch.setattr(gpu, "measure", measure)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(gpu_check, "WIDTHS", (16, 24))
    whole = gpu_check.measure_norms(1e6)
    assert len(whole) == len(set(asked)) == 2 * len(gpu_check.DTYPES) * 2 * len(gpu.ROWS)
    assert gpu_check.measure_norms(0) == []
    one = next(c for c in whole if c["rows"] == 32 and c["norms"]["dtype"] == "float32")
    assert one["gigabytes_per_second"]["kernel"] == round(2 * 32 * 16 * 4 / 4e3, 1)


def bench(name: str, mode: str, faster: float, size: tuple[int, int]) -> dict[str, Any]:
    """What ``time_model`` would return of nine rounds of a model that is simulated."""
    around = [1 + 0.001 * (number - 4) for number in range(9)]
    times = {
        "original": [0.01 * shift for shift in around],
        "folded": [0.01 / faster for _ in around],
        "no_norm": [0.008 for _ in around],
    }
    rows, tokens = size
    row = row_of(f"{rows} x {tokens} tokens, {mode}", rows, tokens, times)
    left_out = ["1 x 512 tokens: no time was left"] if mode == "compile" else []
    about = {"hardware": SIMULATED, "dtype": "float32", "date": "2026-01-01", "versions": {}}
    return {name: {"rows": [row], "left_out": left_out, "fold_seconds": 0.25} | about}


@pytest.fixture(scope="module")
def simulated() -> dict[str, Any]:
    """A file as the check writes it. No GPU was at hand: every time in it is made up."""
    found = {
        **gpu_check.about(),
        "gpu": SIMULATED,
        "cuda": "none",
        "tests": {"status": 0, "output": ["..", "61 passed in 20 s"]},
        "norms": [with_bandwidth(CHOICE)],
        "models": {
            **bench("gpt2", "eager", 1.0625, (1, 128)),
            "bloom-560m": {"rows": [], "left_out": ["out of memory"]},
        },
        "compiled": bench("gpt2", "compile", 0.5, (1, 128)),
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_the_page_is_made_of_all_that_was_measured(simulated: dict[str, Any]) -> None:
    text = page(simulated)
    assert f": {SIMULATED}, CUDA none, torch {torch.__version__}" in text
    assert "* Tests that need a GPU: 61 passed in 20 s" in text
    (norm,) = (line for line in text.splitlines() if "| 32 | kernel |" in line)
    assert norm.startswith("| float32 | 768 | yes | 32 |")
    assert norm.endswith("kernel 4.0 (9.0, 49 GB/s) |")
    eager, compiled = (line for line in text.splitlines() if line.startswith("| gpt2 |"))
    assert eager.startswith("| gpt2 | 1 x 128 tokens, eager | 10 | 1.062 (1.05")
    assert eager.endswith(", faster) | 20.00 % |")
    assert compiled.endswith(", slower) | 20.00 % |")
    assert "* left out: gpt2: 1 x 512 tokens: no time was left" in text
    assert "* left out: bloom-560m: out of memory" in text
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1, table


def test_a_page_is_made_of_what_there_is(simulated: dict[str, Any]) -> None:
    """A step that failed, and a step that did not run."""
    found = {**simulated, "norms": {"error": "RuntimeError: CUDA error"}}
    del found["tests"], found["compiled"]
    text = page(found)
    assert "* Tests that need a GPU: not run\n* norms: RuntimeError: CUDA error\n" in text
    assert "## Norms" not in text and "## Compiled" not in text and "## Models" in text
    assert "## " not in page(gpu_check.about())


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "gpu.json")])
    assert gpu_check.main() == 1
    assert capsys.readouterr().err == "error: torch sees no GPU\n"
    assert not list(tmp_path.iterdir())
