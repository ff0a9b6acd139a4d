"""The weights of an ONNX program as integers and scales, each stored once for all its readers.

A weight ``W`` of shape ``(inputs, outputs)`` becomes integers ``Q`` and a scale for each output:

    s_j = max_i |W_ij| / top,    Q_ij = round(W_ij / s_j)

A table that is read by rows has a scale for each row. A head that is tied to it reads the same
integers: a row of the table is an output of the head.

In groups, a few inputs of an output share a scale. Integers without a sign are stored, of shape
``(outputs, groups, inputs of a group)``, as ``MatMulNBits`` reads them, and a scale for each group.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from enjoyln_cli.onnx_export.programs import TRANSPOSED
from enjoyln_cli.quantisers.gptq import BITS, RoundedWeight

TOP, REDUCED_TOP, TOP_OF_4_BITS = 127, 64, 7
"""The largest integer of 8 bits, of 8 bits where sums of products saturate, and of 4 bits."""
ROWS, COLUMNS = 0, 1
"""The dimension of a stored weight that has a scale for each of its elements."""
ROOM_IN_16_BITS = 4.0
"""Values of 16 bits have a range so many times as wide as the calibration data show. Other data may
have larger values. That costs two of 16 bits, which weights of 8 bits do not show."""
PIECE = 1 << 16
"""About how many weights are rounded at once; they stay in a core's cache."""
ZERO = 128
"""The integer without a sign that stands for 0 in groups."""
FLOAT = 1
"""``onnx.TensorProto.FLOAT``."""
MICROSOFT = "com.microsoft"
"""The domain of operators that read 16-bit and 4-bit integers before opset 21."""
Range = tuple[float, float]
"""The smallest and the largest value."""


@dataclass(frozen=True)
class FixedScales:
    """How the inputs of products are rounded if their scales are fixed."""

    bits: int
    """8 or 16, without a sign."""
    ranges: Mapping[str, Range]
    """By the names of values. A product whose input is not among them is not rounded."""
    with_outputs: bool
    """Whether results of products of known ranges are rounded as well, as NPUs need them."""
    in_4_bits: Container[str] = ()
    """The names of products whose weights get 4 bits."""
    rounded: Mapping[str, RoundedWeight] = field(default_factory=dict)
    """Weights of 4 bits that are rounded already, each with one scale for an output, by name."""


@dataclass
class Rounding:
    """The weights of one program, as they are rounded."""

    graph: Any
    """The ``onnx_ir.Graph`` that owns the weights."""
    top: int
    group: int | None = None
    """At most how many inputs of an output share a scale; ``None`` for all of them."""
    fixed: FixedScales | None = None
    """``None`` if inputs are scaled in each call."""
    stored: dict[tuple[Any, Any], tuple[Any, Any]] = field(default_factory=dict)
    """The integers and the scales, by the weight in float32 and its dimension, or ``int4``."""
    scales_in_a_row: dict[Any, tuple[Any, Any]] = field(default_factory=dict)
    """The scales of rounded weights in one dimension and their zero points, by the integers."""
    inputs: dict[tuple[Any, Any], Any] = field(default_factory=dict)
    """The node that rounds an input of products, by the graph that it stands in."""
    numbers: Iterator[int] = field(default_factory=count)
    """Numbers for the names of new nodes."""

    def graph_of(self, value: Any) -> Any:
        """The graph that gets what a weight becomes.

        onnxruntime 1.32 joins a product with fixed scales and its weight in a branch, and fails if
        the weight is outside of the branch.
        """
        graphs = {user.graph for user, _ in value.uses()}
        return graphs.pop() if self.fixed and len(graphs) == 1 else self.graph

    def weight(self, value: Any, dimension: int) -> tuple[Any, Any]:
        """The integers of a weight and their scales."""
        if (value, dimension) not in self.stored:
            matrix, graph = value.const_value.numpy(), self.graph_of(value)
            if self.group:
                by_outputs = matrix if dimension == ROWS else matrix.T
                integers, scales = rounded_in_groups(by_outputs, self.group)
            else:
                integers, scales = rounded(matrix, dimension, self.top)
            self.stored[value, dimension] = (
                constant(graph, f"{value.name}.int8", integers),
                constant(graph, f"{value.name}.scale", scales),
            )
        return self.stored[value, dimension]

    def weight_in_4_bits(
        self, value: Any, dimension: int, known: RoundedWeight | None
    ) -> tuple[Any, Any]:
        """The integers of a weight, of shape ``(inputs, outputs)``, and their scales.

        ``known`` has them if the weight is rounded already.
        """
        from ml_dtypes import int4

        if (value, int4) not in self.stored:
            if known is not None:
                integers = known.integers.numpy().T - np.int8(known.zero_points[0, 0])
                scales = known.scales.numpy().T
            else:
                matrix = value.const_value.numpy()
                matrix = matrix.T if dimension == ROWS else matrix
                integers, scales = rounded(matrix, COLUMNS, TOP_OF_4_BITS)
            graph = self.graph_of(value)
            self.stored[value, int4] = (
                constant(graph, f"{value.name}.int4", integers.astype(int4)),
                constant(graph, f"{value.name}.scale", scales),
            )
        return self.stored[value, int4]

    def in_a_row(self, integers: Any, scales: Any) -> tuple[Any, Any]:
        """The scales of a weight in one dimension, and as many zero points."""
        if integers not in self.scales_in_a_row:
            flat = scales.const_value.numpy().reshape(-1)
            zeros = np.zeros(flat.shape, integers.const_value.numpy().dtype)
            self.scales_in_a_row[integers] = (
                constant(integers.graph, f"{scales.name}s", flat),
                constant(integers.graph, f"{integers.name}.zeros", zeros),
            )
        return self.scales_in_a_row[integers]

    def node(
        self, kind: str, inputs: list[Any], outputs: int = 1, domain: str = "", **attributes: Any
    ) -> Any:
        """A new node, whose name no other graph of the program has."""
        import onnx_ir

        name = f"int8.{kind}.{next(self.numbers)}"
        results = [onnx_ir.Value(name=f"{name}.{at}") for at in range(outputs)]
        return onnx_ir.node(kind, inputs, attributes, domain=domain, outputs=results, name=name)


def constant(graph: Any, name: str, array: np.ndarray[Any, Any]) -> Any:
    """A new weight of an ``onnx_ir.Graph``, under ``name`` or a longer name."""
    import onnx_ir

    while name in graph.initializers:
        name += "_"
    tensor = onnx_ir.tensor(array, name=name)
    shape = onnx_ir.Shape(array.shape)
    value = onnx_ir.Value(
        name=name, shape=shape, type=onnx_ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def rounded(
    weight: np.ndarray[Any, Any], dimension: int, top: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Integers of the shape of ``weight``, and scales, of size 1 in the other dimension."""
    across = 1 - dimension
    largest = np.maximum(weight.max(across, keepdims=True), -weight.min(across, keepdims=True))
    scales = np.where(largest > 0, largest / top, 1.0).astype(np.float32)
    integers = np.empty(weight.shape, np.int8)
    count = max(1, PIECE // weight.shape[1])
    for first in range(0, len(weight), count):
        rows = slice(first, first + count)
        numbers = weight[rows] / (scales[rows] if dimension == ROWS else scales)
        np.clip(np.rint(numbers, out=numbers), -top, top, out=numbers)
        integers[rows] = numbers
    return integers, scales


def rounded_in_groups(
    weight: np.ndarray[Any, Any], group: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Integers and scales of a weight of shape ``(outputs, inputs)`` in groups.

    Shapes ``(outputs, groups, inputs of a group)``, with zero at 128, and ``(outputs, groups)``.
    """
    outputs, inputs = weight.shape
    groups = inputs // group_of(inputs, group)
    integers, scales = rounded(weight.reshape(outputs * groups, -1), ROWS, TOP)
    unsigned = integers.view(np.uint8) ^ np.uint8(ZERO)
    return unsigned.reshape(outputs, groups, -1), scales.reshape(outputs, groups)


def group_of(inputs: int, most: int) -> int:
    """How many inputs share a scale: the largest divisor of ``inputs`` of at most ``most``.

    All inputs, if that divisor is at most a quarter of ``most``.
    """
    return next((size for size in range(most, most // 4, -1) if inputs % size == 0), inputs)


def scale_of(values: Range, bits: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The scale and the zero point of integers without a sign for such values; 0 is exact.

    Those of 16 bits have room for values of other data (see ``ROOM_IN_16_BITS``).
    """
    room = ROOM_IN_16_BITS if bits == 16 else 1.0
    low, high = room * min(values[0], 0.0), room * max(values[1], 0.0)
    top = 2**bits - 1
    scale = np.float32((high - low) / top if high > low else 1.0)
    zero = np.clip(np.rint(-low / scale), 0, top)
    return np.asarray(scale), np.asarray(zero, f"uint{bits}")


def weights_by_name(weights: Mapping[str, RoundedWeight]) -> dict[str, RoundedWeight]:
    """The weights of layers by their names in a program instead of the paths of the layers."""
    ends = ("", TRANSPOSED)
    return {f"{path}.weight{end}": weight for path, weight in weights.items() for end in ends}


def packed(weight: RoundedWeight) -> dict[str, np.ndarray[Any, Any]]:
    """The integers, scales and zero points of a weight of 4 bits as ``MatMulNBits`` reads them.

    Two integers are in a byte, the first in the low half. The zero points are packed alike, and
    left out if all are in the middle. Inputs that fill up the last group have its zero point.
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
