"""The check of a GPU: each step has a limit, a failure does not stop it, and the page is made."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_check import STEPS, Step, check, measure_norms, page, program, with_bandwidth
from live_models import ROOT
from paper_times import GPU as SCALE
from paper_times import Measured, as_json
from simulated_gpu import SPEEDS, SimulatedGpu

from enjoyln_cli.benchmark.results import Row
from enjoyln_cli.kernels import tuning
from enjoyln_cli.kernels.choices import Norms

SIMULATED = "SIMULATED, NOT A MEASUREMENT"
KIND = Norms("float32", "float32", True, True, 768)
CPU = torch.device("cpu")


def test_the_steps_take_nine_minutes_at_most() -> None:
    assert sum(step.seconds for step in STEPS) == gpu_check.MINUTES * 60 == 540


def test_more_minutes_are_shared_out() -> None:
    given: list[float] = []
    steps = (Step("first", 30, given.append), Step("second", 60, given.append))
    check(steps, lambda some: None, 18 / 9)
    assert given == [60, 120]


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


def row(mode: str, faster: float, size: tuple[int, int] = (1, 128)) -> Row:
    """Nine rounds of a model that is simulated."""
    around = [1 + 0.001 * (number - 4) for number in range(9)]
    times = {
        "original": [0.01 * shift for shift in around],
        "folded": [0.01 / faster for _ in around],
        "torch_rms_norm": [0.011 for _ in around],
        "no_norm": [0.008 for _ in around],
    }
    rows, tokens = size
    return Row(f"{rows} x {tokens} tokens", *size, "prefill", mode, rows * tokens, times)


@pytest.fixture(scope="module")
def simulated() -> dict[str, Any]:
    """A file as the check writes it. No GPU was at hand: every time in it is made up."""
    device = SimulatedGpu({**SPEEDS, "kernel": 4e-6})
    norms = [with_bandwidth(one) for one in tuning.measure(device, KIND, 32)]
    papers = Measured(
        {("Bert", 4, 256, "eager"): row("eager", 1.0625, (4, 256))},
        {("Tiny-16", "bfloat16"): [row("eager", 1.0625, (4, 1))]},
        {"Bert": "1 of 25"},
        {"Bert": (0.25, 0.75)},
        {(4, 64): 12.25},
        ["GPTJ: no time"],
    )

    def models(mode: str, faster: float) -> dict[str, Any]:
        rows = [row(mode, faster).to_json() | {"phase": "prefill", "norms_ms": {}}]
        left_out = ["1 x 512 tokens, prefill: needs about 2 min"] if mode == "compile" else []
        return {"status": 0, "result": {"models": {"gpt2": {"rows": rows, "left_out": left_out}}}}

    found = {
        **gpu_check.about(),
        "gpu": SIMULATED,
        "driver": "none",
        "tests": {"status": None, "output": ["..", "61 passed in 20 s"]},
        "norms": norms,
        "models": models("eager", 1.0625),
        "compiled": models("compile", 0.5),
        "papers": {"status": 0, "result": as_json(papers, "command", "float32", CPU, SCALE)},
    }
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def test_the_page_is_made_of_all_that_was_measured(simulated: dict[str, Any]) -> None:
    text = page(simulated)
    assert f": {SIMULATED}, driver none, torch {torch.__version__}" in text
    assert "* Tests that need a GPU: 61 passed in 20 s (the time was over)" in text
    (alone,) = (line for line in text.splitlines() if "| 32 |  | kernel |" in line)
    assert alone.startswith("| float32 | 768 | yes | 32 |") and "kernel 4.0 (49)" in alone
    (after,) = (line for line in text.splitlines() if "| after an addition | kernel |" in line)
    assert "separate 12.0 (33), kernel 4.0 (98)" in after
    eager, compiled = (line for line in text.splitlines() if line.startswith("| gpt2 |"))
    assert eager.startswith("| gpt2 | 1 x 128 tokens, prefill, eager | 10.000 | 1.062 (")
    assert eager.endswith("| 20.0 % | faster |") and compiled.endswith("| 20.0 % | slower |")
    assert "* left out: gpt2: 1 x 512 tokens, prefill: needs about 2 min" in text
    assert "* left out: GPTJ: no time" in text and "132.3 > 12.2 |" in text
    assert "| 4 x 256 | 0.0201 | 0.0193 | 3.99 % | 51029.1 | 53147.9 | 0.0100 | 0.0094 |" in text
    assert "| Tiny-16, batch 4 | 0.8000 | 1.0000 | 0.9412 | 1.1000 |" in text


def test_every_table_of_the_page_is_whole(simulated: dict[str, Any]) -> None:
    text = page(simulated)
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 10
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1, table
    levels = [line.partition(" ")[0] for line in text.splitlines() if line.startswith("#")]
    assert levels == ["#", "##", "##", "##", *["###"] * 8]


def test_a_page_is_made_of_what_there_is(simulated: dict[str, Any]) -> None:
    """A step that failed, was stopped before it stored anything, or did not run."""
    found = {**simulated, "norms": {"error": "RuntimeError: CUDA error"}, "models": {"status": 1}}
    found["papers"] = {"status": None, "output": ["Bert"]}
    del found["tests"]
    text = page(found)
    assert "* Tests that need a GPU: not run\n* norms: RuntimeError: CUDA error\n" in text
    assert "## Norms" not in text and "papers" not in text
    assert [line for line in text.splitlines() if line.startswith("| gpt2 |")][0].count("compile")
    empty = page(gpu_check.about())
    assert "## " not in empty and "not run" in empty


def test_what_is_simulated_is_not_published() -> None:
    published = ROOT / "docs" / "gpu.md"
    assert not published.exists() or SIMULATED not in published.read_text()


@pytest.mark.slow
def test_the_page_takes_what_the_programs_write(simulated: dict[str, Any], tmp_path: Path) -> None:
    result = tmp_path / "models.json"
    found = program(
        "scripts/bench_models.py", "--models", "tiny", "--seq-len", "8", "--mode", "eager",
        "--seconds", "20", "--repeats", "3", "--out", str(result), seconds=200, result=result,
    )  # fmt: skip
    text = page({**simulated, "models": found})
    assert found["status"] == 0, found["output"]
    assert "| tiny | 1 x 8 tokens, prefill, eager |" in text


def test_without_a_gpu_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--out", str(tmp_path / "gpu.json")])
    assert gpu_check.main() == 1
    assert capsys.readouterr().err == "error: torch sees no GPU\n"
    assert not list(tmp_path.iterdir())


def test_the_notebook_has_one_cell_that_runs_it() -> None:
    notebook = json.loads((ROOT / "scripts" / "gpu_check.ipynb").read_text())
    (cell,) = notebook["cells"]
    assert cell["cell_type"] == "code" and "scripts/gpu_check.py" in "".join(cell["source"])
