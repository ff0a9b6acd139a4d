"""Weights of 8 bits, and inputs that are rounded as well, as onnxruntime computes them."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import torch
from live_models import shaken
from tiny_models import BERT
from transformers import ViTConfig, ViTForImageClassification

from enjoyln_cli.onnx_export.onnx_program import module_of
from enjoyln_cli.onnx_export.programs import programs_of
from enjoyln_cli.onnx_export.runtimes import IN_16_BITS, in_onnxruntime, session_options
from enjoyln_cli.quantisers import gptq
from enjoyln_cli.quantisers.integer_products import matrix_of, reads_integers, round_weights
from enjoyln_cli.quantisers.integer_weights import COLUMNS, ROWS, FixedScales, rounded, scale_of
from enjoyln_cli.quantisers.onnxruntime_quantiser import quantised, quantizer_in_groups
from enjoyln_cli.quantisers.schemes import SCHEMES
from enjoyln_cli.quantisers.static_ranges import ranges_of

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


def computed(program: Any, bits: int = 8) -> Array:
    proto = onnx_ir.to_proto(program)
    onnx.checker.check_model(proto)
    options = session_options(in_16_bits=bits == 16)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options)
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
        if value.const_value.dtype == onnx_ir.DataType.FLOAT and value.const_value.size > 20
    ]


@pytest.mark.parametrize("shape", [(5, 7), (700, 300)])  # as a whole, and in several pieces
@pytest.mark.parametrize("dimension", [ROWS, COLUMNS])
def test_each_output_has_its_scale(dimension: int, shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(0).normal(0.1, 1, shape).astype(np.float32)
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


def test_a_table_of_few_rows_stays_in_float32() -> None:
    """Many tokens read the same row, so that the error of its rounding is in all of them."""
    draw = np.random.default_rng(7)
    tables = {name: draw.normal(0.3, 1, (rows, 6)) for name, rows in (("words", 6), ("types", 5))}
    graph = """<ir_version: 9, opset_import: ["" : 20]>
    toy (int64[N] ids) => (float[N, 6] logits) {
        word = Gather (words, ids)
        type = Gather (types, ids)
        logits = Add (word, type)
    }"""
    model = onnx.parser.parse_model(graph)
    for name, values in tables.items():
        tables[name] = values.astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(tables[name], name))
    program = onnx_ir.from_proto(model)
    round_weights(program, products=True)
    assert floats_of(program) == ["types"]
    feed = onnx_ir.to_proto(program).SerializeToString()
    ids = np.array([3, 0, 4])
    (got,) = onnxruntime.InferenceSession(feed, session_options()).run(None, {"ids": ids})
    exact = with_scales(tables["words"], ROWS)[ids] + tables["types"][ids]
    np.testing.assert_allclose(got, exact, rtol=1e-5)


def test_a_tied_table_is_stored_once() -> None:
    program, _ = toy()
    round_weights(program, products=True)
    stored = {n: v.const_value for n, v in program.graph.initializers.items()}
    assert not floats_of(program)
    integers = [name for name, value in stored.items() if value.dtype == onnx_ir.DataType.INT8]
    assert sorted(integers) == ["table.int8", "w.int8"]


def in_groups(weight: Array, group: int) -> Array:
    """A weight of shape ``(outputs, inputs)``, rounded with a scale for each group of inputs."""
    integers, scales = rounded(weight.reshape(-1, group), ROWS, 127)
    return np.asarray((integers * scales).reshape(weight.shape))


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("most", [3, 4, 5])
def test_weights_in_groups_are_numbers_again(most: int, product: str) -> None:
    """The six inputs are split by their largest divisor of at most ``most``: by 3, or by 2 or 3."""
    program, weights = toy(product)
    round_weights(program, products=False, in_floats=["product"], group=most)
    assert {"table", "w"}.isdisjoint(floats_of(program))
    assert reads_integers(program.graph.node("product"))
    is_turned = "transposed" in product
    matrix = in_groups(weights["w"] if is_turned else weights["w"].T, 3)
    table = in_groups(weights["table"], 3)
    hidden = table[IDS] @ matrix.T + (weights["b"] if product != "MatMul" else 0)
    np.testing.assert_allclose(computed(program), hidden @ table.T, rtol=1e-4)


@pytest.mark.parametrize("inputs_of_8_bits", [False, True])
def test_four_bits_in_groups_have_zero_points(inputs_of_8_bits: bool) -> None:
    """So that the integers of weights that are mostly positive span them, and not as many below."""
    draw = np.random.default_rng(5)
    graph = """<ir_version: 9, opset_import: ["" : 20]>
    toy (float[N, 64] h) => (float[N, 70] y) { y = MatMul (h, w) }"""
    model = onnx.parser.parse_model(graph)
    matrix = draw.normal(0.7, 0.4, (64, 70)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(matrix, "w"))
    scheme = SCHEMES["w4a8" if inputs_of_8_bits else "w4a16"]
    program = quantised(onnx_ir.from_proto(model), scheme, {}, {}, {})
    feed = onnx_ir.to_proto(program).SerializeToString()
    h = draw.normal(0.2, 1, (5, 64)).astype(np.float32)
    (got,) = onnxruntime.InferenceSession(feed, session_options()).run(None, {"h": h})
    exact = gptq.rounded(torch.tensor(matrix.T), None, 32).matrix.numpy()
    h = in_groups(h, 32) if inputs_of_8_bits else h
    np.testing.assert_allclose(got, h @ exact.T, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("width", "kind"), [(64, "MatMulNBits"), (48, "MatMul")])
def test_a_tied_head_multiplies_the_integers_of_its_table(width: int, kind: str) -> None:
    """If the table is split in groups of 32, which the operator takes, and not of 24."""
    draw = np.random.default_rng(3)
    graph = f"""<ir_version: 9, opset_import: ["" : 20]>
    toy (int64[N] ids, float[N, {width}] h) => (float[N, 70] logits) {{
        x = Gather (table, ids)
        y = Add (x, h)
        head = Transpose <perm = [1, 0]> (table)
        logits = MatMul (y, head)
    }}"""
    model = onnx.parser.parse_model(graph)
    table = draw.normal(0.3, 1, (70, width)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    program = onnx_ir.from_proto(model)
    round_weights(program, products=True, group=32)
    (head,) = [node for node in program.graph if node.outputs[0].name == "logits"]
    assert head.op_type == kind and "table" not in floats_of(program)
    feed = onnx_ir.to_proto(program).SerializeToString()
    h = draw.normal(0.2, 1, (5, width)).astype(np.float32)
    (got,) = onnxruntime.InferenceSession(feed, session_options()).run(None, {"ids": IDS, "h": h})
    exact = in_groups(table, 32 if width == 64 else 24)
    y = exact[IDS] + h
    y = in_groups(y, 32) if width == 64 else y
    np.testing.assert_allclose(got, y @ exact.T, rtol=1e-4, atol=1e-3)


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


def with_fixed(x: Array, low: float, high: float, bits: int) -> Array:
    """Values as a fixed scale rounds them; what is beyond the range is cut off."""
    scale, zero = scale_of((low, high), bits)
    steps = np.rint(x / scale) + float(zero)
    return (np.clip(steps, 0, 2**bits - 1) - float(zero)) * scale


def test_sixteen_bits_have_room_for_larger_values_of_other_data() -> None:
    larger = np.array([-5.8, 0.01, 7.9])
    wide, narrow = (with_fixed(larger, -1.5, 2.0, bits) for bits in (16, 8))
    assert float(np.abs(wide - larger).max()) < 2e-4
    assert [float(narrow[0]), float(narrow[2])] == pytest.approx([-1.5, 2.0], abs=0.02)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize(("bits", "with_outputs"), [(8, False), (16, True)])
def test_inputs_with_fixed_scales(product: str, bits: int, with_outputs: bool) -> None:
    program, weights = toy(product)
    ends = {"x": (-1.5, 2.0), "h": (-9.0, 7.0), "logits": (-30.0, 25.0)}
    fixed = FixedScales(bits, ends, with_outputs)
    round_weights(program, products=True, fixed=fixed)
    is_turned = "transposed" in product
    matrix = with_scales(weights["w"], ROWS if is_turned else COLUMNS)
    table = with_scales(weights["table"], ROWS)

    def output(name: str, value: Array) -> Array:
        return with_fixed(value, *ends[name], bits) if with_outputs else value

    hidden = with_fixed(table[IDS], *ends["x"], bits) @ (matrix.T if is_turned else matrix)
    hidden = output("h", hidden + (weights["b"] if product != "MatMul" else 0))
    logits = output("logits", with_fixed(hidden, *ends["h"], bits) @ table.T)
    steps = sum((high - low) / (2**bits - 1) for low, high in ends.values())
    got = computed(program, bits)
    np.testing.assert_allclose(got, logits, rtol=1e-4, atol=2 * steps * with_outputs)
    assert not floats_of(program)


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("in_4_bits", [[], ["product"]])
def test_beside_inputs_of_16_bits_weights_are_loaded_as_numbers(
    product: str, in_4_bits: list[str], tmp_path: Path
) -> None:
    program, _ = toy(product)
    ends = {"x": (-1.5, 2.0), "h": (-9.0, 7.0), "logits": (-30.0, 25.0)}
    round_weights(program, products=True, fixed=FixedScales(16, ends, True, in_4_bits))
    options = session_options(in_16_bits=True)
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    onnxruntime.InferenceSession(onnx_ir.to_proto(program).SerializeToString(), options)
    loaded = onnx_ir.load(tmp_path / "loaded.onnx")
    products = [one for one in loaded.graph if one.op_type in ("MatMul", "MatMulNBits", "Gemm")]
    read = [node.inputs[1].const_value.dtype for node in products]
    assert read == [onnx_ir.DataType.FLOAT] * 2


def test_a_program_says_that_its_inputs_have_16_bits(tmp_path: Path) -> None:
    program, _ = toy()
    ends = {"x": (-1.5, 2.0), "h": (-9.0, 7.0), "logits": (-30.0, 25.0)}
    round_weights(program, products=True, fixed=FixedScales(16, ends, True))
    exact, found = computed(program, 16), []
    for said in ({}, {IN_16_BITS: "true"}):
        program.metadata_props.update(said)
        onnx_ir.save(program, tmp_path / "any.onnx")
        run = in_onnxruntime(tmp_path / "any.onnx")
        found.append(np.array_equal(run({"ids": torch.tensor(IDS)})["logits"], exact))
    assert found == [False, True]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("is_known", [False, True])
def test_products_in_four_bits_beside_a_tied_head(product: str, is_known: bool) -> None:
    program, weights = toy(product)
    is_turned = "transposed" in product
    matrix = weights["w"] if is_turned else weights["w"].T
    ends = {"x": (-1.5, 2.0), "h": (-9.0, 7.0)}
    squares = gptq.Squares(torch.eye(6) + torch.ones(6, 6), 100)
    by_error = gptq.rounded(torch.tensor(matrix), squares, 6, symmetric=True)
    assert float(by_error.scales.min()) > 0 and int(by_error.integers.min()) >= 1
    known = {"w": by_error} if is_known else {}
    round_weights(program, products=True, fixed=FixedScales(16, ends, False, ["product"], known))
    integers, scales = rounded(matrix, ROWS, 7)
    used = by_error.matrix.numpy() if is_known else integers * scales
    assert is_known != np.allclose(used, integers * scales)
    table = with_scales(weights["table"], ROWS)
    hidden = with_fixed(table[IDS], *ends["x"], 16) @ used.T
    hidden = hidden + (weights["b"] if product != "MatMul" else 0)
    logits = with_fixed(hidden, *ends["h"], 16) @ table.T
    np.testing.assert_allclose(computed(program, 16), logits, rtol=1e-4, atol=1e-2)
    stored = {name: one.const_value.dtype.name for name, one in program.graph.initializers.items()}
    assert stored["w.int4"] == "INT4" and stored["table.int8"] == "INT8"
    assert not floats_of(program)


def test_a_product_of_an_unknown_range_is_not_rounded() -> None:
    program, weights = toy()
    round_weights(program, products=True, fixed=FixedScales(8, {"h": (-9.0, 7.0)}, False))
    hidden = with_scales(weights["table"], ROWS)[IDS] @ weights["w"]
    expected = with_fixed(hidden, -9.0, 7.0, 8) @ with_scales(weights["table"], ROWS).T
    np.testing.assert_allclose(computed(program), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("ends", "scale", "zero"),
    [
        ((-1.0, 3.0), 4 / 255, 64),
        ((0.5, 2.55), 0.01, 0),
        ((-2.55, -1.0), 0.01, 255),
        ((0, 0), 1, 0),
    ],
)
def test_zero_is_exact_in_any_range(ends: tuple[float, float], scale: float, zero: int) -> None:
    found, at = scale_of(ends, 8)
    assert float(found) == pytest.approx(scale) and int(at) == zero and at.dtype == np.uint8


def test_ranges_of_inputs_of_different_lengths() -> None:
    torch.manual_seed(4)
    config = ViTConfig(**{**BERT, "image_size": 8, "patch_size": 4, "num_channels": 1})
    model = shaken(ViTForImageClassification(config), 0.05)
    rows = [torch.randn(count, 1, 8, 8) * scale for count, scale in ((1, 1.0), (3, 4.0), (2, 0.1))]
    seen: dict[str, list[torch.Tensor]] = {}
    layer = model.get_submodule("vit.layers.1.mlp.fc1")
    layer.register_forward_pre_hook(lambda _, args: seen.setdefault("x", []).append(args[0]))
    programs = programs_of(model, torch.float32)
    seen.clear()
    (found,) = ranges_of(programs, [{"pixel_values": one} for one in rows]).values()
    with torch.no_grad():
        for one in rows:
            model(one)
    ends = (float(min(x.min() for x in seen["x"])), float(max(x.max() for x in seen["x"])))
    (program,) = programs.models.values()
    (name,) = [
        node.inputs[0].name
        for node in program.graph
        if module_of(node).endswith("layers.1.mlp.fc1") and matrix_of(node)
    ]
    assert found[name] == pytest.approx(ends, rel=1e-4)
    products = [node for node in program.graph if matrix_of(node)]
    assert {value.name for node in products for value in (node.inputs[0], node.outputs[0])} == set(
        found
    )


def test_the_log_of_the_program_stays_as_the_user_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of onnxruntime's quantiser shows messages of all libraries once it is imported."""
    monkeypatch.setattr(logging.root, "handlers", [])
    before = logging.root.level
    name = "onnxruntime.quantization.matmul_nbits_quantizer"
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert quantizer_in_groups().__name__ == "MatMulNBitsQuantizer"
    assert (logging.root.level, logging.root.handlers) == (before, [])
