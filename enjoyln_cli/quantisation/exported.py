"""Models that ``transformers.exporters`` writes, quantised by the library that owns the format.

A model is exported once in float32. The quantiser takes that program, so that the same program in
float32 can be timed beside it.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.run import tensors
from enjoyln_cli.models.classes import apply_experts, leave_out_cache
from enjoyln_cli.models.load import silent
from enjoyln_cli.onnx_export import transformers_exporter
from enjoyln_cli.onnx_export.onnx_program import fold_transposed_weights
from enjoyln_cli.onnx_export.runtimes import session_options
from enjoyln_cli.quantisation import nncf_quantiser, onnxruntime_quantiser
from enjoyln_cli.quantisation.measure import Compute
from enjoyln_cli.quantisation.schemes import ONNX, QuantisationScheme


def exported(model: Any, batch: Batch, form: str) -> Any:
    """The ``transformers.exporters.ExportedModel`` of one call, in float32, with dynamic axes.

    Raises ``UnsupportedModel`` if the model cannot be exported.
    """
    from transformers.exporters import (
        OnnxConfig,
        OnnxExporter,
        OpenVINOConfig,
        OpenVINOExporter,
    )

    leave_out_cache(model)
    apply_experts(model, "batched_mm")
    if form == ONNX:
        made = transformers_exporter.exported(
            OnnxExporter(), model, batch, OnnxConfig(dynamic=True)
        )
        fold_transposed_weights(made.program)
        return made
    config = OpenVINOConfig(dynamic=True)
    return transformers_exporter.exported(OpenVINOExporter(), model, batch, config)


def quantised(
    made: Any,
    form: str,
    scheme: QuantisationScheme,
    batch: Batch,
    calibration: Sequence[Batch],
    keep: Sequence[str],
    is_rotated: bool,
) -> Any:
    """The exported model, quantised; ``is_rotated`` says whether its streams are turned.

    ``keep`` are paths of layers, or patterns, that stay in float32 (in 8 bits if ``scheme`` has
    4). ``calibration`` are inputs for a static scheme. Raises ``UnsupportedModel`` if the model has
    no layer that would be quantised.
    """
    from transformers.exporters import ExportedComponent, ExportedModel

    with silent(), redirect_stdout(io.StringIO()):
        if form == ONNX:
            program = onnxruntime_quantiser.quantised(
                made.program, scheme, batch, calibration, keep
            )
        else:
            program = nncf_quantiser.quantised(made.program, scheme, batch, calibration, is_rotated)
    ((name, component),) = made.components.items()
    parts = {name: ExportedComponent(program, component.metadata)}
    return ExportedModel(parts, made.export_format)


def load(folder: Path, form: str) -> Compute:
    """What was written to ``folder``, as a function that the format's program computes."""
    from transformers.exporters import ExportedModel

    threads = torch.get_num_threads()
    if form == ONNX:
        settings = {"session_options": session_options(threads)}
    else:  # by default, some processors compute in bfloat16
        exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        settings = {"config": exact}
    with silent():
        made: Any = ExportedModel.from_pretrained(folder, device="cpu", **settings)

    def compute(batch: Batch) -> dict[str, torch.Tensor]:
        return dict(tensors(made(**batch)))

    return compute
