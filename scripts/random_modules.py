"""Writes random models, folds each in memory, and looks for wrong folds and bare exceptions.

    python scripts/random_modules.py --count 10000 --seed 4000
    python scripts/random_modules.py --alone              usual models with one odd part each
    python scripts/random_modules.py --seed 123 --show    one model, reduced as long as it fails

``tests/support/grammar.py`` says what models are made of. ``tests/support/random_models.py`` writes
them, ``random_check.py`` folds and compares them. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from random_check import FAILURES, check, shrunk  # noqa: E402
from random_models import odd_productions, write, write_alone  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=100, help="the number of models")
    parser.add_argument("--seed", type=int, default=0, help="the first model")
    parser.add_argument("--alone", action="store_true", help="each odd production by itself")
    parser.add_argument("--show", action="store_true", help="the source of the first model")
    options = parser.parse_args()
    torch.set_num_threads(1)
    writer = write_alone if options.alone else write
    if options.show:
        return show(writer(options.seed))
    count = len(odd_productions()) if options.alone else options.count
    return summarise(map(writer, range(options.seed, options.seed + count)))


def summarise(models: Iterable) -> int:
    """Check models; print failures, then the numbers of outcomes and why norms stay."""
    outcomes, reasons = Counter[str](), Counter[str]()
    for result in map(check, models):
        outcomes[result.outcome] += 1
        reasons.update(result.reason.split("; ") if result.reason else ())
        if result.failed:
            print(f"{result.outcome} {result.seed}: {result.error:.2g} {result.place}")
            print(f"    {', '.join(result.odd)}", flush=True)
        if outcomes.total() % 100 == 0:
            print(f"{outcomes.total()} models", file=sys.stderr)
    print(", ".join(f"{number} {outcome}" for outcome, number in outcomes.most_common()))
    for reason, number in reasons.most_common(40):
        print(f"{number:6} {reason.splitlines()[0][:150]}")
    return int(any(outcomes[name] for name in FAILURES))


def show(written) -> int:
    result = check(written)
    if result.failed:
        written = shrunk(written)
    print(written.source, *written.calls, sep="\n")
    print(f"{result.outcome}: {result.folded} of {result.norms} norms, error {result.error:.3g}")
    print(result.place or result.reason)
    return int(result.failed)


if __name__ == "__main__":
    sys.exit(main())
