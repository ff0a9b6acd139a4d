"""Compares this machine's CPU kernels with torch's norms and writes ``dispatch.json``.

    OMP_NUM_THREADS=<cores> python scripts/tune_kernels.py --seconds 0.2

It decides for this processor from how many elements on a second thread saves time, and for which
shapes a norm of torch is faster than the kernel. A shape counts as lost only if the kernel took
more than ``--margin`` times as long as the best norm of torch in each of three runs. Neighbouring
lost shapes are joined to a range.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from bench_kernels import keep_pages, numbers, timed, ways

from enjoyln_cli import kernels
from enjoyln_cli.kernels import dispatch, native

ROWS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
WIDTHS = (64, 256, 768, 1024, 2048, 4096, 8192)
LARGEST = 1 << 21
"""Most elements of a shape; above it, memory and new pages dominate, and times are noise."""


def serial_below(seconds: float, cores: int) -> int:
    """The fewest elements, as a power of two, for which all threads beat one (rows of 768)."""
    library = native._library()
    best = 1 << 22
    for power in range(21, 12, -1):
        x = torch.randn(max(1, (1 << power) // 768), 768)

        def alone(x: torch.Tensor = x) -> None:
            library.enjoyln_parallel(None, 1 << 40)
            kernels.rms_norm(x, None, None, 1e-5)

        def together(x: torch.Tensor = x) -> None:
            library.enjoyln_parallel(native._parallel_for(), 1)
            kernels.rms_norm(x, None, None, 1e-5)

        torch.set_num_threads(cores)
        us = timed({"one": alone, "all": together}, seconds)
        if us["all"] * 1.05 > us["one"]:
            break
        best = 1 << power
    library.enjoyln_parallel(native._parallel_for(), best)
    return best


def lost(dtype: str, args: argparse.Namespace) -> list[tuple[int, int, str]]:
    """Rows, width and faster norm of each shape for which the kernel is slower in every run."""
    found: list[tuple[int, int, str]] = []
    one = torch.ones(1, 8, dtype=getattr(torch, dtype))
    if native.entry.rms_norm(one, None, None, 1e-5) is NotImplemented:
        return found  # the kernels do not support this dtype
    for width in WIDTHS:
        for rows in (n for n in ROWS if n * width <= LARGEST):
            x = torch.randn(rows, width)
            tensors = (x - x.mean(-1, keepdim=True), torch.zeros_like(x), *torch.randn(2, width))
            given = ways(*(t.to(getattr(torch, dtype)) for t in tensors))
            wanted = ("layer_norm", "torch_rms_norm", "rms_norm")
            given = {name: given[name] for name in wanted}
            for _ in range(3):
                us = timed(given, args.seconds)
                other = min(("layer_norm", "torch_rms_norm"), key=lambda name: us[name])
                if us["rms_norm"] <= us[other] * args.margin:
                    break
            else:
                found.append((rows, width, other.removeprefix("torch_")))
    return found


def ranges(dtype: str, places: list[tuple[int, int, str]]) -> list[dict[str, Any]]:
    """A range for every width and faster norm, from the first lost number of rows to the last."""
    found = []
    for width in sorted({width for _, width, _ in places}):
        at = WIDTHS.index(width)
        low = WIDTHS[at - 1] + 1 if at else 1
        for way in sorted({way for _, w, way in places if w == width}):
            rows = [n for n, w, one in places if w == width and one == way]
            last = rows[-1] if rows[-1] < ROWS[-1] else 2**31
            found.append(
                {"dtype": dtype, "rows": [rows[0], last], "widths": [low, width], "faster": way}
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--isa", default="", help="CPU instruction set: avx512, avx2, plain")
    parser.add_argument("--dtypes", default="float32,bfloat16,float16")
    parser.add_argument(
        "--seconds", type=float, default=0.1, help="seconds for every shape and run"
    )
    parser.add_argument("--margin", type=float, default=1.05)
    parser.add_argument("--threads", type=numbers, default=(torch.get_num_threads(),))
    parser.add_argument("--out", type=Path, default=dispatch.FILE)
    args = parser.parse_args()
    status = native.status("cpu")
    if not status.active or (args.isa and not native.use(args.isa)):
        parser.error(f"no kernels: {status.what}")
    keep_pages()
    cores = args.threads[0]
    name = f"cpu-{args.isa}" if args.isa else native.table_name(status)
    with torch.no_grad():
        below = serial_below(args.seconds, cores) if cores > 1 else 1 << 16
        torch.set_num_threads(1)
        places = [p for dtype in args.dtypes.split(",")
                  for p in ranges(dtype, lost(dtype, args))]  # fmt: skip
    known = json.loads(args.out.read_text()) if args.out.exists() else {}
    threads = f"{cores} thread{'s' * (cores > 1)}"
    known[name] = {
        "measured": f"{platform.machine()}, torch {torch.__version__}, {threads}",
        "serial_below": below,
        "declined": places,
    }
    args.out.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    print(json.dumps({name: known[name]}))


if __name__ == "__main__":
    main()
