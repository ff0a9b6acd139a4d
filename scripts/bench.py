"""Times of commands: medians over rounds in which everything that is compared takes turns.

    python scripts/bench.py fold                    folds of generated checkpoints beside cp
    python scripts/bench.py fold DIR --options=--merge=affine
    python scripts/bench.py command "verify OUT" "report --model-type bloom" --beside ../other

Each prints a table in Markdown, or with ``--json`` its rows. A ratio is the time of the first task
over the time of this task, so more is faster; it is the median of the ratios within a round, with
its quartiles. ``memory_mb`` is the largest anonymous memory of a command, minus the memory of an
interpreter that has imported torch.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, OPTConfig

ENJOYLN = (sys.executable, "-m", "enjoyln_cli")
Row = dict[str, Any]
Task = Callable[[], float]
"""Does its work once, and returns how many seconds of it count."""
Command = tuple[tuple[str, ...], Path | None]
"""Arguments of ``enjoyln``, and the checkout whose code runs, by default this one."""


def in_rounds(tasks: Mapping[str, Task], rounds: int) -> dict[str, list[float]]:
    """Seconds of each task in every round; every second round runs backwards."""
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds):
        for name in list(tasks)[:: -1 if number % 2 else 1]:
            seconds[name].append(tasks[name]())
    return seconds


def ratios(seconds: Mapping[str, list[float]], name: str) -> list[float]:
    """Seconds of the first task over seconds of ``name``, in each round."""
    first = next(iter(seconds.values()))
    return [a / b for a, b in zip(first, seconds[name], strict=True)]


def compared(seconds: Mapping[str, list[float]]) -> Iterable[tuple[str, Row]]:
    """Each task with its median in seconds, and its ratio to the first task."""
    for name, values in seconds.items():
        row: Row = {"time": float(f"{statistics.median(values):.4g}")}
        each = ratios(seconds, name)
        low, middle, high = statistics.quantiles(each, n=4) if len(each) > 1 else each * 3
        yield name, row | {"ratio": round(middle, 3), "from": round(low, 3), "to": round(high, 3)}


def table(rows: list[Row]) -> str:
    """The rows in Markdown, with a column for each key."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    lines = [keys, ["---"] * len(keys), *([row.get(key, "") for key in keys] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


@dataclass(frozen=True)
class Finished:
    """A command that has ended."""

    seconds: float
    memory_mb: float
    """Its largest anonymous memory."""
    output: str


def run(command: Iterable[object], checkout: Path | None = None) -> Finished:
    """Run a command, with the code of ``checkout`` if given. One that fails ends the benchmark."""
    words = list(map(str, command))
    environment = os.environ | ({"PYTHONPATH": str(checkout.resolve())} if checkout else {})
    begin = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    peak, done = [0.0], threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, peak, done))
    sampler.start()
    output, _ = process.communicate()
    seconds = time.perf_counter() - begin
    done.set()
    sampler.join()
    if process.returncode:
        sys.exit(f"{shlex.join(words)} failed with status {process.returncode}")
    return Finished(seconds, peak[0], output)


def _sample(pid: int, peak: list[float], done: threading.Event) -> None:
    """Keep the largest anonymous memory of a process in ``peak``, in MB."""
    while not done.wait(0.01):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        found = [line for line in status.splitlines() if line.startswith("RssAnon")]
        peak[0] = max(peak[0], *(int(line.split()[1]) / 1024 for line in found), 0.0)


def fresh(out: Path, action: Callable[[], float]) -> float:
    """Do ``action`` with ``out`` removed before and after it, and all writes synced to disk."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    try:
        return action()
    finally:
        shutil.rmtree(out, ignore_errors=True)


def copied(source: Path, out: Path) -> float:
    """Seconds of ``cp -r`` and an fsync of every file."""
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", source, out], check=True)
    for path in filter(Path.is_file, out.rglob("*")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - begin


def command_rows(
    commands: Mapping[str, Command], out: Path, rounds: int, first: Mapping[str, Task] | None = None
) -> list[Row]:
    """Time and memory of commands that take turns, after other tasks in ``first``.

    ``{out}`` in an argument is a new directory each time. If a command prints JSON with
    ``seconds``, these are its time: without imports and tracing.
    """
    torch_alone = run([sys.executable, "-c", "import torch"]).memory_mb
    ended: dict[str, list[Finished]] = {name: [] for name in commands}

    def task(name: str, command: Command) -> float:
        words = [word.replace("{out}", str(out)) for word in command[0]]
        done = run([*ENJOYLN, *words], command[1])
        ended[name].append(done)
        stated = json.loads(done.output) if "--json" in words else {}
        return float(stated.get("seconds") or done.seconds)

    tasks = dict(first or {}) | {name: partial(task, name, one) for name, one in commands.items()}
    seconds = in_rounds({name: partial(fresh, out, one) for name, one in tasks.items()}, rounds)
    rows = []
    for name, row in compared(seconds):
        if name in ended:
            row["command_s"] = round(statistics.median(done.seconds for done in ended[name]), 2)
            row["memory_mb"] = round(max(done.memory_mb for done in ended[name]) - torch_alone)
        rows.append({"what": name} | row)
    return rows


def fold(args: argparse.Namespace, work: Path) -> Iterator[list[Row]]:
    """Folds beside ``cp -r`` with an fsync, and with ``--options`` beside folds without."""
    for size in [None] if args.directory else args.sizes:
        source = args.directory or generated(size, work)
        out = work / "out"
        plain = ("fold", str(source), "-o", "{out}", "--no-verify", "--json")
        commands = beside("fold", plain, args.beside)
        for options in args.options:
            commands[f"fold {options}"] = (*plain, *shlex.split(options)), None
        written = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
        first = {"cp": partial(copied, source, out)}
        rows = command_rows(commands, out, args.rounds, first)
        yield [{"model": source.name, "gigabytes": round(written, 2)} | row for row in rows]
        if not args.directory:
            shutil.rmtree(source)


def generated(gigabytes: float, work: Path) -> Path:
    """A random OPT of width 2048 in bfloat16, in 8 files."""
    out, a_layer, others = work / f"opt-{gigabytes:g}GB", 5.04e7, 1.07e8
    layers = max(1, round((gigabytes * 5e8 - others) / a_layer))
    config = OPTConfig(
        hidden_size=2048,
        word_embed_proj_dim=2048,
        ffn_dim=8192,
        num_attention_heads=32,
        num_hidden_layers=layers,
        dtype="bfloat16",
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(out, max_shard_size=f"{gigabytes * 130:.0f}MB")
    return out


def command(args: argparse.Namespace, work: Path) -> Iterator[list[Row]]:
    """Any commands of ``enjoyln``, each by itself, or beside the same of another checkout."""
    for text in args.commands:
        words = tuple(shlex.split(text))
        yield command_rows(beside(text, words, args.beside), work / "out", args.rounds)


def beside(name: str, words: tuple[str, ...], checkout: Path | None) -> dict[str, Command]:
    """The command, after the same with the code of ``checkout`` if given."""
    before = {f"{name} ({checkout})": (words, checkout)} if checkout else {}
    return before | {name: (words, None)}


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--rounds", type=int, default=5)
    shared.add_argument("--json", action="store_true", help="print one JSON array of rows")
    shared.add_argument("--work", type=Path, help="directory for large files")
    kinds = parser.add_subparsers(required=True)

    def kind(run: Any) -> argparse.ArgumentParser:
        added = kinds.add_parser(run.__name__, parents=[shared], help=run.__doc__)
        added.set_defaults(run=run)
        added.add_argument("--beside", type=Path, help="checkout whose code takes turns with this")
        return added

    of_fold = kind(fold)
    of_fold.add_argument("directory", nargs="?", type=Path, help="default: generated checkpoints")
    of_fold.add_argument("--sizes", type=float, nargs="+", default=[1, 4, 8], metavar="GB")
    of_fold.add_argument("--options", action="append", default=[], help="such as --merge=affine")
    of_command = kind(command)
    of_command.add_argument("commands", nargs="+", help='such as "fold DIR -o {out}"')
    return parser


def main() -> None:
    args = arguments().parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.work) as work:
        for some in args.run(args, Path(work)):
            rows += some
            if not args.json:
                print(table(some) + "\n", flush=True)
    if args.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
