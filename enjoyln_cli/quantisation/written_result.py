"""``enjoyln verify`` for a directory that ``enjoyln quantize`` or ``export`` has written.

Decides whether each precision in it is what was written. No file may have changed since. Then the
files are run as their readers run them:

* The error of the outputs that ``quantize`` measured is measured again. On the same inputs it is
  the same up to the order of sums, so ``SAME_INPUTS`` times the recorded error passes. On other
  inputs the same model has another error, and ``OTHER_INPUTS`` times the recorded error passes.
  Calibration data are left out. Above ``--max-error`` nothing passes.
  Without rounding to integers, the error may be ``ROUNDINGS`` roundings of the dtype.
* A model that generates continues some inputs with its cache. In float32 its tokens equal the
  original's; otherwise about as many do as ``quantize`` has recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY, OpenOptions
from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.clock import Progress, no_progress
from enjoyln_cli.comparison.batches import Batch, seeded_batches
from enjoyln_cli.comparison.data_files import FEWEST, UserData, require_halves
from enjoyln_cli.comparison.embedding import embedder
from enjoyln_cli.comparison.run import encoded_once
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.onnx_export.call import MASK
from enjoyln_cli.onnx_export.export import SUFFIXES
from enjoyln_cli.onnx_export.requirements import require_packages
from enjoyln_cli.publish.precisions import needs_data, records
from enjoyln_cli.quantisation.examples import Example, require_no_types, split
from enjoyln_cli.quantisation.load_onnx import load_onnx
from enjoyln_cli.quantisation.measure import (
    Compute,
    Differences,
    differences,
    exact_outputs,
    perplexity_in,
)
from enjoyln_cli.quantisation.workshop import load_result
from enjoyln_cli.quantisers.schemes import FORMATS, ONNX, require_scheme
from enjoyln_cli.rewrite.opened_model import OpenedModel, open_model
from enjoyln_cli.rewrite.written_files import record_verdict, written_files
from enjoyln_cli.text import counted, dtype_name, number
from enjoyln_cli.verification.generated_tokens import (
    MOST_INPUTS,
    Agreement,
    agreement,
    continued,
)
from enjoyln_cli.verification.verify_options import VERIFY_DEFAULTS, VerifyOptions

SAME_INPUTS, OTHER_INPUTS = 1.1, 2.0
"""How many times the recorded error passes."""
ROUNDINGS = 100
"""How many roundings of its dtype the error of a model in floating point may have."""
DTYPES = {dtype_name(dtype): dtype for dtype in SUFFIXES}
"""The dtypes of ``export``, by the names of their precisions."""


@dataclass(frozen=True)
class Record:
    """What is recorded of a precision, as far as a check needs it."""

    name: str
    format: str
    suffix: str
    folder: str
    """The folder of the transformer in a pipeline."""
    is_float: bool
    outputs: tuple[str, ...]
    error: float
    max_error: float
    most_inputs: int
    chosen_by: frozenset[str]
    measured_on: tuple[str, ...]
    generated: Mapping[str, Any] | None


@dataclass(frozen=True)
class PrecisionCheck:
    """What running a precision has shown, beside its record and the original in float32."""

    passed: bool
    summary: str
    """The verdict in words."""
    differences: Differences
    """From the original in float32."""
    perplexity: float | None
    """Of the original in float32."""
    inputs: int
    same_inputs: bool
    """Whether these are the inputs that ``quantize`` has measured the result on."""
    recorded_error: float | None
    limit: float
    """The largest error that passes on these inputs."""
    generated: Agreement | None
    """Of its generated tokens with the original's."""


@dataclass(frozen=True)
class ResultCheck:
    """What comparing all precisions of a result with their records and the original has shown."""

    passed: bool
    summary: str
    """The verdict in words."""
    precisions: Mapping[str, PrecisionCheck] = field(default_factory=dict)
    """Empty if files have changed, so that nothing was run."""

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


def verify_quantised(
    out: Path,
    data: UserData,
    options: VerifyOptions = VERIFY_DEFAULTS,
    opening: OpenOptions = OPENED_PLAINLY,
    *,
    on_event: Event = default_listener,
    on_progress: Progress = no_progress,
) -> ResultCheck:
    """Compare each precision in ``out`` with its record, and with the original in float32.

    Of ``options``, ``against`` and ``accept`` are used; without ``accept``, a result with a changed
    file is not run. ``on_progress`` is as for ``quantize``. The verdict is stored in ``out``.
    Without ``data``, precisions in floating point are run on seeded inputs.

    Raises ``BadCheckpoint`` if the record in ``out`` cannot be read or the result cannot be loaded,
    ``ModelNotFound`` and ``UnsupportedModel`` as ``quantize`` does.
    """
    if needs_data(out):
        require_halves(data)
    result = Source(str(out), out, None)
    files = written_files(result, options.accept)
    check = ResultCheck(False, f"not verified: {files.failure}")
    if not files.failure:
        entries = records(out)
        recorded = [_record(out, name, entry) for name, entry in entries.items()]
        if not recorded:
            raise _damaged(out)
        made_from = next(iter(entries.values()))
        if options.against is None and opening.revision is None:
            opening = replace(opening, revision=made_from["revision"])
        opened = open_model(str(options.against or made_from["source"]), opening)
        original = opened.as_class(made_from["model_class"]).load(torch.float32)
        trusted = opening.trust_remote_code

        @cache
        def inputs(most: int) -> list[Example]:
            first, second = split(
                original, opened.source.path, data, most, trusted, on_progress=on_progress
            )
            return [*first, *second]

        own = inputs if data.is_given else None
        with encoded_once(original):
            checks = {
                one.name: _measured(out, one, opened, original, own, on_event, on_progress)
                for one in recorded
            }
        failed = {name: one for name, one in checks.items() if not one.passed}
        told = [f"{name}: {one.summary}" for name, one in (failed or checks).items()]
        summary = f"{'not verified: ' if failed else ''}{'; '.join(told)}"
        check = ResultCheck(not failed, summary, checks)
    record_verdict(result, check.to_json(), files, on_event)
    return check


def _record(out: Path, name: str, entry: Mapping[str, Any]) -> Record:
    """What is recorded of a precision. Raises ``BadCheckpoint`` if it cannot be read."""
    try:
        texts = [entry["source"], entry["model_class"], entry["suffix"]]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError
        is_float = entry["scheme"] in DTYPES
        if is_float:
            require_packages(("onnxruntime",), "running onnx")
            rounding = ROUNDINGS * torch.finfo(DTYPES[entry["scheme"]]).eps
            entry = {**entry, "held_out": {"error": rounding}, "max_error": rounding}
            entry |= {"most_inputs": MOST_INPUTS, "chosen_by": (), "measured_on": ()}
        else:
            require_scheme(entry["scheme"], entry["format"], to_run=True)
        return Record(
            name=name,
            format=str(entry["format"]),
            suffix=str(entry["suffix"]),
            folder=str(entry.get("folder", "")),
            is_float=is_float,
            outputs=tuple(map(str, entry["outputs"])),
            error=float(entry["held_out"]["error"]),
            max_error=float(entry["max_error"]),
            most_inputs=int(entry["most_inputs"]),
            chosen_by=frozenset(entry["chosen_by"]),
            measured_on=tuple(entry["measured_on"]),
            generated=entry.get("generated"),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(out) from error


def _damaged(out: Path) -> BadCheckpoint:
    return BadCheckpoint(f"{out / PRECISIONS_FILE} is damaged; write the result again")


def _measured(
    out: Path,
    record: Record,
    opened: OpenedModel,
    original: Any,
    inputs: Callable[[int], list[Example]] | None,
    event: Event,
    on_progress: Progress,
) -> PrecisionCheck:
    """Run a precision; ``inputs`` are the user's for each half, at most so many."""
    event("stage", f"running {record.name}")
    source, trusted = opened.source, opened.trust_remote_code
    if inputs:
        examples, is_same = _to_measure_on(inputs(record.most_inputs), record)
        if not FORMATS[record.format].is_checkpoint:
            require_no_types(original, examples[0])
    else:
        seeded = seeded_batches(original, MOST_INPUTS, 0, torch.float32, at_once=1)
        examples = [
            Example({n: torch.ones_like(v) if n == MASK else v for n, v in batch.items()})
            for batch in seeded
        ]
        is_same = False
    embed = embedder(source, event)
    place = out / record.folder
    with TemporaryDirectory() as scratch:
        exact = exact_outputs(original, examples, record.outputs, Path(scratch), embed, on_progress)
        compute = load_result(place, record.format, type(original), record.suffix)
        if record.suffix == SUFFIXES[torch.float16]:
            compute = _in_float16(compute)
        found = differences(compute, exact)
        perplexity = perplexity_in(exact)
    generated = None
    if record.format == ONNX and original.can_generate():
        model = load_onnx(place, record.suffix[1:], trust_remote_code=trusted)
        if model.has_cache:
            rows = [example.batch for example in examples]
            prompts = continued(original, rows, is_decoded=inputs is not None)
            is_exact = record.suffix == SUFFIXES[torch.float32]
            generated = agreement(model, prompts, original if is_exact else None)
    times = SAME_INPUTS if is_same else OTHER_INPUTS
    limit = min(times * record.error, record.max_error)
    which = (
        "the inputs that it was measured on" if is_same else counted(len(examples), "other input")
    )
    recorded = "" if record.is_float else f", where {number(record.error)} was recorded"
    summary = f"error {number(found.error)} of the outputs on {which}{recorded}"
    if not found.error <= limit:
        summary = f"above the limit of {number(limit)}: {summary}"
    passed = found.error <= limit
    if generated:
        is_judged = record.generated or record.suffix == SUFFIXES[torch.float32]
        passed = passed and (not is_judged or generated.passes(record.generated, times))
        summary += f", {generated}"
        if record.generated:
            summary += f", where {record.generated['same']} of {record.generated['tokens']} were"
    count, before = len(examples), None if record.is_float else record.error
    return PrecisionCheck(
        passed, summary, found, perplexity, count, is_same, before, limit, generated
    )


def _in_float16(compute: Compute) -> Compute:
    """A program in float16 as a function of inputs and outputs in float32."""

    def computed(batch: Batch) -> dict[str, torch.Tensor]:
        half = {n: v.half() if v.is_floating_point() else v for n, v in batch.items()}
        return {name: value.float() for name, value in compute(half).items()}

    return computed


def _to_measure_on(examples: Sequence[Example], record: Record) -> tuple[list[Example], bool]:
    """The held-out data of ``quantize`` and ``True``, or else all inputs but calibration data.

    Raises ``UnsupportedModel`` if fewer than ``FEWEST`` are left.
    """
    by_digest = {example.digest: example for example in examples}
    if record.measured_on and {*record.measured_on} <= by_digest.keys():
        return [by_digest[digest] for digest in record.measured_on], True
    others = [example for example in examples if example.digest not in record.chosen_by]
    if len(others) < FEWEST:
        raise UnsupportedModel(
            f"too little data: all but {len(others)} of these inputs are its calibration data, and "
            f"{FEWEST} others are needed; pass the data that it was quantised with, or other data"
        )
    return others, False
