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
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from bench_models import MODELS, folded_of, norms_of, plan_of, random_model
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

from enjoyln_cli import __version__, analyze, kernels
from enjoyln_cli.benchmark.cases import BenchOptions, compare_speeds
from enjoyln_cli.benchmark.results import Row, hardware
from enjoyln_cli.benchmark.timing import NO_GAIN, waiter_for
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters

LONG = 16384
"""Positions of models that are run on long rows; only their position tables grow."""
PAPER_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Bert": ("bert", "BertModel", {"max_position_embeddings": LONG}),
    "GPT2": ("gpt2", "GPT2Model", {"n_positions": LONG}),
    "OPT": ("opt", "OPTModel", {**MODELS["opt-125m"][2], "max_position_embeddings": LONG}),
    "Phi": ("phi", "PhiModel", {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
        "num_attention_heads": 32}),
    "GPTJ": ("gptj", "GPTJModel", {}),
}  # fmt: skip
VITS = {
    "Tiny-16": (192, 12, 3, 768, 16), "Small-16": (384, 12, 6, 1536, 16),
    "Base-16": (768, 12, 12, 3072, 16), "Large-16": (1024, 24, 16, 4096, 16),
    "Huge-14": (1280, 32, 16, 5120, 14), "Giant-14": (1664, 48, 16, 8192, 14),
}  # fmt: skip
"""Width, depth, heads, hidden units and patch size, from Table 2 of the Pre-RMSNorm paper."""
Pair = tuple[int, int]
"""Rows and tokens."""


@dataclass(frozen=True)
class Scale:
    """The part of the tables that a machine can run in reasonable time."""

    pairs: dict[str, list[Pair]]
    """From each model to the rows and tokens that are run in eager mode."""
    fused: tuple[Pair, ...]
    """The rows and tokens that are also run in fused mode."""
    vits: tuple[str, ...]
    vit_batches: dict[str, tuple[int, ...]]
    """From dtype to batch sizes."""
    folding: tuple[Pair, ...]
    repeats: int
    seconds: float


def _all_pairs(names: Iterable[str], batches: Iterable[int], lengths: Sequence[int]) -> Any:
    common = [(1, 256), (2, 256), *product((4,), lengths)]
    found = {name: list(common) for name in names}
    found["Bert"] += [(rows, 256) for rows in batches if rows != 4]
    return found


CPU = Scale(
    pairs=_all_pairs(("Bert", "GPT2", "OPT"), (4, 8), (64, 256)),
    fused=((2, 256),),
    vits=("Tiny-16", "Small-16", "Base-16"),
    vit_batches={"": (1, 4)},
    folding=((4, 64), (128, 4096)),
    repeats=9,
    seconds=40.0,
)
GPU = Scale(
    pairs={
        **_all_pairs(("Bert", "GPT2", "OPT"), BATCHES, LENGTHS),
        "Phi": [(1, 256)],
        "GPTJ": [size for size, figures in GPTJ.items() if figures],
    },
    fused=((2, 256),),
    vits=tuple(VITS),
    vit_batches={"bfloat16": (1, 4, 16, 64, 256, 1024), "float32": (1, 4, 16)},
    folding=tuple(product(FOLDING, LENGTHS_6)),
    repeats=25,
    seconds=0.5,
)


@dataclass
class Measured:
    """The results so far."""

    rows: dict[tuple[str, int, int, str], Row] = field(default_factory=dict)
    """From model, rows, tokens and mode to the result."""
    vits: dict[tuple[str, str], list[Row]] = field(default_factory=dict)
    """From size and dtype to the results."""
    folded: dict[str, str] = field(default_factory=dict)
    """From model to how many of its norms fold."""
    overhead: dict[str, tuple[float, float]] = field(default_factory=dict)
    """From model to the seconds for folding it and for creating it."""
    folding: dict[Pair, float] = field(default_factory=dict)
    """From rows and tokens to the milliseconds of analysing BERT with such an example."""
    left_out: list[str] = field(default_factory=list)


def measure(
    scale: Scale,
    dtype: str,
    device: torch.device,
    on_found: Callable[[Measured], None] = lambda _: None,
) -> Measured:
    """Measure all cases of ``scale``. ``on_found`` receives the results so far after each model."""
    found = Measured()
    log("folding for inputs of several sizes")
    config = transformers.BertConfig(max_position_embeddings=4096)
    with torch.device("meta"):
        bert = transformers.BertModel(config).eval()
    for rows, tokens in [scale.folding[0], *scale.folding]:  # the first run warms up
        ids = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
        begin = time.perf_counter()
        analyze(bert, ids)
        found.folding[rows, tokens] = 1e3 * (time.perf_counter() - begin)
    for name, pairs in scale.pairs.items():
        _measure_model(found, name, pairs, scale, getattr(torch, dtype), device)
        on_found(found)
    for size in scale.vits:
        width, depth, heads, hidden, patch = VITS[size]
        settings = {
            "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads,
            "intermediate_size": hidden, "patch_size": patch}  # fmt: skip
        vit = ("vit", "ViTModel", settings)
        plan = plan_of(*vit)
        for kind, batches in scale.vit_batches.items():
            log(f"ViT {size} {kind or dtype}")
            original = random_model(*vit, getattr(torch, kind or dtype), str(device))
            folded = folded_of(original, plan)
            asked = BenchOptions(tuple((rows, 1) for rows in batches), phases=("prefill",),
                          repeats=scale.repeats, seconds=math.inf,
                          case_seconds=scale.seconds)  # fmt: skip
            rows, left_out = _compared(original, folded, plan, asked, device)
            found.vits[size, kind or dtype] = rows
            found.left_out += [f"ViT {size}: {line}" for line in left_out]
            del original, folded
        on_found(found)
    return found


def _measure_model(
    found: Measured,
    name: str,
    pairs: Sequence[Pair],
    scale: Scale,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    log(name)
    wait = waiter_for(device)
    begin = time.perf_counter()
    original = random_model(*PAPER_MODELS[name], dtype, str(device))
    wait()
    init = time.perf_counter() - begin
    begin = time.perf_counter()
    plan = plan_of(*PAPER_MODELS[name])
    centre_parameters(original, plan)
    wait()
    found.overhead[name] = time.perf_counter() - begin, init
    folded = folded_of(original, plan)
    found.folded[name] = f"{len(plan.folded)} of {len(plan.norms)}"
    for mode, asked_for in (("eager", pairs), ("fused", [p for p in pairs if p in scale.fused])):
        if asked_for:
            asked = BenchOptions(
                tuple(asked_for), (mode,), ("prefill",), scale.repeats, math.inf, scale.seconds
            )
            rows, left_out = _compared(original, folded, plan, asked, device)
            found.left_out += [f"{name}: {line}" for line in left_out]
            for row in rows:
                found.rows[name, row.batch_size, row.seq_len or 0, mode] = row


def _compared(
    original: Any, folded: Any, plan: Plan, asked: BenchOptions, device: torch.device
) -> tuple[list[Row], list[str]]:
    """As ``compare_speeds``, but if a mode fails, the reason is returned as left out."""
    try:
        event = lambda level, text: log(text)  # noqa: E731
        return compare_speeds(original, folded, norms_of(plan), asked, device, event)
    except UnsupportedModel as error:
        return [], [str(error)]


def log(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


# The tables.


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


def page(found: Measured, command: str, dtype: str, device: torch.device, scale: Scale) -> str:
    def get(name: str, rows: int, tokens: int, mode: str = "eager") -> Row | None:
        return found.rows.get((name, rows, tokens, mode))

    norms = ", ".join(f"{name} {text}" for name, text in found.folded.items())
    left_out = "".join(f"* left out: {line}\n" for line in dict.fromkeys(found.left_out))
    return f"""\
# The papers' times, and this machine's

Written by `{command}` on {date.today().isoformat()}.

* {hardware(device)}, {dtype}, kernels: {kernels.native.status(device.type).what}
* load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; if it is far
  above the threads of the run, other programs were running, and small differences are lost in noise
* enjoyln {__version__}, torch {torch.__version__}, transformers {transformers.__version__}
* Weights are random, of the sizes that the papers name; classes without a head.
* Norms that fold: {norms}. The papers fold all of them; in BERT, a post-LN model, that would change
  the outputs, so here only the norms that fold exactly are folded.
* Medians of {scale.repeats} rounds, or fewer if a round takes long. `saved` and `norms cost` are
  medians of the shares within a round; `saved` is negative if the folded model takes longer.
  `slower`: the 95 % interval of before / after lies below 1. `{NO_GAIN}`: the interval contains 1,
  or more is saved than norms cost. `norms cost`: the time that leaving out every norm would save,
  which is the most that any change to norms can save. `-`: not run on this machine.
* The papers' times were taken on GPUs, and their sizes fit float32.
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


def as_json(found: Measured, dtype: str, device: torch.device) -> dict[str, Any]:
    """All results as plain values."""
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(device),
        "dtype": dtype,
        "kernels": kernels.native.status(device.type).what,
        "versions": {
            "enjoyln": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "folded": found.folded,
        "overhead_seconds": {name: list(pair) for name, pair in found.overhead.items()},
        "folding_ms": {f"{rows} x {tokens}": ms for (rows, tokens), ms in found.folding.items()},
        "rows": [{"model": key[0], **row.to_json()} for key, row in found.rows.items()],
        "vits": [
            {"model": f"ViT {size}", "dtype": kind, **row.to_json()}
            for (size, kind), rows in found.vits.items()
            for row in rows
        ],
        "left_out": found.left_out,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--dtype", help="default: float32 on a GPU, as in the papers; bfloat16 on a CPU"
    )
    parser.add_argument("--json", type=Path, help="file for all results")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    device = torch.device(args.device)
    scale = GPU if device.type == "cuda" else CPU
    dtype = args.dtype or ("float32" if device.type == "cuda" else "bfloat16")

    def write(found: Measured) -> None:
        if args.json:
            args.json.write_text(json.dumps(as_json(found, dtype, device), indent=1) + "\n")

    found = measure(scale, dtype, device, write)
    options = "".join(f" --{name} {v}" for name in ("device", "dtype") if (v := vars(args)[name])
                      and v != parser.get_default(name))  # fmt: skip
    print(page(found, f"scripts/paper_tables.py{options}", dtype, device, scale), end="")


if __name__ == "__main__":
    main()
