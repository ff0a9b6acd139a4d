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
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch

from enjoyln_cli.benchmark.timing import Task, time_rounds
from enjoyln_cli.checkpoint.config import load_config, require_unfolded
from enjoyln_cli.checkpoint.model_name import local_folder
from enjoyln_cli.checkpoint.reader import Checkpoint, open_checkpoint, other_files
from enjoyln_cli.checkpoint.result_files import QUANTISATION_FILE, is_own
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.user_data import UserData
from enjoyln_cli.conversion.inspect import Opening, open_named
from enjoyln_cli.errors import UnsupportedModel, VerificationFailed
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.staging import check_place, staged_output
from enjoyln_cli.quantisation import exported
from enjoyln_cli.quantisation.candidates import (
    ORIGINAL,
    TurnedForm,
    candidates,
    load_candidate,
    rotation_plan,
)
from enjoyln_cli.quantisation.examples import Example, Halves, split, traced_batch
from enjoyln_cli.quantisation.layer_costs import costly_layers
from enjoyln_cli.quantisation.measure import (
    Compute,
    Differences,
    compared_outputs,
    differences,
    exact_outputs,
    perplexity_in,
)
from enjoyln_cli.quantisation.schemes import ONNX, QuantisationScheme, require_scheme
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.runtime.loading import saved_class
from enjoyln_cli.text import listed_briefly, number
from enjoyln_cli.version import __version__

INPUTS_IN_A_HALF = 16
MARGIN = 0.9
"""A candidate replaces the original if its cost is at most this many times the original's."""
ROUNDS = 15
TIMED_SECONDS = 20.0


@dataclass(frozen=True)
class Compared:
    """A candidate as it was written, on the first half of the data."""

    name: str
    differences: Differences
    size: int
    """Bytes of the program and its weights."""


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
    perplexity: float | None
    """Of the original in float32."""
    size: int
    """Bytes of the program and its weights."""
    float_size: int
    milliseconds: float
    """Median time of a call on one input."""
    float_milliseconds: float
    """The same for the original in float32, in the same program; calls take turns."""
    threads: int
    max_error: float
    kept: tuple[str, ...]
    """Patterns of the layers that were kept more precise."""
    seconds: float
    version: str = __version__

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
) -> Quantised:
    """Quantise ``model`` (a Hub id or a directory) into the new directory ``out``.

    * ``data``: at least eight inputs. The original, the model with turned values, and rotations
      with these ``seeds`` are compared on the first half; the result is measured on the second.
    * ``form`` and ``scheme`` are names of ``schemes.FORMATS`` and ``schemes.SCHEMES``.
    * ``keep``: paths of layers, or patterns, to keep in float32 (in 8 bits if weights have 4).
    * ``max_error``: the largest relative error of the outputs; by default that of the scheme.
    * ``inputs``: use at most this many inputs in each half.

    Raises ``UnsupportedModel`` for a model, a format or data that cannot be used, and
    ``VerificationFailed``, with the layers that cost most, if the error is too large. ``out``
    appears only if everything has succeeded.
    """
    begin, event = time.perf_counter(), on_event or default_listener
    settings, opening = require_scheme(scheme, form), opening or Opening()
    limit = settings.max_error if max_error is None else max_error
    if keep and form != ONNX:
        raise UnsupportedModel(f"--keep works for onnx, not for {form}")
    require_float(str(model))
    source = open_named(str(model), opening, weights=True)
    config = load_config(source, opening.trust_remote_code)
    require_unfolded(config, source.model)
    check_place(Path(out), source=source.root, force=force)
    checkpoint = open_checkpoint(source)
    event("stage", f"finding what can turn in {config.model_type}")
    plan = rotation_plan(config, checkpoint, event)
    name = plan.model_class if plan else _class_name(checkpoint, config, opening)

    def load_as(candidate: TurnedForm) -> Any:
        fresh = load_config(source, opening.trust_remote_code)
        return load_candidate(candidate, checkpoint, name, fresh, opening.trust_remote_code)

    with staged_output(Path(out), source=source.root, force=force) as staged:
        with TemporaryDirectory(dir=staged.parent) as scratch:
            work = Workshop(Path(scratch), form, settings, tuple(keep))
            original = load_as(TurnedForm(ORIGINAL, None))
            event("stage", "running the original on the data")
            folder = source.path
            halves = split(original, folder, data, inputs, opening.trust_remote_code)
            first = run(original, [halves.choosing[0].batch])[0]
            names = compared_outputs(first, plan.outputs if plan else ())
            choosing = exact_outputs(original, halves.choosing, names, work.folder)
            held_out = exact_outputs(original, halves.held_out, names, work.folder)
            perplexity = perplexity_in(held_out, halves.held_out)
            del original
            compared: dict[str, Compared] = {}
            tried = candidates(plan, seeds)
            for candidate in tried:
                event("stage", f"quantising: {candidate.name}")
                work.write(candidate, load_as(candidate), halves)
                compute = work.load(candidate.name)
                found = differences(compute, halves.choosing, choosing, names)
                size = size_of(work.place(candidate.name))
                compared[candidate.name] = Compared(candidate.name, found, size)
                del compute
            chosen = best(list(compared.values()))
            event("stage", f"measuring on the other half: {chosen}")
            computes = {key: work.load(key) for key in (FLOAT, ORIGINAL, chosen)}
            measured = {
                key: differences(computes[key], halves.held_out, held_out, names)
                for key in dict.fromkeys((ORIGINAL, chosen))
            }
            if not measured[chosen].error <= limit:
                (candidate,) = (one for one in tried if one.name == chosen)
                worst = costly_layers(
                    load_as(candidate), settings, halves.choosing, choosing, names
                )
                raise VerificationFailed(
                    f"{scheme} costs too much: error {number(measured[chosen].error)} of the "
                    f"outputs (limit {limit:g}); the layers that cost most are "
                    f"{listed_briefly(worst)}; --keep leaves layers more precise, --max-error "
                    "raises the limit; nothing was written"
                )
            times = _time(computes, chosen, halves.held_out[0])
            result = Quantised(
                out=str(out),
                source=str(source.root.resolve()) if source.revision is None else source.model,
                revision=source.revision,
                model_class=name,
                outputs=names,
                format=form,
                scheme=scheme,
                chosen=chosen,
                candidates=tuple(compared.values()),
                held_out=measured[chosen],
                plain=measured[ORIGINAL],
                inputs=len(halves.held_out),
                perplexity=perplexity,
                size=compared[chosen].size,
                float_size=size_of(work.place(FLOAT)),
                milliseconds=times[chosen] * 1000,
                float_milliseconds=times[FLOAT] * 1000,
                threads=torch.get_num_threads(),
                max_error=limit,
                kept=tuple(keep),
                seconds=time.perf_counter() - begin,
            )
            del computes
            for file in work.place(chosen).iterdir():
                file.rename(staged / file.name)
        written = {file.name for file in staged.iterdir()}
        others = [file for file in other_files(checkpoint) if not is_own(file)]
        copy_files([file for file in others if file not in written], source.path, staged)
        text = json.dumps(result.to_json(), indent=2) + "\n"
        (staged / QUANTISATION_FILE).write_text(text, encoding="utf-8")
    return result


FLOAT = "float"


@dataclass(frozen=True)
class Workshop:
    """Writes candidates into a scratch directory, one folder each."""

    folder: Path
    form: str
    scheme: QuantisationScheme
    keep: tuple[str, ...]

    def place(self, name: str) -> Path:
        """The folder of a candidate."""
        return self.folder / name.replace(" ", "_")

    def write(self, candidate: TurnedForm, model: Any, halves: Halves) -> None:
        """Write a candidate, quantised; of the original also the float32 program."""
        batch = traced_batch(halves.choosing[0])
        made = exported.exported(model, batch, self.form)
        calibration = [example.batch for example in halves.choosing]
        keep = (*self.keep, *head_of(model)) if self.scheme.weight_bits == 4 else self.keep
        small = exported.quantised(
            made, self.form, self.scheme, batch, calibration, keep, candidate.is_rotated
        )
        exported.save(small, self.place(candidate.name), self.form, model.config)
        if candidate.plan is None:
            exported.save(made, self.place(FLOAT), self.form, model.config)

    def load(self, name: str) -> Compute:
        """A candidate, or ``FLOAT``, in the program that runs it."""
        return exported.load(self.place(name), self.form)


def head_of(model: Any) -> list[str]:
    """The path of the layer that computes the logits, which needs 8 bits; empty if there is none.

    A head that is tied to the embedding is not quantised.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    return [name for name, module in model.named_modules() if module is head]


def require_float(model: str) -> None:
    """Raise ``UnsupportedModel`` for a directory that ``quantize`` has written."""
    folder = local_folder(model)
    if folder is not None and (folder / QUANTISATION_FILE).is_file():
        raise UnsupportedModel(f"{model} is quantised already; pass the model it was made from")


def best(compared: Sequence[Compared]) -> str:
    """The name of the candidate to write: the cheapest, if it is clearly better than the original.

    The original is the first one.
    """
    original = compared[0]
    cheapest = min(compared, key=lambda one: one.differences.cost)
    is_better = cheapest.differences.cost <= MARGIN * original.differences.cost
    return cheapest.name if is_better else original.name


def size_of(folder: Path) -> int:
    """Bytes of a program and its weights."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix != ".json")


def _class_name(checkpoint: Checkpoint, config: Any, opening: Opening) -> str:
    trusted = opening.trust_remote_code
    folder = str(checkpoint.source.path)
    return str(saved_class(folder, config=config, trust_remote_code=trusted).__name__)


def _time(computes: dict[str, Compute], chosen: str, example: Example) -> dict[str, float]:
    """Median seconds of a call of the float program and of the chosen one, which take turns."""

    def task(name: str) -> Task:
        return Task(lambda _: computes[name](example.batch))

    rounds = time_rounds({n: task(n) for n in (FLOAT, chosen)}, ROUNDS, TIMED_SECONDS)
    return {name: median(times) for name, times in rounds.items()}
