"""Measures the times in the tables of the two papers on this machine; prints Markdown.

    OMP_NUM_THREADS=1 python scripts/paper_times.py
    python scripts/paper_times.py --device cuda --dtype float32 --json times.json

These are what Tables 4, 5 and 9 to 19 of Enjoy-LN and Table 3 of Pre-RMSNorm time, with random
weights, as ``enjoyln bench`` does. A CPU runs the small sizes, a GPU all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from bench_cases import OPT_125M, benchmarked

from enjoyln_cli import BenchOptions
from enjoyln_cli.errors import EnjoyLNError


def table(head: Sequence[str], body: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


LONG = 16384
PHI_2 = {
    "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
TIMED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Bert": ("bert", "BertModel", {"max_position_embeddings": LONG}),
    "GPT2": ("gpt2", "GPT2Model", {"n_positions": LONG}),
    "OPT": ("opt", "OPTModel", {**OPT_125M, "max_position_embeddings": LONG}),
    "Phi": ("phi", "PhiModel", PHI_2),
    "GPTJ": ("gptj", "GPTJModel", {}),
}
"""Position tables are as long as the papers' rows; that changes no time."""
VITS = {
    "Tiny-16": (192, 12, 3, 768, 16), "Small-16": (384, 12, 6, 1536, 16),
    "Base-16": (768, 12, 12, 3072, 16), "Large-16": (1024, 24, 16, 4096, 16),
    "Huge-14": (1280, 32, 16, 5120, 14), "Giant-14": (1664, 48, 16, 8192, 14),
}  # fmt: skip
"""Width, depth, heads, hidden units and patch size, from Table 2 of the Pre-RMSNorm paper."""
VIT_TIMES = {"A100, amp": (0.8567, 0.9699), "A100, float32": (0.9353, 0.9850)}
"""Without norms and with RMSNorm, of the time with LayerNorm: means over sizes and batches."""
NORM_SHARES = {"Bert": 9.56, "GPT2": 10.72, "OPT": 7.33}
"""Percent of the time that norms take, from Table 9."""
FOLDS = {
    "Bert": ("0.0452", "0.1263"), "GPT2": ("0.0651", "0.1639"), "OPT": ("0.0484", "0.1183"),
    "Phi": ("0.0928", "0.1779"),
}  # fmt: skip
"""Seconds of a fold, on an A100 (Table 4) and on a V100 (Table 5)."""
FIGURES: list[tuple[str, int, int, str, float | None, float | None, float]] = [
    *(("Bert", rows, 256, "V100, Table 12", *three) for rows, three in {
        4: (0.0201, 0.0193, 3.99), 8: (0.0360, 0.0347, 3.64), 16: (0.0693, 0.0675, 2.58),
        32: (0.1339, 0.1269, 5.25), 64: (0.2557, 0.2418, 5.45), 128: (0.5092, 0.4763, 6.45),
    }.items()),
    *((name, 1, 256, f"{gpu}, Table {4 + (gpu == 'V100')}", *three) for name, gpu, *three in [
        ("Bert", "A100", 0.0077, 0.0073, 5.19), ("Bert", "V100", 0.0095, 0.0086, 9.47),
        ("GPT2", "A100", 0.0119, 0.0113, 5.22), ("GPT2", "V100", 0.0115, 0.0110, 4.34),
        ("OPT", "A100", 0.0092, 0.0078, 14.60), ("OPT", "V100", 0.0106, 0.0091, 14.73),
        ("Phi", "A100", 0.0531, 0.0507, 4.52), ("Phi", "V100", 0.0693, 0.0668, 3.54)]),
    *((name, 2, 256, f"{gpu}, Table 10", *three) for name, gpu, *three in [
        ("Bert", "V100", 0.0116, 0.0111, 3.90), ("Bert", "A100", 0.0090, 0.0087, 2.79),
        ("GPT2", "V100", 0.0121, 0.0117, 3.57), ("GPT2", "A100", 0.0093, 0.0089, 4.22),
        ("OPT", "V100", 0.0119, 0.0116, 2.53), ("OPT", "A100", 0.0094, 0.0089, 5.85)]),
    *((name, 4, tokens, "A100, Table 16", None, None, saved) for name, shares in {
        "Bert": (1.96, 6.86, 10.62, 18.45, 24.95), "GPT2": (4.23, 6.65, 8.50, 13.88, 21.47),
        "OPT": (14.13, 5.09, 5.17, 8.04, 11.51),
    }.items() for tokens, saved in zip((64, 256, 1024, 4096, LONG), shares, strict=True)),
    *(("GPTJ", rows, tokens, "A100, Table 17", *three) for rows, tokens, *three in [
        (4, 64, 0.2030, 0.1931, 4.89), (4, 256, 0.7840, 0.7453, 4.94),
        (4, 1024, 3.0976, 2.8637, 7.55), (8, 64, 0.4187, 0.4010, 4.22),
        (8, 256, 1.5709, 1.4666, 6.64), (8, 1024, 6.2038, 5.7415, 7.45),
        (16, 64, 0.7793, 0.7409, 4.92), (16, 256, 2.9893, 2.7601, 7.67)]),
]  # fmt: skip
"""Model, rows, tokens, where, seconds before and after a fold (not in Table 16), percent saved."""


Case = tuple[str, tuple[str, str, dict[str, Any]], Sequence[tuple[int, int]]]
"""A name, a model, and its pairs of rows and tokens."""


def paper_cases(on_gpu: bool) -> Iterator[Case]:
    """What is timed on a GPU, or on a CPU."""
    for name in TIMED:
        pairs = sorted({(rows, tokens) for model, rows, tokens, *_ in FIGURES if model == name})
        if not on_gpu:
            pairs = [pair for pair in pairs if pair[0] * pair[1] <= 2048 and name in NORM_SHARES]
        if pairs:
            yield name, TIMED[name], pairs
    for size, (width, depth, heads, hidden, patch) in list(VITS.items())[: None if on_gpu else 3]:
        settings = {
            "hidden_size": width, "num_hidden_layers": depth, "num_attention_heads": heads,
            "intermediate_size": hidden, "patch_size": patch}  # fmt: skip
        batches = (1, 4, 16, 64, 256, 1024) if on_gpu else (1, 4)
        yield f"ViT {size}", ("vit", "ViTModel", settings), [(rows, 1) for rows in batches]


def time_models(
    cases: Iterable[Case],
    device: str,
    dtype: str,
    seconds: float,
    modes: tuple[str, ...] = ("eager",),
    write: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """From each model to what ``enjoyln bench`` measured, or to ``left_out`` with the reason.

    Each model gets its share of ``seconds``. ``write`` gets the results so far after each.
    """
    results: dict[str, Any] = {}
    cases = list(cases)
    for name, kind, pairs in cases:
        print(name, file=sys.stderr, flush=True)
        asked = BenchOptions(tuple(pairs), modes, ("prefill",), seconds=seconds / len(cases))
        with tempfile.TemporaryDirectory() as folder:
            try:
                results[name] = benchmarked(kind, Path(folder, name), asked, dtype, device)
            except (EnjoyLNError, torch.OutOfMemoryError) as error:
                results[name] = {"rows": [], "left_out": [str(error).partition("\n")[0]]}
        write(results)
    return results


def saved(row: Mapping[str, Any]) -> str:
    """The share of the original's time that is saved, as the papers state it."""
    words = "" if row["verdict"] == "faster" else f" ({row['verdict']})"
    return f"{100 * (1 - 1 / row['speedup']):.2f} %{words}"


def norm_cost(row: Mapping[str, Any]) -> str:
    interval = row["norm_cost_interval"]
    words = "" if interval and interval[0] > 0 else " (too small to measure)"
    return f"{100 * row['norm_cost']:.2f} %{words}"


def seconds_of(row: Mapping[str, Any], model: str) -> str:
    return f"{row['models'][model]['median_ms'] / 1e3:.4f}"


def times_page(results: Mapping[str, Any]) -> str:
    """What ``time_models`` returned, beside the papers' figures."""
    rows = {(name, r["batch_size"], r["seq_len"] or 1): r
            for name, found in results.items() for r in found["rows"]}  # fmt: skip
    body: list[list[object]] = []
    for name, count, tokens, where, before, after, share in FIGURES:
        row, paper = rows.get((name, count, tokens)), [before or "", after or "", f"{share:.2f} %"]
        here = ["-"] * 4
        if row:
            here = [seconds_of(row, "original"), seconds_of(row, "folded"), saved(row),
                    norm_cost(row)]  # fmt: skip
        body.append([name, f"{count} x {tokens}", where, *paper, *here])
    head = ("model", "rows x tokens", "the paper's", "before, s", "after, s", "saved",
            "here: before, s", "after, s", "saved", "norms cost")  # fmt: skip
    folds = [
        [name, *paper, *(f"{results[name][key]:.2f}" for key in ("fold_seconds", "load_seconds")),
         f"{NORM_SHARES[name]:.2f} %" if name in NORM_SHARES else ""]
        for name, paper in FOLDS.items() if results.get(name, {}).get("fold_seconds")
    ]  # fmt: skip
    vits = [[where, f"{bare:.4f}", f"{rms:.4f}", ""] for where, (bare, rms) in VIT_TIMES.items()]
    for size in VITS:
        if found := results.get(f"ViT {size}", {}).get("rows"):
            vits.append([f"here, {size}", *(
                f"{statistics.fmean(1 / r['models'][m]['times_as_fast'] for r in found):.4f}"
                for m in ("no_norm", "folded", "torch_rms_norm"))])  # fmt: skip
    left = [f"* left out: {name}: {line}" for name, r in results.items() for line in r["left_out"]]
    about = next((found for found in results.values() if found["rows"]), {})
    versions = ", ".join(f"{name} {v}" for name, v in about.get("versions", {}).items())
    return "\n".join([
        f"{about.get('hardware')}, {about.get('dtype')}, {versions}, {about.get('date')}. Weights "
        "are random, classes without a head. `-`: not run here. `saved` and `norms cost` are what "
        "`enjoyln bench` prints. The papers replace all norms of BERT, which changes its outputs; "
        "here the norms that fold exactly are folded.", "", *left, "", table(head, body), "",
        "Seconds of a fold, here with reading and writing; `load`: loading the original.",
        "",
        table(("model", "A100, Table 4", "V100, Table 5", "here: fold, s", "load, s",
               "norms cost, Table 9"), folds), "",
        "ViT, Table 3 of Pre-RMSNorm: times divided by those with LayerNorm.", "",
        table(("where", "no norm", "RMSNorm", "torch's F.rms_norm"), vits),
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16", help="the papers' is probably float32")
    parser.add_argument("--seconds", type=float, default=900, help="for all times")
    parser.add_argument("--json", type=Path, help="file for the times, written after each model")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)

    def write(results: dict[str, Any]) -> None:
        if args.json:
            args.json.write_text(json.dumps(results, indent=1) + "\n")

    print("# The papers' times, and this machine's\n")
    cases = paper_cases(on_gpu=args.device != "cpu")
    print(times_page(time_models(cases, args.device, args.dtype, args.seconds, write=write)))


if __name__ == "__main__":
    main()
