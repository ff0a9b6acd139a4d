"""``enjoyln quantize``: choose a form of the model, quantise it, and measure what was written.

The order of the steps: read the data and run the original on it; write each candidate in the chosen
format and scheme, and run it in the program that the format is for, on the first half of the data;
take the best one; measure it on the other half, beside the original quantised in the same way.
Nothing is simulated: what is compared is what users would run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from enjoyln_cli.checkpoint.reader import other_files
from enjoyln_cli.checkpoint.result_files import QUANTISATION_FILE, require_float
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.clock import Countdown, Progress, no_progress
from enjoyln_cli.comparison.data_files import UserData, require_data
from enjoyln_cli.comparison.timing import time_rounds
from enjoyln_cli.conversion.inspect import Opening, open_unfolded
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel, VerificationFailed
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.staging import check_place, staged_output
from enjoyln_cli.onnx_export import transformers_exporter
from enjoyln_cli.publish.written_card import write_quantised_card
from enjoyln_cli.quantisation import exported, quantised_checkpoints
from enjoyln_cli.quantisation.candidates import (
    ORIGINAL,
    FloatModel,
    TurnedForm,
    candidates,
    rotation_plan,
    stored_class,
)
from enjoyln_cli.quantisation.examples import Example, require_every_input, traced_batch
from enjoyln_cli.quantisation.measure import (
    Compute,
    Differences,
    ExactOutputs,
    clearly_cheaper,
    costly_layers,
    differences,
    exact_halves,
    perplexity_in,
)
from enjoyln_cli.quantisation.quantised_checkpoints import WeightCount
from enjoyln_cli.quantisation.schemes import (
    FORMATS,
    ONNX,
    OPENVINO,
    QuantisationScheme,
    require_scheme,
)
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.rewrite.written_files import record_files
from enjoyln_cli.text import counted, first_line, number
from enjoyln_cli.verification.verify import compute_dtype
from enjoyln_cli.version import __version__

INPUTS_IN_A_HALF = 16
NAMED = 3
"""How many of the layers that cost most are named."""
ROUNDS = 15
TIMED_SECONDS = 20.0
EQUAL = 1.05
"""Times that differ by less are taken for equal."""


@dataclass(frozen=True)
class Compared:
    """A candidate as it was written, on the first half of the data."""

    name: str
    differences: Differences
    size: int
    """Bytes of the program and its weights."""
    weights: WeightCount | None = None
    """How many weights were rounded, in a checkpoint."""


@dataclass(frozen=True)
class Quantised:
    """The result of ``quantize``."""

    out: str
    source: str
    revision: str | None
    """The commit of a ``source`` on the Hub."""
    model_class: str
    outputs: tuple[str, ...]
    """The outputs that were compared."""
    format: str
    scheme: str
    chosen: str
    """The name of the candidate that was written."""
    candidates: tuple[Compared, ...]
    held_out: Differences
    """Of the result, on the second half of the data."""
    plain: Differences
    """Of the original, quantised in the same way, on the second half of the data."""
    inputs: int
    """Number of inputs in the second half."""
    most_inputs: int
    """At most so many were wanted in each half."""
    chosen_by: tuple[str, ...]
    """Digests of the inputs in the first half."""
    measured_on: tuple[str, ...]
    """Digests of the inputs in the second half."""
    perplexity: float | None
    """Of the original in float32."""
    size: int
    """Bytes of the program and its weights."""
    float_size: int
    milliseconds: float | None
    """Median time of a call on one input; ``None`` if transformers only simulates the format."""
    float_milliseconds: float | None
    """The same for the original in float32, in the same program; calls take turns."""
    threads: int
    max_error: float
    kept: tuple[str, ...]
    """Patterns of the layers that were kept more precise."""
    seconds: float
    version: str = __version__

    @property
    def summary(self) -> str:
        """What the user gains, or loses, compared with float32: time and size."""
        words = []
        if self.milliseconds and self.float_milliseconds:
            ratio = self.milliseconds / self.float_milliseconds
            words.append(
                f"slower than float32 (a call takes {number(ratio)} times as long)"
                if is_slower(self.milliseconds, self.float_milliseconds)
                else f"a call takes {number(ratio)} of float32's time"
            )
        larger = self.size >= self.float_size
        part = number(self.size / self.float_size)
        words.append(
            f"no smaller than float32 ({part} of its size)" if larger else f"{part} of its size"
        )
        return f"{self.scheme} in {self.format}: {', '.join(words)}"

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)


def quantize(
    model: str | Path,
    out: str | Path,
    data: UserData,
    *,
    scheme: str = "w8a8",
    form: str = "onnx",
    seeds: Sequence[int] = (0, 1, 2),
    keep: Sequence[str] = (),
    max_error: float | None = None,
    inputs: int = INPUTS_IN_A_HALF,
    force: bool = False,
    opening: Opening | None = None,
    on_event: Event | None = None,
    on_progress: Progress = no_progress,
) -> Quantised:
    """Quantise ``model`` (a Hub id or a directory) into the new directory ``out``.

    * ``data``: at least eight inputs. The original, the model with turned values, and rotations
      with these ``seeds`` are compared on the first half; the result is measured on the second.
    * ``form`` and ``scheme`` are names of ``schemes.FORMATS`` and ``schemes.SCHEMES``.
    * ``keep``: paths of layers, or patterns, to leave in floating point (in ONNX in 8 bits if
      weights have 4).
    * ``max_error``: the largest relative error of the outputs; by default that of the scheme.
    * ``inputs``: use at most this many inputs in each half.

    ``on_event`` receives stages and warnings, and ``on_progress``, after each input and each
    form, the seconds that this stage has taken so far and those that it takes in all.

    Raises ``UnsupportedModel`` for a model, a format or data that cannot be used, and
    ``VerificationFailed``, with the layers that cost most, if the error is too large. ``out``
    appears only if everything has succeeded.
    """
    begin, event = time.perf_counter(), on_event or default_listener
    require_data(data)
    settings, opening = require_scheme(scheme, form), opening or Opening()
    if keep and form == OPENVINO:
        raise UnsupportedModel(f"--keep does not work for {form}")
    require_float(str(model))
    subject = open_unfolded(str(model), opening)
    source = subject.source
    check_place(Path(out), source=source.root, force=force)
    event("stage", f"finding which features of {subject.config.model_type} can be rotated")
    products = form == ONNX and settings.is_static
    plan = rotation_plan(subject, event, products)
    name = plan.model_class if plan else stored_class(subject)
    original = FloatModel(subject, name)
    with (
        staged_output(Path(out), source=source.root, force=force) as staged,
        TemporaryDirectory(dir=staged.parent) as scratch,
    ):
        work = Workshop(Path(scratch), form, settings, tuple(keep), original)
        event("stage", "running the original on the data")
        float_model = original.load(None)
        require_layers(float_model, keep)
        used = plan.outputs if plan else ()
        choosing, held_out = exact_halves(
            float_model, subject, data, inputs, used, work.folder, event, on_progress
        )
        if not FORMATS[form].is_checkpoint:
            require_every_input(float_model, source.path, choosing.examples[0])
        del float_model
        forms = candidates(plan, seeds, head_is_rounded=not FORMATS[form].is_checkpoint)
        countdown, compared = Countdown(len(forms) + 1, on_progress), []
        for candidate in forms:
            event("stage", f"quantising: {candidate.name}{countdown.in_words}")
            weights, folder = work.write(candidate, choosing.examples), work.place(candidate.name)
            apart = differences(work.load(candidate.name), choosing)
            compared.append(Compared(candidate.name, apart, size_of(folder), weights))
            countdown.count()
        float_size = size_of(work.place(FLOAT))
        chosen = forms[best(compared, float_size)]
        event("stage", f"measuring on the other half: {chosen.name}{countdown.in_words}")
        limit = settings.max_error if max_error is None else max_error
        measured = measure(work, chosen, held_out, limit)
        if not measured.chosen.error <= limit:
            event("stage", "finding the layers that cost most")
            layers = costly_layers(original.load(chosen.plan), settings, choosing, on_progress)
            worst = ",".join(layers[:NAMED])
            way = f"leave the layers that cost most more precise with --keep {worst}"
            if form == OPENVINO:
                way = f"choose another --scheme (the layers that cost most are {worst})"
            raise VerificationFailed(
                f"{scheme} costs too much: error {number(measured.chosen.error)} of the outputs "
                f"(limit {limit:g}), so nothing was written; {way}, or raise the limit with "
                "--max-error"
            )
        size = size_of(work.place(chosen.name))
        require_gain(measured, size, float_size)
        result = Quantised(
            out=str(out),
            source=str(source.root.resolve()) if source.revision is None else source.model,
            revision=source.revision,
            model_class=name,
            outputs=held_out.names,
            format=form,
            scheme=scheme,
            chosen=chosen.name,
            candidates=tuple(compared),
            held_out=measured.chosen,
            plain=measured.plain,
            inputs=len(held_out.examples),
            most_inputs=inputs,
            chosen_by=tuple(example.digest for example in choosing.examples),
            measured_on=tuple(example.digest for example in held_out.examples),
            perplexity=perplexity_in(held_out),
            size=size,
            float_size=float_size,
            milliseconds=measured.milliseconds,
            float_milliseconds=measured.float_milliseconds,
            threads=torch.get_num_threads(),
            max_error=limit,
            kept=tuple(keep),
            seconds=time.perf_counter() - begin,
        )
        store(work, result, staged)
    return result


FLOAT = "float"


@dataclass(frozen=True)
class Workshop:
    """Writes candidates into a scratch directory, one folder each."""

    folder: Path
    form: str
    scheme: QuantisationScheme
    keep: tuple[str, ...]
    original: FloatModel

    def place(self, name: str) -> Path:
        """The folder of a candidate."""
        return self.folder / name.replace(" ", "_")

    def write(self, candidate: TurnedForm, examples: Sequence[Example]) -> WeightCount | None:
        """Write a candidate, quantised; of the original also the float32 program."""
        model, folder = self.original.load(candidate.plan), self.place(candidate.name)
        float_folder = self.place(FLOAT) if candidate.plan is None else None
        if FORMATS[self.form].is_checkpoint:
            dtype = compute_dtype(self.original.subject.checkpoint, None)
            return quantised_checkpoints.write(
                model, self.form, self.scheme, dtype, self.keep, folder, float_folder
            )
        batch = traced_batch(model, examples[0])
        made = exported.exported(model, batch, self.form)
        calibration = [example.batch for example in examples]
        keep = (*self.keep, *head_of(model)) if self.scheme.weight_bits == 4 else self.keep
        small = exported.quantised(
            made, self.form, self.scheme, batch, calibration, keep, candidate.is_rotated
        )
        transformers_exporter.save(small, folder, model.config)
        if float_folder:
            transformers_exporter.save(made, float_folder, model.config)
        return None

    def load(self, name: str) -> Compute:
        """A candidate, or ``FLOAT``, in the program that runs it."""
        return load_result(self.place(name), self.form, self.original.class_of_model)


def load_result(folder: Path, form: str, model_class: Any) -> Compute:
    """A quantised model of the class ``model_class``, in the program that runs it.

    Raises ``BadCheckpoint`` if it cannot be loaded.
    """
    try:
        if FORMATS[form].is_checkpoint:
            return quantised_checkpoints.load(folder, model_class)
        return exported.load(folder, form)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the libraries do not check files, and may raise anything
        raise BadCheckpoint(f"{folder} cannot be loaded: {first_line(error)}") from error


def is_slower(milliseconds: float | None, float_milliseconds: float | None) -> bool:
    """Whether a call takes clearly longer than in float32; ``False`` if it was not timed."""
    if milliseconds is None or float_milliseconds is None:
        return False
    return milliseconds > EQUAL * float_milliseconds


@dataclass(frozen=True)
class Measured:
    """The candidate that is written, on the second half of the data."""

    chosen: Differences
    plain: Differences
    """Of the original, quantised in the same way."""
    milliseconds: float | None = None
    """Median time of a call on one input; ``None`` if it was not timed."""
    float_milliseconds: float | None = None
    """The same for the original in float32, in the same program; calls take turns."""

    @property
    def is_slower(self) -> bool:
        return is_slower(self.milliseconds, self.float_milliseconds)


def measure(work: Workshop, chosen: TurnedForm, held_out: ExactOutputs, limit: float) -> Measured:
    """Run the chosen candidate on the second half of the data, beside the original.

    Nothing is timed if the error is above the ``limit``.
    """
    computes = {name: work.load(name) for name in (FLOAT, ORIGINAL, chosen.name)}
    found = {name: differences(computes[name], held_out) for name in {ORIGINAL, chosen.name}}
    result = Measured(found[chosen.name], found[ORIGINAL])
    if not (FORMATS[work.form].is_timed and result.chosen.error <= limit):
        return result
    batch = held_out.examples[0].batch
    calls = {name: partial(computes[name], batch) for name in (FLOAT, chosen.name)}
    rounds = time_rounds(calls, ROUNDS, TIMED_SECONDS)
    times = {name: 1000 * median(seconds) for name, seconds in rounds.items()}
    return replace(result, milliseconds=times[chosen.name], float_milliseconds=times[FLOAT])


def require_gain(measured: Measured, size: int, float_size: int) -> None:
    """Raise ``VerificationFailed`` if the result is slower than float32, and no smaller."""
    if measured.is_slower and size >= float_size:
        raise VerificationFailed(
            f"nothing is gained: a call takes {number(measured.milliseconds)} ms, where float32 "
            f"takes {number(measured.float_milliseconds)} ms, and the result is no smaller, so "
            "nothing was written; choose another --scheme or --format"
        )


def store(work: Workshop, result: Quantised, staged: Path) -> None:
    """Put the chosen candidate, all other files of the original, and the record into ``staged``."""
    for file in work.place(result.chosen).iterdir():
        file.rename(staged / file.name)
    written = {file.name for file in staged.iterdir()}
    checkpoint = work.original.subject.checkpoint
    others = other_files(checkpoint)
    copy_files([file for file in others if file not in written], checkpoint.source.path, staged)
    record = {name: value for name, value in result.to_json().items() if name != "out"}
    text = json.dumps(record, indent=2) + "\n"
    (staged / QUANTISATION_FILE).write_text(text, encoding="utf-8")
    error, limit = number(result.held_out.error), f"{result.max_error:g}"
    summary = f"error {error} of the outputs on {counted(result.inputs, 'input')} (limit {limit})"
    record_files(Source(str(staged), staged, None), {"passed": True, "summary": summary})
    write_quantised_card(staged, checkpoint.source, Path(result.out).expanduser().absolute())


def head_of(model: Any) -> list[str]:
    """The path of the layer that computes the logits, which needs 8 bits; empty if there is none.

    A head that is tied to the embedding is not quantised.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [name for name, module in model.named_modules() if module is head]


def require_layers(model: Any, patterns: Sequence[str]) -> None:
    """Raise ``UnsupportedModel`` for a pattern that is the path of no layer."""
    paths = [path for path, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise UnsupportedModel(f"--keep {pattern}: no layer has such a path")


def best(compared: Sequence[Compared], float_size: int) -> int:
    """Which candidate to write: the cheapest of those that are clearly cheaper than the original.

    The original is the first one. Others have to be smaller than the model in float32, of
    ``float_size`` bytes: an untied head can take more than rounding saves. A form that is larger
    than the original has to earn it: at ``n`` times the size it may have ``1 / n`` of the cost.
    """
    first = compared[0]
    original, *others = (candidate.differences for candidate in compared)
    cheaper = [
        at
        for at, is_cheaper in enumerate(clearly_cheaper(others, original), 1)
        if is_cheaper
        and compared[at].size < float_size
        and compared[at].size * others[at - 1].cost <= first.size * original.cost
    ]
    return min(cheaper, key=lambda at: compared[at].differences.cost, default=0)


def size_of(folder: Path) -> int:
    """Bytes of a program and its weights."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix != ".json")
