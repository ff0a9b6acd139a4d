"""How the commands scale with the size of a checkpoint, also beyond the memory and the disk.

    python scripts/bench_scale.py                    everything, one after the other
    python scripts/bench_scale.py --only fold        folds of 4, 8 and 16 GB against copying them
    python scripts/bench_scale.py --only bloom       all tensors of BLOOM-176B, 64 times smaller
    python scripts/bench_scale.py --only verify      8 GB verified within 3 GB of memory
    python scripts/bench_scale.py --only processes   one process against two, each on its own core

Decides the sizes and the projections; ``bench_fold`` measures times and memory. The simulated
checkpoint of 176 billion parameters has BLOOM's names, its 72 files, its index and its shapes,
except that each matrix is 64 times smaller in a dimension over which no mean is taken. Its plan is
made for the real shapes. The time per tensor is measured. The hours for the real checkpoint are
projected from its bytes, at 1 GB/s and at the measured rate. One process and two are compared with
checkpoint and result in memory, so that the processor is the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from bench_fold import ENJOYLN, LARGE, fold_against_copy, generated, run, table

SHRINK = 64
"""Factor by which matrices of the simulated checkpoint are smaller."""
FLAT = 20
"""Largest difference, in MB, between folds of different sizes that counts as flat."""


def folds(sizes: list[float], model_type: str, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Compare a fold of each size with a copy, with one checkpoint on the disk at a time."""
    rows = []
    for size in sizes:
        source = generated(size, model_type, folder)
        rows.append(fold_against_copy(source, repeats, None))
        shutil.rmtree(source)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def bloom() -> tuple[Any, dict[str, tuple[int, ...]], dict[str, str]]:
    """The configuration of BLOOM-176B, its stored shapes, and the file of each tensor.

    The names are those of the base model, as published. The embedding is in the first of 72 files,
    a block in each of the next 70, and the final norm in the last.
    """
    from make_checkpoint import on_meta, stored_tensors
    from transformers import BloomConfig, BloomForCausalLM

    config = BloomConfig(**LARGE["bloom-176b"])
    stored = stored_tensors(on_meta(BloomForCausalLM, config), "bfloat16")
    shapes = {one.name.removeprefix("transformer."): one.shape for one in stored}

    def file(name: str) -> str:
        number = int(name.split(".")[1]) + 2 if name.startswith("h.") else 1
        number = 72 if name.startswith("ln_f") else number
        return f"model_{number:05d}-of-00072.safetensors"

    return config, shapes, {name: file(name) for name in shapes}


def planned(config: Any, shapes: dict[str, tuple[int, ...]], places: dict[str, str]) -> Any:
    """The edits of the plan for the real model, for each stored tensor, from headers alone."""
    from enjoyln_cli.analysis.analyze import analyze_config
    from enjoyln_cli.checkpoint.headers import StoredTensor
    from enjoyln_cli.checkpoint.reader import Checkpoint
    from enjoyln_cli.checkpoint.source import Source
    from enjoyln_cli.rewrite.preconditions import check_edits

    tensors = {
        name: StoredTensor(name, places[name], "BF16", shape, 8, 2 * prod(shape))
        for name, shape in shapes.items()
    }
    source = Source("bloom-176b", Path(), None)
    files = tuple(sorted(set(places.values())))
    whole = Checkpoint(source, "safetensors", files, tensors, {}, "model.safetensors.index.json")
    return check_edits(analyze_config(config, checkpoint=whole).plan, whole)


def shrunken(shape: tuple[int, ...], centred: set[int]) -> tuple[int, ...]:
    """The shape of a matrix, smaller in its largest dimension over which no mean is taken."""
    free = [dim for dim in range(len(shape)) if dim not in centred]
    if len(shape) < 2 or not free:
        return shape
    at = max(free, key=lambda dim: shape[dim])
    return (*shape[:at], -(-shape[at] // SHRINK), *shape[at + 1 :])


def write_bloom(out: Path) -> None:
    """Write the simulated checkpoint: random values, real names, files and index."""
    from make_checkpoint import Stored, blocks, cuts, header_of

    config, shapes, places = bloom()
    edits = planned(config, shapes, places)
    out.mkdir()
    config.architectures = ["BloomForCausalLM"]
    config.save_pretrained(out)
    source, start = blocks("bfloat16", 0), 0
    for file in sorted(set(places.values())):
        group = []
        for name in (name for name, place in places.items() if place == file):
            axes = edits[name].axes if name in edits else ()
            shape = shrunken(shapes[name], {axis.dim for axis in axes})
            group.append(Stored(name, shape, "BF16", 2 * prod(shape)))
        with (out / file).open("wb") as opened:
            opened.write(header_of(group))
            for tensor in group:
                start += 7919
                for part in cuts(tensor, source, start):
                    opened.write(part)
    index = {"metadata": {}, "weight_map": places}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))


def fold_bloom(source: Path, out: Path) -> None:
    """Fold the simulated checkpoint with the real plan, and print the seconds that it took."""
    from enjoyln_cli.checkpoint.reader import open_checkpoint
    from enjoyln_cli.checkpoint.source import open_source
    from enjoyln_cli.rewrite.writer import write_shards

    begin = time.perf_counter()
    edits = planned(*bloom())
    settled = time.perf_counter()
    checkpoint = open_checkpoint(open_source(str(source), weights=True))
    out.mkdir()
    write_shards(checkpoint, edits, out)
    print(json.dumps({"plan_s": settled - begin, "fold_s": time.perf_counter() - settled}))


def simulated(folder: Path, repeats: int) -> dict[str, Any]:
    """Measured time per tensor, and projected hours for the real checkpoint."""
    source, out = folder / "bloom", folder / "bloom.folded"
    write_bloom(source)
    _, shapes, _ = bloom()
    torch_alone = run([sys.executable, "-c", "import torch"]).anonymous
    done = []
    for _ in range(repeats):
        done.append(run([sys.executable, __file__, "--fold-bloom", source, out]))
        shutil.rmtree(out)
    stated = sorted((json.loads(one.output) for one in done), key=lambda one: one["fold_s"])
    took = stated[len(stated) // 2]
    small = sum(path.stat().st_size for path in source.glob("*.safetensors")) / 1e9
    whole = sum(2 * prod(shape) for shape in shapes.values()) / 1e9
    shutil.rmtree(source)
    return {
        "what": "fold bloom-176b / 64",
        "gigabytes": round(small, 2),
        "fold_s": round(took["fold_s"], 2),
        "plan_s": round(took["plan_s"], 2),
        "memory_mb": round(max(one.anonymous for one in done) - torch_alone),
        "tensors": len(shapes),
        "ms_per_tensor": round(1000 * took["fold_s"] / len(shapes), 1),
        "whole_gb": round(whole, 1),
        "projected_hours_at_1_GB_per_s": round(whole / 3600, 2),
        "projected_hours_at_the_rate_measured": round(whole / small * took["fold_s"] / 3600, 2),
    }


def verified(gigabytes: float, limit: str, model_type: str, folder: Path) -> dict[str, Any]:
    """Fold a random checkpoint, and verify it in less memory than the model needs."""
    source = generated(gigabytes, model_type, folder)
    out = folder / "folded"
    run([*ENJOYLN, "fold", source, "-o", out, "--no-verify", "--quiet"])
    command = [*ENJOYLN, "verify", out, "--device-map", "auto", "--max-memory", limit, "--json"]
    done = run(command)
    found = json.loads(done.output)
    shutil.rmtree(source)
    shutil.rmtree(out)
    kept = ("passed", "identity_error", "ratio", "stock_ratio", "rows", "blocks_checked")
    return {
        "what": f"verify {source.name} --max-memory {limit}",
        "gigabytes": gigabytes,
        "command_s": round(done.seconds),
        "memory_mb": round(done.anonymous * 1.048576),
        **{name: found[name] for name in kept},
    }


def shared(processes: int, model_type: str, repeats: int) -> dict[str, Any]:
    """Fold 1 GB with one process and with several, in turns, each process on its own core.

    The time of a run is that of its slowest process, from the plan to the published result. Ends
    the benchmark if the results differ.
    """
    from enjoyln_cli.fs.digests import digest_of_file

    cores = sorted(os.sched_getaffinity(0))[:processes]
    if len(cores) < processes:
        sys.exit(f"{processes} processes need {processes} cores; there are only {len(cores)}")
    runs: dict[int, list[float]] = {1: [], processes: []}
    digests = set()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        source, out = generated(1, model_type, Path(name)), Path(name) / "folded"
        for _ in range(repeats):
            for many, seconds in runs.items():
                seconds.append(max(_together(cores[:many], source, out)))
                digests.add(
                    tuple(digest_of_file(path) for path in sorted(out.glob("*.safetensors")))
                )
                shutil.rmtree(out)
    if len(digests) > 1:
        sys.exit(f"{processes} processes and one process write different bytes")
    one, several = median(runs[1]), median(runs[processes])
    return {
        "what": f"fold 1 GB, {processes} processes",
        "gigabytes": 1,
        "fold_s": round(several, 2),
        "one_process_s": round(one, 2),
        "times_as_fast": round(one / several, 2),
        "seconds": {many: [round(s, 2) for s in seconds] for many, seconds in runs.items()},
    }


def _together(cores: list[int], source: Path, out: Path) -> list[float]:
    """Seconds that each process prints; one process runs on each core."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    team = {"WORLD_SIZE": f"{len(cores)}", "MASTER_ADDR": "localhost", "MASTER_PORT": f"{port}"}
    team["LOCAL_WORLD_SIZE"] = team["WORLD_SIZE"]
    command = [*ENJOYLN, "fold", source, "-o", out, "--no-verify", "--json", "--jobs", "1"]
    members = [
        subprocess.Popen(
            ["taskset", "-c", f"{core}", *map(str, command)],
            env={**os.environ, **team, "RANK": f"{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for rank, core in enumerate(cores)
    ]
    told = [member.communicate()[0] for member in members]
    if any(member.returncode for member in members):
        sys.exit(f"a fold with {len(cores)} processes failed")
    return [json.loads(text)["seconds"] for text in told if text]


def results(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    if args.only in (None, "fold"):
        rows = folds(args.sizes, args.model_type, args.repeats, folder)
        yield from rows
        spread = max(r["memory_mb"] for r in rows) - min(r["memory_mb"] for r in rows)
        flat = "flat" if spread <= FLAT else f"not flat: more than {FLAT} MB"
        yield {"what": f"memory of the folds differs by {spread} MB ({flat})"}
    if args.only in (None, "bloom"):
        yield simulated(folder, args.repeats)
    if args.only in (None, "verify"):
        yield verified(args.verify_size, args.max_memory, args.model_type, folder)
    if args.only in (None, "processes"):
        yield shared(args.processes, args.model_type, args.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description="How the enjoyln commands scale.")
    parser.add_argument("--only", choices=["fold", "bloom", "verify", "processes"])
    parser.add_argument("--sizes", type=float, nargs="+", default=[4, 8, 16], metavar="GB")
    parser.add_argument("--verify-size", type=float, default=8, metavar="GB")
    parser.add_argument("--max-memory", default="3GB", help="memory limit of the verification")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--model-type", default="opt", help="of generated checkpoints")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work", type=Path, help="directory for checkpoints; temporary by default")
    parser.add_argument("--json", action="store_true", help="print one JSON array")
    parser.add_argument("--fold-bloom", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.fold_bloom:
        fold_bloom(*args.fold_bloom)
        return
    with tempfile.TemporaryDirectory(dir=args.work) as name:
        rows = list(results(args, Path(name)))
    if args.json:
        print(json.dumps(rows))
        return
    print(table(rows))
    for row in rows:
        rest = {name: value for name, value in row.items() if name not in table([row])}
        if rest:
            print(f"{row['what']}: {json.dumps(rest)}")


if __name__ == "__main__":
    main()
