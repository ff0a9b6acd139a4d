"""Times the cases of a pair of models one after the other, until the time is up.

A case is one size, phase and mode. Cases run from the smallest to the largest input. Each gets an
equal share of the time that is left, and what it does not use is left for the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from enjoyln_cli.benchmark.baselines import fresh_compiler, in_mode, variants
from enjoyln_cli.benchmark.choices import GRID_LENGTHS, GRID_ROWS, SECONDS
from enjoyln_cli.benchmark.speedups import Row
from enjoyln_cli.benchmark.timing import time_rounds
from enjoyln_cli.benchmark.workload import PHASES, Size, decode, prefill, prompt, sizes
from enjoyln_cli.calls.calls import keeps_cache
from enjoyln_cli.checkpoint.marker import blame_marker
from enjoyln_cli.clock import Clock
from enjoyln_cli.runtime.loading import optimize
from enjoyln_cli.runtime.modules import Folded

GRID = tuple(product(GRID_ROWS, GRID_LENGTHS))
"""Rows and tokens that are measured by default."""
SHORT = (1, 32)
"""Rows and tokens that come first by default, for models that are slow or have few positions."""


@dataclass(frozen=True)
class BenchOptions:
    """What ``bench`` measures."""

    pairs: tuple[tuple[int, int], ...] = (SHORT, *GRID)
    """Rows and tokens of each size."""
    modes: tuple[str, ...] = ("eager",)
    phases: tuple[str, ...] = PHASES
    repeats: int = 15
    """Largest number of rounds; each model runs once per round."""
    seconds: float = SECONDS
    """Time for the whole run; cases that do not fit are left out, and ``inf`` sets no limit."""


@dataclass(frozen=True)
class Case:
    """The mode, size and phase of one row of the result."""

    mode: str
    size: Size
    phase: str

    def __str__(self) -> str:
        return f"{self.size}, {self.phase}, {self.mode}"


def planned_cases(model: Any, options: BenchOptions) -> tuple[list[Case], list[str]]:
    """The cases that ``model`` can run, and a sentence for each size or phase that it cannot."""
    inputs, left_out = sizes(model, options.pairs)
    phases = [phase for phase in options.phases if phase != "decode" or keeps_cache(model)]
    if len(phases) < len(options.phases):
        left_out.append(_no_cache(model))
    return [Case(*case) for case in product(options.modes, inputs, phases)], left_out


def time_cases(
    original: Any,
    folded: Any,
    norms: Sequence[str],
    cases: Sequence[Case],
    repeats: int,
    device: torch.device,
    clock: Clock,
) -> Iterator[Row | str]:
    """Time both models on ``device``, with the two models for comparison, case after case.

    Both models are in memory, on the CPU. ``norms`` are the paths of all LayerNorms. Yields the row
    of each case, or a sentence that says why there is none.

    Raises ``TimeIsUp`` if ``clock`` has no time left for enough rounds of a case.
    """
    original, folded = original.to(device), folded.to(device)
    if device.type != "cpu" and any(isinstance(module, Folded) for module in folded.modules()):
        optimize(folded)  # chooses the kernels for this device
    with torch.no_grad(), torch.cuda.device(device.index if device.type == "cuda" else -1):
        with blame_marker(type(folded).__name__):
            prefill(folded, cases[0].size.to(device).inputs).run(None)
        models = variants(original, folded, norms)
        for number, case in enumerate(cases):
            share = clock.left / (len(cases) - number)
            try:
                yield _time_case(models, case, device, repeats, share, clock.left)
            except torch.OutOfMemoryError:
                yield f"{case}: does not fit in the memory of {device}"


def _no_cache(model: Any) -> str:
    return f"decode: {type(model).__name__} has no cache"


def _time_case(
    models: Mapping[str, Any],
    case: Case,
    device: torch.device,
    repeats: int,
    seconds: float,
    limit: float,
) -> Row | str:
    """Time one case within about ``seconds``. Returns the row, or why there is none.

    Raises ``TimeIsUp`` if that takes more than ``limit`` seconds.
    """
    size, mode = case.size.to(device), case.mode
    with fresh_compiler(mode):
        if case.phase == "decode":
            if size.tokens == 1:
                return f"{case}: needs at least two tokens"
            text = prompt(models["original"], size)
            if text is None:
                return _no_cache(models["original"])
            tasks = {name: decode(model, text) for name, model in in_mode(models, mode).items()}
        else:
            ready = in_mode(models, mode)
            tasks = {name: prefill(model, size.inputs) for name, model in ready.items()}
        times = time_rounds(tasks, repeats, seconds, limit)
    return Row(str(size), size.rows, size.tokens, case.phase, mode, times)
