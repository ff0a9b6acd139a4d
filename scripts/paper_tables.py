"""Compares the papers' tables of times with this machine's: docs/paper_timings.md.

    OMP_NUM_THREADS=1 python scripts/paper_tables.py --json timings.json > docs/paper_timings.md
    python scripts/paper_tables.py --device cuda --json timings.json > docs/paper_timings.md

These are Tables 4 to 6 and 10 to 19 of Enjoy-LN, and Table 3 of the Pre-RMSNorm paper with the
sizes of its Table 2. Weights are random. On a CPU some of the sizes are run. On a GPU all sizes of
the papers are run, the largest batches of ViT only in bfloat16. Each case is timed once, as in
``enjoyln bench``, for all tables that contain it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from paper_figures import (
    BATCHES,
    FOLDING,
    GPTJ,
    LENGTHS,
    LENGTHS_6,
    OVERHEAD,
    TABLE_10,
    TABLE_11,
    TABLE_14,
    TABLE_15,
    TABLE_16,
    TABLE_19,
    VIT_TIMES,
)
from paper_times import CPU, GPU, Measured, as_json, from_json, measure
from paper_times import PAPER_MODELS as PAPER_MODELS
from paper_times import log as log

from enjoyln_cli.benchmark.results import Row
from enjoyln_cli.benchmark.timing import NO_GAIN


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def seconds(row: Row | None, column: str) -> str:
    return "-" if row is None else f"{row.ms[column].median / 1e3:.4f}"


def gain(row: Row | None) -> str:
    """The papers' "acceleration": the share of the original's time that is saved."""
    if row is None:
        return "-"
    words = "" if row.verdict == "faster" else f" ({row.verdict})"
    return f"{100 * row.saved:.2f} %{words}"


def tax(row: Row | None) -> str:
    """The share of the original's time that norms cost."""
    if row is None:
        return "-"
    words = "" if row.cost_is_measurable else " (too small to measure)"
    return f"{100 * row.norm_cost.median:.2f} %{words}"


def throughput(row: Row | None, column: str) -> str:
    return "-" if row is None else f"{row.throughput(column):.1f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} %"


Get = Callable[..., Row | None]


def overhead(found: Measured, get: Get) -> str:
    head = ("model, where", "norms folded", "fold, s", "init, s", "ratio", "before, s", "after, s",
            "saved", "break-even runs")  # fmt: skip
    body: list[Sequence[object]] = []
    for name in OVERHEAD["A100 (Table 4)"]:
        for where, rows in OVERHEAD.items():
            fold, init, ratio, before, after, saved, runs = rows[name]
            body.append((f"{name}, {where}", "", fold, init, f"{ratio:.2f} %", before, after,
                         percent(saved), runs))  # fmt: skip
        row = get(name, 1, 256)
        if row is not None:
            fold, init = found.overhead[name]
            runs_here = row.break_even(fold)
            body.append((f"**{name}, here**", found.folded[name], f"{fold:.4f}", f"{init:.4f}",
                         f"{100 * fold / (fold + init):.2f} %", seconds(row, "original"),
                         seconds(row, "folded"), gain(row),
                         "-" if runs_here is None else f"{runs_here:.1f}"))  # fmt: skip
    return table(head, body)


def folding(found: Measured) -> str:
    head = ("batch", *(f"{tokens} tokens, paper > here" for tokens in LENGTHS_6))
    body = []
    for rows, paper in FOLDING.items():
        here = [found.folding.get((rows, tokens)) for tokens in LENGTHS_6]
        cells = [f"{p} > {'-' if h is None else f'{h:.1f}'}"
                 for p, h in zip(paper, here, strict=True)]  # fmt: skip
        body.append((rows, *cells))
    return table(head, body)


def latency(get: Get) -> str:
    head = ("model, where", "before, s", "after, s", "saved", "norms cost", "tokens/s before",
            "tokens/s after")  # fmt: skip
    body: list[Sequence[object]] = []
    for name in ("Bert", "GPT2", "OPT"):
        for where in ("V100", "A100"):
            before, after, saved = TABLE_10[name, where]
            body.append((f"{name}, {where}", before, after, percent(saved), "",
                         *TABLE_11[name, where]))  # fmt: skip
        for mode in ("eager", "fused"):
            row = get(name, 2, 256, mode)
            body.append((f"**{name}, here, {mode}**", seconds(row, "original"),
                         seconds(row, "folded"), gain(row), tax(row),
                         throughput(row, "original"), throughput(row, "folded")))  # fmt: skip
    return table(head, body)


def batches(get: Get) -> str:
    return _paper_and_here({(rows, 256): paper for rows, paper in BATCHES.items()}, "Bert", get)


def gptj(get: Get) -> str:
    return _paper_and_here(GPTJ, "GPTJ", get)


def _paper_and_here(paper: Any, name: str, get: Get) -> str:
    head = ("batch x tokens", "paper: before, s", "after, s", "saved", "tokens/s", "after",
            "here: before, s", "after, s", "saved", "tokens/s", "after")  # fmt: skip
    body = []
    for (rows, tokens), figures in paper.items():
        row = get(name, rows, tokens)
        theirs = ("OOM", "OOM", "-", "OOM", "OOM")
        if figures:
            theirs = (*figures[:2], percent(figures[2]), *figures[3:])
        body.append((f"{rows} x {tokens}", *theirs, seconds(row, "original"),
                     seconds(row, "folded"), gain(row), throughput(row, "original"),
                     throughput(row, "folded")))  # fmt: skip
    return table(head, body)


def lengths(get: Get) -> str:
    head = ("model", "tokens", "paper: tokens/s", "more", "saved", "here: tokens/s", "more",
            "saved", "norms cost")  # fmt: skip
    body: list[Sequence[object]] = []
    for name in TABLE_15:
        for index, tokens in enumerate(LENGTHS):
            row = get(name, 4, tokens)
            more = "-"
            if row is not None:
                more = f"{row.throughput('folded') - row.throughput('original'):+.1f}"
            paper = TABLE_14[tokens][0] if name == "Bert" else ""
            body.append((name, tokens, paper, f"+{TABLE_15[name][index]}",
                         percent(TABLE_16[name][index]), throughput(row, "original"), more,
                         gain(row), tax(row)))  # fmt: skip
    return table(head, body)


def by_model_size(get: Get) -> str:
    head = ("model", "paper: 256 tokens", "1024 tokens", "here: 256 tokens", "1024 tokens")
    body = [
        (name, *map(percent, paper), gain(get(name, 4, 256)), gain(get(name, 4, 1024)))
        for name, paper in TABLE_19.items()
    ]
    return table(head, body)


def vits(found: Measured) -> str:
    """Means of the normalised times over all sizes and batches, and for each size."""
    head = ("where", "no norm", "LayerNorm", "RMSNorm", "by torch's F.rms_norm")
    body: list[Sequence[object]] = [
        (where, f"{bare:.4f}", "1.0000", f"{rms:.4f}", "")
        for where, (bare, rms) in VIT_TIMES.items()
    ]
    for dtype in dict.fromkeys(kind for _, kind in found.vits):
        every = [row for (_, kind), rows in found.vits.items() if kind == dtype for row in rows]
        body.append((f"**here, {dtype}**", *_normalised(every)))
        for (size, kind), rows in found.vits.items():
            if kind == dtype and rows:
                sizes = ", ".join(str(row.batch_size) for row in rows)
                body.append((f"{size}, batch {sizes}", *_normalised(rows)))
    return table(head, body)


def _normalised(rows: Sequence[Row]) -> list[str]:
    columns = ("no_norm", "original", "folded", "torch_rms_norm")
    return [f"{statistics.fmean(1 / r.faster(name).median for r in rows):.4f}" for name in columns]


def page(results: dict[str, Any]) -> str:
    """The page ``docs/paper_timings.md``, from what ``as_json`` returns."""
    versions = results["versions"]
    return f"""\
# The papers' times, and this machine's

Written by `{results["command"]}` on {results["date"]}.

* {results["hardware"]}, {results["dtype"]}, kernels: {results["kernels"]}
* load average at the end: {results["load"]:.1f} on {results["cores"]} cores; if it is far
  above the threads of the run, other programs were running, and small differences are lost in noise
* enjoyln {versions["enjoyln"]}, torch {versions["torch"]}, transformers {versions["transformers"]}
{sections(results)}"""


def sections(results: dict[str, Any]) -> str:
    """The notes and the tables, from what ``as_json`` returns."""
    found = from_json(results)

    def get(name: str, rows: int, tokens: int, mode: str = "eager") -> Row | None:
        return found.rows.get((name, rows, tokens, mode))

    norms = ", ".join(f"{name} {text}" for name, text in found.folded.items())
    left_out = "".join(f"* left out: {line}\n" for line in dict.fromkeys(found.left_out))
    return f"""\
* Weights are random, of the sizes that the papers name; classes without a head.
* Norms that fold: {norms}. The papers fold all of them; in BERT, a post-LN model, that would change
  the outputs, so here only the norms that fold exactly are folded.
* Medians of {results["repeats"]} rounds, or fewer if a round takes long. `saved` and `norms cost`
  are medians of the shares within a round; `saved` is negative if the folded model takes longer.
  `slower`: the 95 % interval of before / after lies below 1. `{NO_GAIN}`: the interval contains 1,
  or more is saved than norms cost. `norms cost`: the time that leaving out every norm would save,
  which is the most that any change to norms can save. `-`: not run on this machine.
* The papers' times were taken on GPUs, and their sizes fit float32. [The papers' claims](papers.md)
  says which papers are meant, and where their times do not fit together.
{left_out}
## Enjoy-LN, Tables 4 and 5: what folding costs, and what it gains

Batch 1 x 256 tokens. `fold` finds the plan from the configuration and centres the weights in
memory; `ratio` is fold / (fold + init); `saved` is the share (before - after) / before.

{overhead(found, get)}
## Enjoy-LN, Table 6: folding does not depend on the size of the inputs

Milliseconds to analyse BERT, with an example input of each size.

{folding(found)}
## Enjoy-LN, Tables 10 and 11: latency and throughput

Batch 2 x 256 tokens. `fused` is `torch.compile(backend="enjoyln")`; the original is captured in the
same way. This backend computes additions together with norms, also with norms that were kept.

{latency(get)}
## Enjoy-LN, Tables 12 and 13: BERT by batch size, the paper's on a V100

{batches(get)}
## Enjoy-LN, Tables 14, 15 and 16: by sequence length, batch 4, the paper's on an A100

{lengths(get)}
## Enjoy-LN, Tables 17 and 18: GPT-J, the paper's on an A100

{gptj(get)}
## Enjoy-LN, Table 19: a small model and a large one, batch 4

{by_model_size(get)}
## Pre-RMSNorm, Table 3: normalised time of ViT

The paper's are means over the six sizes of its Table 2 and batches of 1, 4, 16, 64, 256, 1024.

{vits(found)}"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtype", help="default: float32 on a GPU, as in the papers; bfloat16 on a CPU"
    )
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="for all of it; cases are left out for it"
    )
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device = torch.device(args.device)
    scale = GPU if device.type == "cuda" else CPU
    dtype = args.dtype or ("float32" if device.type == "cuda" else "bfloat16")

    options = "".join(f" --{name} {v}" for name in ("device", "dtype", "seconds")
                      if (v := vars(args)[name]) and v != parser.get_default(name))  # fmt: skip
    command = f"scripts/paper_tables.py{options}"

    def write(found: Measured) -> None:
        if args.json:
            results = as_json(found, command, dtype, device, scale)
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    found = measure(scale, dtype, device, write, args.seconds)
    print(page(as_json(found, command, dtype, device, scale)), end="")


if __name__ == "__main__":
    main()
