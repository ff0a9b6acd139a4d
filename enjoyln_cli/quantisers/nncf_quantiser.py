"""OpenVINO programs, quantised by NNCF."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.onnx_export.exporting import quiet
from enjoyln_cli.quantisers.schemes import QuantisationScheme, RoundingMethod

GROUP = 32
"""Weights of 4 bits share a scale in groups of this many; a weight whose width is no multiple of it
gets 8 bits."""
NO_SMOOTHING = -1


def quantised(
    program: Any,
    scheme: QuantisationScheme,
    rounding: RoundingMethod,
    calibration: Sequence[Batch],
    in_float: Sequence[str],
    in_8_bits: Sequence[str],
    is_rotated: bool,
) -> Any:
    """An ``openvino.Model`` in float32, quantised; it is changed in place.

    ``rounding`` says how weights of 4 bits are rounded. ``calibration`` are inputs of the program,
    for a static scheme and for GPTQ. ``in_float`` and ``in_8_bits`` are the names of products whose
    weights stay in float32, or get 8 bits where others get 4. SmoothQuant is off for a model that
    ``is_rotated``: it scales single features, which undoes what a rotation has gained.
    """
    import nncf

    nncf.set_log_level("ERROR")
    samples = [
        {name: batch[name].numpy() for value in program.inputs for name in value.names}
        for batch in calibration
    ]
    data: dict[str, Any] = {}
    if samples:
        data = {"dataset": nncf.Dataset(samples), "subset_size": len(samples)}
    floats = nncf.IgnoredScope(names=[*in_float])
    with quiet():
        if scheme.is_static:
            smoothing = {"smooth_quant_alpha": NO_SMOOTHING} if is_rotated else {}
            return nncf.quantize(
                program,
                model_type=nncf.ModelType.TRANSFORMER,
                advanced_parameters=nncf.AdvancedQuantizationParameters(**smoothing),
                ignored_scope=floats,
                calibration_dataset=data.pop("dataset"),
                **data,
            )
        modes = nncf.CompressWeightsMode
        if scheme.weight_bits == 8:
            return nncf.compress_weights(program, mode=modes.INT8_ASYM, ignored_scope=floats)
        by_error = rounding == "gptq"
        parameters = nncf.AdvancedCompressionParameters(
            group_size_fallback_mode=nncf.GroupSizeFallbackMode.ADJUST,
            gptq_params=nncf.AdvancedGPTQParameters(subset_size=max(1, len(samples))),
        )
        made = nncf.compress_weights(
            program,
            mode=modes.INT4_ASYM if by_error else modes.INT4_SYM,
            group_size=GROUP,
            gptq=by_error,
            advanced_parameters=parameters,
            ignored_scope=nncf.IgnoredScope(names=[*in_float, *in_8_bits]),
            **data,
        )
        if not in_8_bits:
            return made
        return nncf.compress_weights(made, mode=modes.INT8_ASYM, ignored_scope=floats)
