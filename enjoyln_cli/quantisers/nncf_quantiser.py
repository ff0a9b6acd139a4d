"""OpenVINO programs, quantised by NNCF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.quantisers.schemes import QuantisationScheme

GROUP = 32
"""Weights of 4 bits share a scale in groups of this many."""
NO_SMOOTHING = -1


def quantised(
    program: Any,
    scheme: QuantisationScheme,
    batch: Batch,
    calibration: Sequence[Batch],
    is_rotated: bool,
) -> Any:
    """The ``openvino.Model`` of a model in float32, quantised.

    ``calibration`` are inputs for a static scheme. SmoothQuant is off for a model that
    ``is_rotated``: it scales single features, which undoes what a rotation has gained.
    """
    import nncf
    from transformers.exporters import (
        ExportFormat,
        NNCFOpenVINOQuantizer,
        NNCFQuantizationConfig,
        NNCFWeightCompressionConfig,
    )

    nncf.set_log_level("ERROR")
    if scheme.is_static:
        smoothing = {"smooth_quant_alpha": NO_SMOOTHING} if is_rotated else {}
        parameters = nncf.AdvancedQuantizationParameters(**smoothing)
        config: Any = NNCFQuantizationConfig(advanced_parameters=parameters)
    elif scheme.weight_bits == 8:
        config = NNCFWeightCompressionConfig(mode=nncf.CompressWeightsMode.INT8_SYM)
    else:
        mode = nncf.CompressWeightsMode.INT4_SYM
        config = NNCFWeightCompressionConfig(mode=mode, group_size=GROUP)
    quantizer = NNCFOpenVINOQuantizer(config, list(calibration))
    return quantizer.quantize(program.clone(), dict(batch), ExportFormat.OPENVINO)
