"""``enjoyln verify`` for a directory that ``enjoyln quantize`` has written.

Decides whether the result is what was written. No file may have changed since, and the error that
``quantize`` measured is measured again. On the inputs that it was measured on it is the same up to
the order of sums, so ``SAME_INPUTS`` times the recorded error passes. On other inputs it is another
number for the same model, and ``OTHER_INPUTS`` times the recorded error passes. Inputs that the
form was chosen by are left out. Above ``--max-error`` nothing passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY, OpenOptions
from enjoyln_cli.checkpoint.result_files import QUANTISATION_FILE
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.clock import Progress, no_progress
from enjoyln_cli.comparison.data_files import UserData, require_data
from enjoyln_cli.comparison.embedding import embedder
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.whole_file import read_object
from enjoyln_cli.quantisation.examples import FEWEST, Example, split
from enjoyln_cli.quantisation.measure import Differences, differences, exact_outputs, perplexity_in
from enjoyln_cli.quantisation.workshop import load_result
from enjoyln_cli.quantisers.schemes import QuantisationScheme, require_scheme
from enjoyln_cli.rewrite.opened_model import open_model
from enjoyln_cli.rewrite.written_files import record_verdict, written_files
from enjoyln_cli.text import counted, number
from enjoyln_cli.verification.verify_options import VERIFY_DEFAULTS, VerifyOptions

SAME_INPUTS, OTHER_INPUTS = 1.1, 2.0
"""How many times the recorded error passes."""


@dataclass(frozen=True)
class Record:
    """What ``quantize`` has recorded of a result, as far as a check needs it."""

    source: str
    revision: str | None
    model_class: str
    form: str
    scheme: QuantisationScheme
    outputs: tuple[str, ...]
    error: float
    max_error: float
    most_inputs: int
    chosen_by: frozenset[str]
    measured_on: tuple[str, ...]


@dataclass(frozen=True)
class QuantisedCheck:
    """What comparing a quantised result with its record and the original has shown."""

    passed: bool
    summary: str
    """The verdict in words."""
    differences: Differences | None = None
    """From the original in float32; ``None`` if files have changed, so that nothing was run."""
    perplexity: float | None = None
    """Of the original in float32."""
    inputs: int = 0
    same_inputs: bool = False
    """Whether these are the inputs that ``quantize`` has measured the result on."""
    recorded_error: float | None = None
    limit: float | None = None
    """The largest error that passes on these inputs."""

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
) -> QuantisedCheck:
    """Compare the quantised model in ``out`` with its record, and with the original in float32.

    Of ``options``, ``against`` and ``accept`` are used; without ``accept``, a result with a changed
    file is not run. ``on_progress`` is that of ``quantize``. The verdict is stored in ``out``.

    Raises ``BadCheckpoint`` if the record in ``out`` cannot be read or the result cannot be loaded,
    ``ModelNotFound`` and ``UnsupportedModel`` as ``quantize`` does.
    """
    require_data(data)
    result = Source(str(out), out, None)
    files = written_files(result, options.accept)
    check = QuantisedCheck(False, f"not verified: {files.failure}")
    if not files.failure:
        check = _measured(out, data, options.against, opening, on_event, on_progress)
    record_verdict(result, check.to_json(), files, on_event)
    return check


def _record(out: Path) -> Record:
    content: Mapping[str, Any] = read_object(out / QUANTISATION_FILE)
    try:
        scheme = require_scheme(content["scheme"], content["format"], to_run=True)
        return Record(
            source=str(content["source"]),
            revision=content["revision"],
            model_class=str(content["model_class"]),
            form=str(content["format"]),
            scheme=scheme,
            outputs=tuple(map(str, content["outputs"])),
            error=float(content["held_out"]["error"]),
            max_error=float(content["max_error"]),
            most_inputs=int(content["most_inputs"]),
            chosen_by=frozenset(content["chosen_by"]),
            measured_on=tuple(content["measured_on"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{out / QUANTISATION_FILE} is damaged; quantise again") from error


def _measured(
    out: Path,
    data: UserData,
    against: str | Path | None,
    opening: OpenOptions,
    event: Event,
    on_progress: Progress,
) -> QuantisedCheck:
    record = _record(out)
    if against is None and opening.revision is None:
        opening = replace(opening, revision=record.revision)
    opened = open_model(str(against or record.source), opening, unfolded=True)
    embed = embedder(opened.source, event)
    original = opened.as_class(record.model_class).load(torch.float32)
    folder, trusted = opened.source.path, opened.trust_remote_code
    halves = split(original, folder, data, record.most_inputs, trusted, on_progress=on_progress)
    examples, is_same = _to_measure_on([*halves[0], *halves[1]], record)
    with TemporaryDirectory() as scratch:
        exact = exact_outputs(original, examples, record.outputs, Path(scratch), embed, on_progress)
        compute = load_result(out, record.form, type(original), record.scheme.suffix)
        found = differences(compute, exact)
        perplexity = perplexity_in(exact)
    times = SAME_INPUTS if is_same else OTHER_INPUTS
    limit = min(times * record.error, record.max_error)
    passed = found.error <= limit
    which = (
        "the inputs that it was measured on" if is_same else counted(len(examples), "other input")
    )
    verdict = "" if passed else f"not verified: above the limit of {number(limit)}: "
    summary = (
        f"{verdict}error {number(found.error)} of the outputs on {which}, where "
        f"{number(record.error)} was recorded"
    )
    count = len(examples)
    return QuantisedCheck(passed, summary, found, perplexity, count, is_same, record.error, limit)


def _to_measure_on(examples: Sequence[Example], record: Record) -> tuple[list[Example], bool]:
    """The inputs that ``quantize`` measured on, and ``True``; otherwise those it did not choose by.

    Raises ``UnsupportedModel`` if there are fewer than ``FEWEST`` of the latter.
    """
    by_digest = {example.digest: example for example in examples}
    if record.measured_on and {*record.measured_on} <= by_digest.keys():
        return [by_digest[digest] for digest in record.measured_on], True
    others = [example for example in examples if example.digest not in record.chosen_by]
    if len(others) < FEWEST:
        raise UnsupportedModel(
            f"too little data: the form was chosen by all but {len(others)} of these inputs, and "
            f"{FEWEST} are needed; pass the data that it was quantised with, or other data"
        )
    return others, False
