"""ONNX programs with weights of 8 or 4 bits, and with inputs of products that are rounded as well.

A product ``x W`` becomes ``(x_q Q) * (s_x s_j)``, with the integers ``Q`` and the scales ``s`` of
the weight (see ``integer_weights``), and the integers ``x_q`` of the input and their scale ``s_x``.

A product with weights in groups and inputs in floating point multiplies by ``(Q - 128) s`` as
numbers again. onnxruntime computes these numbers when it loads the program, so that a call takes as
long as in float32. ``MatMulNBits`` with ``accuracy_level`` 0 computes them in each call, and takes
up to a hundred times as long for one token.

Weights of products have 4 bits on demand, if the scales of inputs are fixed; tables have 8 bits.
The scale of an input follows from its values in each call, or is fixed. onnxruntime fuses these
operators into one: ``DynamicQuantizeLinear`` and ``MatMulInteger``, or for fixed
scales ``QuantizeLinear`` and ``DequantizeLinear`` in front of a product (QDQ).
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from enjoyln_cli.quantisers.gptq import BITS, RoundedWeight
from enjoyln_cli.quantisers.integer_weights import (
    COLUMNS,
    FLOAT,
    MICROSOFT,
    REDUCED_TOP,
    ROWS,
    TOP,
    ZERO,
    FixedScales,
    Rounding,
    constant,
    group_of,
    packed,
    scale_of,
    weights_by_name,
)


def round_weights(
    program: Any,
    *,
    products: bool,
    in_floats: Container[str] = (),
    kept: Container[str] = (),
    reduced: bool = False,
    group: int | None = None,
    fixed: FixedScales | None = None,
) -> None:
    """Round the tables of an ``onnx_ir.Model`` and, with ``products``, its products, in place.

    ``in_floats`` are names of products whose weights are rounded and whose inputs are not. ``kept``
    are names of nodes that stay in float32, and with them the weights that they read. ``reduced``
    says that weights get 7 bits. With ``group``, at most so many inputs of an output share a
    scale, and of the products only heads that are tied to a table multiply integers. Other readers
    of a rounded table read it as numbers again.
    """
    rounding = Rounding(program.graph, REDUCED_TOP if reduced else TOP, group, fixed)
    if group or (fixed and (fixed.bits == 16 or fixed.in_4_bits)):
        program.graph.opset_imports.setdefault(MICROSOFT, 1)
    nodes = list(program.graph.all_nodes())
    in_float = {_weight_of(node) for node in nodes if node.name in kept} - {None}
    for node in nodes:
        if _weight_of(node) in in_float:
            continue
        if node.op_type == "Gather" and _is_weight(node.inputs[0]) and _axis(node) == 0:
            if is_large(*node.inputs[0].const_value.shape):
                _round_table(node, rounding)
        elif node.name in in_floats:
            if (found := matrix_of(node)) is not None:
                rounding.weight(*found)
        elif products and group:
            _round_tied_head(node, rounding, group)
        elif products:
            _round_product(node, rounding)
    _read_integers(rounding)


def write_rounded(program: Any, weights: Mapping[str, RoundedWeight], accuracy: int) -> None:
    """Let the products of an ``onnx_ir.Model`` read ``weights``, by the paths of their layers.

    The program is changed in place. ``accuracy`` is the ``accuracy_level`` of
    ``MatMulNBits``: 4 rounds the inputs to 8 bits, 0 leaves them.
    """
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
        shape, group = weight.integers.shape, weight.group
        _multiply_in_groups(node, shape, stored[name], BITS, group, accuracy)
        if not value.uses():
            del program.graph.initializers[value.name]
    if stored:
        program.opset_imports.setdefault(MICROSOFT, 1)


def _is_weight(value: Any) -> bool:
    """Whether a value is a stored matrix in float32."""
    return (
        value is not None
        and value.is_initializer()
        and value.const_value is not None
        and value.const_value.dtype == FLOAT
        and len(value.const_value.shape) == 2
    )


def is_large(rows: int, features: int) -> bool:
    """Whether a table of this shape is rounded: it has at least as many rows as features.

    A table of fewer rows, as for the types of tokens, takes few bytes, and many tokens read the
    same row, so that the errors of its rounding add up over them.
    """
    return rows >= features


def _axis(node: Any) -> int:
    axis = node.attributes.get("axis")
    return axis.as_int() if axis else 0


def _round_table(node: Any, rounding: Rounding) -> None:
    """Read rows of integers, and the scales of these rows."""
    table, ids = node.inputs
    integers, scales = rounding.weight(table, ROWS)
    rows = rounding.node("Gather", [integers, ids])
    their_scales = rounding.node("Gather", [scales, ids])
    shape = [*[0] * len(ids.shape), table.shape[1]]
    numbers = _numbers(rows.outputs[0], their_scales.outputs[0], shape, rounding)
    _replace(node, [rows, their_scales, *numbers])


def _numbers(integers: Any, scales: Any, shape: list[int], rounding: Rounding) -> list[Any]:
    """The nodes that multiply integers by their scales; the last node has the result.

    ``shape`` is the shape of the result of groups; a 0 stands for the size of ``integers`` there.
    """
    numbers = rounding.node("Cast", [integers], to=FLOAT)
    if not rounding.group:
        return [numbers, rounding.node("Mul", [numbers.outputs[0], scales])]
    of_graph = [
        constant(rounding.graph, f"int8.{name}", np.array(value))
        for name, value in (("zero", np.float32(ZERO)), ("last", [-1]), ("shape", shape))
    ]
    centred = rounding.node("Sub", [numbers.outputs[0], of_graph[0]])
    column = rounding.node("Unsqueeze", [scales, of_graph[1]])
    product = rounding.node("Mul", [centred.outputs[0], column.outputs[0]])
    result = rounding.node("Reshape", [product.outputs[0], of_graph[2]])
    return [numbers, centred, column, product, result]


def _round_tied_head(node: Any, rounding: Rounding, group: int) -> None:
    """Multiply by the integers of a table that was rounded in groups, if a node is its head."""
    found = matrix_of(node)
    if found not in rounding.stored or group_of(found[0].shape[1], group) != group:
        return
    _multiply_in_groups(node, found[0].shape, rounding.stored[found], 8, group, accuracy=4)


def _round_product(node: Any, rounding: Rounding) -> None:
    """Multiply integers, if a node is a product with a stored matrix."""
    found = matrix_of(node)
    if found is None:
        return
    weight, dimension = found
    if rounding.fixed:
        if node.inputs[0].name in rounding.fixed.ranges:
            _with_fixed_scales(node, weight, dimension, rounding, rounding.fixed)
        return
    integers, scales = rounding.weight(weight, dimension)
    before = []
    if dimension == ROWS:  # stored with an output in each row
        turned = rounding.node("Transpose", [integers], perm=[1, 0])
        turned_scales = rounding.node("Transpose", [scales], perm=[1, 0])
        before = [turned, turned_scales]
        (integers,), (scales,) = turned.outputs, turned_scales.outputs
    source = node.inputs[0]
    if (node.graph, source) not in rounding.inputs:
        made = rounding.node("DynamicQuantizeLinear", [source], outputs=3)
        rounding.inputs[node.graph, source] = made
        before.append(made)
    numbers, scale, zero = rounding.inputs[node.graph, source].outputs
    sums = rounding.node("MatMulInteger", [numbers, integers, zero])
    wide = rounding.node("Cast", [sums.outputs[0]], to=FLOAT)
    both = rounding.node("Mul", [scale, scales])
    result = rounding.node("Mul", [wide.outputs[0], both.outputs[0]])
    after = []
    if node.op_type == "Gemm" and len(node.inputs) > 2:
        after = [rounding.node("Add", [result.outputs[0], node.inputs[2]])]
    _replace(node, [*before, sums, wide, both, result, *after])


def _with_fixed_scales(
    node: Any, weight: Any, dimension: int, rounding: Rounding, fixed: FixedScales
) -> None:
    """Multiply numbers that were rounded with fixed scales."""
    before, source, domain = [], node.inputs[0], ""
    if node.name in fixed.in_4_bits:
        known, domain = fixed.rounded.get(weight.name), MICROSOFT
        integers, scales = rounding.weight_in_4_bits(weight, dimension, known)
    else:
        integers, scales = rounding.weight(weight, dimension)
    row = rounding.in_a_row(integers, scales)
    if dimension == ROWS and not domain:
        before = [rounding.node("Transpose", [integers], perm=[1, 0])]
        (integers,) = before[0].outputs
    matrix = rounding.node("DequantizeLinear", [integers, *row], domain=domain, axis=1)
    if (node.graph, source) not in rounding.inputs:
        made = _rounded_value(source, source.name, rounding, fixed)
        rounding.inputs[node.graph, source] = made[-1]
        before += made
    inputs = [rounding.inputs[node.graph, source].outputs[0], matrix.outputs[0]]
    bias, last = _bias_of(node)
    scale = inputs[0].producer().inputs[1].const_value.numpy() * row[0].const_value.numpy()
    is_joined = fixed.bits == 8 and not domain and (last is node or not fixed.with_outputs)
    sums = _as_sums(bias, scale) if is_joined else None
    if sums is not None:
        numbers = [
            constant(row[0].graph, f"{bias.name}.{name}", array)
            for name, array in (("int32", sums), ("scale", scale))
        ]
        added = rounding.node("DequantizeLinear", numbers, axis=0)
        nodes = [*before, matrix, added, rounding.node("Gemm", [*inputs, added.outputs[0]])]
    else:
        nodes = [*before, matrix, rounding.node("MatMul", inputs)]
        if last is node and bias is not None:
            nodes.append(rounding.node("Add", [nodes[-1].outputs[0], bias]))
        last = node
    if fixed.with_outputs and node.outputs[0].name in fixed.ranges:
        nodes += _rounded_value(nodes[-1].outputs[0], node.outputs[0].name, rounding, fixed)
    _replace(last, nodes)
    if last is not node:
        node.graph.remove(node, safe=True)
    if bias is not None and bias.is_initializer() and not bias.uses():
        del bias.graph.initializers[bias.name]


def _bias_of(node: Any) -> tuple[Any, Any]:
    """The bias of a product, and the node that adds it: a ``Gemm``, or the next node.

    onnxruntime joins a product of matrices with the ``Add`` that alone reads it to a ``Gemm``.
    ``None`` and the product itself if there is no bias.
    """
    if node.op_type == "Gemm":
        return (node.inputs[2] if len(node.inputs) > 2 else None), node
    result = node.outputs[0]
    users = [user for user, _ in result.uses()]
    are_matrices = len(result.shape or ()) == 2 and not result.is_graph_output()
    if are_matrices and [(one.op_type, one.graph) for one in users] == [("Add", node.graph)]:
        (bias,) = [one for one in users[0].inputs if one is not result]
        return bias, users[0]
    return None, node


def _as_sums(bias: Any, scale: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """A bias as sums of products of integers, which have this ``scale``, one for each output.

    onnxruntime multiplies integers in a ``Gemm`` only if its bias is such sums. ``None`` if the
    bias is not stored, or so large that the sums could leave 32 bits.
    """
    if bias is None or not bias.is_initializer() or bias.const_value.numpy().shape != scale.shape:
        return None
    sums = np.rint(bias.const_value.numpy().astype(np.float64) / scale)
    return sums.astype(np.int32) if np.abs(sums).max() < 2**30 else None


def _rounded_value(value: Any, name: str, rounding: Rounding, fixed: FixedScales) -> list[Any]:
    """The nodes that round a value by the range of ``name``; the last node has the result."""
    scale, zero = scale_of(fixed.ranges[name], fixed.bits)
    numbers = [
        constant(rounding.graph, f"{name}.scale", scale),
        constant(rounding.graph, f"{name}.zero", zero),
    ]
    domain = MICROSOFT if fixed.bits == 16 else ""
    quantize = rounding.node("QuantizeLinear", [value, *numbers], domain=domain)
    return [
        quantize,
        rounding.node("DequantizeLinear", [quantize.outputs[0], *numbers], domain=domain),
    ]


def _weight_of(node: Any) -> Any:
    """The stored matrix that a product or a table multiplies by or reads; ``None`` for others."""
    found = matrix_of(node)
    return found[0] if found else node.inputs[0] if node.op_type == "Gather" else None


def reads_integers(node: Any) -> bool:
    """Whether a product multiplies by integers and their scales as numbers."""
    maker = node.inputs[1].producer()
    while maker is not None and maker.op_type in ("Transpose", "Reshape", "Mul", "Sub"):
        maker = maker.inputs[0].producer()
    return maker is not None and maker.op_type == "Cast" and maker.inputs[0].is_initializer()


def matrix_of(node: Any) -> tuple[Any, int] | None:
    """The stored matrix of a product, and the dimension of its outputs; ``None`` for others."""
    if node.op_type not in ("MatMul", "Gemm"):
        return None
    right, dimension = node.inputs[1], COLUMNS
    if node.op_type == "Gemm":
        numbers = {name: value.value for name, value in node.attributes.items()}
        if numbers.get("transA") or {numbers.get("alpha", 1), numbers.get("beta", 1)} != {1}:
            return None
        dimension = ROWS if numbers.get("transB") else COLUMNS
    maker = right.producer() if right is not None else None
    if maker is not None and maker.op_type == "Transpose" and dimension == COLUMNS:
        right, dimension = maker.inputs[0], ROWS
    return (right, dimension) if _is_weight(right) else None


def _multiply_in_groups(
    node: Any, shape: Sequence[int], weight: Sequence[Any], bits: int, group: int, accuracy: int
) -> None:
    """Let a product multiply by integers in groups of ``group`` inputs.

    ``shape`` is ``(outputs, inputs)``. ``weight`` are the integers of so many ``bits``, their
    scales, and zero points if these are not in the middle. ``accuracy`` is as for
    ``write_rounded``.
    """
    import onnx_ir

    sizes = {"K": shape[1], "N": shape[0], "bits": bits, "block_size": group}
    name = f"{node.name}.in_groups"
    made = onnx_ir.node(
        "MatMulNBits",
        [node.inputs[0], *weight],
        {**sizes, "accuracy_level": accuracy},
        domain=MICROSOFT,
        name=name,
        outputs=[onnx_ir.Value(name=name)],
    )
    _replace(node, [made])


def _replace(node: Any, nodes: list[Any]) -> None:
    """Put ``nodes`` in the place of ``node``; the last of them computes its result."""
    old, new = node.outputs[0], nodes[-1].outputs[0]
    new.shape, new.type = old.shape, old.type
    name, old.name = old.name, f"{old.name}.float"
    for made in nodes:
        made.metadata_props.update(node.metadata_props)
    node.graph.insert_before(node, nodes)
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    node.graph.remove(node, safe=True)
    new.name = name


def _read_integers(rounding: Rounding) -> None:
    """Let all readers of a rounded weight read its integers, and remove what nothing reads."""
    for (value, dimension), (integers, scales) in rounding.stored.items():
        for user, _ in list(value.uses()):
            if user.op_type == "Transpose" and not user.outputs[0].uses():
                user.graph.remove(user, safe=True)
        if value.uses() and dimension in (ROWS, COLUMNS):
            rows, columns = value.shape
            is_turned = bool(rounding.group) and dimension == COLUMNS
            shape = [columns, rows] if is_turned else [rows, columns]
            numbers = _numbers(integers, scales, shape, rounding)
            if is_turned:
                numbers.append(rounding.node("Transpose", [numbers[-1].outputs[0]], perm=[1, 0]))
            rounding.graph.insert_before(next(iter(rounding.graph)), numbers)
            value.replace_all_uses_with(numbers[-1].outputs[0])
        for one in (value, scales):
            if not one.uses() and one.is_initializer():
                del one.graph.initializers[one.name]
