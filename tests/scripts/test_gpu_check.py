"""The check of a GPU: each step has a limit, a failure does not stop it, and the page is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_check import STEPS, Step, check, measure_norms, page, program
from live_models import ROOT
from simulated_gpu import SPEEDS, SimulatedGpu

from enjoyln_cli.kernels import tuning


def test_the_steps_take_nine_minutes_at_most() -> None:
    assert sum(step.seconds for step in STEPS) <= 9 * 60


def test_a_step_that_fails_leaves_its_error() -> None:
    written: list[dict[str, Any]] = []

    def fails(seconds: float) -> None:
        raise RuntimeError("CUDA error: out of memory")

    steps = (Step("first", 1, fails), Step("second", 2, lambda seconds: seconds * 2))
    found = check(steps, lambda some: written.append(dict(some)))
    assert found["first"] == {"error": "RuntimeError: CUDA error: out of memory"}
    assert found["second"] == 4 and found["torch"] == torch.__version__
    assert ["second" in some for some in written] == [False, True]


def test_a_program_has_a_limit_and_a_result(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    code = f"print('a'); print('b'); open({str(result)!r}, 'w').write('[1]'); raise SystemExit(3)"
    found = program("-c", code, seconds=60, result=result)
    assert (found["status"], found["output"], found["result"]) == (3, ["a", "b"], [1])
    slow = program("-c", "import time; print(1, flush=True); time.sleep(60)", seconds=2)
    assert slow["status"] is None and slow["output"] in ([], ["1"]) and slow["seconds"] < 60


def test_norms_are_measured_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "WIDTHS", (16, 24))
    whole = measure_norms(1e6, SimulatedGpu({**SPEEDS, "kernel": 4e-6}))
    assert len(whole) == 2 * 2 * len(gpu_check.DTYPES) * 2 * len(tuning.ROWS)
    assert 0 < len(measure_norms(5, SimulatedGpu(step=1.0))) < len(whole)
    one = next(c for c in whole if c["rows"] == 32 and c["norms"]["dtype"] == "float32")
    assert one["gigabytes_per_second"]["kernel"] == round(2 * 32 * 16 * 4 / 4e3, 1)
    text = page({"date": "2026-01-02", "torch": "2.13", "transformers": "5", "enjoyln": "0.1",
                 "tests": {"output": ["..", "61 passed in 20 s"]}, "norms": whole,
                 "models": {"result": {"models": {"gpt2": {"rows": [
                     {"size": "1 x 128 tokens", "phase": "prefill", "mode": "eager",
                      "speedup": 1.0123, "verdict": "faster"}]}}}}})  # fmt: skip
    assert "* Tests that need a GPU: 61 passed in 20 s" in text
    assert "| gpt2 | 1 x 128 tokens, prefill, eager | 1.012 | faster |" in text
    table = [line for line in text.splitlines() if line.startswith("| float32 | 16 ")]
    assert len(table) == 4 * len(tuning.ROWS) and "kernel 4.0 (1)" in table[2]


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    command = [sys.executable, "scripts/gpu_check.py", "--out", str(tmp_path / "gpu.json")]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (1, "error: torch sees no GPU\n")
    assert not list(tmp_path.iterdir())


def test_the_notebook_has_one_cell_that_runs_it() -> None:
    notebook = json.loads((ROOT / "scripts" / "gpu_check.ipynb").read_text())
    (cell,) = notebook["cells"]
    assert cell["cell_type"] == "code" and "scripts/gpu_check.py" in "".join(cell["source"])
