"""Candidates as ONNX programs: traced once, filled with the weights of each candidate.

A rotation changes weights and no structure, so all candidates share one trace. A candidate has a
trace of its own if it has a product that others lack, or if the config entries that its untied head
needs change what the model computes. If the cache of a model cannot be exported, or if data have
other inputs than its config tells, the model is one program of a whole call. If torch cannot export
that, transformers' exporter does so anew for each candidate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from enjoyln_cli.checkpoint.config import set_entry
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.run import encoded_once, run
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event
from enjoyln_cli.models.classes import apply_experts, leave_out_cache
from enjoyln_cli.onnx_export.cached_calls import MODEL
from enjoyln_cli.onnx_export.call import (
    BATCH,
    Axes,
    ExportedCall,
    Positional,
    ProgramCall,
    call_to_export,
)
from enjoyln_cli.onnx_export.exporting import exported, exporting
from enjoyln_cli.onnx_export.image_parts import VISION, image_inputs
from enjoyln_cli.onnx_export.onnx_program import fold_transposed_weights, scale_norms
from enjoyln_cli.onnx_export.programs import (
    Programs,
    program_calls,
    programs_of_calls,
    with_weights,
)
from enjoyln_cli.onnx_export.runtimes import IN_16_BITS
from enjoyln_cli.plan.plan import Plan, Setting
from enjoyln_cli.quantisers import onnxruntime_quantiser
from enjoyln_cli.quantisers.gptq import RoundedWeight
from enjoyln_cli.quantisers.integer_weights import Range
from enjoyln_cli.quantisers.schemes import QuantisationScheme
from enjoyln_cli.scaling.float16 import computed_in_parts, scaled_inputs

Structure = tuple[Any, ...]


@dataclass
class TracedPrograms:
    """The programs of the candidates of one model."""

    samples: Sequence[Batch]
    """Inputs of the model, of all their shapes."""
    traced_sample: Batch
    """The first, as a whole call is traced."""
    event: Event
    shifts: Mapping[str, int] = field(default_factory=dict)
    """Norms whose input is multiplied by ``2^-k`` (see ``onnx_program.scale_norms``)."""
    cross_cache: bool = True
    """See ``programs_of``."""
    is_one_call: bool = field(default=False, init=False)
    """Whether the programs are traced from the sample, without a cache."""
    is_by_transformers: bool = field(default=False, init=False)
    """Whether that is done by transformers' exporter, for each candidate anew."""
    axes: Axes = field(default_factory=dict, init=False)
    """The dynamic axes that the config tells; empty if no inputs can be made from it."""
    traced: dict[Structure, Programs] = field(default_factory=dict)
    harmless: set[tuple[Setting, ...]] = field(default_factory=set)
    """Config entries that were found to change no output."""

    def programs(self, model: Any, plan: Plan | None) -> Programs:
        """The programs of ``model`` in float32, which was edited by ``plan``.

        Raises ``UnsupportedModel`` if the model cannot be exported.
        """
        structure = self._structure(model, plan)
        if structure in self.traced:
            return with_weights(self.traced[structure], model)
        apply_experts(model, "batched_mm")
        made = self._of_one_call(model) if self.is_one_call else self._in_parts_or_whole(model)
        if made.bare:
            self.traced[structure] = replace(made, models={})
        return made

    def _in_parts_or_whole(self, model: Any) -> Programs:
        """The programs that clients read, or one program if these cannot be made."""
        try:
            return self._in_parts(model)
        except UnsupportedModel as error:
            whole = self._of_one_call(model)
            self.is_one_call = True
            if model.can_generate():
                self.event("warning", f"exported without a cache: {error}")
            return whole

    def _in_parts(self, model: Any) -> Programs:
        """The programs in the layout that clients read, with a cache if the model generates."""
        with encoded_once(model), torch.no_grad():
            call = call_to_export(model, (), torch.float32)
            self.axes = call.axes
            if not model.can_generate():
                _require_same_inputs(call, self.samples)
            calls = program_calls(model, call)
        made = programs_of_calls(model, calls, shifts=self.shifts, cross_cache=self.cross_cache)
        _require_sizes(made, self.samples)
        if VISION in made.bare and not self.cross_cache:
            raise UnsupportedModel("OpenVINO takes a model of pictures and text as a whole")
        return made

    def _of_one_call(self, model: Any) -> Programs:
        """One program of a whole call with the inputs of the user.

        transformers' exporter replaces parts of some models that torch cannot export.
        """
        leave_out_cache(model)
        if not self.is_by_transformers:
            with suppress(UnsupportedModel):
                call = _whole_call(model, self.samples, self.traced_sample, self.axes)
                return programs_of_calls(model, {MODEL: call}, shifts=self.shifts)
        made = _by_transformers(model, self.traced_sample, self.shifts)
        self.is_by_transformers = True
        return made

    def _structure(self, model: Any, plan: Plan | None) -> Structure:
        if plan is None:
            return ()
        online_rotations = tuple(
            (group.online_rotation, group.size) for group in plan.rotated if group.online_rotation
        )
        if plan.settings and plan.settings not in self.harmless:
            if not _same_outputs(model, plan.settings, self.samples[0]):
                return (*online_rotations, *plan.settings)
            self.harmless.add(plan.settings)
        return online_rotations


def _require_same_inputs(call: ExportedCall, samples: Sequence[Batch]) -> None:
    """Raise ``UnsupportedModel`` if a program of this call would not take the user's inputs.

    Without generation, a program takes the inputs that the config tells, and pictures of that size.
    """
    if {*call.batch} != {*samples[0]}:
        raise UnsupportedModel(f"the data have {', '.join(samples[0])}")
    for name, value in call.batch.items():
        told = [call.axes[name].get(axis, size) for axis, size in enumerate(value.shape)]
        _require_size(name, told, samples)


def _require_sizes(programs: Programs, samples: Sequence[Batch]) -> None:
    """Raise ``UnsupportedModel`` if pictures of the user have other sizes than a program takes."""
    if VISION not in programs.bare:
        return
    taken = {value.name: value.shape for value in programs.bare[VISION].graph.inputs}
    samples = [image_inputs(taken, sample) for sample in samples]
    for name in samples[0]:
        sizes = [size if isinstance(size, int) else str(size.value) for size in taken[name]]
        _require_size(name, sizes, samples)


def _require_size(name: str, taken: Sequence[int | str], samples: Sequence[Batch]) -> None:
    """Raise ``UnsupportedModel`` if an input has another fixed size than the ``taken`` sizes."""
    for shape in (sample[name].shape for sample in samples):
        pairs = zip(taken, shape, strict=True)
        if any(isinstance(fixed, int) and fixed != size for fixed, size in pairs):
            raise UnsupportedModel(
                f"{name} of the data has shape {list(shape)}, and its program takes {[*taken]}"
            )


def _whole_call(model: Any, samples: Sequence[Batch], traced: Batch, told: Axes) -> ProgramCall:
    """A call with the inputs of the user, which is traced with the inputs ``traced``.

    An axis is dynamic if it is ``told``, or if its sizes differ. Axes of equal sizes have one name.
    """
    with exporting(model, "torch.onnx"):
        (found,) = run(model, [traced])
    axes: Axes = {}
    names: dict[tuple[int, ...], str] = {}
    for name, value in traced.items():
        axes[name] = dict(told.get(name, {}))
        for at in range(value.ndim):
            sizes = tuple(batch[name].shape[at] for batch in (traced, *samples))
            if len({*sizes}) > 1:
                known = names.setdefault(sizes, f"size_{len(names)}" if at else BATCH)
                axes[name].setdefault(at, known)
    call = ExportedCall(traced, tuple(found), axes)
    return ProgramCall(Positional(model, call), call.batch, call.outputs, call.axes)


def _by_transformers(model: Any, batch: Batch, shifts: Mapping[str, int]) -> Programs:
    """One program of a whole call with the inputs of ``batch``, which others cannot fill."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    config = OnnxConfig(dynamic=True)
    in_parts = computed_in_parts(model, shifts)
    with scaled_inputs(model, in_parts):
        program = exported(OnnxExporter(), model, batch, config).program
    scale_norms([program.graph], {norm: k for norm, k in shifts.items() if norm not in in_parts})
    fold_transposed_weights(program)
    return Programs({MODEL: program}, {})


def _same_outputs(model: Any, settings: Sequence[Setting], sample: Batch) -> bool:
    """Whether a model computes the same with these flags of its config as without them."""
    try:
        with encoded_once(model):
            (after,) = run(model, [sample])
            for setting in settings:
                set_entry(model.config, setting.name, not setting.value)
            (before,) = run(model, [sample])
    finally:
        for setting in settings:
            set_entry(model.config, setting.name, setting.value)
    return all(torch.equal(after[name], before[name]) for name in after)


def quantised(
    programs: Programs,
    scheme: QuantisationScheme,
    ranges: Mapping[str, Mapping[str, Range]],
    bits: Mapping[str, int],
    rounded: Mapping[str, RoundedWeight] | None = None,
) -> Programs:
    """The programs, quantised by ``scheme``.

    ``bits`` and ``rounded`` are as for ``onnxruntime_quantiser.quantised``. ``ranges`` are of
    values by program and name, for a static scheme (see ``static_ranges.ranges_of``). Raises
    ``UnsupportedModel`` if no program has a layer that would be quantised.
    """
    small = {
        name: onnxruntime_quantiser.quantised(
            program.clone(), scheme, ranges.get(name, {}), bits, rounded or {}
        )
        for name, program in programs.models.items()
    }
    for name, program in programs.models.items():
        small[name].metadata_props.update(program.metadata_props)
        if scheme.input_bits == 16:
            small[name].metadata_props[IN_16_BITS] = "true"
    if not any(map(onnxruntime_quantiser.is_rounded, small.values())):
        raise UnsupportedModel("the model has no linear layer that this scheme quantises")
    return replace(programs, models=small)
