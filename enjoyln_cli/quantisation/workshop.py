"""Write candidates in a format, run them in the program that the format is for, and time them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import nn

from enjoyln_cli.clock import Progress, no_progress
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.simulated_rounding import (
    input_dimension,
    linear_layers,
    path_of_head,
)
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.events import Event
from enjoyln_cli.models.load import refusing
from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.programs import save
from enjoyln_cli.onnx_export.runtimes import LoadedProgram
from enjoyln_cli.plan.plan import NormFusion, Plan
from enjoyln_cli.quantisation.candidates import ORIGINAL, Candidate
from enjoyln_cli.quantisation.examples import Example, traced_batch
from enjoyln_cli.quantisation.layer_bits import bits_of, for_all_readers
from enjoyln_cli.quantisation.measure import Compute, Differences, ExactOutputs, differences
from enjoyln_cli.quantisers import openvino_programs, quantised_checkpoints, traced_programs
from enjoyln_cli.quantisers.gptq import RoundedWeight
from enjoyln_cli.quantisers.integer_weights import Range
from enjoyln_cli.quantisers.onnxruntime_quantiser import GROUP
from enjoyln_cli.quantisers.quantised_checkpoints import WeightCount
from enjoyln_cli.quantisers.schemes import FORMATS, ONNX, OPENVINO, QuantisationScheme, bits_at
from enjoyln_cli.quantisers.sequential_gptq import round_model
from enjoyln_cli.quantisers.speed import Speed, speeds, speeds_of_programs
from enjoyln_cli.quantisers.static_ranges import ranges_of
from enjoyln_cli.quantisers.traced_programs import TracedPrograms
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.scaling.smoothing import smooth, smoothing
from enjoyln_cli.verification.verify import compute_dtype

FLOAT = "float"
"""The folder of the original in float32."""
HEAD_BITS = 8
"""A head needs so many in an ONNX file. If it is tied to the embedding, it has the embedding's."""


@dataclass
class Workshop:
    """Writes candidates into a scratch directory, one folder each."""

    folder: Path
    format: str
    scheme: QuantisationScheme
    bits: Mapping[str, int]
    """Of the weights of layers, by paths or patterns, where the user has chosen them."""
    original: OpenedModel
    norms: Sequence[NormFusion] = ()
    """That can be smoothed in the original."""
    traced: TracedPrograms | None = field(default=None, init=False)
    """What programs are made from."""
    rounded: dict[str, dict[str, RoundedWeight]] = field(default_factory=dict, init=False)
    """Weights that were rounded by error, by the names of candidates and the paths of layers."""
    ranges: dict[str, dict[str, dict[str, Range]]] = field(default_factory=dict, init=False)
    """Of values, for a static scheme, by the names of candidates, programs and values."""
    edited: tuple[Plan | None, Any] | None = field(default=None, init=False)
    """The plan and the model of the candidate that was smoothed, until that is written."""

    def place(self, name: str) -> Path:
        """The folder of a candidate."""
        return self.folder / name.replace(" ", "_")

    def remove(self, name: str) -> None:
        """Remove the files of a candidate."""
        rmtree(self.place(name))

    def suffix(self, name: str) -> str:
        """What the names of a candidate's ONNX files end with."""
        return "" if name == FLOAT else self.scheme.suffix

    def size(self, name: str) -> int:
        """Bytes of the programs and weights of a candidate."""
        files = (file for file in self.place(name).rglob("*") if file.is_file())
        return sum(file.stat().st_size for file in files if file.suffix != ".json")

    def trace(
        self,
        model: Any,
        examples: Sequence[Example],
        event: Event,
        shifts: Mapping[str, int] | None = None,
    ) -> None:
        """Export the original ``model`` as ONNX programs, which all candidates fill.

        The input of each norm in ``shifts`` is multiplied by ``2^-k`` in them.
        """
        samples = [example.batch for example in examples]
        traced = traced_batch(model, examples[0])
        cross_cache = self.format == ONNX
        self.traced = TracedPrograms(samples, traced, event, shifts or {}, cross_cache=cross_cache)
        self.traced.programs(model, None)

    def model(self, candidate: Candidate) -> Any:
        """A candidate before it is quantised."""
        edited, self.edited = self.edited, None
        if edited is None or edited[0] is not candidate.plan:
            edited = candidate.plan, self.original.load(torch.float32, candidate.plan)
        smooth(edited[1], candidate.smoothed)
        return edited[1]

    def smoothed(self, candidate: Candidate, examples: Sequence[Example]) -> Sequence[Candidate]:
        """The candidate with smoothed norms, if that is worth trying.

        A rotation has spread the large features of norms inside of it already.
        """
        rotated = {norm.norm for norm in candidate.plan.fused} if candidate.plan else set()
        norms = [norm for norm in self.norms if norm.norm not in rotated]
        if not norms or not self.scheme.can_be_smoothed(self.format):
            return ()
        batches = [example.batch for example in examples]
        model = self.model(candidate)
        smoothed = smoothing(model, norms, batches)
        if not smoothed:
            return ()
        self.edited = candidate.plan, model
        return [replace(candidate, name=f"{candidate.name}, smoothed", smoothed=smoothed)]

    def write(
        self,
        candidate: Candidate,
        examples: Sequence[Example],
        on_progress: Progress = no_progress,
    ) -> WeightCount | None:
        """Write a candidate, quantised; the original in float32 as well."""
        model = self.model(candidate)
        folder = self.place(candidate.title)
        float_folder = self.place(FLOAT) if candidate.title == ORIGINAL else None
        bits = {**self.bits, **bits_of(candidate.finer)}
        is_checkpoint = FORMATS[self.format].is_checkpoint
        if not is_checkpoint:
            bits = for_all_readers(model, bits)
        calibration = [example.batch for example in examples]
        rounded = self.round_by_error(model, candidate, calibration, on_progress)
        rounded = {path: one for path, one in rounded.items() if not bits_at(path, bits, 0)}
        if is_checkpoint:
            return quantised_checkpoints.write(
                model,
                self.format,
                self.scheme,
                compute_dtype(self.original.checkpoint, None),
                bits,
                rounded,
                folder,
                float_folder,
            )
        assert self.traced is not None
        if self.format == OPENVINO:
            programs = self.traced.programs(model, candidate.plan)
            if float_folder:
                openvino_programs.save(openvino_programs.converted(programs), float_folder)
            made = openvino_programs.quantised(
                programs, self.scheme, calibration, bits, rounded, candidate.is_rotated
            )
            openvino_programs.save(made, folder)
            return None
        if self.scheme.weight_bits < HEAD_BITS:
            bits = {**dict.fromkeys(path_of_head(model), HEAD_BITS), **bits}
        programs = self.traced.programs(model, candidate.plan)
        if float_folder:
            save(programs, float_folder)
        if self.scheme.is_static and candidate.name not in self.ranges:
            self.ranges[candidate.name] = ranges_of(programs, calibration)
        ranges = self.ranges.get(candidate.name, {})
        small = traced_programs.quantised(programs, self.scheme, ranges, bits, rounded)
        save(small, folder, self.scheme.suffix)
        return None

    def round_by_error(
        self,
        model: Any,
        candidate: Candidate,
        calibration: Sequence[Batch],
        on_progress: Progress,
    ) -> dict[str, RoundedWeight]:
        """The weights of ``model`` in 4 bits, if the candidate has them rounded by error.

        They are computed once for a candidate, whichever of its layers are finer.
        """
        if candidate.rounding == "nearest":
            return {}
        if candidate.name not in self.rounded:
            self.rounded[candidate.name] = round_model(
                model,
                self.groups(model),
                calibration,
                self.scheme.is_static,
                on_progress,
                self.folder,
            )
        return self.rounded[candidate.name]

    def groups(self, model: Any) -> dict[str, int]:
        """The paths of the layers that get 4 bits, and how many inputs of each share a scale."""
        is_checkpoint = FORMATS[self.format].is_checkpoint
        widths = {
            path: _width(layer)
            for path, layer in linear_layers(model).items()
            if not bits_at(path, self.bits, 0)
            and (isinstance(layer, nn.Linear) or not is_checkpoint)
        }
        if is_checkpoint:
            group_of = quantised_checkpoints.group_of
            return {path: group_of(width) or width for path, width in widths.items()}
        if not self.scheme.is_in_groups:
            return widths
        may_be_split = self.format != OPENVINO
        return {path: GROUP for path, width in widths.items() if may_be_split or width % GROUP == 0}

    def load(self, name: str) -> Compute:
        """A candidate, or ``FLOAT``, in the program that runs it."""
        kind = self.original.cls
        return load_result(self.place(name), self.format, kind, self.suffix(name))

    def speeds(self, names: Sequence[str], example: Example) -> dict[str, Speed]:
        """The times of candidates on one input; they take turns."""
        if FORMATS[self.format].is_checkpoint:
            return speeds({name: partial(self.load(name), example.batch) for name in names})
        programs = {
            name: programs_in(self.place(name), self.format, self.suffix(name), spin=True)
            for name in names
        }
        return speeds_of_programs(programs, example.batch)


def _width(layer: Any) -> int:
    """How many inputs a linear layer has."""
    return int(layer.weight.shape[input_dimension(layer)])


def load_result(folder: Path, format_name: str, model_class: Any, suffix: str) -> Compute:
    """A quantised model of the class ``model_class``, in the program that runs it.

    ``suffix`` ends the names of ONNX files. Raises ``BadCheckpoint`` if it cannot be loaded. The
    result raises ``UnsupportedModel`` for an input with which the program fails.
    """
    with refusing(BadCheckpoint, f"{folder} cannot be loaded"):
        if FORMATS[format_name].is_checkpoint:
            compute = quantised_checkpoints.load(folder, model_class)
        else:
            compute = whole_rows(programs_in(folder, format_name, suffix))
    return partial(_computed, compute, format_name)


def _computed(compute: Compute, format_name: str, batch: Batch) -> dict[str, torch.Tensor]:
    """What ``compute`` returns for a batch with which the original runs.

    A program may have fixed sizes, or lack a kernel for its numbers.
    """
    words = f"{format_name} cannot run the model on inputs with which the original runs"
    with refusing(UnsupportedModel, words):
        return compute(batch)


def programs_in(
    folder: Path, format_name: str, suffix: str, spin: bool = False
) -> dict[str, LoadedProgram]:
    """The programs of a result, loaded with the threads of torch.

    ``spin`` makes onnxruntime as fast as it is by default (see ``runtimes.session_options``).
    """
    threads = torch.get_num_threads()
    if format_name == OPENVINO:
        return openvino_programs.load_programs(folder, threads)
    return load_programs(folder, suffix, threads=threads, spin=spin)


@dataclass(frozen=True)
class Measured:
    """The candidate that is written, on the held-out data."""

    chosen: Differences
    plain: Differences
    """Of the original, quantised in the same way."""
    speed: Speed | None = None
    """``None`` if it was not timed."""
    float_speed: Speed | None = None
    """Of the original in float32, in the same program; both take turns."""

    @property
    def is_slower(self) -> bool:
        """Whether it is clearly slower than in float32."""
        both = self.speed, self.float_speed
        return bool(both[0] and both[1] and both[0].is_slower_than(both[1]))


def measure(
    work: Workshop, chosen: Candidate, held_out: ExactOutputs, limit: float, event: Event
) -> Measured:
    """Run the chosen candidate on the held-out data, beside the original.

    Nothing is timed if the error is above the ``limit``.
    """
    found = {name: differences(work.load(name), held_out) for name in {ORIGINAL, chosen.title}}
    measured, plain = found[chosen.title], found[ORIGINAL]
    if not (FORMATS[work.format].is_timed and measured.error <= limit):
        return Measured(measured, plain)
    event("stage", "timing")
    times = work.speeds((FLOAT, chosen.title), held_out.examples[0])
    return Measured(measured, plain, times[chosen.title], times[FLOAT])
