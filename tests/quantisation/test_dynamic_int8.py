"""Weights of 8 bits, and inputs that are rounded in each call, as onnxruntime computes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

from enjoyln_cli.quantisers.dynamic_int8 import COLUMNS, ROWS, round_weights, rounded

Array = np.ndarray[Any, Any]
GRAPH = """<ir_version: 9, opset_import: ["" : 20]>
toy (int64[N] ids) => (float[N, 11] logits) {
    x = Gather (table, ids)
    h = PRODUCT
    head = Transpose <perm = [1, 0]> (table)
    logits = MatMul (h, head)
}"""
PRODUCTS = {
    "MatMul": "MatMul (x, w)",
    "Gemm": "Gemm (x, w, b)",
    "Gemm of a transposed weight": "Gemm <transB = 1> (x, w, b)",
}
IDS = np.array([3, 0, 10, 3, 7])


def toy(product: str = "MatMul") -> tuple[Any, dict[str, Array]]:
    """A table, a product and a head that is tied to the table, and their weights."""
    draw = np.random.default_rng(5)
    weights = {
        "table": draw.normal(0.3, 1, (11, 6)).astype(np.float32),
        "w": draw.normal(-0.1, 2, (6, 6)).astype(np.float32),
        "b": draw.normal(0, 1, 6).astype(np.float32),
    }
    model = onnx.parser.parse_model(GRAPH.replace("PRODUCT", PRODUCTS[product]))
    read = {name for node in model.graph.node for name in node.input}
    for name in read & weights.keys():
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights[name], name))
    program = onnx_ir.from_proto(model)
    program.graph[1].name = "product"
    return program, weights


def computed(program: Any) -> Array:
    proto = onnx_ir.to_proto(program)
    onnx.checker.check_model(proto)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    return np.asarray(session.run(["logits"], {"ids": IDS})[0])


def at_eight_bits(x: Array) -> Array:
    """Inputs as ``DynamicQuantizeLinear`` rounds them: 0 to 255, and 0 is exact."""
    least, most = min(x.min(), 0), max(x.max(), 0)
    scale = (most - least) / 255
    zero = np.rint(-least / scale)
    return (np.clip(np.rint(x / scale) + zero, 0, 255) - zero) * scale


def with_scales(weight: Array, dimension: int) -> Array:
    integers, scales = rounded(weight, dimension, 127)
    return integers * scales


def floats_of(program: Any) -> list[str]:
    return [
        name
        for name, value in program.graph.initializers.items()
        if value.const_value.dtype == onnx_ir.DataType.FLOAT and min(value.const_value.shape) > 1
    ]


@pytest.mark.parametrize("dimension", [ROWS, COLUMNS])
def test_each_output_has_its_scale(dimension: int) -> None:
    weight = np.random.default_rng(0).normal(0.1, 1, (5, 7)).astype(np.float32)
    weight[2, :] *= 50
    weight[:, 3] = weight[4, :] = 0
    integers, scales = rounded(weight, dimension, 127)
    assert integers.dtype == np.int8 and scales.size == weight.shape[dimension]
    assert np.all(np.abs(integers * scales - weight) <= scales / 2 * 1.0001)
    largest = np.abs(integers.astype(int)).max(axis=1 - dimension)
    assert set(largest.tolist()) == {0, 127}


@pytest.mark.parametrize("product", PRODUCTS)
def test_the_program_computes_the_rounded_function(product: str) -> None:
    program, weights = toy(product)
    round_weights(program, products=True)
    is_turned = "transposed" in product
    matrix = with_scales(weights["w"], ROWS if is_turned else COLUMNS)
    table = with_scales(weights["table"], ROWS)
    hidden = at_eight_bits(table[IDS]) @ (matrix.T if is_turned else matrix)
    hidden = hidden + (weights["b"] if product != "MatMul" else 0)
    np.testing.assert_allclose(computed(program), at_eight_bits(hidden) @ table.T, rtol=1e-4)


def test_a_tied_table_is_stored_once() -> None:
    program, _ = toy()
    round_weights(program, products=True)
    stored = {n: v.const_value for n, v in program.graph.initializers.items()}
    assert not floats_of(program)
    integers = [name for name, value in stored.items() if value.dtype == onnx_ir.DataType.INT8]
    assert sorted(integers) == ["table.int8", "w.int8"]


@pytest.mark.parametrize("kept", [False, True])
def test_what_stays_in_float32(kept: bool) -> None:
    program, weights = toy()
    round_weights(program, products=kept, kept=["product"] if kept else [])
    table = with_scales(weights["table"], ROWS)
    hidden = table[IDS] @ weights["w"]
    hidden = at_eight_bits(hidden) if kept else hidden
    np.testing.assert_allclose(computed(program), hidden @ table.T, rtol=1e-4)
    assert floats_of(program) == ["w"]


def test_seven_bits_where_sums_saturate() -> None:
    program, _ = toy()
    round_weights(program, products=True, reduced=True)
    integers = [program.graph.initializers[name].const_value.numpy() for name in ("w.int8",)]
    assert [int(np.abs(one.astype(int)).max()) for one in integers] == [64]
