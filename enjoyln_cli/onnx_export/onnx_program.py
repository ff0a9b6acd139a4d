"""Write a model that computes RMSNorm as an ONNX graph, with torch's own exporter.

Each call of a folded norm becomes one ``RMSNormalization``, an operator of opset 23. That is
checked: a norm that was traced as LayerNorm would make a right but slower file. A model without
folded norms is written in opset 20.

The file is written so that quantisers accept it, which costs no time:

* Attention is written as its products and its softmax. Opset 23 has an ``Attention`` too, which
  onnxruntime's quantiser takes for the operator of that name in ``com.microsoft``.
* ``addmm`` is a ``MatMul`` and an ``Add``. onnxruntime 1.32 cannot load a quantised ``Gemm`` whose
  result goes through a ``Reshape`` into a ``Split``, from opset 21 on.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export.call import ProgramCall
from enjoyln_cli.onnx_export.cross_cache import keep_cross_cache
from enjoyln_cli.onnx_export.exporting import captured, exporting, translated
from enjoyln_cli.runtime.call_guards import call_guards

OPSET = 23
"""The first opset with ``RMSNormalization``."""
OPSET_OF_LAYER_NORMS = 20
"""The opset of a model without ``RMSNormalization``: the last that every quantiser accepts."""
RMS_NORM, LAYER_NORM = "RMSNormalization", "LayerNormalization"
PARAMETER = "model."
"""What the name of a parameter begins with, as an input of a traced program."""
_SCOPES = "pkg.torch.onnx.name_scopes"


def traced_program(call: ProgramCall, opset: int, parameters: Container[str]) -> Any:
    """The ``onnx_ir.Model`` of one call, in which the ``parameters`` of the model are inputs.

    Their names begin with ``PARAMETER``. What is simplified is right for any of their values.
    Nodes say in their metadata which module they come from. Raises ``UnsupportedModel`` if torch
    cannot export the call, or if an axis that should be dynamic would be fixed.
    """
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    dims = tuple(dict(call.axes[name]) for name in call.batch)
    kind = type(call.module.model).__name__
    with exporting(call.module.model, "torch.onnx"):
        program: Any = translated(
            captured(call.module, tuple(call.batch.values()), dims),
            input_names=list(call.batch),
            output_names=list(call.outputs),
            dynamic_shapes=(dims,),
            opset_version=opset,
            dynamo=True,
            verbose=False,
            custom_translation_table={
                torch.ops.aten.scaled_dot_product_attention.default: (
                    aten_scaled_dot_product_attention
                ),
                torch.ops.aten.addmm.default: _addmm,
            },
            optimize=False,  # its rotary embedding takes no batch: cos and sin have one row
        )
        model = program.model
        _parameters_to_inputs(model.graph, parameters)
        if call.cross:
            keep_cross_cache(model, call.cross, is_parameter)
        simplify(model)
        _compute_in_float32(model.graph)
    _remove_unused_inputs(model.graph)
    _require_dynamic(model.graph, call, kind)
    model.metadata_props.update(call.metadata)
    return model


def is_parameter(value: Any) -> bool:
    """Whether an input of a traced program stands for a parameter of the model."""
    return str(value.name).startswith(PARAMETER)


def _parameters_to_inputs(graph: Any, parameters: Container[str]) -> None:
    for name, value in list(graph.initializers.items()):
        if is_parameter(value) and name.removeprefix(PARAMETER) in parameters:
            del graph.initializers[name]
            value.const_value = None
            graph.inputs.append(value)


def _compute_in_float32(graph: Any) -> None:
    """Let nodes on bfloat16 values compute in float32 and round, as torch does.

    onnxruntime has no other operators for bfloat16 than ``Cast`` on a CPU. Falcon's ALiBi is
    computed in that dtype.
    """
    import onnx_ir

    narrow, wide = onnx_ir.DataType.BFLOAT16, onnx_ir.DataType.FLOAT

    def cast(value: Any, dtype: Any) -> Any:
        node = onnx_ir.node("Cast", [value], {"to": dtype})
        node.outputs[0].dtype, node.outputs[0].shape = dtype, value.shape
        return node

    for node in list(graph.all_nodes()):
        if node.op_type in ("Cast", "Constant"):
            continue
        for at, value in enumerate(node.inputs):
            if value is not None and value.dtype == narrow:
                before = cast(value, wide)
                node.graph.insert_before(node, before)
                node.replace_input_with(at, before.outputs[0])
        for value in node.outputs:
            if value.dtype == narrow:
                value.dtype = wide
                after = cast(value, narrow)
                value.replace_all_uses_with(after.outputs[0])
                after.replace_input_with(0, value)
                node.graph.insert_after(node, after)


def _remove_unused_inputs(graph: Any) -> None:
    for value in list(graph.inputs):
        if not value.uses() and not value.is_graph_output():
            graph.inputs.remove(value)


def _require_dynamic(graph: Any, call: ProgramCall, kind: str) -> None:
    """Raise ``UnsupportedModel`` if torch has fixed an axis, or has taken two axes for one."""
    for value in graph.inputs:
        for at, axis in call.axes.get(value.name, {}).items():
            size = value.shape[at]
            if isinstance(size, int) or size.value != axis:
                raise UnsupportedModel(
                    f"torch.onnx cannot export {kind}: the {axis} of {value.name} would be {size}"
                )


def simplify(model: Any) -> None:
    """Fold constants of an ``onnx_ir.Model``, and remove nodes that compute nothing, in place."""
    from onnxscript.optimizer import optimize_ir

    optimize_ir(model)


def fold_transposed_weights(program: Any) -> None:
    """Store the weights of linear layers transposed, as quantisers expect them.

    The exporter lets each call transpose a large weight. A weight that something else
    reads as well, as a tied embedding, stays.
    """
    from onnxscript.optimizer import fold_constants

    def is_own_weight(node: Any) -> bool:
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        return weight is not None and weight.is_initializer() and len(weight.uses()) == 1

    fold_constants(program, onnx_shape_inference=False, should_fold=is_own_weight)


def require_rms_norms(graph: Any, model: nn.Module, norms: set[str]) -> None:
    """Raise ``UnsupportedModel`` if one of the ``norms`` that the call runs is no RMSNorm node.

    ``graph`` is an ``onnx_ir.Graph`` of ``model``.
    """
    nodes = (node for node in graph if node.op_type == RMS_NORM)
    missing = sorted(norms - {module_of(node).removeprefix("model.") for node in nodes})
    if missing:
        trouble = next((guard.trouble for _, guard in call_guards(model) if guard.trouble), "")
        raise UnsupportedModel(
            f"{missing[0]} of {type(model).__name__} would be exported as LayerNorm"
            + (f": {trouble}" if trouble else "")
        )


def scale_norms(graphs: Iterable[Any], shifts: Mapping[str, int]) -> None:
    """Multiply the input of each norm in ``shifts`` by ``2^-k``, and its eps by ``4^-k``.

    This changes no result: ``LN(x; eps) = LN(2^-k x; 4^-k eps)``.
    ``graphs`` are ``onnx_ir.Graph``s; ``shifts`` has ``k`` by the norm's path. Raises
    ``UnsupportedModel`` if a norm is no node of its own.
    """
    import onnx_ir

    found = set()
    for node in (node for graph in graphs for node in list(graph.all_nodes())):
        norm = module_of(node).removeprefix(PARAMETER)
        if node.op_type not in (LAYER_NORM, RMS_NORM) or norm not in shifts:
            continue
        x, shift = node.inputs[0], shifts[norm]
        factor = onnx_ir.tensor(2.0**-shift, dtype=x.dtype)
        number = onnx_ir.node("Constant", [], {"value": factor})
        scaled = onnx_ir.node("Mul", [x, number.outputs[0]])
        scaled.outputs[0].dtype, scaled.outputs[0].shape = x.dtype, x.shape
        node.graph.insert_before(node, [number, scaled])
        node.replace_input_with(0, scaled.outputs[0])
        eps = node.attributes["epsilon"].as_float() * 4.0**-shift
        node.attributes["epsilon"] = onnx_ir.AttrFloat32("epsilon", eps)
        found.add(norm)
    if missing := sorted(shifts.keys() - found):
        raise UnsupportedModel(
            f"{missing[0]} overflows in float16, its stream cannot be scaled in the weights, and "
            "it is not one node of the program that could get a multiplication"
        )


def module_of(node: Any) -> str:
    """The path of the module that a node was traced in; empty if there is none."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "['']"))
    return str(scopes[-2]) if len(scopes) > 1 else ""


def count_nodes(graph: Any) -> dict[str, int]:
    """How many nodes of each type the graph has."""
    return dict(Counter(node.op_type for node in graph))


def _addmm(bias: Any, left: Any, right: Any, beta: float = 1.0, alpha: float = 1.0) -> Any:
    from onnxscript import opset18 as op

    if (beta, alpha) != (1, 1):
        return op.Gemm(left, right, bias, alpha=alpha, beta=beta)
    return op.Add(op.MatMul(left, right), bias)
