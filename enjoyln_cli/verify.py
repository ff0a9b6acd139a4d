"""Is a folded checkpoint as close to the exact function as the original is?

Decides what passes. ``exact`` is the original's stored weights, run in float64. Beside it stand

    identity error   the same weights, centred and run as RMSNorm, in float64: is the algebra right?
    storage error    the stored folded weights in float64: what rounding them costs
    runtime error    the folded model in the compute dtype
    stock error      the folded weights in the unchanged transformers class, in the compute dtype
    original error   the original in the compute dtype: the rounding that users have today

It passes when the identity error is at most 1e-12, the runtime and stock errors are at most
``max_ratio`` times the original's own, and every stored tensor is the original's, rounded once after
the centring where the recipe says so. No tolerance is guessed per dtype.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli import __version__, inputs
from enjoyln_cli.axis import Axis, centre, group_means
from enjoyln_cli.checkpoint import (
    Checkpoint,
    Source,
    load_config,
    open_checkpoint,
    open_source,
    raw_config,
    read_tensor,
)
from enjoyln_cli.compare import (
    Outputs,
    divergence,
    load,
    perplexity,
    ratio,
    relative_errors,
    release,
    run,
)
from enjoyln_cli.errors import ModelNotFound
from enjoyln_cli.fold import VERIFY_FILE, Marker, centre_parameters, read_marker
from enjoyln_cli.norms import input_means, install
from enjoyln_cli.plan import Centring, Plan, Writer

IDENTITY_BOUND = 1e-12
ENTRIES = 4096
"""Output entries that a ratio of two rounding errors should at least rest on."""
MOST_ENTRIES = 1 << 25
HEADROOM = 1.3
"""Memory of a float64 model over its parameters: activations, outputs and the loader's copies."""
SLICE = 1 << 24


@dataclass(frozen=True)
class Verification:
    """What ``verify`` measured. Errors are relative, the worst over the outputs of the model."""

    passed: bool
    failures: tuple[str, ...]
    """What failed, one sentence each."""
    identity_error: float | None
    """``None``, as the other errors, where not even one block fits in memory in float64."""
    storage_error: float | None
    runtime_error: float | None
    original_error: float | None
    stock_error: float | None
    ratio: float | None
    """Runtime error over the original's own, for the worst output."""
    stock_ratio: float | None
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
    """Number of first blocks that were run, where the whole model does not fit in memory."""

    @property
    def summary(self) -> str:
        """One line: the verdict and the numbers that it rests on."""
        part = "" if self.blocks_checked is None else f", first {self.blocks_checked} blocks only"
        if not self.passed:
            return f"not verified{part}: {'; '.join(self.failures)}"
        if self.ratio is None:
            return "stored tensors are right; no block fits in memory, so nothing was run"
        return (
            f"as close to the exact function as the original in {self.compute_dtype}{part} "
            f"(ratio {self.ratio:.3f}, identity error {self.identity_error:.1e})"
        )

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
    samples: int | None = None,
    max_ratio: float = 1.25,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    max_memory: int | None = None,
    write: bool = True,
) -> Verification:
    """Measure whether the converted checkpoint ``out`` computes the original's function.

    ``against`` is the original, by default the one that ``out`` remembers; ``plan`` the plan that
    ``out`` was made by, by default its recipe. ``text`` is a UTF-8 file, ``images`` image files;
    without them ``samples`` rows of seeded inputs, by default as many as a stable ratio needs.
    ``dtype`` is what users compute in, by default what most of ``out`` is stored in. ``max_memory``
    is in bytes. With ``write``, ``enjoyln_verify.json`` in ``out`` holds the result and the
    SHA-256 digests of all other files.

    Raises ``BadCheckpoint`` where ``out`` was not converted, ``ModelNotFound`` where the original
    is gone, ``UnsupportedModel`` for inputs that cannot be made.
    """
    out = Path(out)
    folded = open_checkpoint(open_source(str(out), weights=True))
    found = read_marker(raw_config(folded.source))
    hub = {"token": token, "cache_dir": cache_dir}
    original = open_checkpoint(_original(found, against, revision, hub))
    writers = plan.writers if plan else _writers_of(out, found, original, trust_remote_code)
    compute = _dtype(dtype) or _stored_dtype(folded)
    budget = _available_memory() if max_memory is None else max_memory
    subject = Subject(original, folded, found, writers, compute, trust_remote_code)
    drift, failures = _check_tensors(subject)
    subject = subject.cut(_blocks_that_fit(original, subject.config, budget))
    measured = _Measured()
    if subject.blocks != 0:
        measured = _measure(subject, text, images, seed, samples)
        failures += _judge(measured, max_ratio, compute, _stored_dtype(folded))
    result = Verification(
        passed=not failures,
        failures=tuple(failures),
        max_ratio=max_ratio,
        writer_drift=_worst_first(drift),
        model_class=found.model_class,
        source=original.source.model,
        compute_dtype=str(compute).removeprefix("torch."),
        seed=seed,
        blocks_checked=subject.blocks,
        **vars(measured),
    )
    if write:
        _write(result, out)
    return result


@dataclass(frozen=True)
class Subject:
    """The two checkpoints, and what is to be done with them."""

    original: Checkpoint
    folded: Checkpoint
    marker: Marker
    writers: tuple[Writer, ...]
    dtype: torch.dtype
    trust_remote_code: bool
    blocks: int | None = None

    def config(self, checkpoint: Checkpoint) -> Any:
        config = load_config(checkpoint.source, self.trust_remote_code)
        return config if self.blocks is None else first_blocks(config, self.blocks)

    def load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
        name, config = self.marker.model_class, self.config(checkpoint)
        return load(checkpoint.source.path, name, config, dtype, self.trust_remote_code)

    def install(self, model: Any) -> None:
        modules = {name for name, _ in model.named_modules()}
        norms, ops = self.marker.rmsnorm, self.marker.centering
        if self.blocks is not None:
            norms = tuple(name for name in norms if name in modules)
            ops = tuple(op for op in ops if op.module in modules)
        install(model, norms, ops, self.marker.entry_inputs)

    def centre(self, model: Any) -> None:
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
        writers = self.writers
        if self.blocks is not None:
            writers = tuple(writer for writer in writers if writer.parameter in names)
        name = self.marker.model_class
        centre_parameters(model, Plan("", name, self.marker.classes, (), writers, ()))


@dataclass
class _Measured:
    """The part of a ``Verification`` that comes from running the models."""

    identity_error: float | None = None
    storage_error: float | None = None
    runtime_error: float | None = None
    original_error: float | None = None
    stock_error: float | None = None
    ratio: float | None = None
    stock_ratio: float | None = None
    kl: float | None = None
    top1_agreement: float | None = None
    norm_input_mean: dict[str, float] = field(default_factory=dict)
    perplexity: dict[str, float] | None = None
    rows: int = 0


@dataclass(frozen=True)
class _Examples:
    """What the models are run on, and the longer text that a perplexity is over."""

    batches: list[inputs.Batch]
    text: list[inputs.Batch]
    mask_token: int | None


def _measure(
    subject: Subject,
    text: str | Path | None,
    images: Sequence[str | Path],
    seed: int,
    samples: int | None,
) -> _Measured:
    """Four models, one after the other: never two of them in memory."""
    done = _Measured()
    model = subject.load(subject.original, torch.float64)
    examples = _examples(subject, model, text, images, seed, samples)
    done.rows = sum(len(next(iter(batch.values()))) for batch in examples.batches)
    exact = run(model, examples.batches)
    subject.centre(model)
    subject.install(model)
    done.identity_error = _worst(relative_errors(run(model, examples.batches), exact))
    del model
    release()

    model = subject.load(subject.folded, torch.float64)
    subject.install(model)
    done.storage_error = _worst(relative_errors(run(model, examples.batches), exact))
    del model
    release()

    def score(model: Any) -> tuple[float, int]:
        return perplexity(model, examples.text, examples.mask_token, seed)

    model = subject.load(subject.original, subject.dtype)
    outputs = run(model, examples.batches)
    own = relative_errors(outputs, exact)
    done.original_error = _worst(own)
    before = score(model) if examples.text else None
    del model
    release()

    model = subject.load(subject.folded, subject.dtype)
    stock = relative_errors(run(model, examples.batches), exact)
    done.stock_error, done.stock_ratio = _worst(stock), ratio(stock, own, subject.dtype)
    subject.install(model)
    with input_means(model) as means:
        folded = run(model, examples.batches)
    done.norm_input_mean = _worst_first(means)
    runtime = relative_errors(folded, exact)
    done.runtime_error, done.ratio = _worst(runtime), ratio(runtime, own, subject.dtype)
    done.kl, done.top1_agreement = divergence(folded, outputs)
    if before:
        after = score(model)
        done.perplexity = {"original": before[0], "folded": after[0], "tokens": after[1]}
    return done


def _examples(
    subject: Subject,
    model: Any,
    text: str | Path | None,
    images: Sequence[str | Path],
    seed: int,
    samples: int | None,
) -> _Examples:
    folder, dtype = subject.folded.source.path, subject.dtype
    if images:
        return _Examples(inputs.from_images(images, folder, dtype), [], None)
    if text is None:
        rows = samples or _rows(run(model, inputs.seeded(model, 2, seed, dtype)[:1]))
        return _Examples(inputs.seeded(model, rows, seed, dtype), [], None)
    head_kind(model)
    tokenizer = inputs.tokenizer_of(folder, subject.trust_remote_code)
    words = Path(text).read_text(encoding="utf-8")
    batches = inputs.from_text(model, tokenizer, words, TEXT_ROWS)
    rows = samples or _rows(run(model, [{k: v[:1] for k, v in batches[0].items()}]))
    return _Examples(_first_rows(batches, rows), batches, tokenizer.mask_token_id)


def _rows(outputs: Outputs) -> int:
    """Enough for a ratio that hardly depends on the seed, few enough to be kept in memory."""
    (batch,) = outputs
    sizes = [value.numel() // max(len(value), 1) for value in batch.values() if value.ndim]
    fewest = math.ceil(ENTRIES / max(min(sizes, default=1), 1))
    most = MOST_ENTRIES // max(sum(sizes), 1)
    return max(2, min(max(fewest, FEWEST_ROWS), most, MOST_ROWS))


def _first_rows(batches: list[inputs.Batch], rows: int) -> list[inputs.Batch]:
    kept = []
    for batch in batches:
        if rows > 0:
            kept.append({name: value[:rows] for name, value in batch.items()})
        rows -= len(next(iter(batch.values())))
    return kept


def _worst(errors: dict[str, float]) -> float:
    return max(errors.values(), default=0.0)


def _worst_first(values: dict[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))


def _judge(
    done: _Measured, max_ratio: float, compute: torch.dtype, stored: torch.dtype
) -> list[str]:
    failures = []
    if not (done.identity_error or 0.0) <= IDENTITY_BOUND:
        failures.append(
            f"the edits change the function: identity error {done.identity_error:.1e} in float64, "
            f"at most {IDENTITY_BOUND:.0e} is rounding"
        )
    if not math.isfinite(done.original_error or 0.0):
        failures.append(f"the original itself overflows in {compute}; pass another --compute-dtype")
    wider = torch.finfo(compute).eps < torch.finfo(stored).eps
    hint = f"; storing the weights in {stored} costs {done.storage_error:.1e}" if wider else ""
    for what, error, value in (
        ("as RMSNorm", done.runtime_error, done.ratio),
        ("in the stock class", done.stock_error, done.stock_ratio),
    ):
        if not (value or 0.0) <= max_ratio:
            failures.append(
                f"{what} it is {value:.2f} times as far from the exact function as the original "
                f"({error:.1e} against {done.original_error:.1e}, at most {max_ratio} times "
                f"passes){hint}"
            )
    return failures


def _check_tensors(subject: Subject) -> tuple[dict[str, float], list[str]]:
    """Every stored tensor against the original's, and the mean that is left in the edited ones."""
    original, folded = subject.original, subject.folded
    axes: dict[str, list[Axis]] = {}
    for writer in subject.writers:
        known = axes.setdefault(writer.tensor, [])
        if writer.axis not in known:
            known.append(writer.axis)
    names = sorted(set(original.tensors) ^ set(folded.tensors))
    failures = [f"{name} is stored in one of the two checkpoints only" for name in names[:3]]
    drift: dict[str, float] = {}
    wrong: list[str] = []
    for name in original.tensors:
        if name not in folded.tensors:
            continue
        old, new = read_tensor(original, name), read_tensor(folded, name)
        if old.shape != new.shape or old.is_floating_point() != new.is_floating_point():
            wrong.append(name)
            continue
        if name not in axes:
            if not _same_bytes(old.to(new.dtype), new):
                wrong.append(name)
            continue
        edits = axes[name]
        parts = list(_slices(old, new, edits))
        if not all(_is_rounded(a, b, edits) for a, b in parts):
            wrong.append(name)
        drift[name] = max(_drift([b for _, b in parts], axis) for axis in edits)
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        failures.append(
            f"{', '.join(wrong[:3])}{more}: not what the recipe makes of the original's tensor"
        )
    return drift, failures


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def _slices(
    old: torch.Tensor, new: torch.Tensor, axes: list[Axis]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both tensors in parts of bounded size that hold whole groups."""
    free = [d for d in range(old.ndim) if d not in {axis.dim for axis in axes}]
    if old.numel() <= SLICE or not free:
        yield old, new
        return
    dim = max(free, key=lambda d: old.shape[d])
    step = max(1, SLICE * old.shape[dim] // old.numel())
    yield from zip(old.split(step, dim), new.split(step, dim), strict=True)


def _is_rounded(old: torch.Tensor, new: torch.Tensor, axes: list[Axis]) -> bool:
    """``new`` is ``P old`` rounded to its dtype: within half a step, whichever way a tie went."""
    exact = old.double()
    for axis in axes:
        exact = centre(exact, axis)
    info = torch.finfo(new.dtype)
    step = info.eps * exact.abs() + info.smallest_normal * info.eps
    slack = 1e-14 * float(old.abs().max()) if old.numel() else 0.0
    return bool(((new.double() - exact).abs() <= 0.5001 * step + slack).all())


def _drift(parts: list[torch.Tensor], axis: Axis) -> float:
    """Root mean square of the groups' means over that of the elements."""
    means = torch.cat([group_means(part.double(), axis).flatten() for part in parts])
    covered = [part.narrow(axis.dim, axis.start, axis.length).double() for part in parts]
    size = sum(float(part.square().sum()) for part in covered)
    count = sum(part.numel() for part in covered)
    rms = math.sqrt(size / max(count, 1))
    return float(means.square().mean().sqrt()) / rms if rms else 0.0
