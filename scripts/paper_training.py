"""Repeats the training experiments of Enjoy-LN in small: docs/paper_training.json and its page.

    OMP_NUM_THREADS=1 python scripts/paper_training.py --write-docs
    python scripts/paper_training.py norms moving --json results.json
    python scripts/paper_training.py --quick

Needs scikit-learn for its digits, matplotlib for the pictures, and no network: texts are those of
Python's standard library. Runs on the CPU. Without names all experiments are run; with some, the
others in the JSON file stay as they are. ``training_equivalence.py``, ``training_spread.py`` and
``training_times.py`` say what they are. ``--write-docs`` writes the JSON file, the pictures and the
section of docs/training.md; ``--draw-only`` writes the latter two from the JSON file that is there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import training_equivalence
import training_spread
import training_times
import transformers
from paper_tables import log
from training_page import page
from training_plots import draw_all
from training_sizes import FULL, QUICK, Sizes, Tell

from enjoyln_cli import __version__
from enjoyln_cli.benchmark.results import hardware
from enjoyln_cli.clock import duration

BEGIN = "<!-- written by scripts/paper_training.py; do not edit by hand -->"
END = "<!-- end of what scripts/paper_training.py writes -->"
DOCS = Path(__file__).parents[1] / "docs"
EXPERIMENTS: dict[str, tuple[Callable[[Sizes, Tell], dict[str, Any]], float]] = {
    "equality": (training_equivalence.equality, 136),
    "transformer": (training_equivalence.transformer, 75),
    "dropout": (training_spread.dropout, 285),
    "fine_tuning": (training_spread.fine_tuning, 170),
    "norms": (training_spread.norms, 86),
    "moving": (training_equivalence.moving, 38),
    "step_times": (training_times.step_times, 82),
    "break_even": (training_times.break_even, 30),
}
"""Each experiment with the seconds that it takes on one idle core, for the time that is left."""


def run(names: list[str], sizes: Sizes, on_result: Callable[[str, Any], None]) -> None:
    """Run experiments one after the other, with progress and the time left on standard error."""
    begin = time.perf_counter()
    whole = sum(EXPERIMENTS[name][1] for name in names)
    before = 0.0
    for name in names:
        function, share = EXPERIMENTS[name]
        since, used = time.perf_counter(), time.process_time()
        tell = partial(_tell, begin, name, before / whole, share / whole)
        tell(0.0, "starts")
        result = function(sizes, tell)
        facts = run_facts(time.perf_counter() - since, time.process_time() - used)
        on_result(name, {"run": facts, "results": result})
        before += share


def _tell(begin: float, name: str, before: float, share: float, done: float, text: str) -> None:
    part, spent = before + share * done, time.perf_counter() - begin
    left = f", about {duration(spent * (1 - part) / part)} left" if part else ""
    log(f"{name}: {text}; {duration(spent)} so far{left}")


def run_facts(seconds: float, processor_seconds: float) -> dict[str, Any]:
    """When, where and with what an experiment was run."""
    return {
        "date": date.today().isoformat(),
        "seconds": round(seconds),
        "processor_seconds": round(processor_seconds),
        "hardware": hardware(torch.device("cpu")),
        "load": round(os.getloadavg()[0], 1),
        "cores": os.cpu_count(),
        "versions": {
            "enjoyln": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "scikit-learn": _version("scikit-learn"),
            "Python": platform.python_version(),
        },
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def rounded(value: Any, digits: int = 6) -> Any:
    """The same with all numbers of ``digits`` significant digits, to keep the file small."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, dict):
        return {key: rounded(one, digits) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(one, digits) for one in value]
    return value


def as_text(results: dict[str, Any]) -> str:
    """JSON with each list of plain values on one line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\[[^][{}]*\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"


def replace_section(text: str, section: str) -> str:
    """``text`` with what stands between ``BEGIN`` and ``END`` replaced, or appended at the end."""
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2] or "\n"
    return f"{head.rstrip()}\n\n{BEGIN}\n{section.rstrip()}\n{END}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT",
                        help=", ".join(EXPERIMENTS))  # fmt: skip
    parser.add_argument("--json", type=Path, help="file for the results; others in it stay")
    parser.add_argument("--write-docs", action="store_true", help="write JSON, page and pictures")
    parser.add_argument("--draw-only", action="store_true", help="as --write-docs; runs nothing")
    parser.add_argument("--quick", action="store_true", help="run every line in seconds")
    args = parser.parse_args()
    if args.quick and (args.write_docs or args.draw_only):
        parser.error("the numbers of --quick mean nothing; they are not for the docs")
    if unknown := set(args.experiments) - EXPERIMENTS.keys():
        parser.error(f"no experiment is called {min(unknown)}; there is {', '.join(EXPERIMENTS)}")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    docs = args.write_docs or args.draw_only
    file = DOCS / "paper_training.json" if docs else args.json
    known = json.loads(file.read_text("utf-8")) if file and file.exists() else {}

    def keep(name: str, result: Any) -> None:
        known[name] = rounded(result)
        if file:
            in_order = {one: known[one] for one in EXPERIMENTS if one in known}
            file.write_text(as_text(in_order), "utf-8")

    if not args.draw_only:
        run(args.experiments or list(EXPERIMENTS), QUICK if args.quick else FULL, keep)
    text = page(known)
    if docs:
        draw_all(known, DOCS / "pictures")
        target = DOCS / "training.md"
        target.write_text(replace_section(target.read_text("utf-8"), text), "utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
