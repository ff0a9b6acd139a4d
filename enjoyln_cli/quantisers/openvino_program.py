"""OpenVINO programs that ``transformers.exporters`` writes, quantised by NNCF.

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
from enjoyln_cli.onnx_export import exporting
from enjoyln_cli.onnx_export.runtimes import RunProgram
from enjoyln_cli.plan.trusted_code import MODELS, is_defined_in
from enjoyln_cli.quantisers import nncf_quantiser
from enjoyln_cli.quantisers.schemes import QuantisationScheme


def exported(model: Any, batch: Batch) -> Any:
    """The ``transformers.exporters.ExportedModel`` of one call, in float32, with dynamic axes.

    Raises ``UnsupportedModel`` if the model cannot be exported.
    """
    from transformers.exporters import OpenVINOConfig, OpenVINOExporter

    leave_out_cache(model)
    apply_experts(model, "batched_mm")
    config = OpenVINOConfig(dynamic=True)
    return exporting.exported(OpenVINOExporter(), model, batch, config)


def quantised(
    made: Any,
    scheme: QuantisationScheme,
    batch: Batch,
    calibration: Sequence[Batch],
    is_rotated: bool,
) -> Any:
    """The exported model, quantised; ``is_rotated`` says whether its streams are rotated.

    ``calibration`` are inputs for a static scheme.
    """
    from transformers.exporters import ExportedComponent, ExportedModel

    with silent(), redirect_stdout(io.StringIO()):
        program = nncf_quantiser.quantised(made.program, scheme, batch, calibration, is_rotated)
    ((name, component),) = made.components.items()
    parts = {name: ExportedComponent(program, component.metadata)}
    return ExportedModel(parts, made.export_format)


def load(folder: Path, model_class: type) -> RunProgram:
    """What was written to ``folder``, as a function that OpenVINO computes.

    Code that comes with the result is trusted if the class of the original is such code.
    """
    from transformers.exporters import ExportedModel

    # by default, some processors compute in bfloat16
    exact = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    with silent():
        made: Any = ExportedModel.from_pretrained(
            folder,
            device="cpu",
            config=exact,
            trust_remote_code=not is_defined_in(model_class, MODELS),
        )

    def compute(batch: Batch) -> dict[str, torch.Tensor]:
        return dict(tensors(made(**batch)))

    return compute
