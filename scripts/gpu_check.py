"""Everything that can only be said with a GPU, in nine minutes: one JSON file.

    python scripts/gpu_check.py --out gpu.json
    python scripts/gpu_check.py --page gpu.json  # its tables as Markdown

Runs the tests that need a GPU; measures what computes a norm on it, as loading a model does; times
six models, two of them compiled as well. What does not fit into the time is named.
``--minutes 25`` leaves little out.

Needs an NVIDIA GPU and ``pip install -e ".[dev]"`` in a clone of the repository. The file is
written after each step, so that Ctrl-C leaves what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from model_times import MODELS, model_lines, time_models

from enjoyln_cli import __version__
from enjoyln_cli.kernels import gpu
from enjoyln_cli.kernels.gpu import Choice, Norms
from enjoyln_cli.text import dtype_name

ROOT = Path(__file__).parent.parent
WIDTHS = (768, 1024, 2048, 4096)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIZES = ((1, 128), (8, 512), (32, 512))
"""Rows and tokens of each model."""
COMPILED, COMPILED_SIZES = ("gpt2", "vit"), ((8, 512),)
"""What is timed compiled, too; each size is compiled for itself."""
TESTS = ("tests/kernels/test_gpu.py", "tests/system/test_on_a_gpu.py")
MINUTES = 9
Step = tuple[float, Callable[[float], Any]]
"""The seconds that a step may take, and the step: gets the seconds, returns plain values."""


def run_tests(seconds: float) -> dict[str, Any]:
    """The end of what the tests that need a GPU print.

    They are stopped when the time is over, with their processes, so that nothing runs beside what
    is measured next.
    """
    command = [sys.executable, "-m", "pytest", "-n", "8", "--disable-warnings", *TESTS]
    run = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        output, _ = run.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise TimeoutError(f"not done after {seconds:.0f} s") from None
    return {"status": run.returncode, "output": output.splitlines()[-40:]}


def measure_norms(seconds: float) -> list[dict[str, Any]]:
    """What loading a model measures, for several kinds of norm, with each candidate's bandwidth."""
    device, end = torch.device("cuda", 0), time.monotonic() + seconds
    found = []
    for width, dtype, bias, rows in product(WIDTHS, DTYPES, (False, True), gpu.ROWS):
        if time.monotonic() < end:
            with torch.cuda.device(device), torch.no_grad():
                choice = gpu.measure(device, Norms(dtype, dtype, True, bias, width), rows)
            found.append(with_bandwidth(choice))
    return found


def with_bandwidth(choice: Choice) -> dict[str, Any]:
    """A choice as plain values, with GB/s: bytes that have to be read and written, over time."""
    moved = 2 * choice.rows * choice.norms.width * choice.norms.dtype.itemsize
    rates = {name: round(moved / (times.graph * 1e3), 1) for name, times in choice.times.items()}
    norms = choice.norms._asdict()
    norms |= {key: dtype_name(norms[key]) for key in ("dtype", "parameters")}
    return asdict(choice) | {"norms": norms, "gigabytes_per_second": rates}


def time_eager(seconds: float) -> dict[str, Any]:
    """All models of ``model_times.py``."""
    chosen = [(name, SIZES) for name in MODELS if name != "tiny"]
    return time_models(chosen, "cuda", "bfloat16", seconds)


def time_compiled(seconds: float) -> dict[str, Any]:
    chosen = [(name, COMPILED_SIZES) for name in COMPILED]
    return time_models(chosen, "cuda", "bfloat16", seconds, "compile")


STEPS: dict[str, Step] = {
    "tests": (150, run_tests),
    "norms": (60, measure_norms),
    "models": (165, time_eager),
    "compiled": (165, time_compiled),
}
"""What is run, with the seconds that each may take of ``MINUTES``."""


def check(
    steps: Mapping[str, Step], write: Callable[[dict[str, Any]], None], times: float = 1.0
) -> dict[str, Any]:
    """Run the steps in order, each in up to ``times`` its seconds.

    A step that fails leaves its error, and the next step runs.
    """
    found = about()
    for name, (seconds, step) in steps.items():
        print(f"{name}: up to {seconds * times:.0f} s", file=sys.stderr, flush=True)
        try:
            found[name] = step(seconds * times)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
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
    if torch.cuda.is_available():
        found |= {"gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda)}
    return found


def page(found: Mapping[str, Any]) -> str:
    """What was measured, as Markdown."""
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "enjoyln"))
    device = f"{found.get('gpu', 'no GPU')}, CUDA {found.get('cuda', 'unknown')}"
    tests = found.get("tests", {})
    lines = ["# On a GPU", ""]
    lines += [f"Measured by `scripts/gpu_check.py` on {found['date']}: {device}, {versions}.", ""]
    lines.append(f"* Tests that need a GPU: {(tests.get('output') or ['not run'])[-1]}")
    errors = {name: error_of(step) for name, step in found.items() if error_of(step)}
    lines += [f"* {name}: {error}" for name, error in errors.items()]
    done = {name: found[name] for name in STEPS if name in found and name not in errors}
    if "norms" in done:
        lines += ["", "## Norms", "", *norm_lines(done["norms"])]
    for name, title in (("models", "Models"), ("compiled", "Compiled models")):
        if name in done:
            lines += ["", f"## {title}", "", *model_lines(done[name])]
    return "\n".join(lines) + "\n"


def error_of(step: Any) -> str | None:
    return step.get("error") if isinstance(step, Mapping) else None


def norm_lines(choices: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table: one line for each kind of norm and number of rows."""
    lines = [
        "Microseconds of a call in a CUDA graph; in brackets of a call from Python, and GB/s "
        "in the graph, for the bytes that have to be read and written.",
        "",
        "| dtype | width | bias | rows | chosen | times |",
        "|---|---|---|---|---|---|",
    ]
    for one in choices:
        norms, rates = one["norms"], one["gigabytes_per_second"]
        times = ", ".join(
            f"{name} {time['graph']:.1f} ({time['call']:.1f}, {rates[name]:.0f} GB/s)"
            for name, time in one["times"].items()
        )
        lines.append(
            f"| {norms['dtype']} | {norms['width']} | {'yes' if norms['bias'] else 'no'} | "
            f"{one['rows']} | {one['candidate']} | {times or 'not timed'} |"
        )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--page", type=Path, help="print the tables of this file instead")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    args = parser.parse_args()
    if args.page:
        print(page(json.loads(args.page.read_text())), end="")
        return 0
    if not torch.cuda.is_available():
        print("error: torch sees no GPU", file=sys.stderr)
        return 1

    def save(found: Mapping[str, Any]) -> None:
        args.out.write_text(json.dumps(found, indent=1) + "\n")

    found = check(STEPS, save, args.minutes / MINUTES)
    failed = [name for name in STEPS if error_of(found[name])]
    print(f"wrote {args.out}" + f"; failed: {', '.join(failed)}" * bool(failed), file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
