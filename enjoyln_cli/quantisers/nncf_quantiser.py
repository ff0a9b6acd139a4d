"""OpenVINO programs, quantised by NNCF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.onnx_export.exporting import quiet
from enjoyln_cli.quantisers.schemes import QuantisationScheme

GROUP = 32
"""Weights of 4 bits share a scale in groups of this many; a weight whose width is no multiple of it
gets 8 bits."""
NO_SMOOTHING = -1


def quantised(
    program: Any,
    scheme: QuantisationScheme,
    calibration: Sequence[Batch],
    in_float: Sequence[str],
    in_8_bits: Sequence[str],
    is_rotated: bool,
) -> Any:
    """An ``openvino.Model``, its weights in float32 quantised; it is changed in place.

    ``calibration`` are inputs of the program, for a static scheme. ``in_float`` and ``in_8_bits``
    are the names of products whose weights stay in float32, or get 8 bits where others get 4.
    SmoothQuant is off for a model that ``is_rotated``: it scales single features, which undoes what
    a rotation has gained.
    """
    import nncf

    nncf.set_log_level("ERROR")
    floats = nncf.IgnoredScope(names=[*in_float])
    with quiet():
        if scheme.is_static:
            samples = [
                {name: batch[name].numpy() for value in program.inputs for name in value.names}
                for batch in calibration
            ]
            smoothing = {"smooth_quant_alpha": NO_SMOOTHING} if is_rotated else {}
            return nncf.quantize(
                program,
                model_type=nncf.ModelType.TRANSFORMER,
                advanced_parameters=nncf.AdvancedQuantizationParameters(**smoothing),
                ignored_scope=floats,
                calibration_dataset=nncf.Dataset(samples),
                subset_size=len(samples),
            )
        modes = nncf.CompressWeightsMode
        if scheme.weight_bits == 4:
            adjusts = nncf.GroupSizeFallbackMode.ADJUST
            program = nncf.compress_weights(
                program,
                mode=modes.INT4_ASYM,
                group_size=GROUP,
                advanced_parameters=nncf.AdvancedCompressionParameters(
                    group_size_fallback_mode=adjusts
                ),
                ignored_scope=nncf.IgnoredScope(names=[*in_float, *in_8_bits]),
            )
        return nncf.compress_weights(program, mode=modes.INT8_ASYM, ignored_scope=floats)
