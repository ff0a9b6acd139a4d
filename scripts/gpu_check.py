"""Everything that can only be said with a GPU, in nine minutes: one JSON file.

    python scripts/gpu_check.py --out gpu.json
    python scripts/gpu_check.py --page gpu.json > docs/gpu.md

Runs the tests that need a GPU; measures what computes a norm on it, as loading a model does; times
six models (eager, CUDA graphs and torch.compile; prefill and decode) and the papers' tables. What
does not fit into the time is named; torch.compile takes most of it, so that not all models are
compiled in nine minutes. ``--minutes 25`` leaves little out.

Needs an NVIDIA GPU and ``pip install -e ".[dev]"`` in a clone of the repository. The file is
written after each step, so that Ctrl-C leaves what was measured until then.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import paper_tables
import torch
import transformers

from enjoyln_cli import __version__
from enjoyln_cli.kernels import gpu, tuning
from enjoyln_cli.kernels.choices import Choice, Norms

ROOT = Path(__file__).parent.parent
WIDTHS = (768, 1024, 2048, 4096)
DTYPES = ("bfloat16", "float16", "float32")
MODELS = ("gpt2", "bert", "opt-125m", "bloom-560m", "vit", "minilm")
START = 15
"""Seconds that a program takes before it measures."""
COMPILE_SECONDS = 62
"""The fewest seconds for a model in which a case with torch.compile is begun."""
MINUTES = 9
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
        with suppress(ValueError):  # it was stopped while it wrote
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
    return _models("eager,cudagraphs", (seconds - START) / len(MODELS), seconds)


def time_compiled_models(seconds: float) -> dict[str, Any]:
    each = max(COMPILE_SECONDS, (seconds - START) / len(MODELS))
    return _models("compile", each, seconds, "--seq-len", "128")


def _models(mode: str, each: float, seconds: float, *options: str) -> dict[str, Any]:
    """Time the models in a mode, ``each`` in so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "models.json")
        return program(
            "scripts/bench_models.py", "--device", "cuda", "--models", ",".join(MODELS),
            "--mode", mode, "--seconds", str(round(each)), "--out", str(result), *options,
            seconds=seconds, result=result,
        )  # fmt: skip


def time_papers(seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "papers.json")
        return program(
            "scripts/paper_tables.py", "--device", "cuda", "--json", str(result),
            "--seconds", str(round(seconds - 2 * START)), seconds=seconds, result=result,
        )  # fmt: skip


STEPS = (
    Step("tests", 70, run_tests),
    Step("norms", 40, measure_norms),
    Step("models", 145, time_models),
    Step("compiled", 145, time_compiled_models),
    Step("papers", 140, time_papers),
)
"""What is run, with the seconds that each may take of ``MINUTES``."""


def check(
    steps: Iterable[Step], write: Callable[[dict[str, Any]], None], times: float = 1.0
) -> dict[str, Any]:
    """Run the steps one after the other, each in up to ``times`` its seconds.

    One that fails leaves its error, and the next one runs.
    """
    found = about()
    for step in steps:
        seconds = step.seconds * times
        print(f"{step.name}: up to {seconds:.0f} s", file=sys.stderr, flush=True)
        try:
            found[step.name] = step.run(seconds)
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
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "transformers", "enjoyln"))
    lines = [
        "# On a GPU",
        "",
        f"Measured by `scripts/gpu_check.py` on {found['date']}: {found.get('gpu', 'no GPU')}, "
        f"driver {found.get('driver', 'unknown')}, {versions}.",
        "",
        f"* Tests that need a GPU: {last_line(found.get('tests'))}",
    ]
    lines += [
        f"* {name}: {last_line(found[name])}" for name in found if _error(found[name]) is not None
    ]
    if isinstance(found.get("norms"), list):
        lines += ["", "## Norms", "", *norm_lines(found["norms"])]
    models = [found[name] for name in ("models", "compiled") if _result(found.get(name))]
    if models:
        lines += ["", "## Models", "", *model_lines([_result(one)["models"] for one in models])]
    if papers := _result(found.get("papers")):
        text = paper_tables.sections(papers).replace("\n## ", "\n### ")
        lines += ["", "## The papers' times, and this machine's", "", f"In {papers['dtype']}.", ""]
        lines.append(text)
    return "\n".join(lines).rstrip() + "\n"


def _error(step: Any) -> str | None:
    return step.get("error") if isinstance(step, Mapping) else None


def _result(step: Any) -> Any:
    """What a program stored, or ``None``."""
    return step.get("result") if isinstance(step, Mapping) else None


def last_line(step: Any) -> str:
    """What a step said at its end."""
    if step is None:
        return "not run"
    output = step.get("output") or [_error(step) or "no output"]
    late = step.get("status", 0) is None
    return f"{output[-1]}{' (the time was over)' * late}"


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


def model_lines(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """A table: how many times as fast each folded model is; then what was left out, and why.

    Each of ``steps`` has the models of one run of ``bench_models.py``.
    """
    lines = [
        "`times as fast`: LayerNorm's time over RMSNorm's, the median over the rounds, with the "
        "interval at 95 %. `norms cost`: the share of the time that leaving out all norms saves.",
        "",
        "| model | case | LayerNorm, ms | times as fast | norms cost | verdict |",
        "|---|---|---:|---:|---:|---|",
    ]
    left_out = []
    for name, found in (pair for models in steps for pair in models.items()):
        for row in found["rows"]:
            interval = row["speedup_interval"]
            spread = f" ({interval[0]:.3f} to {interval[1]:.3f})" if interval else ""
            lines.append(
                f"| {name} | {row['case']} | {row['models']['original']['median_ms']:.3f} | "
                f"{row['speedup']:.3f}{spread} | {100 * row['norm_cost']:.1f} % | "
                f"{row['verdict']} |"
            )
        left_out += [f"* left out: {name}: {line}" for line in found["left_out"]]
    return [*lines, "", *left_out] if left_out else lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"))
    parser.add_argument("--page", type=Path, help="write docs/gpu.md from this file instead")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    args = parser.parse_args()
    if args.page:
        print(page(json.loads(args.page.read_text())), end="")
        return 0
    if not torch.cuda.is_available():
        print("error: torch sees no GPU", file=sys.stderr)
        return 1
    found = check(STEPS, lambda some: save(args.out, some), args.minutes / MINUTES)
    failed = [step.name for step in STEPS if _error(found[step.name]) is not None]
    print(f"wrote {args.out}" + f"; failed: {', '.join(failed)}" * bool(failed), file=sys.stderr)
    return int(bool(failed))


def save(path: Path, found: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
