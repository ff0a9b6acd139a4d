"""ONNX programs, quantised: in groups by onnxruntime's tools, else by ``integer_products``."""

from __future__ import annotations

import io
import logging
import platform
from collections.abc import Mapping
from contextlib import redirect_stdout
from typing import Any

import torch

from enjoyln_cli.models.load import silent
from enjoyln_cli.onnx_export.onnx_program import module_of
from enjoyln_cli.quantisers.fused_attention import fuse_attention
from enjoyln_cli.quantisers.gptq import RoundedWeight
from enjoyln_cli.quantisers.integer_products import reads_integers, round_weights, write_rounded
from enjoyln_cli.quantisers.integer_weights import FixedScales, Range, weights_by_name
from enjoyln_cli.quantisers.schemes import FLOAT_BITS, QuantisationScheme, bits_at
from enjoyln_cli.rewrite.in_memory import ROTATION_LAYER

PRODUCTS = ("MatMul", "Gemm")
GROUP = 32
"""How many weights share a scale, where they are scaled in groups."""
GROUPS_IN_8_BITS = {8: GROUP, 4: 4 * GROUP}
"""The same for weights of 8 bits, by the bits of the scheme's weights. Beside 4 bits, weights of 8
bits lose little, so that larger groups save bytes."""
ROUNDED = ("MatMulInteger", "MatMulNBits", "QuantizeLinear")
"""Operators of quantised products, except of products with 8-bit weights and inputs in floats."""


def quantised(
    program: Any,
    scheme: QuantisationScheme,
    ranges: Mapping[str, Range],
    bits: Mapping[str, int],
    rounded: Mapping[str, RoundedWeight],
) -> Any:
    """An ``onnx_ir.Model`` in float32, quantised; it may be changed in place.

    ``bits`` are of the weights of layers, by paths or patterns (see ``schemes.bits_at``), where
    they differ from the bits of ``scheme``. ``ranges`` are of values by name, for a static scheme
    (see ``static_ranges``). ``rounded`` are weights of linear layers as integers already, by the
    paths of their layers. Embeddings get 8 bits as well: they are most of a small model's bytes.
    """
    kept = _nodes_with(FLOAT_BITS, program, {f"*.{ROTATION_LAYER}": FLOAT_BITS, **bits})
    in_eight_bits = _nodes_with(8, program, bits)
    everything = {str(node.name) for node in program.graph.all_nodes()}
    fixed = None
    if scheme.is_static:
        in_4_bits = everything - {*in_eight_bits} if scheme.weight_bits == 4 else set[str]()
        known = weights_by_name(rounded)
        input_bits = scheme.input_bits or 8
        fixed = FixedScales(input_bits, ranges, scheme.rounds_results, in_4_bits, known)
    in_floats = everything if scheme.weight_bits == 8 else {*in_eight_bits}
    round_weights(
        program,
        products=scheme.input_bits is not None,
        in_floats=in_floats if scheme.input_bits is None else (),
        kept=kept,
        reduced=scheme.is_reduced,
        group=GROUPS_IN_8_BITS[scheme.weight_bits] if scheme.is_in_groups else None,
        fixed=fixed,
    )
    if scheme.is_in_groups:
        write_rounded(program, rounded, _accuracy(scheme))
        with silent(), redirect_stdout(io.StringIO()):
            program = _in_groups(program, scheme, kept, in_eight_bits)
    if not scheme.is_static:
        fuse_attention(program)
    program.graph.sort()  # onnxruntime's order does not know what a branch reads
    return program


def is_rounded(program: Any) -> bool:
    """Whether a program has a quantised product."""
    return any(
        node.op_type in ROUNDED or (node.op_type in PRODUCTS and reads_integers(node))
        for node in program.graph.all_nodes()
    )


def sums_saturate() -> bool:
    """Whether this processor adds products of 8-bit numbers in 16 bits, so that sums may saturate.

    x86 without VNNI does. Weights of 7 bits then lose less.
    """
    is_x86 = platform.machine().lower() in ("x86_64", "amd64", "i686")
    return is_x86 and not torch.cpu._is_vnni_supported()


def _nodes_with(count: int, program: Any, bits: Mapping[str, int]) -> list[str]:
    """The names of the products and embeddings in the modules that ``bits`` gives so many bits.

    Each ``Gemm`` becomes a ``MatMul`` in onnxruntime's quantisers, which gets a longer name.
    """
    nodes = (node for node in program.graph.all_nodes() if node.op_type in (*PRODUCTS, "Gather"))
    return [
        name
        for node in nodes
        if bits_at(module_of(node).removeprefix("model."), bits, 0) == count
        for name in (str(node.name), f"{node.name}_MatMul")
    ]


def _accuracy(scheme: QuantisationScheme) -> int:
    """``accuracy_level``: products of 8-bit integers, or of the inputs' own dtype."""
    return 4 if scheme.input_bits else 0


def _in_groups(
    program: Any, scheme: QuantisationScheme, kept: list[str], in_eight_bits: list[str]
) -> Any:
    """The program with weights in groups that share a scale.

    The ``kept`` products stay in float32, and products ``in_eight_bits`` get no 4 bits. Weights of
    8 bits whose products have inputs in floating point are rounded before.
    """
    import onnx_ir

    proto = onnx_ir.to_proto(program)
    passes = [(4, [*kept, *in_eight_bits])] if scheme.weight_bits == 4 else []
    if scheme.input_bits:
        passes.append((8, kept))
    for bits, excluded in passes:
        quantizer = quantizer_in_groups()(
            proto,
            bits=bits,
            block_size=GROUP,
            is_symmetric=bits == 8,
            accuracy_level=_accuracy(scheme),
            nodes_to_exclude=excluded,
            op_types_to_quantize=("MatMul",),
        )
        quantizer.model.replace_gemm_with_matmul()
        quantizer.process()
        proto = quantizer.model.model
    return onnx_ir.from_proto(proto)


def quantizer_in_groups() -> Any:
    """onnxruntime's class. Without the log of all libraries, which its module turns on."""
    level, handlers = logging.root.level, [*logging.root.handlers]
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)
    return MatMulNBitsQuantizer
