"""Is a folded checkpoint as close to the exact function as the original is?

Decides what passes. ``exact`` is the original's stored weights, run in float64. Beside it stand

    identity error   the same weights, centred and run as RMSNorm, in float64: is the algebra right?
    storage error    the stored folded weights in float64: what rounding them costs
    runtime error    the folded model in the compute dtype
    stock error      the folded weights in the unchanged transformers class, in the compute dtype
    original error   the original in the compute dtype: the rounding that users have today

It passes when the identity error is at most 1e-12, the runtime and stock errors are at most
``max_ratio`` times the original's own, and every stored tensor is the original's, where the recipe
says so centred and rounded once. No tolerance is guessed per dtype. Beside the errors over all
positions stands that of the worst one, which may not be more than 4 times (``position_bound``)
the original's at its worst; nor may the stored weights alone cost that much where the original's
rounding is small. ``config.json`` says the same as the original's, every weight that the class
needs is stored, and the outputs are finite.
"""

from __future__ import annotations

import json
import math
import os
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli import __version__
from enjoyln_cli.checkpoint.access import HubAccess
from enjoyln_cli.checkpoint.config import load_config, raw_config, require_unfolded
from enjoyln_cli.checkpoint.headers import DTYPES
from enjoyln_cli.checkpoint.marker import Marker, read_marker
from enjoyln_cli.checkpoint.reader import Checkpoint, open_checkpoint
from enjoyln_cli.checkpoint.result_files import RECIPE_FILE, VERIFY_FILE, verified_files
from enjoyln_cli.checkpoint.source import Source, open_source
from enjoyln_cli.clock import Clock, Progress
from enjoyln_cli.comparison.embedding import embedder
from enjoyln_cli.comparison.metrics import gross_bound, position_bound
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.comparison.user_data import read_user_data, seconds_of
from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError, ModelNotFound, UnsupportedModel
from enjoyln_cli.events import Event, default_listener, write_or_warn
from enjoyln_cli.fs.digests import digest_of_file
from enjoyln_cli.plan.edits import edits_of
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.verification.config_differences import differing_settings
from enjoyln_cli.verification.nonfinite import failure
from enjoyln_cli.verification.runs import Measurement, Subject, measure, worst_first
from enjoyln_cli.verification.stored_tensors import check_tensors

IDENTITY_BOUND = 1e-12


@dataclass(frozen=True)
class Verification:
    """What ``verify`` measured. Errors are relative, the worst over the outputs of the model."""

    passed: bool
    failures: tuple[str, ...]
    """What failed, one sentence each."""
    identity_error: float
    storage_error: float
    runtime_error: float
    original_error: float
    stock_error: float
    ratio: float
    """Runtime error over the original's own, for the worst output."""
    stock_ratio: float
    max_ratio: float
    kl: float | None
    top1_agreement: float | None
    norm_input_mean: dict[str, float]
    """Path of each RMSNorm to the mean it sees, relative to its input's rms; worst first."""
    writer_drift: dict[str, float]
    """Stored tensor to the mean left in it, relative to its rms; worst first."""
    perplexity: dict[str, float] | None
    """``original``, ``folded`` and the number of ``tokens``."""
    model_class: str
    source: str
    compute_dtype: str
    rows: int
    seed: int
    blocks_checked: int | None
    """Number of first blocks that were run, where a user asked for a model cut to them."""
    full_rows: int = 0
    """Inputs of a check that nothing limits; ``rows`` is how many were run."""
    own_rows: int = 0
    """How many of the inputs that were run the user gave."""
    inputs_are: str = "inputs"
    """``images`` or ``inputs``."""
    sparse_outputs: dict[str, dict[str, float]] = field(default_factory=dict)
    """Outputs with too few entries to judge their rounding: ``entries``, and the ``ratio``."""
    outputs: tuple[str, ...] = ()
    """The outputs that were compared, where the fold left it to others to change."""
    worst_position_error: float = math.nan
    """That of the folded model at its worst position, as RMSNorm or in the stock class."""
    worst_position_original: float = math.nan
    """The original's own at its worst position."""
    worst_position_ratio: float = math.nan
    max_position_ratio: float = math.nan
    stored_position_error: float | None = None
    """What storing the weights costs at the position where that counts most."""
    stored_position_original: float | None = None
    """What the original's rounding costs there, at least what it costs at most positions."""
    stored_position_ratio: float | None = None
    """``None`` in float64, where it cannot be told from the rounding of a run."""

    @property
    def is_partial(self) -> bool:
        """Whether ``samples`` or ``seconds`` left inputs out."""
        return self.rows < self.full_rows

    @property
    def count(self) -> str:
        """``16 inputs``, or ``8 of 128 images``."""
        part = f" of {self.full_rows}" if self.is_partial else ""
        return f"{self.rows}{part} {self.inputs_are}"

    @property
    def summary(self) -> str:
        """One line: the verdict and the numbers that it rests on."""
        part = f", in the outputs {', '.join(self.outputs)}" if self.outputs else ""
        if (many := self.blocks_checked) is not None:
            part += ", first block only" if many == 1 else f", first {many} blocks only"
        part += f", on {self.count}" if self.is_partial else ""
        if not self.passed:
            return f"not verified{part}: {'; '.join(self.failures)}"
        few = ""
        if self.sparse_outputs:
            few = f"; too few inputs to judge the rounding of {', '.join(self.sparse_outputs)}"
        if math.isnan(self.ratio):
            identity = f"identity error {self.identity_error:.1e}"
            return f"same function in float64 ({identity}){part}{few}"
        error = f"error {self.ratio:.2f} x the original's own"
        return f"same outputs up to {self.compute_dtype} rounding ({error}){part}{few}"

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values; an infinite or undefined number is ``None``."""
        return _plain({**asdict(self), "summary": self.summary})


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def verify(
    out: str | Path,
    *,
    against: str | Path | None = None,
    plan: Plan | None = None,
    text: str | Path | None = None,
    images: Sequence[str | Path] = (),
    dtype: str | torch.dtype | None = None,
    seed: int = 0,
    samples: int | str | Path | None = None,
    seconds: float | None = None,
    max_ratio: float = 1.25,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    device_map: str = "auto",
    max_memory: int | None = None,
    layers: int | None = None,
    on_event: Event | None = None,
    on_progress: Progress = lambda done, total: None,
    write: bool = True,
) -> Verification:
    """Measure whether the converted checkpoint ``out`` computes the original's function.

    ``against`` is the original, by default the one that ``out`` remembers; ``plan`` the plan that
    ``out`` was made by, by default its recipe. The outputs compared are those that the marker of
    ``out`` names, by default all. ``text`` is a UTF-8 file of running text, or ``images`` are image
    files; seeded inputs make them as many as a stable ratio needs. ``samples`` is another number of
    inputs, or a UTF-8 file with one text on each line. ``seconds`` is the time that the check may
    take: the number of inputs is chosen for it after the first two (one runs in any case), while
    every stored tensor is compared and the identity is measured in float64 as ever. An output that
    then has too few entries for its rounding to be judged is in ``sparse_outputs``. ``dtype`` is
    what users compute in, by default what most of ``out`` is stored in.

    A model that does not fit in ``max_memory`` (bytes for this process, by default what the machine
    has left) is run with its weights read from the disk when a layer needs them, as far as there is
    no room for them: the ``device_map`` ``auto``. ``cpu`` asks for all in memory, ``disk`` for
    none. ``layers`` cuts both models to so many first blocks, and the result says so; all stored
    tensors are looked at nevertheless. ``on_event`` receives stages and warnings, ``on_progress``
    the seconds that have passed and those that the check should take (0 while that is not known).

    With ``write``, ``enjoyln_verify.json`` in ``out`` holds the result and the SHA-256 digests of
    all files but those that tell of it (``REPORTS``). Nothing is written to the Hub's cache,
    where ``out`` is a Hub id; a directory that cannot be written to is a warning.

    Raises ``BadCheckpoint`` where ``out`` was not converted, or not from that original,
    ``ModelNotFound`` where the original is gone, ``UnsupportedModel`` for inputs that cannot be
    made.
    """
    data = read_user_data(text, images, samples)
    pace = Pace(Clock(time.perf_counter, seconds_of(seconds), on_progress))
    event = on_event or default_listener
    access = HubAccess(token=token, cache_dir=cache_dir)
    folded = open_checkpoint(open_source(str(out), access=access, weights=True))
    cached = folded.source.cached
    marker = read_marker(raw_config(folded.source), folded.source.model)
    original = original_of(folded.source, marker, against, revision, access)
    stored = _stored_dtype(folded)
    compute = stored if dtype is None else _as_dtype(dtype)
    plan = plan or _plan_of(folded, trust_remote_code)
    drift, failures = check_tensors(original, folded, edits_of(plan))
    differing = differing_settings(
        type(load_config(folded.source, trust_remote_code)),
        raw_config(original.source),
        raw_config(folded.source),
        plan,
        marker,
        dtype_name(stored),
    )
    subject = Subject(original, folded, marker, plan, compute, trust_remote_code, layers)
    embed = None if marker.outputs else embedder(folded.source, event)
    subject = replace(subject, device_map=device_map, max_memory=max_memory, embed=embed)
    with _room_on_disk(None if cached else folded.source.root.resolve().parent) as folder:
        subject = replace(subject, folder=folder, event=event)
        try:
            measured = measure(subject, data, seed, pace)
        except EnjoyLNError as error:
            if differing:
                raise BadCheckpoint(f"{differing}, and it cannot be run so: {error}") from error
            raise
    failures += [differing] if differing else []
    unfinished = vars(measured).pop("nonfinite")
    failures += _judge(measured, max_ratio, compute, stored)
    if nothing := failure(unfinished, original, marker.nonfinite):
        failures.append(nothing)
    result = Verification(
        passed=not failures,
        failures=tuple(failures),
        max_ratio=max_ratio,
        max_position_ratio=position_bound(max_ratio),
        writer_drift=worst_first(drift),
        model_class=marker.model_class,
        source=original.source.model,
        compute_dtype=dtype_name(compute),
        seed=seed,
        blocks_checked=layers,
        outputs=marker.outputs,
        **vars(measured),
    )
    if write and not cached:
        _write(result, folded.source, event)
    return result


@contextmanager
def _room_on_disk(beside: Path | None) -> Iterator[Path]:
    """A directory beside the result, where there is room; elsewhere if nobody may write there."""
    place = beside if beside is not None and os.access(beside, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".enjoyln.", dir=place) as name:
        yield Path(name)


def original_of(
    result: Source,
    marker: Marker,
    against: str | Path | None,
    revision: str | None,
    access: HubAccess,
) -> Checkpoint:
    """The checkpoint that ``result`` was made from: ``against``, or the one that ``marker`` names.

    Raises ``ModelNotFound`` where it is gone, ``AlreadyFolded`` where it is a result itself,
    ``BadCheckpoint`` where it is another model.
    """
    name = marker.source if against is None else str(against)
    if against is None and revision is None:
        revision = marker.revision
    try:
        source = open_source(name, revision=revision, access=access, weights=True)
    except ModelNotFound as error:
        if against is not None:
            raise
        raise ModelNotFound(f"{error}; name the original with --against") from error
    config = raw_config(source)
    require_unfolded(config, source.model)
    kind, wanted = config.get("model_type"), raw_config(result).get("model_type")
    if kind != wanted:
        raise BadCheckpoint(
            f"{source.model} is of type {kind} and {result.model} of type {wanted}; name the model "
            "that it was folded from"
        )
    return open_checkpoint(source)


def _plan_of(folded: Checkpoint, trust_remote_code: bool) -> Plan:
    from enjoyln_cli.recipe.read import load_recipe
    from enjoyln_cli.recipe.to_plan import to_plan

    shapes = {name: stored.shape for name, stored in folded.tensors.items()}
    config = load_config(folded.source, trust_remote_code)
    return to_plan(load_recipe(folded.source.path / RECIPE_FILE), shapes, config=config)


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise UnsupportedModel(
            f"{dtype!r} is no floating dtype: float64, float32, float16 or bfloat16"
        )
    return found


def dtype_name(dtype: torch.dtype) -> str:
    """As transformers writes it: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def compute_dtype(checkpoint: Checkpoint, dtype: str | torch.dtype | None) -> torch.dtype:
    """``dtype``, by default the one that most of ``checkpoint`` is stored in."""
    return _stored_dtype(checkpoint) if dtype is None else _as_dtype(dtype)


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The floating dtype that most bytes are stored in."""
    sizes: Counter[torch.dtype] = Counter()
    for stored in checkpoint.tensors.values():
        if DTYPES[stored.dtype].is_floating_point:
            sizes[DTYPES[stored.dtype]] += stored.nbytes
    return sizes.most_common(1)[0][0] if sizes else torch.float32


def _write(result: Verification, of: Source, event: Event) -> None:
    """The result with versions and the files' digests, to ``enjoyln_verify.json``."""
    import transformers

    report = {
        **result.to_json(),
        "versions": {
            "enjoyln": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "sha256": {name: digest_of_file(of.root / name) for name in verified_files(of)},
    }
    write_or_warn(of.path / VERIFY_FILE, json.dumps(report, indent=2) + "\n", event)


def _judge(
    done: Measurement, max_ratio: float, compute: torch.dtype, stored: torch.dtype
) -> list[str]:
    failures = []
    if not done.identity_error <= IDENTITY_BOUND:
        failures.append(
            f"the edits change the function: identity error {done.identity_error:.1e} in float64, "
            f"at most {IDENTITY_BOUND:.0e} is rounding"
        )
    if not math.isfinite(done.original_error):
        where = torch.float32 if compute == torch.float64 else compute
        failures.append(
            f"the original itself overflows in {dtype_name(where)}; pass another --compute-dtype"
        )
    failures += [
        f"too far from the exact function: error {one['ratio']:.0f} x the original's in {name}, "
        f"more than chance allows over {one['entries']:.0f} entries"
        for name, one in done.sparse_outputs.items()
        if not one["ratio"] <= gross_bound(max_ratio, int(one["entries"]))
    ]
    if math.isnan(done.ratio):  # no output has enough entries
        return failures
    ways = (
        ("as RMSNorm", done.runtime_error, done.ratio),
        ("in the stock class", done.stock_error, done.stock_ratio),
    )
    over = [
        f"error {error:.1e} {way}, {times:.2f} x the original's"
        for way, error, times in ways
        if not times <= max_ratio
    ]
    if over:
        wider = torch.finfo(compute).eps < torch.finfo(stored).eps
        cost = f"; storing the weights in {dtype_name(stored)} costs {done.storage_error:.1e}"
        failures.append(
            f"too far from the exact function: {' and '.join(over)} ({done.original_error:.1e}; "
            f"limit {max_ratio} x){cost if wider else ''}"
        )
    return failures if over else failures + _judge_positions(done, max_ratio, stored)


def _judge_positions(done: Measurement, max_ratio: float, stored: torch.dtype) -> list[str]:
    """The worst positions of a model that passes over all of them."""
    bound = position_bound(max_ratio)
    if not done.worst_position_ratio <= bound:
        return [
            f"too far from the exact function at one position: error "
            f"{done.worst_position_error:.1e}, {done.worst_position_ratio:.1f} x the original's "
            f"at its worst ({done.worst_position_original:.1e}; limit {bound:g} x)"
        ]
    error, own = done.stored_position_error, done.stored_position_original
    ratio = done.stored_position_ratio
    if ratio is not None and not ratio <= bound:
        return [
            f"storing the weights in {dtype_name(stored)} costs {error:.1e} at one position, "
            f"{ratio:.1f} x what rounding costs the original there ({own:.1e}; limit {bound:g} x)"
        ]
    return []
