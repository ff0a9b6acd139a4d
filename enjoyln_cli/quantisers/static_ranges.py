"""Which values the inputs of products have on the user's data, for schemes with fixed scales.

A program gets the smallest and the largest value of each as further outputs, so that inputs of any
length can be looked at one by one, in little memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.onnx_export.cached_run import load_programs, whole_rows
from enjoyln_cli.onnx_export.programs import Programs, save
from enjoyln_cli.onnx_export.runtimes import LoadedProgram
from enjoyln_cli.quantisers.integer_products import matrix_of
from enjoyln_cli.quantisers.integer_weights import Range

ENDS = {"ReduceMin": ".smallest", "ReduceMax": ".largest"}


def ranges_of(programs: Programs, batches: Sequence[Batch]) -> dict[str, dict[str, Range]]:
    """The ranges of inputs and results of products with stored matrices, by program and value.

    The programs compute ``batches``, inputs of the model, in order. A value that is only
    computed inside a branch is left out.
    """
    watched = replace(programs, models={n: _watched(p) for n, p in programs.models.items()})
    found: dict[str, dict[str, Range]] = {name: {} for name in programs.models}

    def noting(name: str, program: LoadedProgram) -> LoadedProgram:
        def noted(batch: Batch) -> Batch:
            results = program.run(batch)
            for end in [key for key in results if key.endswith(ENDS["ReduceMin"])]:
                value = end.removesuffix(ENDS["ReduceMin"])
                low = float(results.pop(end))
                high = float(results.pop(f"{value}{ENDS['ReduceMax']}"))
                before = found[name].get(value, (low, high))
                found[name][value] = (min(before[0], low), max(before[1], high))
            return results

        return replace(program, run=noted)

    with TemporaryDirectory() as folder:
        save(watched, Path(folder))
        loaded = load_programs(Path(folder), threads=torch.get_num_threads())
        compute = whole_rows({name: noting(name, one) for name, one in loaded.items()})
        for batch in batches:
            compute(batch)
    return found


def _watched(program: Any) -> Any:
    """A copy of an ``onnx_ir.Model`` that returns the ends of ranges as well."""
    import onnx_ir

    program = program.clone()
    graph = program.graph
    products = [node for node in graph.all_nodes() if matrix_of(node)]
    values = dict.fromkeys(
        value
        for node in products
        for value in (node.inputs[0], node.outputs[0])
        if value.is_graph_input() or (value.producer() and value.producer().graph is graph)
    )
    for value in values:
        for kind, end in ENDS.items():
            result = onnx_ir.Value(
                name=f"{value.name}{end}", type=value.type, shape=onnx_ir.Shape([])
            )
            node = onnx_ir.node(kind, [value], {"keepdims": 0}, outputs=[result])
            graph.append(node)
            graph.outputs.append(result)
    return program
