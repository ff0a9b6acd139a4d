"""Run the original and the folded checkpoint, one model in memory at a time.

Decides the order of the runs and how many inputs they get: as many as make a ratio of two rounding
errors stable.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli import inputs
from enjoyln_cli.checkpoint import Checkpoint, load_config
from enjoyln_cli.compare import (
    Outputs,
    chosen,
    divergence,
    elements,
    head_kind,
    load,
    perplexity,
    ratio,
    relative_errors,
    release,
    run,
)
from enjoyln_cli.errors import UnsupportedModel, size
from enjoyln_cli.fold import centre_parameters
from enjoyln_cli.marker import Marker, believed
from enjoyln_cli.memory import first_blocks, room_for_weights
from enjoyln_cli.news import Event, by_python
from enjoyln_cli.norms import input_means, install
from enjoyln_cli.offload import Offload, reader_of
from enjoyln_cli.plan import Plan
from enjoyln_cli.returned import returning

ENTRIES = 1 << 14
"""Entries per output that a ratio of two rounding errors should at least rest on. The entries of a
row err together, so this takes more than their number suggests."""
MOST_ENTRIES = 1 << 25
FEWEST_ROWS, MOST_ROWS, TEXT_ROWS = 16, 128, 64


@dataclass(frozen=True)
class Subject:
    """The two checkpoints, and what is to be done with them."""

    original: Checkpoint
    folded: Checkpoint
    marker: Marker
    plan: Plan
    dtype: torch.dtype
    trust_remote_code: bool
    layers: int | None = None
    """Run a model cut to its first so many blocks."""
    device_map: str = "auto"
    max_memory: int | None = None
    folder: Path | None = None
    """A directory for what is on the disk while models run."""
    event: Event = by_python

    def load(self, checkpoint: Checkpoint, dtype: torch.dtype) -> Any:
        folder, name = checkpoint.source.path, self.marker.model_class
        config = returning(
            load_config(checkpoint.source, self.trust_remote_code), self.marker.outputs
        )
        sizes = elements(folder, name, config, self.trust_remote_code)
        if self.layers is not None:
            config, whole = first_blocks(config, self.layers), sizes
            sizes = elements(folder, name, config, self.trust_remote_code)
            if sizes.keys() == whole.keys():
                raise UnsupportedModel(
                    f"{name} has the same weights with a config of {self.layers} blocks, so it "
                    "cannot be cut: leave --layers out"
                )
        room = room_for_weights(sizes, dtype, self.device_map, self.max_memory)
        offload = None
        if room is not None and self.folder:
            offload = Offload(self.folder, room)
            total = sum(sizes.values()) * dtype.itemsize
            what = f"{size(total)} in {str(dtype).removeprefix('torch.')}"
            kept = f"{size(min(room, total))} of it stay in memory"
            self.event("stage", f"reading weights from the disk as layers run: {what}, {kept}")
        return load(folder, name, config, dtype, self.trust_remote_code, offload)

    def run(self, model: Any, batches: list[inputs.Batch]) -> Outputs:
        folder = self.folder if reader_of(model) or self.max_memory else None
        return chosen(run(model, batches, folder), self.marker.outputs)

    def install(self, model: Any) -> None:
        modules = {name for name, _ in model.named_modules()}
        norms, ops = self.marker.rmsnorm, self.marker.centering
        if self.layers is not None:
            norms = tuple(name for name in norms if name in modules)
            ops = tuple(op for op in ops if op.module in modules)
        install(model, norms, ops, self.marker.entry_inputs, self.marker.unproven)

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
class Measured:
    """What running the models gives; errors are the worst over the outputs."""

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


@dataclass(frozen=True)
class _Examples:
    """What the models are run on, and the longer text that a perplexity is over."""

    batches: list[inputs.Batch]
    text: list[inputs.Batch]
    mask_token: int | None


def measure(
    subject: Subject,
    text: str | Path | None,
    images: Sequence[str | Path],
    seed: int,
    samples: int | None,
) -> Measured:
    """Four models, one after the other: never two of them in memory."""
    done = Measured()

    def returned(model: Any) -> Outputs:
        return subject.run(model, examples.batches)

    words = None if text is None else inputs.text_of(text)
    model = subject.load(subject.original, torch.float64)
    try:
        examples = _examples(subject, model, words, images, seed, samples)
        exact = returned(model)
    except RuntimeError as error:
        first = str(error).strip().split("\n")[0]
        raise UnsupportedModel(
            f"{type(model).__name__} does not run in float64 ({first}), so there is nothing exact "
            "to compare with; `enjoyln fold --no-verify` converts it unchecked"
        ) from error
    done.rows = sum(map(_length, examples.batches))
    subject.centre(model)
    with believed(subject.marker.model_class):
        subject.install(model)
        done.identity_error = _worst(relative_errors(returned(model), exact))
    gone = weakref.ref(model)
    del model
    release(gone)

    model = subject.load(subject.folded, torch.float64)
    subject.install(model)
    done.storage_error = _worst(relative_errors(returned(model), exact))
    gone = weakref.ref(model)
    del model
    release(gone)

    def score(model: Any) -> tuple[float, int]:
        return perplexity(model, examples.text, examples.mask_token, seed)

    model = subject.load(subject.original, subject.dtype)
    outputs = returned(model)
    own = relative_errors(outputs, exact)
    done.original_error = _worst(own)
    before = score(model) if examples.text else None
    gone = weakref.ref(model)
    del model
    release(gone)

    model = subject.load(subject.folded, subject.dtype)
    stock = relative_errors(returned(model), exact)
    done.stock_error, done.stock_ratio = _worst(stock), ratio(stock, own, subject.dtype)
    subject.install(model)
    with input_means(model) as means:
        folded = returned(model)
    done.norm_input_mean = worst_first(means)
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
    words: str | None,
    images: Sequence[str | Path],
    seed: int,
    samples: int | None,
) -> _Examples:
    """The user's examples first; seeded ones fill up to the rows that a stable ratio needs."""
    folder, dtype = subject.folded.source.path, subject.dtype
    given: list[inputs.Batch] = []
    scored: list[inputs.Batch] = []
    mask_token = None
    if images:
        given = inputs.from_images(model, images, folder, dtype)
    elif words is not None:
        head_kind(model)
        tokenizer = inputs.tokenizer_of(folder, subject.trust_remote_code)
        given = scored = inputs.from_text(model, tokenizer, words, TEXT_ROWS)
        mask_token = tokenizer.mask_token_id
    first = given or inputs.seeded(model, 2, seed, dtype)
    two_rows = [{name: value[:2] for name, value in first[0].items()}]
    rows = samples or _rows(subject.run(model, two_rows))
    batches = _first_rows(given, rows)
    missing = rows - sum(map(_length, batches))
    if missing > 0:
        seeded = inputs.seeded(model, missing, seed, dtype)
        batches += seeded + _masked(model, seeded[0], seed)
    return _Examples(batches, scored, mask_token)


def _length(batch: inputs.Batch) -> int:
    return len(next(iter(batch.values())))


def _masked(model: Any, batch: inputs.Batch, seed: int) -> list[inputs.Batch]:
    """A batch with masked patches; a class may take the mask and refuse it for its config."""
    masked = inputs.with_masked_patches(model, batch, seed)
    try:
        return [masked] if masked and run(model, [masked]) else []
    except (ValueError, AttributeError):
        return []


def _rows(outputs: Outputs) -> int:
    """Enough for a ratio that hardly depends on the seed, few enough to be kept in memory."""
    (batch,) = outputs
    sizes = [value.numel() // max(len(value), 1) for value in batch.values()]
    fewest = math.ceil(ENTRIES / max(min(sizes, default=1), 1))
    most = MOST_ENTRIES // max(sum(sizes), 1)
    return max(2, min(max(fewest, FEWEST_ROWS), most, MOST_ROWS))


def _first_rows(batches: list[inputs.Batch], rows: int) -> list[inputs.Batch]:
    kept = []
    for batch in batches:
        if rows > 0:
            kept.append({name: value[:rows] for name, value in batch.items()})
        rows -= _length(batch)
    return kept


def _worst(errors: dict[str, float]) -> float:
    return max(errors.values(), default=0.0)


def worst_first(values: dict[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))
