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
from typing import Any

import torch
from torch import nn

from enjoyln_cli.analysis.stored_class import require_weights
from enjoyln_cli.checkpoint.access import HubAccess
from enjoyln_cli.checkpoint.marker import Marker, read_marker
from enjoyln_cli.checkpoint.reader import Subject, open_subject
from enjoyln_cli.errors import EnjoyLNError, UnsupportedModel, VerificationFailed
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.fs.staged_files import staged_file
from enjoyln_cli.models.classes import apply_experts
from enjoyln_cli.models.load import load
from enjoyln_cli.models.outputs import config_returning
from enjoyln_cli.onnx_export.call import ExportedCall, Positional, call_to_export
from enjoyln_cli.onnx_export.check import RuntimeCheck, check_in, reference_of
from enjoyln_cli.onnx_export.onnx_program import (
    OPSET,
    OPSET_OF_LAYER_NORMS,
    count_nodes,
    program_of,
    require_rms_norms,
    save,
)
from enjoyln_cli.onnx_export.requirements import require_export, weights_file
from enjoyln_cli.onnx_export.runtimes import installed
from enjoyln_cli.plan import schema
from enjoyln_cli.recipe.read import tried_to_merge
from enjoyln_cli.runtime.entries import input_means
from enjoyln_cli.runtime.loading import optimize, saved_class
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.text import first_line
from enjoyln_cli.verification.verify import (
    RATIO,
    ROTATED_RATIO,
    compute_dtype,
    dtype_name,
    original_of,
)

DTYPES = (torch.float32, torch.float16)
"""The dtypes that are exported."""


@dataclass(frozen=True)
class Exported:
    """The result of ``export``."""

    file: str
    data_file: str | None
    """The file beside it that holds the weights, if they are larger than 1.5 GB."""
    bytes_written: int
    model_class: str
    source: str
    """The original of the converted checkpoint."""
    dtype: str
    opset: int
    inputs: dict[str, list[str | int]]
    """The shape of each input; dynamic axes by name."""
    outputs: tuple[str, ...]
    nodes: dict[str, int]
    """How many nodes of each type the graph has."""
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
    require_export(file, force=force, verify=verify)
    data = weights_file(file)
    access = HubAccess(token=token, cache_dir=cache_dir)
    folded = open_subject(
        str(out), revision=revision, access=access, trust_remote_code=trust_remote_code
    )
    marker = read_marker(folded.checkpoint.raw_config, folded.source.model)
    stored = compute_dtype(folded.checkpoint, None)
    kind = _as_exported(compute_dtype(folded.checkpoint, dtype))
    original = original_of(folded, marker, against, None, access) if verify else None
    if max_ratio is None:
        max_ratio = ROTATED_RATIO if marker.rotated else RATIO
    name = model_class or _class_name(folded)

    def load_from(subject: Subject, dtype: torch.dtype) -> Any:
        return _load(subject, name, marker, dtype)

    event("stage", f"exporting {name} in {dtype_name(kind)}")
    model = load_from(folded, kind)
    optimize(model)
    call = call_to_export(model, marker.outputs, kind)
    norms = _norms_that_run(model, call)
    opset = OPSET if norms else OPSET_OF_LAYER_NORMS
    program = program_of(model, call, opset)
    require_rms_norms(program, model, norms)
    result = Exported(
        file=str(file),
        data_file=None,
        bytes_written=0,
        model_class=name,
        source=marker.source,
        dtype=dtype_name(kind),
        opset=opset,
        inputs={n: _shape(value, call.axes[n]) for n, value in call.batch.items()},
        outputs=call.outputs,
        nodes=count_nodes(program),
        centrings=len(marker.centering),
        biased=0 if tried_to_merge(folded.source.path) else _count_biased(model),
        checks=(),
        seconds=0.0,
    )
    del model
    with staged_file(file, (data,), force=force) as staged:
        event("stage", f"writing {file}")
        save(program, staged)
        del program
        if original is not None:
            load_original = partial(load_from, original)

            @cache
            def original_file() -> Path:
                path = staged.with_name("original.onnx")
                save(program_of(load_original(kind), call, opset), path)
                return path

            folder = folded.source.path
            reference = reference_of(load_original, call, kind, marker.unproven, folder, seed)
            check = partial(
                check_in,
                file=staged,
                original=original_file,
                call=call,
                reference=reference,
                dtype=kind,
                max_ratio=max_ratio,
            )
            advice = ""
            if torch.finfo(stored).eps > torch.finfo(kind).eps:
                advice = f" ({out} is stored in {dtype_name(stored)}; fold with --dtype float32)"
            result = replace(result, checks=_run_checks(check, advice, event))
        written = [one for one in (staged, staged.with_name(data.name)) if one.exists()]
        size = sum(one.stat().st_size for one in written)
    where = str(data) if len(written) > 1 else None
    seconds = time.perf_counter() - begin
    return replace(result, data_file=where, bytes_written=size, seconds=seconds)


def _as_exported(dtype: torch.dtype) -> torch.dtype:
    if dtype not in DTYPES:
        raise UnsupportedModel(
            f"{dtype_name(dtype)} cannot be exported: onnxruntime has no operators for it on a "
            "CPU; fold with --dtype float32 or float16"
        )
    return dtype


def _class_name(subject: Subject) -> str:
    """The class that the checkpoint was saved as."""
    folder, trusted = str(subject.source.path), subject.trust_remote_code
    cls = saved_class(folder, config=subject.config, trust_remote_code=trusted)
    return str(cls.__name__)


def _load(subject: Subject, name: str, marker: Marker, dtype: torch.dtype) -> Any:
    """The checkpoint as the class ``name``, in a form that the exporter takes.

    Raises ``BadCheckpoint`` if its outputs depend on weights that are not stored.
    """
    config = config_returning(subject.config, marker.outputs)
    folder, trusted, missing = subject.source.path, subject.trust_remote_code, set[str]()
    model = load(folder, name, config, dtype, trusted, missing=missing)
    require_weights(model, missing, subject.source.model)
    for part in (model.config, model.config.get_text_config()):
        if getattr(part, "use_cache", None):
            part.use_cache = False
    apply_experts(model, "eager" if dtype == torch.float64 else "batched_mm")
    return model


def _norms_that_run(model: nn.Module, call: ExportedCall) -> set[str]:
    """The folded norms that the call runs."""
    with torch.no_grad(), input_means(model) as means:
        Positional(model, call)(*call.batch.values())
    return set(means)


def _count_biased(model: nn.Module) -> int:
    """The number of folded norms that add a bias."""
    norms = [module for module in model.modules() if isinstance(module, Folded)]
    return sum(
        getattr(norm, norm.bias_name, None) is not None and not norm.biasless for norm in norms
    )


def _shape(value: torch.Tensor, axes: dict[int, str]) -> list[str | int]:
    return [axes.get(at, size) for at, size in enumerate(value.shape)]


def _run_checks(
    check: Callable[[str], RuntimeCheck], advice: str, event: Event
) -> tuple[RuntimeCheck, ...]:
    """``check`` for every installed program.

    Raises ``VerificationFailed``, with ``advice``, if one of them gives other outputs, or if
    onnxruntime cannot run the file. If another program cannot run it, there is a warning.
    """
    checks = []
    for runtime in installed():
        event("stage", f"verifying in {runtime}")
        try:
            found = check(runtime)
        except (EnjoyLNError, MemoryError):
            raise
        except Exception as error:  # each program has exceptions of its own
            what = f"{runtime} cannot run the exported model: {first_line(error)}"
            if runtime == "onnxruntime":
                raise VerificationFailed(f"{what}; nothing was written") from error
            event("warning", what)
            continue
        if found.failure:
            raise VerificationFailed(
                f"in {found.runtime}, the exported model is too far from the exact function: "
                f"{found.failure}{advice}; nothing was written"
            )
        checks.append(found)
    return tuple(checks)
