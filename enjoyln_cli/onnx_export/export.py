"""Write a checkpoint as ONNX programs, and check that they compute the same function.

The order of the steps: load the checkpoint with RMSNorm, trace its calls, write the programs to a
directory beside their place, run them in the installed runtimes, and put the directory there only
if they pass.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.checkpoint.reader import other_files, pipeline_files
from enjoyln_cli.checkpoint.result_files import REPORTS
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.comparison.data_files import UserData, require_data
from enjoyln_cli.errors import EnjoyLNError, VerificationFailed
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.staging import staged_output
from enjoyln_cli.onnx_export.cached_calls import MERGED, MODEL
from enjoyln_cli.onnx_export.cached_run import is_cached, load_programs, whole_rows
from enjoyln_cli.onnx_export.call import call_to_export
from enjoyln_cli.onnx_export.check import (
    CheckedBatches,
    RuntimeCheck,
    batches_of_one_call,
    batches_to_generate,
    check_in,
    reference_of,
)
from enjoyln_cli.onnx_export.onnx_program import OPSET, count_nodes
from enjoyln_cli.onnx_export.programs import programs_of, save
from enjoyln_cli.onnx_export.requirements import require_export
from enjoyln_cli.onnx_export.runtimes import RunProgram, installed
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.option_field import keywords_of
from enjoyln_cli.publish.card import display_name
from enjoyln_cli.publish.precisions import (
    MadeFrom,
    can_add,
    keep_files,
    record,
    require_addition,
    write_config,
)
from enjoyln_cli.publish.written_card import write_quantised_card
from enjoyln_cli.recipe.read import tried_to_fuse
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.runtime.loading import optimize
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.scaling.float16 import (
    analysis_for,
    calibration_batches,
    edits_for,
    scale_streams,
)
from enjoyln_cli.text import dtype_name, first_line
from enjoyln_cli.verification.model_to_export import ModelToExport, open_to_export
from enjoyln_cli.verification.verify_options import ExportOptions
from enjoyln_cli.version import __version__

SUFFIXES = {torch.float32: "", torch.float16: "_fp16"}
"""What the names of files end with, for each dtype."""
GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ProgramSummary:
    """What one program takes, returns and consists of."""

    inputs: dict[str, list[str | int]]
    """The shape of each input; dynamic axes by name."""
    outputs: tuple[str, ...]
    nodes: dict[str, int]
    """How many nodes of each type it has."""


@dataclass(frozen=True)
class Exported:
    """The result of ``export``."""

    folder: str
    files: tuple[str, ...]
    """The programs and their weights, relative to ``folder``."""
    bytes_written: int
    """Size of these files."""
    model_class: str
    source: str
    """The original of the checkpoint, or the checkpoint itself."""
    dtype: str
    opset: int
    programs: dict[str, ProgramSummary]
    """By the stems of their files."""
    centrings: int
    """Number of added mean subtractions."""
    biased: int
    """Number of RMSNorms with a node for their bias, which ``fold --merge bias`` may take away.

    0 for a model that was folded with ``--merge``: what is left there cannot be fused."""
    checks: tuple[RuntimeCheck, ...]
    """One for each runtime that ran the programs; empty without ``verify``."""
    overflowing: tuple[str, ...]
    """With ``fp16_data``: the norms that would overflow in float16, whose input is scaled."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        found: dict[str, Any] = schema.to_json(self)
        return found


@keywords_of(options=ExportOptions, opening=OpenOptions)
def export(
    model: str | Path,
    folder: str | Path,
    *,
    options: ExportOptions,
    opening: OpenOptions,
    fp16_data: UserData | None = None,
    on_event: Event | None = None,
) -> Exported:
    """Write the checkpoint ``model`` (a directory or a Hub id) as ONNX to ``folder``.

    It may be the result of a fold or rotation, or a model that was not converted. ``folder`` has
    the layout of optimum and transformers.js: ``onnx/model.onnx``, or for an encoder with its
    decoder ``onnx/encoder_model.onnx`` and ``onnx/decoder_model_merged.onnx``, with ``_fp16``
    before ``.onnx`` in float16. Beside ``onnx`` are the config, the tokenizer or processor, and the
    other files of ``model``. A model that generates has a cache of keys and values (see
    ``cached_calls``). Weights above 1.5 GB are written to ``.onnx_data`` files. ``folder`` appears
    when it is complete and checked, and not before. Without ``force``, the files are added to a
    ``folder`` with other precisions of the same model.

    The programs run in onnxruntime, and in OpenVINO if it is installed. Their outputs are compared
    with the original's in float64, on inputs of several sizes; the error may be ``max_ratio`` times
    the original's in ``dtype``. Another class than the stored class has to be a class that the
    conversion of ``model`` was proven for.

    ``fp16_data`` are calibration data. The norms whose squares or sums overflow in float16 on these
    data read their input at a smaller scale, a power of two (see ``scaling.float16``), so that
    engines that take norms apart compute them right. ``on_event`` receives stages and warnings.

    Raises ``UnsupportedModel`` if a library is missing, for another dtype, and if the model cannot
    be exported; ``ModelNotFound`` if it or its original is not found, ``OutputError`` if
    ``folder`` cannot be written, and ``VerificationFailed`` if the programs do not compute the same
    function. The other keywords:
    """
    start = time.perf_counter()
    event = on_event or default_listener
    folder, opset = Path(folder), options.opset
    require_export(folder, options)
    made = open_to_export(str(model), options, opening)
    source, plan, kind = made.opened.source, made.plan, made.dtype
    if adds := can_add(folder, options.force):
        _require_addition(folder, made)
    event("stage", f"exporting {made.model_class} in {dtype_name(kind)}")
    live = made.load(made.opened, kind)
    edits = None
    if fp16_data is not None:
        event("stage", "looking for norms that overflow in float16")
        require_data(fp16_data)
        wide = made.load(made.opened, torch.float32)
        batches = calibration_batches(made.opened, wide, fp16_data)
        edits = edits_for(wide, batches, analysis_for(made.opened, wide))
        scale_streams(live, edits.streams)
    if plan is not None and (opset is None or opset >= OPSET):
        optimize(live)
    programs = programs_of(
        live, kind, outputs=made.outputs, opset=opset, shifts=edits.norms if edits else None
    )
    result = Exported(
        folder=str(folder),
        files=(),
        bytes_written=0,
        model_class=made.model_class,
        source=made.origin,
        dtype=dtype_name(kind),
        opset=programs.opset,
        programs={name: _summary(program.graph) for name, program in programs.models.items()},
        centrings=len(plan.subtractions) if plan else 0,
        biased=0 if tried_to_fuse(source.path) else _count_biased(live),
        checks=(),
        overflowing=edits.overflowing if edits else (),
        seconds=0.0,
    )
    with staged_output(folder, source=source.root, force=options.force or adds) as staged:
        event("stage", f"writing {folder}")
        inner = staged / source.folder
        files = save(programs, inner, SUFFIXES[kind])
        if adds:
            keep_files(folder, staged)
        _write_beside(made.opened, live, staged)
        result = replace(
            result,
            files=tuple(file.relative_to(staged).as_posix() for file in files),
            bytes_written=sum(file.stat().st_size for file in files),
        )
        del live, programs
        if made.original is not None:
            checks = _run_checks(made, made.original, inner, result.opset, options.seed, event)
            result = replace(result, checks=checks)
        _record(result, made, staged)
    return replace(result, seconds=time.perf_counter() - start)


def _require_addition(folder: Path, made: ModelToExport) -> None:
    """Raise ``OutputError`` if the export cannot be added to the files in ``folder``."""
    source, checkpoint = made.opened.source, made.opened.checkpoint
    inside = {
        Path(source.folder, name).as_posix(): source.path / name for name in other_files(checkpoint)
    }
    copies = inside | {name: source.root / name for name in pipeline_files(checkpoint)}
    original = MadeFrom(made.origin, made.revision, made.model_class)
    require_addition(folder, dtype_name(made.dtype), original, copies)


def _record(result: Exported, made: ModelToExport, staged: Path) -> None:
    """Record the files in ``staged`` and their checks, and write the card."""
    source = made.opened.source
    checks = [f"{check.runtime}: {check.summary}" for check in result.checks]
    main = result.programs[MODEL if MODEL in result.programs else MERGED]
    entry = {
        "format": "onnx",
        "scheme": result.dtype,
        "suffix": SUFFIXES[getattr(torch, result.dtype)],
        "source": made.origin,
        "revision": made.revision,
        "model_class": result.model_class,
        "folder": source.folder,
        "exported": display_name(source),
        "opset": result.opset,
        "size": result.bytes_written,
        "outputs": [name for name in main.outputs if not is_cached(name)],
        "checks": checks,
        "version": __version__,
    }
    verdict = {"passed": True, "summary": "; ".join(checks)} if checks else {}
    record(staged, result.dtype, entry, verdict)
    original = Source(made.origin, Path(made.origin), made.revision)
    write_quantised_card(staged, original, Path(result.folder), source.root)


def _write_beside(opened: OpenedModel, model: Any, staged: Path) -> None:
    """Write the config of ``model``, and copy the tokenizer and other files of its directory."""
    source, inner = opened.source, staged / opened.source.folder
    copied = [name for name in other_files(opened.checkpoint) if name not in REPORTS]
    copy_files(copied, source.path, inner)
    around = [name for name in pipeline_files(opened.checkpoint) if name not in REPORTS]
    copy_files(around, source.root, staged)
    write_config(inner, opened.checkpoint.raw_config, type(model).__name__)
    if model.can_generate() and GENERATION_CONFIG not in copied:
        model.generation_config.save_pretrained(inner)


def _summary(graph: Any) -> ProgramSummary:
    return ProgramSummary(
        {value.name: _shape(value) for value in graph.inputs},
        tuple(value.name for value in graph.outputs),
        count_nodes(graph),
    )


def _count_biased(model: nn.Module) -> int:
    """The number of folded norms that add a bias."""
    norms = [module for module in model.modules() if isinstance(module, Folded)]
    return sum(
        getattr(norm, norm.bias_name, None) is not None and not norm.biasless for norm in norms
    )


def _shape(value: Any) -> list[str | int]:
    """The sizes of an input; dynamic sizes by name."""
    return [size if isinstance(size, int) else str(size.value) for size in value.shape]


def _run_checks(
    made: ModelToExport, original: OpenedModel, folder: Path, opset: int, seed: int, event: Event
) -> tuple[RuntimeCheck, ...]:
    """Run the programs in ``folder`` in every installed runtime.

    Raises ``VerificationFailed`` if any gives other outputs, or if onnxruntime cannot run
    the programs. If another runtime cannot run them, there is a warning.
    """
    load_original = partial(made.load, original)
    kind, stored = made.dtype, made.stored
    advice = ""
    if made.plan and torch.finfo(stored).eps > torch.finfo(kind).eps:
        name = made.opened.source.model
        advice = f" ({name} is stored in {dtype_name(stored)}; fold with --dtype float32)"

    def inputs_for(model: Any) -> CheckedBatches:
        call = call_to_export(model, made.outputs, torch.float64)
        if model.can_generate():
            return batches_to_generate(model, call, kind, seed)
        unproven = made.plan.unproven if made.plan else ()
        return batches_of_one_call(model, call, kind, unproven, made.opened.source.path, seed)

    reference = reference_of(load_original, inputs_for, kind)
    checks = []
    with TemporaryDirectory(dir=folder.parent) as scratch:

        @cache
        def original_folder() -> Path:
            exact = programs_of(load_original(kind), kind, outputs=made.outputs, opset=opset)
            save(exact, Path(scratch), SUFFIXES[kind])
            return Path(scratch)

        def in_runtime(runtime: str, written: Path) -> RunProgram:
            return whole_rows(load_programs(written, SUFFIXES[kind], runtime))

        def of_original(runtime: str) -> RunProgram:
            return in_runtime(runtime, original_folder())

        for runtime in installed():
            event("stage", f"verifying in {runtime}")
            try:
                check = check_in(
                    runtime,
                    in_runtime(runtime, folder),
                    None if made.plan is None else partial(of_original, runtime),
                    reference,
                    kind,
                    made.max_ratio,
                )
            except (EnjoyLNError, MemoryError):
                raise
            except Exception as error:  # each runtime has exceptions of its own
                what = f"{runtime} cannot run the exported model: {first_line(error)}"
                if runtime == "onnxruntime":
                    raise VerificationFailed(f"{what}; nothing was written") from error
                event("warning", what)
                continue
            if check.failure:
                raise VerificationFailed(
                    f"in {check.runtime}, the exported model is too far from the exact function: "
                    f"{check.failure}{advice}; nothing was written"
                )
            checks.append(check)
    return tuple(checks)
