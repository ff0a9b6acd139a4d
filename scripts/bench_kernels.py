"""Compares the times of the CPU kernels and of torch's own norms; writes one JSON object.

    OMP_NUM_THREADS=1 python scripts/bench_kernels.py --out kernels.json

For every dtype, number of rows and width, these take turns in one process: ``F.layer_norm``,
``F.rms_norm`` with a bias, and the kernel; an addition and ``F.layer_norm``, and the fused kernel
in place. The inputs have zero mean, and the norms have weight and bias. Times are medians. A ratio
is torch's time divided by the kernel's, so more is better. ``--compiled`` also times torch's norms
compiled by Inductor.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from enjoyln_cli import kernels
from enjoyln_cli.kernels import native

ROWS = (1, 8, 32, 128, 512)
WIDTHS = (384, 768, 1024, 2048)
EPS = 1e-5
Ways = dict[str, Callable[[], Any]]


def ways(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Ways:
    shape = x.shape[-1:]
    scratch = residual.clone()
    own = residual.clone()
    return {
        "layer_norm": lambda: F.layer_norm(x, shape, weight, bias, EPS),
        "torch_rms_norm": lambda: F.rms_norm(x, shape, weight, EPS).add_(bias),
        "rms_norm": lambda: kernels.rms_norm(x, weight, bias, EPS),
        "add_layer_norm": lambda: F.layer_norm(scratch.add_(x), shape, weight, bias, EPS),
        "add_rms_norm_": lambda: kernels.add_rms_norm_(x, own, weight, bias, EPS),
        "own_add_layer_norm_": lambda: kernels.add_layer_norm_(x, own, weight, bias, EPS),
    }


def compiled(x: Tensor, weight: Tensor, bias: Tensor) -> Ways:
    """torch's norms, compiled by Inductor."""
    shape = x.shape[-1:]

    def layer_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, shape, weight, bias, EPS)

    def rms_norm(x: Tensor) -> Tensor:
        return F.rms_norm(x, shape, weight, EPS) + bias

    first, second = torch.compile(layer_norm), torch.compile(rms_norm)
    return {"compiled_layer_norm": lambda: first(x), "compiled_rms_norm": lambda: second(x)}


def keep_pages() -> None:
    """Tell the C library to keep freed memory; otherwise large results sometimes need new pages."""
    import ctypes

    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(option, 1 << 25)


def timed(candidates: Ways, seconds: float) -> dict[str, float]:
    """Median time of one call in microseconds."""
    found = turns(candidates, seconds)
    return {name: round(statistics.median(times), 3) for name, times in found.items()}


def turns(candidates: Ways, seconds: float) -> dict[str, list[float]]:
    """Time of one call in microseconds, for every turn. Each candidate runs once per turn."""
    calls = {}
    for name, call in candidates.items():
        call()
        start = time.perf_counter()
        for _ in range(10):
            call()
        calls[name] = max(1, int(2e-4 / ((time.perf_counter() - start) / 10)))
    found: dict[str, list[float]] = {name: [] for name in candidates}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(found[name]) < 15:
        for name, call in candidates.items():
            call()  # so that no candidate profits from the caches of the one before
            start = time.perf_counter()
            for _ in range(calls[name]):
                call()
            found[name].append((time.perf_counter() - start) / calls[name] * 1e6)
    return found


def measure(args: argparse.Namespace, dtype: torch.dtype) -> list[dict[str, Any]]:
    found = []
    for width in args.widths:
        for rows in args.rows:
            x, residual = (torch.randn(rows, width) for _ in range(2))
            tensors = (x - x.mean(-1, keepdim=True), residual * 0, *torch.randn(2, width))
            given = [t.to(dtype) for t in tensors]
            given[0] *= 1e-3  # the sum in place grows with every call, and must not overflow
            candidates = ways(*given)
            if args.compiled:
                candidates |= compiled(given[0], *given[2:])
            times = turns(candidates, args.seconds)
            us = {name: round(statistics.median(one), 3) for name, one in times.items()}
            found.append({"rows": rows, "width": width, "us": us} | ratios(times))
    return found


RATIOS = {
    "rms_over_layer_norm": ("layer_norm", "rms_norm"),
    "add_rms_over_add_layer_norm": ("add_layer_norm", "add_rms_norm_"),
    "add_layer_over_add_layer_norm": ("add_layer_norm", "own_add_layer_norm_"),
    "rms_over_compiled_layer_norm": ("compiled_layer_norm", "rms_norm"),
    "rms_over_compiled_rms_norm": ("compiled_rms_norm", "rms_norm"),
}
"""Ratios of the first time to the second."""


def ratios(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of the ratios within a turn, and the quartiles as their ``spread``."""
    found: dict[str, Any] = {"spread": {}}
    for name, (slow, fast) in RATIOS.items():
        if slow in times:
            each = [a / b for a, b in zip(times[slow], times[fast], strict=True)]
            low, middle, high = statistics.quantiles(each, n=4)
            found[name] = round(middle, 3)
            found["spread"][name] = [round(low, 3), round(high, 3)]
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    def geometric(name: str, shapes: list[dict[str, Any]]) -> float:
        return round(math.exp(statistics.fmean(math.log(one[name]) for one in shapes)), 3)

    many = [one for one in found if one["rows"] > 1] or found
    return {
        name: {
            "geometric_mean": geometric(name, found),
            "geometric_mean_without_one_row": geometric(name, many),
            "least": min(one[name] for one in found),
        }
        for name in found[0]
        if name in RATIOS
    }


def one_token(seconds: float) -> dict[str, Any]:
    """The time of a module call for one token of width 768, compared with ``nn.LayerNorm``."""
    from enjoyln_cli.runtime.install import install

    stock = nn.LayerNorm(768).eval()
    folded = install(nn.LayerNorm(768).eval(), [""], [])
    x = torch.randn(1, 768)
    calls: Ways = {"nn.LayerNorm": lambda: stock(x), "folded": lambda: folded(x)}
    times = turns(calls, seconds)
    each = [a / b for a, b in zip(times["folded"], times["nn.LayerNorm"], strict=True)]
    low, middle, high = (round(one, 3) for one in statistics.quantiles(each, n=4))
    us = {name: round(statistics.median(one), 3) for name, one in times.items()}
    return {"us": us, "folded_over_stock": middle, "spread": [low, high]}


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, help="file for the JSON; $OUT/bench_kernels.json if set"
    )
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--rows", type=numbers, default=ROWS)
    parser.add_argument("--widths", type=numbers, default=WIDTHS)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3, help="for every shape")
    parser.add_argument("--isa", default="", help="CPU instruction set: avx512, avx2, plain")
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_pages()
    status = native.status("cpu")
    if args.isa and not native.use(args.isa):
        parser.error(f"{args.isa} does not run here")
    result: dict[str, Any] = {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "kernels": args.isa or status.what,
        "threads": args.threads,
        "dtypes": {},
    }
    with torch.no_grad():
        result["one_token"] = one_token(args.seconds)
        for name in args.dtypes.split(","):
            shapes = measure(args, getattr(torch, name))
            result["dtypes"][name] = {"summary": summary(shapes), "shapes": shapes}
    out = args.out or (
        Path(os.environ["OUT"], "bench_kernels.json") if "OUT" in os.environ else None
    )
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"one_token": result["one_token"]}))
    for name, found in result["dtypes"].items():
        print(name, json.dumps(found["summary"]))


if __name__ == "__main__":
    main()
