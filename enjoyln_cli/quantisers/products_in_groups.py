"""Write weights that were rounded to integers in groups into an ONNX program, as they are.

``MatMulNBits`` reads a weight of shape ``(outputs, inputs)`` in blocks of ``group`` inputs: two
integers of 4 bits in a byte, the first in the low half, a scale for each block, and zero points,
packed alike and left out if all are in the middle. Inputs that fill up the last block have its zero
point.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from enjoyln_cli.onnx_export.programs import TRANSPOSED
from enjoyln_cli.quantisers.gptq import BITS, RoundedWeight
from enjoyln_cli.quantisers.integer_products import MICROSOFT, constant


def write_rounded(program: Any, weights: Mapping[str, RoundedWeight], accuracy: int) -> None:
    """Let the products of an ``onnx_ir.Model`` read ``weights``, by the paths of their layers.

    The program is changed in place. ``accuracy`` is the ``accuracy_level`` of ``MatMulNBits``: 4
    rounds the inputs to 8 bits, 0 leaves them.
    """
    import onnx_ir

    by_name = weights_by_name(weights)
    stored: dict[str, list[Any]] = {}
    for node in list(program.graph.all_nodes()):
        value = node.inputs[1] if node.op_type == "MatMul" else None
        if value is None or not value.is_initializer() or value.name not in by_name:
            continue
        name, weight = value.name, by_name[value.name]
        if name not in stored:
            arrays = packed(weight)
            stored[name] = [constant(program.graph, f"{name}.{n}", a) for n, a in arrays.items()]
        rows, width = weight.integers.shape
        sizes = {"K": width, "N": rows, "bits": BITS, "block_size": weight.group}
        made = onnx_ir.node(
            "MatMulNBits",
            [node.inputs[0], *stored[name]],
            {**sizes, "accuracy_level": accuracy},
            domain=MICROSOFT,
            name=f"{node.name}.in_groups",
            outputs=[onnx_ir.Value(name=f"{node.outputs[0].name}.in_groups")],
        )
        made.metadata_props.update(node.metadata_props)
        made.outputs[0].shape, made.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        node.graph.insert_before(node, made)
        node.outputs[0].replace_all_uses_with(made.outputs[0], replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
        if not value.uses():
            del program.graph.initializers[value.name]
    if stored:
        program.opset_imports.setdefault(MICROSOFT, 1)


def weights_by_name(weights: Mapping[str, RoundedWeight]) -> dict[str, RoundedWeight]:
    """The weights of layers by their names in a program instead of the paths of the layers."""
    ends = ("", TRANSPOSED)
    return {f"{path}.weight{end}": weight for path, weight in weights.items() for end in ends}


def packed(weight: RoundedWeight) -> dict[str, np.ndarray[Any, Any]]:
    """The integers, scales and zero points of a weight as ``MatMulNBits`` reads them.

    Shapes ``(outputs, groups, group / 2)``, ``(outputs, groups)``, ``(outputs, groups / 2)``.
    """
    rows, groups = weight.scales.shape
    width = weight.integers.shape[1]
    zeros = weight.zero_points.repeat_interleave(weight.group, 1)
    integers = torch.cat([weight.integers, zeros[:, width:]], 1)
    found = {
        "integers": _halves(integers).reshape(rows, groups, weight.group // 2).numpy(),
        "scales": weight.scales.numpy(),
    }
    if bool((weight.zero_points == 2 ** (BITS - 1)).all()):
        return found
    return {**found, "zero_points": _halves(F.pad(weight.zero_points, (0, groups % 2))).numpy()}


def _halves(integers: torch.Tensor) -> torch.Tensor:
    """Two integers of 4 bits in each byte, the first in the low half."""
    return (integers[:, ::2] | (integers[:, 1::2] << 4)).contiguous()
