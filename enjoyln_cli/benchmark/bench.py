"""Times a folded checkpoint and its original on this machine, within a given time.

Decides what is loaded, and where it runs. ``cases`` times the cases, round by round (``timing``),
each with two more models for comparison (``baselines``). ``speedups`` computes what the times say.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from enjoyln_cli.benchmark.cases import BenchOptions, Case, planned_cases, time_cases
from enjoyln_cli.benchmark.speedups import Bench, Row
from enjoyln_cli.benchmark.timing import TimeIsUp
from enjoyln_cli.checkpoint.access import HubAccess
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.checkpoint.reader import open_subject
from enjoyln_cli.clock import Clock, Progress, duration, no_progress
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.models.load import load
from enjoyln_cli.runtime.loading import optimize
from enjoyln_cli.text import counted, dtype_name, first_line
from enjoyln_cli.verification.verify import compute_dtype, original_of

DEVICES = ("cpu", "cuda", "mps")
"""The types of device that models can run on."""


def bench(
    out: str | Path,
    *,
    against: str | Path | None = None,
    options: BenchOptions = BenchOptions(),  # noqa: B008  (frozen)
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    on_event: Event | None = None,
    on_progress: Progress = no_progress,
) -> Bench:
    """Time the converted checkpoint ``out`` and its original on this machine.

    ``against`` is the original, by default the one that ``out`` records. Both run in ``dtype``, by
    default the dtype of most weights of ``out``. ``device`` is by default a GPU if there is one.
    ``on_event`` receives stages. ``on_progress`` receives the seconds that have passed and those
    that the whole run should take (0 while that is not known). Nothing is written.

    The run ends after ``options.seconds``; a call of a model that has begun is finished first, and
    so is its compilation. Downloads are not included.

    Raises ``BadCheckpoint`` if ``out`` was not converted, or not from that original,
    ``ModelNotFound`` if the original is missing, and ``UnsupportedModel`` if the machine or the
    model does not support an option, or if ``options.seconds`` suffices for no case.
    """
    event = on_event or default_listener
    place = device_named(device)
    if not options.seconds > 0:
        raise UnsupportedModel(f"seconds={options.seconds:g} leaves no time to measure anything")
    access = HubAccess(token=token, cache_dir=cache_dir)
    folded = open_subject(str(out), access=access, trust_remote_code=trust_remote_code)
    marker = read_marker(folded.checkpoint.raw_config, folded.source.model)
    original = original_of(folded, marker, against, revision, access)
    chosen = compute_dtype(folded.checkpoint, dtype)
    clock = Clock(time.perf_counter, options.seconds, on_progress)
    event("stage", f"loading {original.source.model} and {folded.source.model}")
    clock.tell()
    cases: list[Case] = []
    rows: list[Row] = []
    reasons: list[str] = []
    try:
        before = load(original, marker.model_class, chosen).requires_grad_(False)
        load_seconds = clock.spent
        after = optimize(load(folded, marker.model_class, chosen).requires_grad_(False))
        if clock.left <= 0:
            raise TimeIsUp
        cases, left_out = planned_cases(before, options)
        event("stage", f"measuring {_plan_in_words(len(cases), options)}")
        norms = (*marker.rmsnorm, *marker.layernorm)
        timed = time_cases(before, after, norms, cases, options.repeats, place, clock)
        for row in timed if cases else ():
            if isinstance(row, Row):
                rows.append(row)
                event("stage", _line(row))
            else:
                reasons.append(row)
            clock.tell()
    except TimeIsUp:
        if not rows:
            raise UnsupportedModel(
                f"{options.seconds:g} s are too short to load the models and measure "
                f"{cases[0] if cases else 'a case'}; allow more with --seconds "
                f"{math.ceil(4 * options.seconds)}"
            ) from None
    left_out += dict.fromkeys(reasons)
    left_out += [f"{case}: no time was left" for case in cases[len(rows) + len(reasons) :]]
    return Bench(
        rows=tuple(rows),
        left_out=tuple(left_out),
        source=original.source.model,
        model_class=marker.model_class,
        dtype=dtype_name(chosen),
        device=str(place),
        repeats=options.repeats,
        load_seconds=load_seconds,
        seconds=clock.spent,
    )


def _plan_in_words(cases: int, options: BenchOptions) -> str:
    limited = not math.isinf(options.seconds)
    until = f"; the run ends after {duration(options.seconds)}" if limited else ""
    return f"{counted(cases, 'case')}, at most {options.repeats} rounds{until}"


def _line(row: Row) -> str:
    text = f"{row.case}: original {row.median_ms('original'):.4g} ms"
    return f"{text}, folded {row.speedup.median:.3f} times as fast"


def device_named(name: str | None) -> torch.device:
    """The device of that name, by default a GPU if there is one; ``UnsupportedModel`` if not."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in DEVICES:
        raise UnsupportedModel(f"--device {name} is not supported; use {', '.join(DEVICES)}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = first_line(error).split(". ")[0]
        raise UnsupportedModel(f"--device {name} is not available: {first}") from error
    return device
