"""Folds thousands of random modules, and looks for wrong folds and unexpected exceptions.

    python scripts/random_modules.py --count 10000 --out modules.jsonl python
    scripts/random_modules.py --count 500 --seed 4000 --workers 2 python scripts/random_modules.py
    --alone                   every odd part, each in its own module python
    scripts/random_modules.py --seed 123 --one          one module, with its source python
    scripts/random_modules.py --seed 123 --one --shrink  the same, reduced as long as it fails

``tests/support/random_writer.py`` writes the modules. ``tests/support/random_check.py`` analyses
each one, folds it in memory, and compares all its outputs in float64, on inputs of other shapes and
values. A call that was not analysed has to be refused. Each worker is a separate process, which is
started again if it crashes or takes too long. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

SECONDS = 30
"""Time limit for one module."""
FAILURES = ("wrong", "apart", "raised", "spoiled", "crashed", "timeout")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--out", type=Path, help="a line of JSON for each module")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="each odd part, in its own module")
    parser.add_argument("--one", action="store_true", help="the module --seed, with its source")
    parser.add_argument("--shrink", action="store_true", help="first reduce a failing module")
    options = parser.parse_args()
    if options.one:
        return show(options.seed, options.alone, options.shrink)
    if options.alone:
        from random_writer import odd_parts

        options.seed, options.count = 0, len(odd_parts())
    results = []
    out = options.out.open("w") if options.out else None
    begin = time.monotonic()
    seeds = range(options.seed, options.seed + options.count)
    for result in run(seeds, options.workers, options.alone):
        results.append(result)
        if out:
            out.write(json.dumps(result) + "\n")
            out.flush()
        if result["outcome"] in FAILURES:
            print(f"\r\x1b[K{described(result)}" if sys.stdout.isatty() else described(result))
        if sys.stdout.isatty() or len(results) % 100 == 0:
            gone = time.monotonic() - begin
            left = gone / len(results) * (options.count - len(results))
            text = f"{len(results)} of {options.count}, {left / 60:.0f} min left"
            print(f"\r\x1b[K{text}" if sys.stdout.isatty() else text, end="", flush=True)
            print("" if not sys.stdout.isatty() else "", end="\n" * (not sys.stdout.isatty()))
    print()
    print(summary(results))
    return int(any(r["outcome"] in FAILURES for r in results))


def described(result: dict[str, Any]) -> str:
    parts = ", ".join(result["decisions"])
    lines = [f"{result['outcome']} seed {result['seed']}: error {result['error']:.2g} [{parts}]"]
    lines += [f"    {result[key]}" for key in ("call", "where") if result[key]]
    if result["outcome"] in ("raised", "spoiled", "crashed"):
        lines.append(f"    {result['reason'][:300]}")
    return "\n".join(lines)


def summary(results: list[dict[str, Any]]) -> str:
    count = Counter(r["outcome"] for r in results)
    folded = sum(bool(r["folded"]) for r in results)
    norms = sum(r["folded"] for r in results), sum(r["norms"] for r in results)
    lines = [
        ", ".join(f"{number} {name}" for name, number in count.most_common()),
        f"{folded} of {len(results)} modules have a folded norm; {norms[0]} of {norms[1]} norms",
    ]
    reasons = Counter(
        reason.split("\n")[0][:150]
        for r in results
        if r["outcome"] in ("kept", "refused")
        for reason in r["reason"].split("; ")
    )
    lines += ["why norms stay, and what is refused:"]
    lines += [f"{number:6} {reason}" for reason, number in reasons.most_common(40)]
    parts: Counter[str] = Counter()
    for r in results:
        if r["outcome"] in FAILURES:
            parts.update(set(d.partition(": ")[2] for d in r["decisions"]))
    if parts:
        lines += ["what failing modules are made of:"]
        lines += [f"{number:6} {what}" for what, number in parts.most_common(25)]
    return "\n".join(lines)


def run(seeds: range, workers: int, alone: bool) -> Iterator[dict[str, Any]]:
    """The results, in the order in which they arrive."""
    context = multiprocessing.get_context("spawn")
    waiting = iter(seeds)
    running: dict[Any, Worker] = {}
    for seed in waiting:
        worker = Worker(context, alone)
        worker.give(seed)
        running[worker.pipe] = worker
        if len(running) == workers:
            break
    while running:
        ready = multiprocessing.connection.wait([*running], timeout=1)
        for pipe, worker in list(running.items()):
            if pipe in ready:
                result = worker.take()
            elif time.monotonic() > worker.until:
                result = worker.failed("timeout", f"took more than {SECONDS} s")
                worker.process.kill()
            else:
                continue
            yield result
            if result["outcome"] in ("timeout", "crashed"):
                del running[pipe]
                worker.process.join()
                worker = Worker(context, alone)
                running[worker.pipe] = worker
            seed = next(waiting, None)
            if seed is None:
                worker.stop()
                del running[worker.pipe]
            else:
                worker.give(seed)


class Worker:
    """A process that checks one module after the other."""

    def __init__(self, context: Any, alone: bool) -> None:
        self.alone = alone
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=work, args=(other, alone), daemon=True)
        self.process.start()
        other.close()
        self.seed, self.until, self.first = 0, 0.0, True

    def give(self, seed: int) -> None:
        self.seed = seed
        self.until = time.monotonic() + SECONDS + 60 * self.first
        self.first = False
        self.pipe.send(seed)

    def take(self) -> dict[str, Any]:
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return self.failed("crashed", f"the process ended: {self.process.exitcode}")

    def failed(self, outcome: str, why: str) -> dict[str, Any]:
        from random_writer import write, write_alone

        decisions = (write_alone if self.alone else write)(self.seed).decisions
        made_of = [f"{place}: {what}" for place, what in decisions.items()]
        empty = {"norms": 0, "folded": 0, "error": 0.0, "call": "", "where": why, "skipped": 0}
        return {
            "seed": self.seed, "outcome": outcome, "reason": why, "decisions": made_of, **empty
        }  # fmt: skip

    def stop(self) -> None:
        with suppress(OSError):
            self.pipe.send(None)
        self.process.join(5)
        self.process.kill()


def work(pipe: Any, alone: bool) -> None:
    import torch
    from random_check import checked
    from random_writer import write, write_alone

    torch.set_num_threads(1)
    while (seed := pipe.recv()) is not None:
        written = (write_alone if alone else write)(seed)
        pipe.send(dataclasses.asdict(checked(written)))


def show(seed: int, alone: bool, shrink: bool) -> int:
    import torch
    from random_check import checked, shrunk
    from random_writer import write, write_alone

    torch.set_num_threads(1)
    written = (write_alone if alone else write)(seed)
    if shrink:
        written = shrunk(written)
    print(written)
    print(f"# analysed: {written.example}")
    result = checked(written)
    print(f"# {result.outcome}: {result.folded} of {result.norms} norms, error {result.error:.3g}")
    for text in (result.call, result.where, result.reason):
        if text:
            print("\n".join(f"#   {line}" for line in text.split("\n")))
    return int(result.failed)


if __name__ == "__main__":
    sys.exit(main())
