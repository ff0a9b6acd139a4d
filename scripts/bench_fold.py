"""Time and memory of the commands: medians over interleaved repeats.

    python scripts/bench_fold.py                     everything, on generated checkpoints
    python scripts/bench_fold.py DIR --repeats 7     the fold of one checkpoint against copying it
    python scripts/bench_fold.py --only report       the reports alone
    python scripts/bench_fold.py --options=--merge=affine    a fold with options against one without

Decides what is compared. The time of a fold is the one that ``enjoyln fold --no-verify --json``
prints. It includes reading, centring, writing, syncing and publishing, but not imports and tracing,
which have their own columns. It is compared in turns with ``cp -r`` of the same directory and an
fsync of every copied file. Memory is the anonymous memory of the whole command, sampled every
10 ms, minus that of an interpreter that has imported torch. For reports it is the peak resident
set.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

SCRIPTS = Path(__file__).parent
ENJOYLN = (sys.executable, "-m", "enjoyln_cli")

SMALL = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
LARGE = {
    "bloom-176b": {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "hidden_size": 14336,
        "n_head": 112,
        "n_layer": 70,
        "vocab_size": 250880,
    },
    "opt-175b": {
        "model_type": "opt",
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 12288,
        "word_embed_proj_dim": 12288,
        "ffn_dim": 49152,
        "num_attention_heads": 96,
        "num_hidden_layers": 96,
    },
    "falcon-180b": {
        "model_type": "falcon",
        "architectures": ["FalconForCausalLM"],
        "hidden_size": 14848,
        "num_attention_heads": 232,
        "num_kv_heads": 8,
        "num_hidden_layers": 80,
        "new_decoder_architecture": True,
        "parallel_attn": True,
        "bias": False,
        "alibi": False,
    },
}
"""Published configurations; all other settings are the architecture's defaults."""


@dataclass(frozen=True)
class Run:
    """One finished command."""

    seconds: float
    anonymous: float
    """Peak anonymous memory in MB."""
    resident: float
    """Peak resident set in MB."""
    output: str


def run(command: Sequence[object]) -> Run:
    """Run a command to its end and sample its memory. A failing command ends the benchmark."""
    begin = time.perf_counter()
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    peak, done = [0.0], threading.Event()
    sampler = threading.Thread(target=_sample, args=(process.pid, peak, done))
    sampler.start()
    output = process.stdout.read() if process.stdout else ""
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    done.set()
    sampler.join()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed with status {process.returncode}")
    return Run(seconds, peak[0], usage.ru_maxrss / 1024, output)


def _sample(pid: int, peak: list[float], done: threading.Event) -> None:
    while not done.wait(0.01):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return
        found = [line for line in status.splitlines() if line.startswith("RssAnon")]
        peak[0] = max(peak[0], *(int(line.split()[1]) / 1024 for line in found), 0.0)


def copied(source: Path, out: Path) -> float:
    """Seconds of ``cp -r`` and an fsync of every file."""
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", source, out], check=True)
    for path in out.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.close(file)
    return time.perf_counter() - begin


def fold_against_copy(source: Path, repeats: int, jobs: int | None) -> dict[str, Any]:
    """Medians of a fold and a copy, in turns, each into a new directory next to the source."""
    out = source.parent / f"{source.name}.bench"
    torch_alone = run([sys.executable, "-c", "import torch"]).anonymous
    copies, folds, commands, memory = [], [], [], []
    written = 0
    for _ in range(repeats):
        copies.append(_fresh(out, lambda: copied(source, out)))
        options = ["--jobs", str(jobs)] if jobs else []
        command = [*ENJOYLN, "fold", source, "-o", out, "--no-verify", "--json", *options]
        done: Run = _fresh(out, lambda command=command: run(command))
        stated = json.loads(done.output)
        written = stated["bytes_written"]
        folds.append(stated["seconds"])
        commands.append(done.seconds)
        memory.append(done.anonymous - torch_alone)
    ratios = [fold / copy for fold, copy in zip(folds, copies, strict=True)]
    return {
        "what": f"fold {source.name}",
        "gigabytes": round(written / 1e9, 2),
        "fold_s": round(median(folds), 2),
        "copy_s": round(median(copies), 2),
        "ratio": round(median(folds) / median(copies), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
        "command_s": round(median(commands), 2),
        "memory_mb": round(max(memory)),
    }


def options_against_plain(
    source: Path, repeats: int, jobs: int | None, options: Sequence[str]
) -> dict[str, Any]:
    """Medians of a fold with ``options`` and of one without, in turns.

    With ``--keep-means`` in ``options``, the unfold is timed as well.
    """
    out, back = (source.parent / f"{source.name}.{end}" for end in ("bench", "back"))
    torch_alone = run([sys.executable, "-c", "import torch"]).anonymous
    workers = ["--jobs", str(jobs)] if jobs else []
    fold = [*ENJOYLN, "fold", source, "-o", out, "--no-verify", "--json", *workers]
    runs: dict[str, list[Run]] = {"plain": [], "with": [], "back": []}

    def with_options() -> None:
        runs["with"].append(run([*fold, *options]))
        if "--keep-means" in options:
            os.sync()
            command = [*ENJOYLN, "unfold", out, "-o", back, "--json", *workers]
            runs["back"].append(_fresh(back, lambda: run(command)))

    for _ in range(repeats):
        runs["plain"].append(_fresh(out, lambda: run(fold)))
        _fresh(out, with_options)
    stated = {what: [json.loads(r.output) for r in done] for what, done in runs.items()}
    pairs = list(zip(stated["with"], stated["plain"], strict=True))
    row = {
        "what": " ".join(("fold", source.name, *options)),
        "gigabytes": round(stated["with"][0]["bytes_written"] / 1e9, 2),
        "fold_s": round(median(a["seconds"] for a, _ in pairs), 2),
        "plain_s": round(median(b["seconds"] for _, b in pairs), 2),
        "ratio": round(median(a["seconds"] / b["seconds"] for a, b in pairs), 2),
        "ratios": [round(a["seconds"] / b["seconds"], 2) for a, b in pairs],
        "command_s": round(median(r.seconds for r in runs["with"]), 2),
        "plain_command_s": round(median(r.seconds for r in runs["plain"]), 2),
        "memory_mb": round(max(r.anonymous for r in runs["with"]) - torch_alone),
        "plain_memory_mb": round(max(r.anonymous for r in runs["plain"]) - torch_alone),
    }
    if runs["back"]:
        row |= {
            "kept_mb": round(stated["with"][0]["bytes_kept"] / 1e6, 1),
            "unfold_s": round(median(s["seconds"] for s in stated["back"]), 2),
            "unfold_memory_mb": round(max(r.anonymous for r in runs["back"]) - torch_alone),
        }
    return row


def _fresh(out: Path, action: Any) -> Any:
    """Run ``action`` with ``out`` removed before and after, and all writes synced to disk."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    try:
        return action()
    finally:
        shutil.rmtree(out, ignore_errors=True)


def generated(gigabytes: float, model_type: str, folder: Path) -> Path:
    """A random bfloat16 checkpoint in 8 shards."""
    out = folder / f"{model_type}-{gigabytes:g}GB"
    params = f"{gigabytes * 500:g}M"
    script = [sys.executable, SCRIPTS / "make_checkpoint.py", model_type, "--params", params]
    run([*script, "--dtype", "bfloat16", "--shards", "8", "-o", out])
    return out


def commands(repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Time ``--help``, and reports of configurations without weights."""
    cases: dict[str, list[str | Path]] = {"--help": [*ENJOYLN, "--help"]}
    for name, config in {"gpt2": SMALL, **LARGE}.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        cases[f"report {name}"] = [*ENJOYLN, "report", folder / name, "--format", "json"]
    runs: dict[str, list[Run]] = {what: [] for what in cases}
    for _ in range(repeats):
        for what, command in cases.items():
            runs[what].append(run(command))
    return [
        {
            "what": what,
            "command_s": round(median(r.seconds for r in done), 2),
            "memory_mb": round(max(r.resident for r in done)),
        }
        for what, done in runs.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as aligned text; missing values stay empty."""
    known = ("what", "gigabytes", "kept_mb", "fold_s", "copy_s", "plain_s", "ratio", "unfold_s")
    known += ("command_s", "plain_command_s", "memory_mb", "plain_memory_mb", "unfold_memory_mb")
    keys = tuple(key for key in known if any(key in row for row in rows))
    lines = [keys, *(tuple(str(row.get(key, "")) for key in keys) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(keys))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of the enjoyln commands.")
    parser.add_argument("directory", nargs="?", type=Path, help="fold this checkpoint only")
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 4, 8], metavar="GB")
    parser.add_argument("--model-type", default="opt", help="of generated checkpoints")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--only", choices=["fold", "report"])
    parser.add_argument(
        "--options", action="append", help="only compare folds with and without these"
    )
    parser.add_argument("--work", type=Path, help="directory for checkpoints; temporary by default")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def measured(source: Path) -> Iterator[dict[str, Any]]:
        for options in args.options or ():
            yield options_against_plain(source, args.repeats, args.jobs, options.split())
        if not args.options:
            yield fold_against_copy(source, args.repeats, args.jobs)

    with tempfile.TemporaryDirectory(dir=args.work) as name:
        folder = Path(name)
        if args.directory:
            rows += measured(args.directory)
        elif args.only != "report":
            for size in args.sizes:
                source = generated(size, args.model_type, folder)
                rows += measured(source)
                shutil.rmtree(source)
        if args.only != "fold" and not args.directory and not args.options:
            rows += commands(args.repeats, folder)
    print(json.dumps(rows) if args.json else table(rows))


if __name__ == "__main__":
    main()
