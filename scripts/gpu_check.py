"""Everything that can only be said with a GPU, in nine minutes: one JSON file.

    python scripts/gpu_check.py --out gpu.json
    python scripts/gpu_check.py --page gpu.json > docs/gpu.md

Runs the tests that need a GPU; measures what computes a norm on it, as loading a model does; times
six models (eager, CUDA graphs and torch.compile; prefill and decode) and the papers' tables. Needs
an NVIDIA GPU and ``pip install -e ".[dev]"`` in a clone of the repository. The file is written
after each step, so that Ctrl-C leaves what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

from enjoyln_cli import __version__
from enjoyln_cli.kernels import gpu, tuning
from enjoyln_cli.kernels.choices import Choice, Norms

ROOT = Path(__file__).parent.parent
WIDTHS = (768, 1024, 2048, 4096)
DTYPES = ("bfloat16", "float16", "float32")
MODELS = "gpt2,bert,opt-125m,bloom-560m,vit,minilm"
MODEL_SECONDS = 26
"""Seconds for each of the six models."""
LINES = 40
"""How much of a program's output is kept."""


@dataclass(frozen=True)
class Step:
    """One part of the check: a name, the seconds that it may take, and what it does."""

    name: str
    seconds: float
    run: Callable[[float], Any]
    """Gets the seconds; returns plain values."""


def program(*command: str, seconds: float, result: Path | None = None) -> dict[str, Any]:
    """Run a Python program of the repository; its status, the end of its output, and its file."""
    start = time.monotonic()
    try:
        process = subprocess.run(
            [sys.executable, *command], cwd=ROOT, timeout=seconds, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        status, output = process.returncode, process.stdout
    except subprocess.TimeoutExpired as error:
        status, output = None, error.stdout or ""
        output = output if isinstance(output, str) else output.decode(errors="replace")
    found: dict[str, Any] = {
        "command": " ".join(command),
        "status": status,
        "seconds": round(time.monotonic() - start, 1),
        "output": output.splitlines()[-LINES:],
    }
    if result is not None and result.exists():
        found["result"] = json.loads(result.read_text())
    return found


def run_tests(seconds: float) -> dict[str, Any]:
    return program("-m", "pytest", "-q", "tests/kernels/test_gpu.py", seconds=seconds)


def measure_norms(seconds: float, device: tuning.Device | None = None) -> list[dict[str, Any]]:
    """What ``tuning`` measures for several kinds of norm, with the bandwidth of each candidate."""
    device = device or gpu.Gpu(0)
    end, found = device.clock() + seconds, []
    for width, dtype, bias, rows in product(WIDTHS, DTYPES, (False, True), tuning.ROWS):
        if rows * width <= tuning.MOST_ELEMENTS and device.clock() < end:
            norms = Norms(dtype, dtype, True, bias, width)
            found += [with_bandwidth(one) for one in tuning.measure(device, norms, rows)]
    return found


def with_bandwidth(choice: Choice) -> dict[str, Any]:
    """A choice as plain values, with GB/s: bytes that have to be read and written, over time."""
    size = torch.empty(0, dtype=getattr(torch, choice.norms.dtype)).element_size()
    moved = (4 if choice.added else 2) * choice.rows * choice.norms.width * size
    rates = {name: round(moved / (us * 1e3), 1) for name, us in choice.microseconds.items()}
    return asdict(choice) | {"gigabytes_per_second": rates}


def time_models(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "models.json")
        return program(
            "scripts/bench_models.py", "--device", "cuda", "--models", MODELS,
            "--mode", "eager,cudagraphs,compile", "--seconds", str(MODEL_SECONDS),
            "--out", str(result), seconds=seconds, result=result,
        )  # fmt: skip


def time_papers(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "papers.json")
        return program(
            "scripts/paper_tables.py", "--device", "cuda", "--json", str(result),
            seconds=seconds, result=result,
        )  # fmt: skip


STEPS = (
    Step("tests", 80, run_tests),
    Step("norms", 40, measure_norms),
    Step("models", 6 * MODEL_SECONDS + 24, time_models),
    Step("papers", 230, time_papers),
)


def check(steps: Iterable[Step], write: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Run the steps one after the other. One that fails leaves its error, and the next one runs."""
    found = about()
    for step in steps:
        print(f"{step.name}: up to {step.seconds:.0f} s", file=sys.stderr, flush=True)
        try:
            found[step.name] = step.run(step.seconds)
        except Exception as error:
            found[step.name] = {"error": f"{type(error).__name__}: {error}"}
        write(found)
    return found


def about() -> dict[str, Any]:
    """The date, the machine and the versions."""
    found = {
        "date": date.today().isoformat(),
        "enjoyln": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }
    return found | dict(gpu.Gpu(0).key()) if torch.cuda.is_available() else found


def page(found: Mapping[str, Any]) -> str:
    """``docs/gpu.md`` from what was measured."""
    lines = [
        "# On a GPU",
        "",
        f"Measured by `scripts/gpu_check.py` on {found['date']}: {found.get('gpu', 'no GPU')}, "
        f"torch {found['torch']}, transformers {found['transformers']}, "
        f"enjoyln {found['enjoyln']}.",
        "",
    ]
    if "tests" in found:
        tests = found["tests"]
        last = (tests.get("output") or [tests.get("error", "")])[-1]
        lines += [f"* Tests that need a GPU: {last}", ""]
    if isinstance(found.get("norms"), list):
        lines += ["## Norms", "", *norm_lines(found["norms"]), ""]
    if rows := found.get("models", {}).get("result", {}).get("models"):
        lines += ["## Models", "", *model_lines(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def norm_lines(choices: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table: one line for each kind of norm and number of rows."""
    lines = [
        "Microseconds of a call in a CUDA graph; in brackets GB/s, for the bytes that have to be "
        "read and written.",
        "",
        "| dtype | width | bias | rows | | taken | times |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in choices:
        norms, rates = one["norms"], one["gigabytes_per_second"]
        times = ", ".join(
            f"{name} {us:.1f} ({rates[name]:.0f})" for name, us in one["microseconds"].items()
        )
        lines.append(
            f"| {norms['dtype']} | {norms['width']} | {'yes' if norms['bias'] else 'no'} | "
            f"{one['rows']} | {'after an addition' if one['added'] else ''} | {one['taken']} | "
            f"{times or 'not timed'} |"
        )
    return lines


def model_lines(models: Mapping[str, Any]) -> list[str]:
    """A table: how many times as fast each folded model is."""
    lines = ["| model | case | times as fast | verdict |", "|---|---|---|---|"]
    for name, found in models.items():
        for row in found["rows"]:
            case = f"{row['size']}, {row['phase']}, {row['mode']}"
            lines.append(f"| {name} | {case} | {row['speedup']:.3f} | {row['verdict']} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--page", type=Path, help="write docs/gpu.md from this file instead")
    args = parser.parse_args()
    if args.page:
        print(page(json.loads(args.page.read_text())), end="")
        return 0
    if not torch.cuda.is_available():
        print("error: torch sees no GPU", file=sys.stderr)
        return 1
    found = check(STEPS, lambda some: save(args.out, some))
    failed = [step.name for step in STEPS if "error" in found[step.name]]
    print(f"wrote {args.out}" + f"; failed: {', '.join(failed)}" * bool(failed), file=sys.stderr)
    return int(bool(failed))


def save(path: Path, found: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
