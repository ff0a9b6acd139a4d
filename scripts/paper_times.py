"""Measures what the papers' tables have, for ``paper_tables.py``."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import partial
from itertools import product
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
)

from enjoyln_cli import __version__, analyze, kernels
from enjoyln_cli.benchmark.cases import BenchOptions, compare_speeds
from enjoyln_cli.benchmark.results import Row, hardware
from enjoyln_cli.benchmark.timing import waiter_for
from enjoyln_cli.clock import Clock
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
FUSED_CASES = 6
"""How many cases in eager mode take the time of one in fused mode, which is compiled."""


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
    seconds: float = math.inf,
) -> Measured:
    """Measure the cases of ``scale`` in about ``seconds``: each model gets its share of them.

    ``on_found`` receives the results so far after each model. What there was no time or memory for
    is in ``left_out``.
    """
    found, clock = Measured(), Clock(time.perf_counter, seconds)
    log("folding for inputs of several sizes")
    config = transformers.BertConfig(max_position_embeddings=4096)
    with torch.device("meta"):
        bert = transformers.BertModel(config).eval()
    for rows, tokens in [scale.folding[0], *scale.folding]:  # the first run warms up
        if clock.spent > 0.1 * seconds:
            found.left_out.append(f"folding for inputs of {rows} x {tokens} and more: no time")
            break
        ids = torch.zeros(rows, tokens, dtype=torch.int64, device="meta")
        begin = time.perf_counter()
        analyze(bert, ids)
        found.folding[rows, tokens] = 1e3 * (time.perf_counter() - begin)
    groups = _groups(found, scale, dtype, device)
    for index, (name, cases, run) in enumerate(groups):
        if clock.left <= 0:
            found.left_out.append(f"{name}: no time")
            continue
        log(name)
        try:
            run(clock.left * cases / sum(others for _, others, _ in groups[index:]))
        except torch.OutOfMemoryError:
            found.left_out.append(f"{name}: does not fit in the memory of {device}")
        on_found(found)
    return found


def _groups(
    found: Measured, scale: Scale, dtype: str, device: torch.device
) -> list[tuple[str, int, Callable[[float], None]]]:
    """For each model its name, how much time it takes, counted in cases, and what measures it."""
    groups: list[tuple[str, int, Callable[[float], None]]] = []
    for name, pairs in scale.pairs.items():
        cases = len(pairs) + FUSED_CASES * len([pair for pair in pairs if pair in scale.fused])
        run = partial(_measure_model, found, name, pairs, scale, getattr(torch, dtype), device)
        groups.append((name, cases, run))
    for size, (kind, batches) in product(scale.vits, scale.vit_batches.items()):
        run = partial(_measure_vit, found, size, kind or dtype, batches, scale, device)
        groups.append((f"ViT {size} {kind or dtype}", len(batches), run))
    return groups


def _measure_vit(
    found: Measured,
    size: str,
    dtype: str,
    batches: Sequence[int],
    scale: Scale,
    device: torch.device,
    seconds: float,
) -> None:
    clock = Clock(time.perf_counter, seconds)
    width, depth, heads, hidden, patch = VITS[size]
    settings = {
        "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads,
        "intermediate_size": hidden, "patch_size": patch}  # fmt: skip
    vit = ("vit", "ViTModel", settings)
    plan = plan_of(*vit)
    original = random_model(*vit, getattr(torch, dtype), str(device))
    folded = folded_of(original, plan)
    asked = BenchOptions(tuple((rows, 1) for rows in batches), phases=("prefill",),
                         repeats=scale.repeats, seconds=seconds,
                         case_seconds=scale.seconds)  # fmt: skip
    rows, left_out = _compared(original, folded, plan, asked, device, clock)
    found.vits[size, dtype] = rows
    found.left_out += [f"ViT {size}: {line}" for line in left_out]


def _measure_model(
    found: Measured,
    name: str,
    pairs: Sequence[Pair],
    scale: Scale,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
) -> None:
    clock, wait = Clock(time.perf_counter, seconds), waiter_for(device)
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
    fused = [pair for pair in pairs if pair in scale.fused]
    if math.isfinite(seconds):
        clock.after = seconds * FUSED_CASES * len(fused) / (len(pairs) + FUSED_CASES * len(fused))
    for mode, asked_for in (("eager", pairs), ("fused", fused)):
        if mode == "fused":
            clock.after = 0.0
        if asked_for:
            asked = BenchOptions(
                tuple(asked_for), (mode,), ("prefill",), scale.repeats, seconds, scale.seconds
            )
            rows, left_out = _compared(original, folded, plan, asked, device, clock)
            found.left_out += [f"{name}: {line}" for line in left_out]
            for row in rows:
                found.rows[name, row.batch_size, row.seq_len or 0, mode] = row


def _compared(
    original: Any,
    folded: Any,
    plan: Plan,
    asked: BenchOptions,
    device: torch.device,
    clock: Clock,
) -> tuple[list[Row], list[str]]:
    """As ``compare_speeds``, but if a mode fails, the reason is returned as left out."""
    try:
        event = lambda level, text: log(text)  # noqa: E731
        return compare_speeds(original, folded, norms_of(plan), asked, device, event, clock)
    except UnsupportedModel as error:
        return [], [str(error)]


def log(text: str) -> None:
    """Print progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def as_json(
    found: Measured, command: str, dtype: str, device: torch.device, scale: Scale
) -> dict[str, Any]:
    """All results as plain values. ``measured`` of a row has the fields of ``Row``."""
    return {
        "date": date.today().isoformat(),
        "command": command,
        "hardware": hardware(device),
        "dtype": dtype,
        "kernels": kernels.native.status(device.type).what,
        "load": os.getloadavg()[0],
        "cores": os.cpu_count(),
        "repeats": scale.repeats,
        "versions": {
            "enjoyln": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "folded": found.folded,
        "overhead_seconds": {name: list(pair) for name, pair in found.overhead.items()},
        "folding_ms": {f"{rows} x {tokens}": ms for (rows, tokens), ms in found.folding.items()},
        "rows": [
            {"model": key[0], **row.to_json(), "measured": asdict(row)}
            for key, row in found.rows.items()
        ],
        "vits": [
            {"model": f"ViT {size}", "dtype": kind, **row.to_json(), "measured": asdict(row)}
            for (size, kind), rows in found.vits.items()
            for row in rows
        ],
        "left_out": found.left_out,
    }


def from_json(results: dict[str, Any]) -> Measured:
    """What ``as_json`` was called with."""
    found = Measured(
        folded=results["folded"],
        overhead={name: tuple(pair) for name, pair in results["overhead_seconds"].items()},
        folding={pair_of(text): ms for text, ms in results["folding_ms"].items()},
        left_out=results["left_out"],
    )
    for entry in results["rows"]:
        row = Row(**entry["measured"])
        found.rows[entry["model"], row.batch_size, row.seq_len or 0, row.mode] = row
    for entry in results["vits"]:
        key = entry["model"].removeprefix("ViT "), entry["dtype"]
        found.vits.setdefault(key, []).append(Row(**entry["measured"]))
    return found


def pair_of(text: str) -> Pair:
    """``4 x 64`` as numbers."""
    rows, tokens = map(int, text.split(" x "))
    return rows, tokens
