"""Run the original and the folded checkpoint, one model in memory at a time.

Decides the order of the runs. ``sampling`` chooses the inputs, and ``pace`` decides how many of
them fit into the time.

If the compute dtype is float64, there is no more exact run to compare the original with. So its
rounding error in float64 is estimated from that in float32. To first order a rounding error is
``u * C``, where ``u`` is the unit roundoff of the dtype, and ``C`` depends on the model, its inputs
and the order of its sums, which are the same in both dtypes. So the error in float64 is
``eps64 / eps32`` times the error in float32. The reference run in float64 is rounded too,
independently, which gives a factor of ``sqrt(2)``. The error of a wrong fold is far above this.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.analysis.stored_class import require_weights
from enjoyln_cli.checkpoint.config import load_config
from enjoyln_cli.checkpoint.marker import Marker, blame_marker
from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.clock import duration
from enjoyln_cli.comparison import batches as inputs
from enjoyln_cli.comparison.metrics import (
    Distance,
    WorstPosition,
    distances_of,
    largest,
    pool_distances,
    ratio,
    relative,
    worst_position,
    worst_stored,
)
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.comparison.run import Outputs, choose_outputs, run
from enjoyln_cli.comparison.sampling import Runner, choose, length
from enjoyln_cli.comparison.text_scores import divergence, perplexity
from enjoyln_cli.comparison.user_data import UserData
from enjoyln_cli.effects.garbage import collections_of_new_objects
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.models.load import elements, load, release
from enjoyln_cli.models.memory import first_blocks, room_for_weights
from enjoyln_cli.models.offload import Offload, reader_of
from enjoyln_cli.models.outputs import config_returning
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.hooks import input_means
from enjoyln_cli.runtime.install import install
from enjoyln_cli.text import first_line, size
from enjoyln_cli.verification.nonfinite import nonfinite_outputs
from enjoyln_cli.verification.quantised_runs import (
    RUNS_OF_EACH,
    Quantisability,
    measure_quantisability,
    readers_compared,
    schemes_compared,
)

Embed = Callable[[dict[str, torch.Tensor], inputs.Batch], dict[str, torch.Tensor]]
Distances = dict[str, Distance]
Compared = list[Distances]
"""The distances of each batch."""

FLOAT64_OVER_FLOAT32 = (
    math.sqrt(2) * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
)
"""The original's error in float64 divided by that in float32, for a float64 reference."""


@dataclass(frozen=True)
class Subject:
    """The two checkpoints, and how to load and run them."""

    original: Checkpoint
    folded: Checkpoint
    marker: Marker
    plan: Plan
    dtype: torch.dtype
    trust_remote_code: bool
    layers: int | None = None
    """If set, run only the first ``layers`` blocks of both models."""
    device_map: str = "auto"
    max_memory: int | None = None
    """Bytes of memory for the process; ``None`` for what the machine has left."""
    folder: Path | None = None
    """A directory for weights and outputs that are on disk while models run."""
    event: Event = default_listener
    embed: Embed | None = None
    """Adds the sentence embedding of a sentence-transformers pipeline to the outputs."""
    sizes: dict[Path, dict[str, int]] = field(default_factory=dict, compare=False)
    """For each checkpoint that was loaded before, the number of elements of each weight."""

    @property
    def reference_dtype(self) -> torch.dtype:
        """The dtype in which the original's own rounding error is measured."""
        return torch.float32 if self.dtype == torch.float64 else self.dtype

    def load(
        self, checkpoint: Checkpoint, dtype: torch.dtype, missing: set[str] | None = None
    ) -> Any:
        folder, name = checkpoint.source.path, self.marker.model_class
        config = config_returning(
            load_config(checkpoint.source, self.trust_remote_code), self.marker.outputs
        )
        uncut = config
        if self.layers is not None:
            config = first_blocks(config, self.layers)
        if folder not in self.sizes:
            sizes = elements(folder, name, config, self.trust_remote_code)
            if self.layers is not None:
                whole = elements(folder, name, uncut, self.trust_remote_code)
                if sizes.keys() == whole.keys():
                    raise UnsupportedModel(
                        f"{name} has the same weights with a config of {self.layers} blocks, so "
                        "--layers cannot shorten it: leave that option out"
                    )
            self.sizes[folder] = sizes
        sizes = self.sizes[folder]
        room = room_for_weights(sizes, dtype, self.device_map, self.max_memory)
        offload = None
        if room is not None and self.folder:
            offload = Offload(self.folder, room)
            total = sum(sizes.values()) * dtype.itemsize
            what = f"{size(total)} in {str(dtype).removeprefix('torch.')}"
            resident = f"{size(min(room, total))} of it stay in memory"
            self.event("stage", f"reading weights from disk as layers run: {what}, {resident}")
        return load(folder, name, config, dtype, self.trust_remote_code, offload, missing)

    def run(self, model: Any, batch: inputs.Batch) -> dict[str, torch.Tensor]:
        folder = self.folder if reader_of(model) or self.max_memory else None
        outputs = run(model, [batch], folder)
        if self.marker.outputs:
            return choose_outputs(outputs, self.marker.outputs)[0]
        return self.embed(outputs[0], batch) if self.embed else outputs[0]

    def install(self, model: Any) -> None:
        modules = {name for name, _ in model.named_modules()}
        norms, ops = self.marker.rmsnorm, self.marker.centering
        if self.layers is not None:
            norms = tuple(name for name in norms if name in modules)
            ops = tuple(op for op in ops if op.module in modules)
        inputs, unproven, covered = (
            self.marker.entry_inputs,
            self.marker.unproven,
            self.marker.covered,
        )
        install(model, norms, ops, inputs, unproven, covered=covered)

    def centre(self, model: Any) -> None:
        plan = self.plan
        if self.layers is not None:
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
            plan = replace(
                plan,
                writers=tuple(w for w in plan.writers if w.parameter in names),
                untied=tuple(one for one in plan.untied if one.parameter in names),
                widened=tuple(one for one in plan.widened if one.second.parameter in names),
                merged=tuple(
                    one for one in plan.merged if {n.parameter for n in one.names} <= names
                ),
            )
        centre_parameters(model, plan)


@dataclass
class Measurement:
    """The results of running the models. Errors are relative, of the worst output."""

    identity_error: float = math.nan
    storage_error: float = math.nan
    runtime_error: float = math.nan
    original_error: float = math.nan
    stock_error: float = math.nan
    ratio: float = math.nan
    stock_ratio: float = math.nan
    kl: float | None = None
    top1_agreement: float | None = None
    norm_input_mean: dict[str, float] = field(default_factory=dict)
    perplexity: dict[str, float] | None = None
    rows: int = 0
    full_rows: int = 0
    """Number of inputs that an unlimited check would run."""
    own_rows: int = 0
    """Number of inputs that the user gave."""
    inputs_are: str = "inputs"
    sparse_outputs: dict[str, dict[str, float]] = field(default_factory=dict)
    """Outputs with too few entries to judge their ratio: ``entries`` and ``ratio``."""
    worst_position_error: float = math.nan
    worst_position_original: float = math.nan
    worst_position_ratio: float = math.nan
    stored_position_error: float | None = None
    stored_position_original: float | None = None
    stored_position_ratio: float | None = None
    quantised: dict[str, dict[str, float]] = field(default_factory=dict)
    readers: list[dict[str, Any]] = field(default_factory=list)
    nonfinite: dict[str, str] = field(default_factory=dict)
    """The original's outputs that have non-finite values (see ``nonfinite_outputs``)."""


@collections_of_new_objects()  # they free models, and need not pass over all of torch
def measure(subject: Subject, data: UserData, seed: int, pace: Pace) -> Measurement:
    """Load and run four models, one after the other, and measure their errors.

    Each run uses as many inputs as its share of the time allows; later runs use no more than it.
    Raises ``UnsupportedModel`` if the model does not run in float64 or in the compute dtype, and
    ``BadCheckpoint`` if the original does not store a weight that the model needs.
    """
    done = Measurement()
    text: list[inputs.Batch] = []
    for _ in range(2 * RUNS_OF_EACH if subject.plan.turned else 0):
        pace.plan_run()

    def score(model: Any) -> tuple[float, int] | None:
        found = perplexity(model, text, examples.mask_token, seed) if text else None
        pace.end_run(was_planned=examples.is_scored)
        return found

    missing: set[str] = set()
    with pace.loading():
        model = subject.load(subject.original, torch.float64, missing)
    try:
        examples = choose(_model_of(subject, model), data, seed, pace)
        batches = examples.batches
        planned = sum(map(length, batches))
        if planned < examples.full and math.isfinite(pace.clock.limit):
            within = duration(pace.clock.limit)
            part = f"running {planned} of {examples.full} {examples.kind}"
            subject.event("stage", f"{part} to end within {within}")
        require_weights(model, missing, subject.original.source.model)
        exact = pace.run(lambda at: subject.run(model, batches[at]))
    except (EnjoyLNError, MemoryError):
        raise
    except Exception as error:  # any error of the model's code
        raise UnsupportedModel(
            f"{type(model).__name__} does not run in float64 ({_first_line(error)}), so there is "
            "no exact result to compare with; `enjoyln fold --no-verify` converts it unverified"
        ) from error

    def compared(model: Any, results: list[dict[str, torch.Tensor]] | None = None) -> Compared:
        def one(at: int) -> dict[str, Distance]:
            found = subject.run(model, batches[at])
            if results is not None:
                results.append(found)
            return distances_of(found, exact[at])

        return pace.run(one)

    def quantisability(model: Any) -> Quantisability:
        if not subject.plan.turned:
            return Quantisability()
        return measure_quantisability(
            model,
            subject.plan,
            lambda at: distances_of(subject.run(model, batches[at]), exact[at]),
            pace,
        )

    done.nonfinite = nonfinite_outputs(exact, batches[: len(exact)])
    own_results: Outputs = []
    before = None
    if subject.dtype == torch.float64:
        text = examples.text(len(exact))
        own_results, before = exact, score(model)
    subject.centre(model)
    with blame_marker(subject.marker.model_class):
        subject.install(model)
        done.identity_error = largest(relative(pool_distances(compared(model))))
    gone = weakref.ref(model)
    del model
    release(gone)

    with pace.loading():
        model = subject.load(subject.folded, torch.float64)
    subject.install(model)
    storage = compared(model)
    gone = weakref.ref(model)
    del model
    release(gone)

    with pace.loading():
        model = subject.load(subject.original, subject.reference_dtype)
    with _running(model, subject.reference_dtype):
        if subject.dtype == torch.float64:
            rounded = compared(model)
            own = [
                {name: distance.times(FLOAT64_OVER_FLOAT32) for name, distance in one.items()}
                for one in rounded
            ]
        else:
            own = compared(model, own_results)
            text = examples.text(len(own))
            before = score(model)
        unturned = quantisability(model)
    gone = weakref.ref(model)
    del model
    release(gone)

    with pace.loading():
        model = subject.load(subject.folded, subject.dtype)
    results: Outputs = []
    with _running(model, subject.dtype):
        stock = compared(model)
        turned = quantisability(model)
        subject.install(model)
        with input_means(model) as means:
            runtime = compared(model, results)
        after = score(model)
    count = len(runtime)
    done.quantised = schemes_compared(unturned, turned)
    done.readers = readers_compared(subject.plan, unturned, turned)
    done.norm_input_mean = worst_first(means)
    done.rows = sum(map(length, batches[:count]))
    done.own_rows = sum(map(length, batches[: min(count, examples.own)]))
    done.full_rows = max(examples.full, done.rows)
    done.inputs_are = examples.kind
    found = [pool_distances(one[:count]) for one in (storage, own, stock, runtime)]
    _add_errors(done, found, subject.dtype)
    done.kl, done.top1_agreement = divergence(results, own_results[:count])
    if before and after:
        done.perplexity = {"original": before[0], "folded": after[0], "tokens": after[1]}
    return done


def _add_errors(done: Measurement, found: list[Distances], dtype: torch.dtype) -> None:
    """Set the errors of all outputs, and the ratios of the outputs that have enough entries.

    ``found`` are the distances from the exact function, in the order of ``_ERRORS``.
    """
    for name, one_error in zip(_ERRORS, found, strict=True):
        setattr(done, name, largest(relative(one_error)))
    _, own, stock, runtime = found
    for name, one in own.items():
        if one.is_sparse:
            errors = [way[name].relative for way in (stock, runtime)]
            times = max(ratio({name: e}, {name: one.relative}, dtype) for e in errors)
            done.sparse_outputs[name] = {"entries": one.entries, "ratio": times}
    storage, own, stock, runtime = (
        {name: one for name, one in error.items() if name not in done.sparse_outputs}
        for error in found
    )
    if not own:
        return
    done.stock_ratio = ratio(relative(stock), relative(own), dtype)
    done.ratio = ratio(relative(runtime), relative(own), dtype)
    _add_positions(done, (runtime, stock), storage, own, dtype)


_ERRORS = ("storage_error", "original_error", "stock_error", "runtime_error")


def _model_of(subject: Subject, model: Any) -> Runner:
    return Runner(
        model,
        subject.folded.source.path,
        subject.dtype,
        subject.marker.unproven,
        subject.trust_remote_code,
        lambda batch: subject.run(model, batch),
    )


def _add_positions(
    done: Measurement,
    ways: Sequence[dict[str, Distance]],
    storage: dict[str, Distance],
    own: dict[str, Distance],
    dtype: torch.dtype,
) -> None:
    """Set the errors at the worst positions: of the worst of ``ways``, and of the stored weights.

    ``ways`` are the distances of the folded model as RMSNorm and in the stock class.
    """
    found: WorstPosition = max((worst_position(way, own, dtype) for way in ways), key=_by_ratio)
    done.worst_position_error, done.worst_position_original = found.error, found.original
    done.worst_position_ratio = found.ratio
    if dtype == torch.float64:  # the rounding error of the run itself is as large
        return
    stored = worst_stored(storage, own, dtype)
    done.stored_position_error, done.stored_position_original = stored.error, stored.original
    done.stored_position_ratio = stored.ratio


def _by_ratio(found: WorstPosition) -> float:
    return found.ratio


@contextmanager
def _running(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Raises ``UnsupportedModel`` for a model that does not run in ``dtype``."""
    try:
        yield
    except (EnjoyLNError, MemoryError):
        raise
    except Exception as error:  # any error of the model's code
        name = str(dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"{type(model).__name__} does not run in {name} ({_first_line(error)}); pass another "
            "--compute-dtype"
        ) from error


def _first_line(error: Exception) -> str:
    first = first_line(error)
    return first if isinstance(error, RuntimeError) else f"{type(error).__name__}: {first}"


def worst_first(values: dict[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))
