"""Write a converted checkpoint as an ONNX file, and check that it computes the same function.

The order of the steps: load the checkpoint with RMSNorm, trace one call, write the file beside its
place, run it in the installed programs, and put it there only if it passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from enjoyln_cli.checkpoint.access import HubAccess
from enjoyln_cli.checkpoint.reader import Subject, other_files
from enjoyln_cli.checkpoint.result_files import REPORTS
from enjoyln_cli.errors import EnjoyLNError, VerificationFailed
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.staged_files import staged_file
from enjoyln_cli.fs.staging import staged_output
from enjoyln_cli.onnx_export.cached_generation import with_a_cache
from enjoyln_cli.onnx_export.call import call_to_export
from enjoyln_cli.onnx_export.check import RuntimeCheck, check_in, reference_of
from enjoyln_cli.onnx_export.converted import Converted, open_converted
from enjoyln_cli.onnx_export.form import ExportForm
from enjoyln_cli.onnx_export.onnx_program import (
    OPSET,
    OPSET_OF_LAYER_NORMS,
    count_nodes,
    require_rms_norms,
)
from enjoyln_cli.onnx_export.requirements import require_export, weights_file
from enjoyln_cli.onnx_export.runtimes import installed
from enjoyln_cli.onnx_export.whole_call import whole_call
from enjoyln_cli.plan import schema
from enjoyln_cli.recipe.read import tried_to_merge
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.runtime.entries import input_means
from enjoyln_cli.runtime.loading import optimize
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.text import dtype_name, first_line


@dataclass(frozen=True)
class Exported:
    """The result of ``export``."""

    file: str
    """The file, or with a cache the directory."""
    data_file: str | None
    """The file beside it that holds the weights, if they are larger than 1.5 GB."""
    bytes_written: int
    model_class: str
    source: str
    """The original of the converted checkpoint."""
    dtype: str
    opset: int
    inputs: dict[str, list[str | int]]
    """The shape of each input of the (first) file; dynamic axes by name."""
    outputs: tuple[str, ...]
    nodes: dict[str, int]
    """How many nodes of each type the (first) file has."""
    centrings: int
    """Number of added mean subtractions."""
    biased: int
    """Number of RMSNorms with a node for their bias, which ``fold --merge bias`` may take away.

    0 for a model that was folded with ``--merge``: what is left there cannot be merged."""
    checks: tuple[RuntimeCheck, ...]
    """One for each program that ran the file; empty without ``verify``."""
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        found: dict[str, Any] = schema.to_json(self)
        return found


def export(
    out: str | Path,
    file: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    model_class: str | None = None,
    against: str | Path | None = None,
    max_ratio: float | None = None,
    seed: int = 0,
    verify: bool = True,
    with_cache: bool = False,
    force: bool = False,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    trust_remote_code: bool = False,
    on_event: Event | None = None,
) -> Exported:
    """Write the converted checkpoint ``out`` (a directory or a Hub id) as the ONNX file ``file``.

    Each folded norm becomes one ``RMSNormalization`` of opset 23; a file without any has opset 20.
    The file computes one call of the model without a cache: ``input_ids`` and ``attention_mask`` of
    shape ``(batch, sequence)``, or ``pixel_values`` and other inputs of the model, to the outputs
    that the model returns. Weights above 1.5 GB are written to ``file.data`` beside it. Both files
    appear when they are complete and checked, and not before. The parameters:

    * ``dtype``: ``float32`` or ``float16``; by default the one in which most of ``out`` is stored.
    * ``model_class``: another class that the conversion was proven for, such as ``GPT2Model``.
    * ``verify``: run the file in onnxruntime, and in OpenVINO if it is installed, and compare the
      outputs with those of the original in float64, on ``seed``ed inputs of several sizes. The
      error may be ``max_ratio`` times that of the original in ``dtype``: by default 1.25, and 2.0
      for a rotated model.
    * ``with_cache``: write a directory instead, with one or two programs that generate with a
      cache of keys and values (see ``cached_generation``), and with the tokenizer and the configs.
      ``transformers.exporters.ExportedModel`` reads it.
    * ``against``: the original; by default the one that the marker of ``out`` names.
    * ``force``: replace ``file`` if it exists.
    * ``revision``: the branch, tag or commit of ``out`` on the Hub.
    * ``on_event`` receives stages and warnings.

    Raises ``UnsupportedModel`` if a library is missing, for another dtype, and if the model cannot
    be exported; ``BadCheckpoint`` if ``out`` was not converted, ``ModelNotFound`` if it or its
    original is not found, ``OutputError`` if the file cannot be written, and ``VerificationFailed``
    if it does not compute the same function.
    """
    begin = time.perf_counter()
    event = on_event or default_listener
    file = Path(file)
    require_export(file, force=force, verify=verify, with_cache=with_cache)
    data = weights_file(file)
    access = HubAccess(token=token, cache_dir=cache_dir)
    converted = open_converted(
        str(out),
        dtype=dtype,
        model_class=model_class,
        against=against,
        max_ratio=max_ratio,
        verify=verify,
        with_cache=with_cache,
        revision=revision,
        access=access,
        trust_remote_code=trust_remote_code,
    )
    source, marker, kind = converted.folded.source, converted.marker, converted.dtype
    event("stage", f"exporting {converted.model_class} in {dtype_name(kind)}")
    model = converted.load(converted.folded, kind)
    optimize(model)
    call = call_to_export(model, marker.outputs, kind)
    if with_cache:
        form = with_a_cache(model, call, kind, seed)
    else:
        form = whole_call(call, kind, marker.unproven, source.path, seed)
    norms = {name: _norms_that_run(model, traced) for name, traced in form.traced.items()}
    opset = OPSET if any(norms.values()) else OPSET_OF_LAYER_NORMS
    programs = form.export(model, opset)
    graphs = form.graphs(programs)
    for name, graph in graphs.items():
        require_rms_norms(graph, model, norms[name])
    first = next(iter(graphs.values()))
    result = Exported(
        file=str(file),
        data_file=None,
        bytes_written=0,
        model_class=converted.model_class,
        source=marker.source,
        dtype=dtype_name(kind),
        opset=opset,
        inputs={value.name: _shape(value) for value in first.inputs},
        outputs=tuple(value.name for value in first.outputs),
        nodes=count_nodes(first),
        centrings=len(marker.centering),
        biased=0 if tried_to_merge(source.path) else _count_biased(model),
        checks=(),
        seconds=0.0,
    )
    del model, first, graphs
    place: Any = (
        staged_output(file, source=source.root, force=force)
        if with_cache
        else staged_file(file, (data,), force=force)
    )
    with place as staged:
        event("stage", f"writing {file}")
        form.save(programs, staged)
        del programs
        written = [*staged.iterdir()] if with_cache else [staged, staged.with_name(data.name)]
        sizes = {one: one.stat().st_size for one in written if one.exists()}
        if converted.original is not None:
            checks = _run_checks(converted, converted.original, form, staged, opset, event)
            result = replace(result, checks=checks)
        if with_cache:
            others = other_files(converted.folded.checkpoint)
            copy_files((name for name in others if name not in REPORTS), source.path, staged)
    where = str(data) if len(sizes) > 1 and not with_cache else None
    seconds = time.perf_counter() - begin
    return replace(result, data_file=where, bytes_written=sum(sizes.values()), seconds=seconds)


def _norms_that_run(model: nn.Module, call: Callable[[nn.Module], object]) -> set[str]:
    """The folded norms that a call runs."""
    with torch.no_grad(), input_means(model) as means:
        call(model)
    return set(means)


def _count_biased(model: nn.Module) -> int:
    """The number of folded norms that add a bias."""
    norms = [module for module in model.modules() if isinstance(module, Folded)]
    return sum(
        getattr(norm, norm.bias_name, None) is not None and not norm.biasless for norm in norms
    )


def _shape(value: Any) -> list[str | int]:
    """The sizes of an input; dynamic ones by name."""
    return [size if isinstance(size, int) else str(size.value) for size in value.shape]


def _run_checks(
    converted: Converted,
    original: Subject,
    form: ExportForm,
    file: Path,
    opset: int,
    event: Event,
) -> tuple[RuntimeCheck, ...]:
    """Run what was written to ``file`` in every installed program.

    Raises ``VerificationFailed`` if one of them gives other outputs, or if onnxruntime cannot run
    the file. If another program cannot run it, there is a warning.
    """
    load_original = partial(converted.load, original)
    kind, stored = converted.dtype, converted.stored
    advice = ""
    if torch.finfo(stored).eps > torch.finfo(kind).eps:
        out = converted.folded.source.model
        advice = f" ({out} is stored in {dtype_name(stored)}; fold with --dtype float32)"
    reference = reference_of(load_original, form, kind)
    checks = []
    with TemporaryDirectory(dir=file.parent) as scratch:

        @cache
        def original_file() -> Path:
            path = Path(scratch, file.name)
            form.save(form.export(load_original(kind), opset), path)
            return path

        for runtime in installed():
            event("stage", f"verifying in {runtime}")
            try:
                check = check_in(
                    runtime, file, original_file, form, reference, kind, converted.max_ratio
                )
            except (EnjoyLNError, MemoryError):
                raise
            except Exception as error:  # each program has exceptions of its own
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
