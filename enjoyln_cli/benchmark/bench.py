"""Times a folded checkpoint and its original on this machine, within a given time.

Decides what is loaded, where it runs, and what is written. ``cases`` times the cases, round by
round (``timing``), each with two more models for comparison (``baselines``). ``results`` computes
what the times say.
"""

from __future__ import annotations

import json
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli import kernels
from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.benchmark import machine
from enjoyln_cli.benchmark.cases import BenchOptions, compare_speeds
from enjoyln_cli.benchmark.results import Bench
from enjoyln_cli.checkpoint.access import HubAccess
from enjoyln_cli.checkpoint.config import load_config, raw_config
from enjoyln_cli.checkpoint.marker import Marker, read_marker
from enjoyln_cli.checkpoint.reader import Checkpoint, open_checkpoint
from enjoyln_cli.checkpoint.result_files import BENCH_FILE, RECIPE_FILE
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.clock import Clock, Progress, duration
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.events import Event, default_listener, write_or_warn
from enjoyln_cli.models.load import load
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.model import options_asked
from enjoyln_cli.recipe.read import load_recipe
from enjoyln_cli.recipe.to_plan import to_plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.loading import optimize
from enjoyln_cli.runtime.neutral import kinds_of_norms
from enjoyln_cli.text import counted, first_line
from enjoyln_cli.verification.verify import compute_dtype, dtype_name, original_of

DEVICES = ("cpu", "cuda", "mps")
"""The devices that ``timing.waiter_for`` can wait for."""
CENTRED = 100e6
"""Bytes of weights that are centred per second, at least."""


def bench(
    out: str | Path,
    *,
    against: str | Path | None = None,
    asked: BenchOptions = BenchOptions(),  # noqa: B008  (frozen)
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    write: bool = True,
    on_event: Event | None = None,
    on_progress: Progress = lambda done, total: None,
) -> Bench:
    """Time the converted checkpoint ``out`` and its original on this machine.

    ``against`` is the original, by default the one that ``out`` records. Both run in ``dtype``, by
    default the dtype of most weights of ``out``. ``device`` is by default a GPU if there is one.
    With ``write``, the result is written to ``enjoyln_bench.json`` in ``out``; if that fails, a
    warning is issued. ``on_event`` receives stages and warnings. ``on_progress`` receives the
    seconds that have passed and those that the whole run should take (0 while that is not known).

    The run ends after about two minutes, or ``asked.seconds``: after a first short measurement, the
    sizes and the number of rounds are chosen for this time. It does not include downloads.

    Raises ``BadCheckpoint`` if ``out`` was not converted, or not from that original,
    ``ModelNotFound`` if the original is missing, and ``UnsupportedModel`` if the machine or the
    model does not support an option, or if no case fits into ``asked.seconds``.
    """
    warned: list[str] = []

    def event(level: str, text: str) -> None:
        if level == "warning":
            warned.append(text)
        (on_event or default_listener)(level, text)

    stage = partial(event, "stage")
    place = device_named(device)
    if not asked.limit > 0:
        raise UnsupportedModel(f"seconds={asked.limit:g} leaves no time to measure anything")
    folded = open_checkpoint(open_source(str(out), weights=True))
    marker = read_marker(raw_config(folded.source), folded.source.model)
    access = HubAccess(token=token, cache_dir=cache_dir)
    original = original_of(folded.source, marker, against, revision, access)
    chosen = compute_dtype(folded, dtype)
    threads = torch.get_num_threads() if place.type == "cpu" else 1
    clock = Clock(time.perf_counter, asked.limit, on_progress)
    if busy := machine.busy(machine.load_average(), 0, threads, machine.cores()):
        event("warning", busy)
    stage(f"loading {original.source.model} and {folded.source.model}")
    clock.tell()
    begin = time.perf_counter()
    before = _load_model(original, marker, chosen, trust_remote_code)
    load_seconds = time.perf_counter() - begin
    after = optimize(_load_model(folded, marker, chosen, trust_remote_code))
    if hint := _merge_hint(after, marker, place):
        event("warning", hint)
    weights = {"original": weight_bytes(before), "folded": weight_bytes(after)}
    if asked.seconds is not None and clock.left <= 0:
        raise UnsupportedModel(
            f"loading the models alone takes {duration(clock.spent)}; allow it with "
            f"--seconds {math.ceil(2 * clock.spent)}"
        )
    plan, plan_seconds = None, 0.0
    if asked.seconds is None or clock.left > asked.seconds / 2:
        stage("analysing the model once more, to time how long folding takes")
        plan, plan_seconds = _time_planning(original, folded, marker, trust_remote_code)
    clock.after = 0.0 if plan is None else weights["original"] / CENTRED
    norms = (*marker.rmsnorm, *marker.layernorm)
    rows, left_out = compare_speeds(before, after, norms, asked, place, event, clock)
    if not busy:
        busy = machine.busy(machine.load_average(), threads, threads, machine.cores())
        if busy:
            event("warning", busy)
    fold_seconds = None
    if plan is not None:
        fold_seconds = plan_seconds + _time_centring(before.to("cpu"), plan)
    result = Bench(
        rows=tuple(rows),
        left_out=tuple(left_out),
        source=original.source.model,
        model_class=marker.model_class,
        dtype=dtype_name(chosen),
        device=str(place),
        repeats=asked.repeats,
        fold_seconds=fold_seconds,
        load_seconds=load_seconds,
        weight_bytes=weights,
        seconds=clock.spent,
        warnings=tuple(warned),
    )
    if write and not folded.source.cached:
        text = json.dumps(result.to_json(), indent=2)
        write_or_warn(folded.source.path / BENCH_FILE, text + "\n", event)
    return result


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


def weight_bytes(model: nn.Module) -> int:
    """Memory of all parameters and buffers; tied weights count once."""
    held = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in held.values())


def _load_model(of: Checkpoint, marker: Marker, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    config = load_config(of.source, trust_remote_code)
    model = load(of.source.path, marker.model_class, config, dtype, trust_remote_code)
    return model.requires_grad_(False)


def _merge_hint(folded: Any, marker: Marker, place: torch.device) -> str:
    """A hint to merge biases, if torch computes RMSNorm without a bias in one kernel there."""
    kinds = kinds_of_norms(folded, marker.weightless, marker.biasless)
    biased = sum(kind.bias for _, kind in kinds)
    if not biased or not kernels.torch_fuses(place.type):
        return ""
    return (
        f"{counted(biased, 'folded norm')} with a bias: on this device torch computes RMSNorm in "
        "one kernel without a bias only; fold with --merge bias"
    )


def _time_planning(
    original: Checkpoint, folded: Checkpoint, marker: Marker, trust_remote_code: bool
) -> tuple[Plan | None, float]:
    """The plan in the recipe of ``folded``, and the seconds that finding it again took.

    The plan is ``None`` if ``folded`` has no recipe.
    """
    try:
        recipe = load_recipe(folded.source.path / RECIPE_FILE)
        shapes = {name: stored.shape for name, stored in folded.tensors.items()}
        plan = to_plan(recipe, shapes, config=load_config(folded.source, trust_remote_code))
    except EnjoyLNError:
        return None, 0.0
    config = load_config(original.source, trust_remote_code)
    only = marker.model_class if len(marker.classes) == 1 else None
    begin = time.perf_counter()
    analyze_config(config, model_class=only, outputs=marker.outputs, options=options_asked(recipe))
    return plan, time.perf_counter() - begin


def _time_centring(model: Any, plan: Plan) -> float:
    """Seconds to centre the original ``model`` by ``plan``."""
    begin = time.perf_counter()
    centre_parameters(model, plan)
    return time.perf_counter() - begin
