"""Times a folded checkpoint beside its original, on this machine.

Decides what is run: the original, the folded model, and two that bound it (``variants``), turn by
turn (``timing``), for every size and phase that the model has (``workload``) and every mode that
is asked for. What the times say is decided in ``speeds``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.analysis import analyze_config
from enjoyln_cli.checkpoint import Checkpoint, load_config, open_checkpoint, open_source, raw_config
from enjoyln_cli.compare import load
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.fold import BENCH_FILE, RECIPE_FILE, centre_parameters
from enjoyln_cli.loading import optimize
from enjoyln_cli.marker import Marker, believed, read_marker
from enjoyln_cli.news import Event, by_python, keep
from enjoyln_cli.recipe import load_recipe, options_asked, to_plan
from enjoyln_cli.speeds import Bench, Row
from enjoyln_cli.timing import FEWEST, quartiles, ratios, turns, waiting_for
from enjoyln_cli.variants import COLUMNS, compiling, in_mode, recorded, require, variants
from enjoyln_cli.verify import compute_dtype, dtype_name, original_of
from enjoyln_cli.workload import PHASES, Size, decode, moved, prefill, prompt, sizes

DEVICES = ("cpu", "cuda", "mps")
"""Those that ``timing.waiting_for`` knows how to wait for."""


@dataclass(frozen=True)
class Asked:
    """What is to be measured."""

    pairs: tuple[tuple[int, int], ...] = tuple(product((1, 8), (128, 512, 1024)))
    """Rows and tokens of each."""
    modes: tuple[str, ...] = ("eager",)
    phases: tuple[str, ...] = PHASES
    repeats: int = 15
    """Turns, in each of which every model has a go."""
    seconds: float = math.inf
    """Of one case, after which fewer turns have to do."""


def bench(
    out: str | Path,
    *,
    against: str | Path | None = None,
    asked: Asked = Asked(),  # noqa: B008  (frozen)
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    write: bool = True,
    on_event: Event | None = None,
) -> Bench:
    """Time the converted checkpoint ``out`` beside its original, on this machine.

    ``against`` is the original, by default the one that ``out`` remembers. ``dtype`` is what both
    are run in, by default what most of ``out`` is stored in; ``device`` is a GPU where there is
    one. With ``write``, ``enjoyln_bench.json`` in ``out`` holds the result; a directory that cannot
    be written to is a warning. ``on_event`` receives stages and warnings.

    Raises ``BadCheckpoint`` where ``out`` was not converted, or not from that original,
    ``ModelNotFound`` where the original is gone, ``UnsupportedModel`` for what this machine or this
    model does not have.
    """
    event = on_event or by_python
    stage = partial(event, "stage")
    place = device_named(device)
    for mode in asked.modes:
        require(mode, place)
    folded = open_checkpoint(open_source(str(out), weights=True))
    marker = read_marker(raw_config(folded.source), folded.source.model)
    hub = {"token": token, "cache_dir": cache_dir}
    original = original_of(folded.source, marker, against, revision, hub)
    chosen = compute_dtype(folded, dtype)
    stage(f"loading {original.source.model} and {folded.source.model}")
    begin = time.perf_counter()
    before = _loaded(original, marker, chosen, trust_remote_code)
    load_seconds = time.perf_counter() - begin
    after = optimize(_loaded(folded, marker, chosen, trust_remote_code))
    norms = (*marker.rmsnorm, *marker.layernorm)
    rows, left_out = compared(before, after, norms, asked, place, stage)
    weights = {"original": weight_bytes(before), "folded": weight_bytes(after)}
    stage("folding once more, to know how long it takes")
    result = Bench(
        rows=tuple(rows),
        left_out=tuple(left_out),
        source=original.source.model,
        model_class=marker.model_class,
        dtype=dtype_name(chosen),
        device=str(place),
        repeats=asked.repeats,
        fold_seconds=_refolded(before.to("cpu"), original, folded, marker, trust_remote_code),
        load_seconds=load_seconds,
        weight_bytes=weights,
    )
    if write and not folded.source.cached:
        text = json.dumps(result.to_json(), indent=2)
        keep(folded.source.path / BENCH_FILE, text + "\n", event)
    return result


def device_named(name: str | None) -> torch.device:
    """The device of that name, by default a GPU if there is one; ``UnsupportedModel`` if not."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.partition(":")[0] not in DEVICES:
        raise UnsupportedModel(f"--device {name} cannot be timed; take {', '.join(DEVICES)}")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        first = str(error).strip().split("\n")[0].split(". ")[0]
        raise UnsupportedModel(f"--device {name} is not there: {first}") from error
    return device


def weight_bytes(model: nn.Module) -> int:
    """Memory of all parameters and buffers, those that are tied counted once."""
    held = {id(t): t for t in (*model.parameters(), *model.buffers())}
    return sum(t.numel() * t.element_size() for t in held.values())


def _loaded(of: Checkpoint, marker: Marker, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    config = load_config(of.source, trust_remote_code)
    model = load(of.source.path, marker.model_class, config, dtype, trust_remote_code)
    return model.requires_grad_(False)


def _refolded(
    model: Any, original: Checkpoint, folded: Checkpoint, marker: Marker, trust_remote_code: bool
) -> float | None:
    """Seconds to find the plan of ``folded`` and to centre ``model``, the original, by it.

    ``None`` where the recipe of ``folded`` is gone.
    """
    try:
        recipe = load_recipe(folded.source.path / RECIPE_FILE)
        shapes = {name: stored.shape for name, stored in folded.tensors.items()}
        plan = to_plan(recipe, shapes, config=load_config(folded.source, trust_remote_code))
    except EnjoyLNError:
        return None
    config = load_config(original.source, trust_remote_code)
    only = marker.model_class if len(marker.classes) == 1 else None
    begin = time.perf_counter()
    analyze_config(config, model_class=only, outputs=marker.outputs, options=options_asked(recipe))
    centre_parameters(model, plan)
    return time.perf_counter() - begin


def compared(
    original: Any,
    folded: Any,
    norms: Sequence[str],
    asked: Asked,
    device: torch.device,
    stage: Callable[[str], None] = lambda text: None,
) -> tuple[list[Row], list[str]]:
    """Both models, in memory and on the CPU, timed on ``device`` with the two that bound them.

    ``norms`` are the paths of all LayerNorms; ``stage`` is told of every case. Also returns what
    was left out, a sentence each.
    """
    found, left_out = sizes(original, asked.pairs)
    models = variants(original.to(device), folded.to(device), norms)
    rows = []
    with torch.no_grad():
        given = next(moved(found[:1], device)).given
        with suppress(torch.OutOfMemoryError):
            prefill(models["original"], given).run(None)
            with believed(type(folded).__name__):
                prefill(models["folded"], given).run(None)
        for mode in asked.modes:
            for size in moved(found, device):
                for phase in asked.phases:
                    row = _timed(models, size, phase, mode, asked, device)
                    if isinstance(row, str):
                        left_out.append(row)
                        continue
                    before, after = (row.ms[name].median for name in COLUMNS[:2])
                    stage(f"{row.case}: {before:.4g} ms, folded {after:.4g} ms")
                    rows.append(row)
    return rows, list(dict.fromkeys(left_out))


def _timed(
    models: dict[str, Any], size: Size, phase: str, mode: str, asked: Asked, device: torch.device
) -> Row | str:
    """One row, or why there is none."""
    try:
        return _row(models, size, phase, mode, asked, device)
    except torch.OutOfMemoryError:
        return f"{size}, {phase}, {mode}: does not fit in the memory of {device}"


def _row(
    models: dict[str, Any], size: Size, phase: str, mode: str, asked: Asked, device: torch.device
) -> Row | str:
    name = type(models["original"]).__name__
    wait = waiting_for(device)
    with compiling(mode):
        if phase == "decode":
            text = prompt(models["original"], size)
            if text is None:
                return f"decode: {name} keeps no cache"
            tasks = {n: decode(m, text) for n, m in in_mode(models, mode).items()}
        else:
            tasks = {n: prefill(m, size.given) for n, m in in_mode(models, mode).items()}
        timed = tasks
        if mode == "cudagraphs":
            try:
                timed = {n: recorded(task, device) for n, task in tasks.items()}
            except UnsupportedModel as error:
                return f"{size}, {phase}, {mode}: {error}"
        times = turns(timed, max(asked.repeats, FEWEST), wait, asked.seconds)
        peaks = None
        if device.type == "cuda" and mode != "cudagraphs":  # a graph keeps its memory
            peaks = {n: _peak(lambda task=task: task.run(task.prepare()), device)  # type: ignore
                     for n, task in tasks.items()}  # fmt: skip
    return Row(
        size=str(size),
        batch_size=size.rows,
        seq_len=size.tokens,
        phase=phase,
        mode=mode,
        items=size.rows if phase == "decode" else size.items,
        ms={n: quartiles(values).times(1e3) for n, values in times.items()},
        speedup=quartiles(ratios(times, "original", "folded")),
        norm_tax=quartiles([1 - 1 / ratio for ratio in ratios(times, "original", "bare")]),
        peak_bytes=peaks,
    )


def _peak(run: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before
