"""ONNX programs as an engine runs them that computes all in float16 and takes norms apart.

    python scripts/float16_programs.py whisper-base --audio recordings

``rounded_edges`` is for onnxruntime, whose CPU computes operators of float16 in float32 and leaves
out the roundings between them. So the program stays in float32, and the result of each operator is
cast to float16 and back. The command exports a Whisper as it is and with ``--fp16-safe``, and
counts the words that both programs get wrong in onnxruntime.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

NORMS = ("LayerNormalization", "RMSNormalization")
MASKED = 1e30
"""Larger numbers belong to attention masks."""


def rounded_edges(file: Path) -> onnx.ModelProto:
    """The float32 program in ``file`` with norms in single operators, and each result rounded."""
    model = onnx.load(file)
    _take_apart(model.graph)
    _round(onnx.shape_inference.infer_shapes(model).graph, model.graph)
    return model


def parts_of(node: Any, kind: Any = np.float32) -> Iterator[Any]:
    """The operators of a norm, whose constants are of the dtype ``kind``."""
    (name,), (eps,) = node.output, (a.f for a in node.attribute if a.name == "epsilon")
    made: list[Any] = []

    def op(operator: str, *inputs: str, **attributes: Any) -> str:
        result = f"{name}/{operator}{len(made)}"
        made.append(helper.make_node(operator, list(inputs), [result], name=result, **attributes))
        return result

    def number(value: Any, dtype: Any) -> str:
        return op("Constant", value=numpy_helper.from_array(np.array(value, dtype)))

    x, last = node.input[0], number([-1], np.int64)
    if node.op_type == "LayerNormalization":
        x = op("Sub", x, op("ReduceMean", x, last))
    square = op("ReduceMean", op("Mul", x, x), last)
    root = op("Sqrt", op("Add", square, number(eps, kind)))
    y = op("Mul", op("Div", x, root), node.input[1])
    y = op("Add", y, node.input[2]) if len(node.input) > 2 else y
    return iter([*made, helper.make_node("Identity", [y], [name], name=f"{name}/norm")])


def _graphs(node: Any) -> Iterator[Any]:
    return (a.g for a in node.attribute if a.type == onnx.AttributeProto.GRAPH)


def _take_apart(graph: Any) -> None:
    nodes = []
    for node in graph.node:
        for inner in _graphs(node):
            _take_apart(inner)
        nodes += parts_of(node) if node.op_type in NORMS else [node]
    del graph.node[:]
    graph.node.extend(nodes)


def _round(typed: Any, graph: Any) -> None:
    """Round the constants and results of ``graph``; ``typed`` is the same with all types."""
    known = (*typed.value_info, *typed.output)
    floats = {one.name for one in known if one.type.tensor_type.elem_type == TensorProto.FLOAT}
    for stored in (*graph.initializer, *(a.t for node in graph.node for a in node.attribute)):
        if stored.data_type == TensorProto.FLOAT:
            narrow = _half(numpy_helper.to_array(stored))
            stored.CopyFrom(numpy_helper.from_array(narrow, stored.name))
    nodes = []
    for node, same in zip(graph.node, typed.node, strict=True):
        for inner, inner_typed in zip(_graphs(node), _graphs(same), strict=True):
            _round(inner_typed, inner)
        nodes.append(node)
        for at, name in enumerate(node.output):
            if name in floats and node.op_type != "Constant":
                node.output[at] = f"{name}/wide"
                casts = (f"{name}/wide", f"{name}/half", name)
                for given, made, kind in zip(casts, casts[1:], (10, 1), strict=False):
                    nodes.append(
                        helper.make_node("Cast", [given], [made], name=f"{made}/cast", to=kind)
                    )
    del graph.node[:]
    graph.node.extend(nodes)


def _half(values: Any) -> Any:
    """The nearest numbers of float16, in float32; numbers of masks become its largest number."""
    largest = np.finfo(np.float16).max
    values = np.where(np.abs(values) > MASKED, np.sign(values) * largest, values)
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


def main() -> None:
    """Print the words that a Whisper gets wrong in such an engine, as it is and scaled."""
    from real_models import word_errors

    from enjoyln_cli import export, load_onnx
    from enjoyln_cli.comparison.data_files import read_user_data

    parser = argparse.ArgumentParser(description="Whisper in onnxruntime, each result in float16.")
    parser.add_argument("model")
    parser.add_argument("--audio", type=Path, required=True)
    given = parser.parse_args()
    print("| in onnxruntime, each result in float16 | words wrong | in float32 |\n|---|---:|---:|")
    for safe in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            data = read_user_data(audio=given.audio) if safe else None
            export(given.model, f"{folder}/out", verify=False, fp16_data=data)
            for file in Path(folder, "out", "onnx").glob("*.onnx"):
                program = rounded_edges(file)
                onnx.save(program, file, save_as_external_data=False)
            rates = word_errors(given.model, load_onnx(f"{folder}/out"), given.audio)["word_errors"]
        what = "with --fp16-safe" if safe else "as it is"
        print(f"| {what} | {rates['quantised']:.1f} % | {rates['float32']:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
