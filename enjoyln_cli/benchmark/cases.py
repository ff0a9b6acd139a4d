"""Times the cases of a pair of models one after the other, until the time is up.

A case is one size, phase and mode. Cases run from the smallest to the largest input. Each gets an
equal share of the time that is left, and what it does not use is left for the others. A larger
input takes at least as long as a smaller one, so no case begins if the time left does not suffice
for enough rounds of the one before. ``decode`` waits for ``prefill`` in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.utils.benchmark import timer

from enjoyln_cli.benchmark.baselines import COLUMNS, fresh_compiler, in_mode, variants
from enjoyln_cli.benchmark.choices import GRID_LENGTHS, GRID_ROWS, SECONDS
from enjoyln_cli.benchmark.results import Row
from enjoyln_cli.benchmark.timing import ENOUGH, WARM_UP, Task, time_rounds
from enjoyln_cli.benchmark.workload import PHASES, Size, decode, prefill, prompt, sizes
from enjoyln_cli.calls.calls import keeps_cache
from enjoyln_cli.checkpoint.marker import blame_marker
from enjoyln_cli.clock import Clock, duration
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event
from enjoyln_cli.runtime.loading import optimize
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.text import counted

GRID = tuple(product(GRID_ROWS, GRID_LENGTHS))
"""Rows and tokens that are measured by default; ``--full`` measures all of them."""
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


def compare_speeds(
    original: Any,
    folded: Any,
    norms: Sequence[str],
    asked: BenchOptions,
    device: torch.device,
    event: Event,
    clock: Clock,
) -> tuple[list[Row], list[str]]:
    """Time both models on ``device``, with the two models for comparison.

    Both models are in memory, on the CPU. ``norms`` are the paths of all LayerNorms. ``event``
    receives the result of each case. ``clock`` started with the whole run. Returns the rows, and a
    sentence for each case that was left out.

    Raises ``UnsupportedModel`` if there is no time for any case.
    """
    inputs, left_out = sizes(original, asked.pairs)
    phases = [phase for phase in asked.phases if phase != "decode" or keeps_cache(original)]
    if len(phases) < len(asked.phases):
        left_out.append(_no_cache(original))
    if not phases or not asked.modes:
        return [], left_out
    original, folded = original.to(device), folded.to(device)
    if device.type != "cpu" and any(isinstance(module, Folded) for module in folded.modules()):
        optimize(folded)  # chooses the kernels for this device
    cases = [Case(*case) for case in product(asked.modes, inputs, phases)]
    until = "" if math.isinf(clock.limit) else f"; the run ends within {duration(clock.limit)}"
    event(
        "stage", f"measuring {counted(len(cases), 'case')}, at most {asked.repeats} rounds{until}"
    )
    (short,), _ = sizes(original, [(1, min(SHORT[1], inputs[0].tokens or 1))])
    with torch.no_grad(), torch.cuda.device(device.index if device.type == "cuda" else -1):
        with blame_marker(type(folded).__name__):
            run = prefill(folded, short.to(device).given).run
            run(None)  # the first run takes longer than others
            begin = timer()
            run(None)
        an_item = (timer() - begin) / short.items
        models = variants(original, folded, norms)
        time_case = partial(_time_case, models, device, asked.repeats, clock)
        rows, not_measured = run_each(time_case, cases, an_item, clock, event)
    return rows, left_out + not_measured


Run = Callable[[Case, float], tuple[Row | str, float]]
"""Times a case in its share of the time, in seconds. Returns the row, or a reason why there is none
(empty if there was no time), and the seconds that the case needs at least."""


def run_each(
    run: Run, cases: Sequence[Case], an_item: float, clock: Clock, event: Event
) -> tuple[list[Row], list[str]]:
    """Time the cases in order. Returns the rows, and a sentence for each case that was left out.

    ``an_item`` are the seconds for each token (or row) of a short input. A larger input usually
    takes less for each, so this only decides whether there is time for a single call.

    Raises ``UnsupportedModel`` if there is no time for any case.
    """
    rows: list[Row] = []
    left_out: list[str] = []
    least: dict[tuple[str, str], float] = {}
    """From a mode and phase to the seconds that the largest case so far needs at least."""
    begin, needed = clock.spent, math.inf
    for done, case in enumerate(cases):
        row: Row | str = ""
        seconds = max(least.get((case.mode, phase), 0.0) for phase in ("prefill", case.phase))
        a_call = an_item * case.size.items
        if clock.left <= a_call:
            seconds = max(seconds, len(COLUMNS) * (WARM_UP + ENOUGH) * a_call)
        elif clock.left > seconds:
            row, seconds = run(case, clock.left / (len(cases) - done))
            least[case.mode, case.phase] = max(seconds, least.get((case.mode, case.phase), 0.0))
        if isinstance(row, Row):
            rows.append(row)
            event("stage", _line(row))
        elif row:
            left_out.append(row)
        else:
            left_out.append(f"{case}: no time was left; it needs about {duration(seconds)}")
            needed = min(needed, begin + seconds)
        rate = (clock.spent - begin) / (done + 1)
        clock.tell(min(clock.left, (len(cases) - done - 1) * rate))
    if not rows and needed < math.inf:
        raise UnsupportedModel(
            f"no case fits into {duration(clock.limit)}: {cases[0]} needs about "
            f"{duration(needed)} with loading; allow it with --seconds {math.ceil(2 * needed)}"
        )
    return rows, list(dict.fromkeys(left_out))


def _no_cache(model: Any) -> str:
    return f"decode: {type(model).__name__} has no cache"


def _line(row: Row) -> str:
    text = f"{row.case}: original {row.ms['original'].median:.4g} ms"
    return f"{text}, folded {row.speedup.median:.3f} times as fast"


def _time_case(
    models: Mapping[str, Any],
    device: torch.device,
    repeats: int,
    clock: Clock,
    case: Case,
    share: float,
) -> tuple[Row | str, float]:
    """Time one case; see ``Run``."""
    begin, mode, steps = clock.spent, case.mode, None
    try:
        size = case.size.to(device)
        with fresh_compiler(mode):
            if case.phase == "decode" and size.tokens == 1:
                return f"{case}: needs at least two tokens", 0.0
            if case.phase == "decode":
                text = prompt(models["original"], size)
                if text is None:
                    return _no_cache(models["original"]), 0.0
                steps = text.steps
                tasks = {n: decode(m, text) for n, m in in_mode(models, mode).items()}
            else:
                tasks = {n: prefill(m, size.given) for n, m in in_mode(models, mode).items()}
            before = clock.spent - begin
            times, needed = time_rounds(tasks, repeats, clock, share - before)
            peaks = None
            if times and device.type == "cuda":
                peaks = {name: _peak(task, device) for name, task in tasks.items()}
    except torch.OutOfMemoryError:
        return f"{case}: does not fit in the memory of {device}", 0.0
    if not times:
        return "", before + needed
    row = Row(
        size=str(size),
        batch_size=size.rows,
        seq_len=size.tokens,
        phase=case.phase,
        mode=mode,
        items=size.rows if case.phase == "decode" else size.items,
        times={name: tuple(found) for name, found in times.items()},
        peak_bytes=peaks,
        decode_steps=steps,
    )
    return row, before + needed


def _peak(task: Task, device: torch.device) -> int:
    """Bytes of memory that one run adds on a GPU."""
    prepared = task.prepare()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    task.run(prepared)
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before
