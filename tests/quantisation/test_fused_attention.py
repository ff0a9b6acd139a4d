"""Attention as one operator computes what its products and softmax compute; others stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest

from enjoyln_cli.quantisers.fused_attention import ATTENTION, fuse_attention

HEADS, FEATURES, LENGTH = 3, 8, 7
GRAPH = """<ir_version: 9, opset_import: ["" : 20]>
toy (float[N, 7, 24] q, float[N, T, 24] k, float[N, T, 24] v, float[1, 1, 7, 1] mask)
    => (float[N, 7, 24] out) <
    float[N, 7, 24] scaled, float[N, 7, 3, 8] q4, float[N, T, 3, 8] k4, float[N, T, 3, 8] v4,
    float[N, 3, 7, 8] qh, float[N, 3, 8, T] kh, float[N, 3, T, 8] vh, float[N, 7, 24] joined
> {
    half = Constant <value_float = 0.5> ()
    shape = Constant <value_ints = [0, -1, 3, 8]> ()
    whole = Constant <value_ints = [0, -1, 24]> ()
    scaled = Mul (q, half)
    q4 = Reshape (scaled, shape)
    k4 = Reshape (k, shape)
    v4 = Reshape (v, shape)
    qh = Transpose <perm = [0, 2, 1, 3]> (q4)
    kh = Transpose <perm = [0, 2, 3, 1]> (k4)
    vh = Transpose <perm = [0, 2, 1, 3]> (v4)
    scores = MatMul (qh, kh)
    probable = Softmax <axis = -1> (scores)
    mixed = MatMul (probable, vh)
    back = Transpose <perm = [0, 2, 1, 3]> (mixed)
    joined = Reshape (back, whole)
    out = Mul (joined, half)
}"""


def program(change: Callable[[str], str] = str) -> Any:
    """An attention of 3 heads over keys and values of another length than the queries."""
    return onnx_ir.from_proto(onnx.parser.parse_model(change(GRAPH)))


def computed(toy: Any, rows: int = 2, keys: int = 11) -> np.ndarray[Any, Any]:
    draw = np.random.default_rng(3)
    sizes = {"q": LENGTH, "k": keys, "v": keys}
    feed = {
        name: draw.normal(0.2, 1.5, (rows, size, HEADS * FEATURES)).astype(np.float32)
        for name, size in sizes.items()
    }
    feed["mask"] = draw.normal(0, 3, (1, 1, LENGTH, 1)).astype(np.float32)
    session = onnxruntime.InferenceSession(onnx_ir.to_proto(toy).SerializeToString())
    known = {one.name for one in session.get_inputs()}
    return np.asarray(session.run(["out"], {n: x for n, x in feed.items() if n in known})[0])


def test_one_operator_computes_the_same() -> None:
    before, toy = computed(program()), program()
    assert fuse_attention(toy) == 1
    types = [node.op_type for node in toy.graph]
    assert ATTENTION in types and not {"Softmax", "MatMul", "Transpose"} & {*types}
    np.testing.assert_allclose(computed(toy), before, rtol=1e-4, atol=1e-5)


def test_the_result_of_a_graph_keeps_its_name() -> None:
    def ends_there(graph: str) -> str:
        return graph.replace("out = Mul (joined, half)", "").replace("joined", "out")

    toy = program(lambda graph: ends_there(graph).replace(", float[N, 7, 24] out\n>", "\n>"))
    before = computed(toy)
    assert fuse_attention(toy) == 1
    np.testing.assert_allclose(computed(toy), before, rtol=1e-4, atol=1e-5)


def with_mask(graph: str) -> str:
    masked = "masked = Add (scores, mask)\n    probable = Softmax <axis = -1> (masked)"
    return graph.replace("probable = Softmax <axis = -1> (scores)", masked)


REFUSED: dict[str, Callable[[str], str]] = {
    "a mask": with_mask,
    "a softmax over queries": lambda graph: graph.replace("axis = -1", "axis = 2"),
    "probabilities that are scaled": lambda graph: graph.replace(
        "mixed = MatMul (probable, vh)",
        "more = Mul (probable, half)\n    mixed = MatMul (more, vh)",
    ),
    "heads of another order": lambda graph: graph.replace(
        "<perm = [0, 2, 1, 3]> (mixed)", "<perm = [0, 2, 3, 1]> (mixed)"
    ),
    "sizes that are not known": lambda graph: graph.replace("float[N, T, 3, 8] v4", "float v4"),
    "another split into rows": lambda graph: graph.replace(
        "float[N, T, 3, 8] k4", "float[T, N, 3, 8] k4"
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_other_attentions_stay(case: str) -> None:
    toy = program(REFUSED[case])
    assert fuse_attention(toy) == 0
    assert ATTENTION not in {node.op_type for node in toy.graph}
