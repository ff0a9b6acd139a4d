"""ONNX programs, quantised by onnxruntime's own quantisers: dynamic, static, or in groups."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export.onnx_program import module_of
from enjoyln_cli.quantisation.schemes import QuantisationScheme
from enjoyln_cli.rewrite.inserted_product import NAME

PRODUCTS = ("MatMul", "Gemm")
TABLES = ("Gather",)
"""Embeddings are rounded to 8 bits as well: they are most of a small model's bytes."""
GROUP = 32
"""How many weights share a scale, where they are scaled in groups."""
ROUNDED = ("MatMulInteger", "MatMulNBits", "QuantizeLinear")
"""Operators of quantised products."""


def quantised(
    program: Any,
    scheme: QuantisationScheme,
    batch: Batch,
    calibration: Sequence[Batch],
    keep: Sequence[str],
) -> Any:
    """The ``onnx_ir.Model`` of a model in float32, quantised.

    ``keep`` are paths of layers, or patterns, that stay in float32 (in 8 bits if ``scheme`` has
    4). ``calibration`` are inputs for a static scheme. Raises ``UnsupportedModel`` if the model has
    no layer that would be quantised.
    """
    from transformers.exporters import (
        ExportFormat,
        OnnxRuntimeDynamicConfig,
        OnnxRuntimeQuantizer,
        OnnxRuntimeStaticConfig,
    )

    kept = _nodes_in(program, (*keep, f"*.{NAME}"))
    settings: dict[str, Any] = {
        "per_channel": True,
        "reduce_range": sums_saturate(),
        "nodes_to_exclude": kept,
        "extra_options": {"MatMulConstBOnly": True},
    }
    in_groups = scheme.group or scheme.weight_bits == 4 or scheme.input_bits is None
    products = [] if in_groups or scheme.is_static else PRODUCTS
    config = OnnxRuntimeDynamicConfig(op_types_to_quantize=[*TABLES, *products], **settings)
    program = OnnxRuntimeQuantizer(config).quantize(program, batch, ExportFormat.ONNX)
    if in_groups:
        program = _in_groups(program, scheme, kept)
    if scheme.is_static:
        fixed = OnnxRuntimeStaticConfig(op_types_to_quantize=[*PRODUCTS], **settings)
        quantizer = OnnxRuntimeQuantizer(fixed, list(calibration))
        program = quantizer.quantize(program, batch, ExportFormat.ONNX)
    if not any(node.op_type in ROUNDED for node in program.graph):
        raise UnsupportedModel("the model has no linear layer that this scheme quantises")
    return program


def sums_saturate() -> bool:
    """Whether this processor adds products of 8-bit numbers in 16 bits, so that sums may saturate.

    x86 without VNNI does. Weights of 7 bits then lose less.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return is_x86 and not torch.cpu._is_vnni_supported()


def _nodes_in(program: Any, patterns: Sequence[str]) -> list[str]:
    """The names of the products in the modules that match one of the patterns.

    Each ``Gemm`` becomes a ``MatMul`` in onnxruntime's quantisers, which gets a longer name.
    """
    products = (node for node in program.graph if node.op_type in PRODUCTS)
    return [
        name
        for node in products
        if any(fnmatchcase(module_of(node), pattern) for pattern in patterns)
        for name in (str(node.name), f"{node.name}_MatMul")
    ]


def _in_groups(program: Any, scheme: QuantisationScheme, kept: list[str]) -> Any:
    """The program with weights in groups with one scale each.

    If weights get 4 bits, the ``kept`` products get 8; otherwise they stay in float32.
    """
    import onnx_ir
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    proto = onnx_ir.to_proto(program)
    level = 4 if scheme.input_bits else 0  # int8 products, or those of the inputs' own dtype
    passes = [(scheme.weight_bits, kept)]
    if scheme.weight_bits == 4:
        passes.append((8, []))
    for bits, excluded in passes:
        quantizer = MatMulNBitsQuantizer(
            proto,
            bits=bits,
            block_size=GROUP,
            is_symmetric=True,
            accuracy_level=level,
            nodes_to_exclude=excluded,
            op_types_to_quantize=("MatMul",),
        )
        quantizer.model.replace_gemm_with_matmul()
        quantizer.process()
        proto = quantizer.model.model
    return onnx_ir.from_proto(proto)
