"""Is a folded checkpoint as close to the exact function as the original is?

Decides whether a conversion passes. The reference is the original's stored weights, run in float64.
These runs are compared with it:

    identity error   the same weights, centred and run as RMSNorm, in float64: is the algebra right?
    storage error    the stored folded weights in float64: the cost of rounding them
    runtime error    the folded model in the compute dtype
    stock error      the folded weights in the unchanged transformers class, in the compute dtype
    original error   the original in the compute dtype: the rounding error that users have today

The conversion passes if

* the identity error is at most 1e-12, or 1e-5 if the folded model is stored as another class, whose
  norms compute in float32;
* the inputs do not show that the runtime or stock error is more than ``max_ratio`` times the
  original error (so no tolerance is guessed per dtype). A ratio of two rounding errors is partly
  chance; ``comparison.metrics`` computes how far chance reaches, and only a larger ratio fails.
  With few inputs chance reaches far, and the verdict rests on the other checks;
* every stored tensor is the original's, edited as the plan says and rounded once;
* ``config.json`` says the same as the original's, every weight that the class needs is stored, and
  the outputs are finite;
* no file of the result has changed since it was written, except where the user accepts that.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.checkpoint.headers import DTYPES
from enjoyln_cli.checkpoint.marker import Marker, read_marker
from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.checkpoint.result_files import MATRIX_FILE
from enjoyln_cli.clock import Clock, Progress, no_progress
from enjoyln_cli.comparison.data_files import DataFiles, UserData, seconds_of
from enjoyln_cli.comparison.embedding import embedder
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.edits.planned_edits import edits_of
from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError, ModelNotFound, UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.option_field import keywords_of
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.stock_targets import target_for
from enjoyln_cli.recipe.stored_plan import read_plan
from enjoyln_cli.rewrite.opened_model import OpenedModel, open_model
from enjoyln_cli.rewrite.stock_class import target_config
from enjoyln_cli.rewrite.written_files import record_verdict, written_files
from enjoyln_cli.rotation.given_matrices import give_matrices
from enjoyln_cli.text import counted, dtype_name
from enjoyln_cli.verification.checkpoint_pair import CheckpointPair
from enjoyln_cli.verification.config_differences import differing_settings
from enjoyln_cli.verification.nonfinite import failure
from enjoyln_cli.verification.runs import Measurement, measure, worst_first
from enjoyln_cli.verification.stored_tensors import check_tensors
from enjoyln_cli.verification.verify_options import VerifyOptions

IDENTITY_BOUND = 1e-12
STOCK_BOUND = 1e-5
"""The same for a result of ``fold --as``: the norms of the targets compute in float32."""
RATIO, ROTATED_RATIO = 1.25, 2.0
"""The default of ``max_ratio``: for a fold, which changes few weights, and for a rotation."""


@dataclass(frozen=True, kw_only=True)
class Verification(Measurement):
    """The result of ``verify``. Errors are relative, of the model's worst output."""

    passed: bool
    failures: tuple[str, ...]
    """One sentence for each check that failed."""
    max_ratio: float
    """The limit for ``ratio`` and ``stock_ratio``, besides what may be chance."""
    writer_drift: dict[str, float]
    """From each centred tensor to its remaining mean, relative to its rms; worst first."""
    model_class: str
    source: str
    compute_dtype: str
    seed: int
    outputs: tuple[str, ...] = ()
    """The outputs that were compared, if the fold kept only some outputs unchanged; else empty."""

    @property
    def is_partial(self) -> bool:
        """Whether ``samples`` or ``seconds`` left inputs out."""
        return self.rows < self.full_rows

    @property
    def count(self) -> str:
        """``16 inputs``, or ``8 of 128 images``."""
        if not self.is_partial:
            return counted(self.rows, self.inputs_are.removesuffix("s"))
        return f"{self.rows} of {self.full_rows} {self.inputs_are}"

    @property
    def summary(self) -> str:
        """The verdict and its main numbers, in one line."""
        scope = f", in the outputs {', '.join(self.outputs)}" if self.outputs else ""
        scope += f", checked on {self.count}" if self.is_partial or self.rows == 1 else ""
        if not self.passed:
            return f"not verified{scope}: {'; '.join(self.failures)}"
        error = f"error {self.ratio:.2f} x the original's own"
        if not self.undecided_outputs:
            return f"same outputs up to {self.compute_dtype} rounding ({error}){scope}"
        names = ", ".join(self.undecided_outputs)
        return (
            f"same function in float64 (error {self.identity_error:.1e}){scope}; the "
            f"{self.compute_dtype} rounding of {names} is not judged: that needs more inputs"
            f"{', so raise --seconds or --samples' if self.is_partial else ''}"
        )

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values; infinite and undefined numbers become ``None``."""
        return {**schema.to_json(self), "summary": self.summary, "count": self.count}


@keywords_of(data=DataFiles, options=VerifyOptions, opening=OpenOptions)
def verify(
    out: str | Path,
    *,
    data: DataFiles,
    options: VerifyOptions,
    opening: OpenOptions,
    plan: Plan | None = None,
    on_event: Event | None = None,
    on_progress: Progress = no_progress,
) -> Verification:
    """Measure whether the converted checkpoint ``out`` computes the original's function.

    ``plan`` is the plan by which the files in ``out`` have just been written. By default the stored
    plan is taken, and the files are compared with their digests. Only the outputs that the marker
    of ``out`` names are compared, by default all. Seeded inputs are added to the user's data if a
    stable ratio needs more.

    With ``seconds``, the number of inputs is chosen after timing the first; at least one is run.
    Every stored tensor is compared, and the identity error is measured, as without a limit. An
    output for which there were too few inputs to judge its rounding is listed in
    ``undecided_outputs``. The weights and ``config.json`` have to pass all checks, also if
    ``accept`` matches them. Weights that do not fit in ``max_memory`` (bytes) are read from disk
    when their layer runs, with ``device_map="auto"``. ``revision`` is the original's.

    ``on_event`` receives stages and warnings, ``on_progress`` the seconds that have passed and the
    expected total (0 if not known yet). Nothing is written to ``out`` if it is a Hub id, or if
    ``plan`` is passed; if the directory is not writable, there is a warning.

    Raises ``BadCheckpoint`` if ``out`` was not converted, or not from this original;
    ``ModelNotFound`` if the original cannot be found; ``UnsupportedModel`` if the model cannot be
    run on the inputs. The other keywords:
    """
    listeners: Any = {"on_event": on_event, "on_progress": on_progress}
    return check_result(out, data.read(), options, opening, plan=plan, **listeners)


def check_result(
    out: str | Path,
    data: UserData,
    options: VerifyOptions,
    opening: OpenOptions,
    *,
    original: OpenedModel | None = None,
    plan: Plan | None = None,
    on_event: Event | None = None,
    on_progress: Progress = no_progress,
) -> Verification:
    """Measure whether ``out`` computes the original's function (see ``verify``).

    ``original`` is opened already, or else as ``opening`` says; its revision is the original's.
    """
    pace = Pace(Clock(time.perf_counter, seconds_of(options.seconds), on_progress))
    event = on_event or default_listener
    folded = open_model(str(out), replace(opening, revision=None))
    cached = folded.source.cached
    marker = read_marker(folded.checkpoint.raw_config, folded.source.model)
    original = original or original_of(folded, marker, opening, options.against)
    stored = compute_dtype(folded.checkpoint, None)
    compute = compute_dtype(folded.checkpoint, options.dtype)
    files = written_files(folded.source, options.accept) if plan is None else None
    plan = plan or plan_of_result(folded.checkpoint, marker)
    made_from, target = original.checkpoint.raw_config, None
    drift: dict[str, float] = {}
    failures: list[str] = []
    if marker.stored_from:
        target = target_for(marker.stored_from, marker.plan.model_class)
        made_from = target_config(target, original.config, plan).to_dict()
    else:
        drift, failures = check_tensors(original.checkpoint, folded.checkpoint, edits_of(plan))
    differing = differing_settings(
        type(folded.config),
        made_from,
        folded.checkpoint.raw_config,
        marker.plan if target else plan,
        marker,
        dtype_name(stored),
    )
    with _room_on_disk(None if cached else folded.source.root.resolve().parent) as folder:
        pair = CheckpointPair(
            original.as_class(marker.stored_from or marker.plan.model_class).returning(
                marker.plan.outputs
            ),
            folded.as_class(marker.plan.model_class).returning(marker.plan.outputs),
            marker,
            plan,
            target,
            compute,
            options,
            folder=folder,
            event=event,
            embed=None if marker.plan.outputs else embedder(folded.source, event),
        )
        try:
            measured, nonfinite = measure(pair, data, options.seed, pace)
        except EnjoyLNError as error:
            if differing:
                raise BadCheckpoint(f"{differing}; running it failed: {error}") from error
            raise
    max_ratio = options.max_ratio or (ROTATED_RATIO if plan.rotated else RATIO)
    failures += [differing] if differing else []
    bound = STOCK_BOUND if target else IDENTITY_BOUND
    failures += _judge(measured, bound, max_ratio, compute, stored, bool(marker.plan.folded))
    if reason := failure(nonfinite, original.checkpoint, marker.nonfinite):
        failures.append(reason)
    if files and files.failure:
        failures.append(files.failure)
    result = Verification(
        passed=not failures,
        failures=tuple(failures),
        max_ratio=max_ratio,
        writer_drift=worst_first(drift),
        model_class=marker.plan.model_class,
        source=original.source.model,
        compute_dtype=dtype_name(compute),
        seed=options.seed,
        outputs=marker.plan.outputs,
        **vars(measured),
    )
    if options.write and files and not cached:
        record_verdict(folded.source, result.to_json(), files, event)
    return result


@contextmanager
def _room_on_disk(beside: Path | None) -> Iterator[Path]:
    """A temporary directory in ``beside``, or in the system's default place if not writable."""
    place = beside if beside is not None and os.access(beside, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".enjoyln.", dir=place) as name:
        yield Path(name)


def original_of(
    result: OpenedModel, marker: Marker, opening: OpenOptions, against: str | Path | None = None
) -> OpenedModel:
    """The model that ``result`` was made from: ``against``, or the model that ``marker`` names.

    The model that ``marker`` names is opened at the marker's revision, unless ``opening`` has
    another. Raises ``ModelNotFound`` if the original cannot be found, ``AlreadyFolded`` if it is
    converted itself, and ``BadCheckpoint`` if it is of another model type.
    """
    name = marker.source if against is None else str(against)
    if against is None and opening.revision is None:
        opening = replace(opening, revision=marker.revision)
    try:
        original = open_model(name, opening, unfolded=True)
    except ModelNotFound as error:
        if against is not None:
            raise
        raise ModelNotFound(f"{error}; name the original with --against") from error
    kind, wanted = original.config.model_type, result.config.model_type
    if kind != wanted and not marker.stored_from:
        raise BadCheckpoint(
            f"{original.source.model} is of type {kind} and {result.source.model} of type "
            f"{wanted}; name the model that it was folded from"
        )
    return original


def plan_of_result(folded: Checkpoint, marker: Marker) -> Plan:
    """The plan that ``folded`` was made by, with the matrices that the user gave for it."""
    plan = read_plan(folded, marker.plan.covered, fits=not marker.stored_from)
    matrices = folded.source.path / MATRIX_FILE
    return give_matrices(plan, matrices) if matrices.is_file() else plan


def floating_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """A dtype from a dtype or its name. Raises ``UnsupportedModel`` if it is no floating dtype."""
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise UnsupportedModel(
            f"{dtype!r} is not a floating dtype; use float64, float32, float16 or bfloat16"
        )
    return named


def compute_dtype(checkpoint: Checkpoint, dtype: str | torch.dtype | None) -> torch.dtype:
    """``dtype``, by default the dtype of most stored floating bytes, or float32 if there are none.

    Raises ``UnsupportedModel`` if it is no floating dtype.
    """
    if dtype is not None:
        return floating_dtype(dtype)
    sizes: Counter[torch.dtype] = Counter()
    for stored in checkpoint.tensors.values():
        if DTYPES[stored.dtype].is_floating_point:
            sizes[DTYPES[stored.dtype]] += stored.nbytes
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _judge(
    done: Measurement,
    bound: float,
    max_ratio: float,
    compute: torch.dtype,
    stored: torch.dtype,
    folds: bool,
) -> list[str]:
    """A sentence for each check that failed; ``folds`` says whether any norm runs RMSNorm."""
    failures = []
    if not done.identity_error <= bound:
        failures.append(
            f"the edits change the function: identity error {done.identity_error:.1e} in float64 "
            f"(limit {bound:.0e})"
        )
    if not math.isfinite(done.original_error):
        where = torch.float32 if compute == torch.float64 else compute
        failures.append(
            f"the original itself overflows in {dtype_name(where)}; pass another --compute-dtype"
        )
    ways = [("in the stock class", done.stock_error, done.stock_ratio, done.stock_chance)]
    if folds:
        ways.insert(0, ("as RMSNorm", done.runtime_error, done.ratio, done.chance))
    over = [
        f"error {error:.1e} {way}, {times:.2f} x the original's (limit {max_ratio:g} x, or "
        f"{max_ratio * chance:.3g} x for so few inputs)"
        for way, error, times, chance in ways
        if not times <= max_ratio * chance
    ]
    if over:
        wider = torch.finfo(compute).eps < torch.finfo(stored).eps
        cost = (
            f"; storing the weights in {dtype_name(stored)} adds an error of "
            f"{done.storage_error:.1e}, which converting with --dtype float32 avoids"
        )
        failures.append(
            f"too far from the exact function: {' and '.join(over)}; the original's error is "
            f"{done.original_error:.1e}{cost if wider else ''}"
        )
    return failures
