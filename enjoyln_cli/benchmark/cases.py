"""Times the cases of a pair of models one after the other, within a given time.

Chooses the default sizes and first times short calls. From these times, ``budget`` chooses the
cases that fit. After each case, the estimates for the next ones are corrected.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from enjoyln_cli.benchmark import machine
from enjoyln_cli.benchmark.baselines import (
    COLUMNS,
    fresh_compiler,
    in_mode,
    variants,
)
from enjoyln_cli.benchmark.budget import (
    Calls,
    Case,
    Choice,
    Cost,
    choose,
    cost,
    describe,
    fit,
    just_one,
)
from enjoyln_cli.benchmark.choices import GRID_LENGTHS, GRID_ROWS
from enjoyln_cli.benchmark.results import Row
from enjoyln_cli.benchmark.timing import ENOUGH, FEWEST, Limit, Task, time_rounds, waiter_for
from enjoyln_cli.benchmark.workload import (
    PHASES,
    Size,
    decode,
    decode_steps,
    prefill,
    prompt,
    sizes,
    to_device,
)
from enjoyln_cli.calls.calls import keeps_cache
from enjoyln_cli.checkpoint.marker import blame_marker
from enjoyln_cli.clock import Clock, duration
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.runtime.loading import optimize
from enjoyln_cli.runtime.modules import Folded

SECONDS = 120.0
"""Default time for a run."""
GRID = tuple(product(GRID_ROWS, GRID_LENGTHS))
"""Rows and tokens that are measured if there is time; ``--full`` measures all of them."""
SHORT = ((1, 8), (1, 32), (8, 32))
"""Rows and tokens for models that are too slow, or have too few positions, for the grid."""
TRIAL_SHARE = 0.02
"""Largest share of the remaining time for one trial call."""
TRIAL_SECONDS = 2.0
"""Longest time for one trial call."""
SAME = 5
"""Calls of the smallest size, which show whether the times on this machine are steady."""
COMPILING = {"eager": 0.0, "compile": 60.0}
"""First estimate of the seconds for compiling the four models."""


@dataclass(frozen=True)
class BenchOptions:
    """What ``bench`` measures."""

    pairs: tuple[tuple[int, int], ...] | None = None
    """Rows and tokens of each size; by default, the sizes of ``GRID`` that fit into the time."""
    modes: tuple[str, ...] = ("eager",)
    phases: tuple[str, ...] = PHASES
    repeats: int = 15
    """Largest number of rounds; each model runs once per round."""
    seconds: float | None = None
    """Time for the whole run; cases that do not fit are left out, and ``inf`` sets no limit. The
    default is ``SECONDS``, without leaving out any of ``pairs``, which may take longer."""
    case_seconds: float = math.inf
    """Time after which a case ends once it has ``ENOUGH`` rounds."""

    @property
    def limit(self) -> float:
        """Time for the whole run, in seconds."""
        return SECONDS if self.seconds is None else self.seconds

    @property
    def keeps_all(self) -> bool:
        """Whether cases that do not fit into the time are measured all the same."""
        return self.pairs is not None and self.seconds is None


def compare_speeds(
    original: Any,
    folded: Any,
    norms: Sequence[str],
    asked: BenchOptions,
    device: torch.device,
    event: Event = default_listener,
    clock: Clock | None = None,
) -> tuple[list[Row], list[str]]:
    """Time both models on ``device``, with the two models for comparison.

    Both models are in memory, on the CPU. ``norms`` are the paths of all LayerNorms. ``event``
    receives which cases are chosen, and the result of each. ``clock`` started with the whole run.
    Returns the rows, and a sentence for each case that was left out.
    """
    clock = clock or Clock(time.perf_counter, asked.limit)
    found, left_out = sizes(original, asked.pairs or (*SHORT, *GRID))
    phases = [phase for phase in asked.phases if phase != "decode" or keeps_cache(original)]
    if len(phases) < len(asked.phases):
        left_out.append(_no_cache(original))
    if not phases or not asked.modes:
        return [], left_out
    original, folded = original.to(device), folded.to(device)
    if device.type != "cpu" and any(isinstance(module, Folded) for module in folded.modules()):
        optimize(folded)  # chooses the kernels for this device
    models = variants(original, folded, norms)
    with torch.no_grad():
        calls = _first_calls(models, found, device, clock, event)
        cases = [
            Case(size, phase, mode, decode_steps(size, calls.seconds(size.rows)))
            for mode, size, phase in product(asked.modes, found, phases)
        ]
        costs = {case: cost(case, calls).corrected(1, COMPILING[case.mode]) for case in cases}
        choice = choose_cases(costs, asked, clock)
        event("stage", describe(choice, clock.spent + clock.after, asked.limit, asked.repeats))
        left_out += [_no_time(case, seconds) for case, seconds in choice.left_out.items()]
        run = partial(_time_case, models, device=device, clock=clock)
        rows, dropped = run_each(run, choice, costs, asked, clock, event)
    left_out += dropped
    return [rows[case] for case in cases if case in rows], list(dict.fromkeys(left_out))


def _no_cache(model: Any) -> str:
    return f"decode: {type(model).__name__} has no cache"


def _no_time(case: Case, seconds: float) -> str:
    return f"{case}: needs about {duration(seconds)}"


def _first_calls(
    models: dict[str, Any],
    found: Sequence[Size],
    device: torch.device,
    clock: Clock,
    event: Event,
) -> Calls:
    """Time calls of the original, from the smallest size up to the last that is short enough."""
    wait, measured = waiter_for(device), {}
    ordered = sorted(found, key=lambda size: size.items)

    def seconds(task: Task) -> float:
        wait()
        begin = time.perf_counter()
        task.run(None)
        wait()
        return time.perf_counter() - begin

    (smallest,) = to_device(ordered[:1], device)
    with suppress(torch.OutOfMemoryError):
        prefill(models["original"], smallest.given).run(None)
        with blame_marker(type(models["folded"]).__name__):
            prefill(models["folded"], smallest.given).run(None)
        same: list[float] = []
        while len(same) < SAME and sum(same) < TRIAL_SECONDS / 2:
            same.append(seconds(prefill(models["original"], smallest.given)))
        if strange := machine.unsteady(same):
            event("warning", strange)
        measured[smallest.items] = sorted(same)[len(same) // 2]
        for size in to_device(ordered[1:], device):
            if size.items in measured:
                continue
            if Calls(measured).seconds(size.items) > min(TRIAL_SECONDS, TRIAL_SHARE * clock.left):
                break
            seconds(prefill(models["original"], size.given))
            measured[size.items] = seconds(prefill(models["original"], size.given))
    return Calls(measured or {smallest.items: 1.0})


def choose_cases(costs: dict[Case, Cost], asked: BenchOptions, clock: Clock) -> Choice:
    """Choose which of these cases to time.

    Raises ``UnsupportedModel`` if no case fits into the time that the user set.
    """
    usual, short = costs, {}
    if asked.pairs is None:
        usual = {
            c: v for c, v in costs.items() if not c.size.tokens or c.size.tokens >= GRID_LENGTHS[0]
        }
        short = {case: value for case, value in costs.items() if case not in usual}
    left_out: dict[Case, float] = {}
    for some in (usual, short):
        choice = choose(some, clock.left, asked.repeats, all_of_them=asked.keeps_all)
        left_out = {**choice.left_out, **left_out}
        if choice.cases:
            return replace(choice, left_out=left_out)
    least = just_one(short or usual, asked.repeats)
    needed = clock.spent + clock.after + least.seconds
    if asked.seconds is not None and costs:
        raise UnsupportedModel(
            f"no case fits into {duration(asked.limit)}: {least.cases[0]} alone needs about "
            f"{duration(needed)} with loading; allow it with --seconds {math.ceil(needed)}"
        )
    del left_out[least.cases[0]]
    return replace(least, left_out=left_out)


Run = Callable[[Case, int, float, Callable[[int], None]], "Row | str"]


def run_each(
    run: Run,
    choice: Choice,
    costs: dict[Case, Cost],
    asked: BenchOptions,
    clock: Clock,
    event: Event,
) -> tuple[dict[Case, Row], list[str]]:
    """Time the chosen cases. Returns their rows, and a sentence for each case that was left out.

    After each case, the estimates for the next ones are corrected. ``learned`` has the factor and
    the additional seconds for each phase and mode.
    """
    rows: dict[Case, Row] = {}
    left_out: list[str] = []
    todo = list(choice.cases)
    learned: dict[tuple[str, str], tuple[float, float]] = {}
    least = min(ENOUGH, max(asked.repeats, FEWEST))
    while todo:
        expected = [costs[c].corrected(*learned.get((c.phase, c.mode), (1.0, 0.0))) for c in todo]
        count, rounds = fit(expected, clock.left, max(asked.repeats, FEWEST), least)
        if asked.keeps_all and count < len(todo):
            count, rounds = len(todo), FEWEST
        elif not count and not rows:
            count = 1
        late = zip(todo[count:], expected[count:], strict=True)
        left_out += [_no_time(case, price.of(least)) for case, price in late]
        todo, expected = todo[:count], expected[:count]
        if not todo:
            break
        case, now = todo.pop(0), expected[0]
        lap = Lap(clock, now, rounds, sum(one.of(rounds) for one in expected[1:]))
        until = min(clock.left - lap.later, asked.case_seconds)
        found = run(case, rounds, until, lap.on_round)
        if isinstance(found, str):
            left_out.append(found)
            continue
        rows[case] = found
        learned[case.phase, case.mode] = lap.correction(costs[case])
        event("stage", _line(found))
    return rows, left_out


@dataclass
class Lap:
    """One case while it runs."""

    clock: Clock
    expected: Cost
    rounds: int
    later: float
    """Estimated seconds of the cases after this one."""

    def __post_init__(self) -> None:
        self.begin = self.first = self.last = self.clock.now()
        self.done = 0
        self.clock.tell(self.expected.of(self.rounds) + self.later)

    def on_round(self, done: int) -> None:
        """Report the time left after ``done`` rounds; ``done`` is 0 after warming up."""
        self.last, self.done = self.clock.now(), done
        if not done:
            self.first = self.last
        one = (self.last - self.first) / done if done else self.expected.one_round
        self.clock.tell((self.rounds - done) * one + self.later)

    def correction(self, planned: Cost) -> tuple[float, float]:
        """Time of a round divided by the planned time, and additional seconds before the first."""
        factor = (self.last - self.first) / max(self.done, 1) / planned.one_round
        return factor, max(0.0, self.first - self.begin - factor * planned.before)


def _line(row: Row) -> str:
    text = f"{row.case}: original {row.ms['original'].median:.4g} ms"
    return f"{text}, folded {row.speedup.median:.3f} times as fast"


def _time_case(
    models: dict[str, Any],
    case: Case,
    rounds: int,
    seconds: float,
    on_round: Callable[[int], None],
    *,
    device: torch.device,
    clock: Clock,
) -> Row | str:
    """One row, or why there is none. After ``seconds`` fewer rounds are run."""
    try:
        until = clock.now() + seconds
        return _row(models, case, rounds, until, on_round, device, clock)
    except torch.OutOfMemoryError:
        return f"{case}: does not fit in the memory of {device}"


def _row(
    models: dict[str, Any],
    case: Case,
    rounds: int,
    until: float,
    on_round: Callable[[int], None],
    device: torch.device,
    clock: Clock,
) -> Row | str:
    wait, mode = waiter_for(device), case.mode
    (size,) = to_device([case.size], device)
    with fresh_compiler(mode):
        if case.phase == "decode":
            text = prompt(models["original"], size, case.steps)
            if text is None:
                return _no_cache(models["original"])
            tasks = {n: decode(m, text) for n, m in in_mode(models, mode).items()}
        else:
            tasks = {n: prefill(m, size.given) for n, m in in_mode(models, mode).items()}
        limit = Limit(until - clock.now(), max(clock.left, until - clock.now()))
        times = time_rounds(tasks, rounds, wait, limit, on_round)
        peaks = None
        if device.type == "cuda":
            peaks = {n: _peak(lambda task=task: task.run(task.prepare()), device)  # type: ignore
                     for n, task in tasks.items()}  # fmt: skip
    return Row(
        size=str(size),
        batch_size=size.rows,
        seq_len=size.tokens,
        phase=case.phase,
        mode=mode,
        items=size.rows if case.phase == "decode" else size.items,
        times={name: tuple(times[name]) for name in COLUMNS},
        peak_bytes=peaks,
        decode_steps=case.steps if case.phase == "decode" else None,
    )


def _peak(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before
