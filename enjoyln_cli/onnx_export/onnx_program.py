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
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.load import silent
from enjoyln_cli.onnx_export.call import ExportedCall, Positional
from enjoyln_cli.runtime.entries import entries
from enjoyln_cli.text import first_line

OPSET = 23
"""The first one with ``RMSNormalization``."""
OPSET_OF_LAYER_NORMS = 20
"""The opset of a model without ``RMSNormalization``: the last one that every quantiser accepts."""
RMS_NORM = "RMSNormalization"
LARGEST = 1_500_000_000
"""Bytes of weights that are stored in the file itself: protobuf allows 2 GB in all."""
_SCOPES = "pkg.torch.onnx.name_scopes"


def program_of(model: nn.Module, call: ExportedCall, opset: int = OPSET) -> Any:
    """The ``torch.onnx.ONNXProgram`` of one call of ``model``, which computes RMSNorm.

    Its nodes say in their metadata which module they come from. Raises ``UnsupportedModel`` if
    torch cannot export the model, or if an axis that should be dynamic would be fixed.
    """
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention

    dims = tuple(dict(call.axes[name]) for name in call.batch)
    try:
        with torch.no_grad(), silent(), _quiet():
            program: Any = torch.onnx.export(
                Positional(model, call),
                tuple(call.batch.values()),
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
            simplify(program.model)
            return program
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # the exporter and a model's code may raise anything
        raise UnsupportedModel(
            f"torch.onnx cannot export {type(model).__name__}: {_cause(error)}"
        ) from error


def simplify(model: Any) -> None:
    """Fold constants of an ``onnx_ir.Model``, and remove nodes that compute nothing, in place."""
    from onnxscript.optimizer import optimize_ir

    optimize_ir(model)


def fold_transposed_weights(program: Any) -> None:
    """Store the weights of linear layers transposed, as quantisers expect them.

    The exporter leaves a large one to be transposed in each call. A weight that something else
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
        trouble = next((entry.trouble for _, entry in entries(model) if entry.trouble), "")
        raise UnsupportedModel(
            f"{missing[0]} of {type(model).__name__} would be exported as LayerNorm"
            + (f": {trouble}" if trouble else "")
        )


def module_of(node: Any) -> str:
    """The path of the module that a node was traced in; empty if there is none."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "['']"))
    return str(scopes[-2]) if len(scopes) > 1 else ""


def count_nodes(graph: Any) -> dict[str, int]:
    """How many nodes of each type the graph has."""
    return dict(Counter(node.op_type for node in graph))


def save(program: Any, file: Path) -> None:
    """Write the graph to ``file``; weights above ``LARGEST`` go to ``file.data`` beside it.

    The nodes' metadata is left out: it quotes the source code that was traced, with its paths.
    """
    for node in program.model.graph:
        node.metadata_props.clear()
    weights = (value.const_value for value in program.model.graph.initializers.values())
    program.save(file, external_data=sum(weight.nbytes for weight in weights) > LARGEST)


def _cause(error: BaseException) -> str:
    """The first line of the exception that started it."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = first_line(error)
    return line if isinstance(error, RuntimeError) else f"{type(error).__name__}: {line}"


def _addmm(bias: Any, left: Any, right: Any, beta: float = 1.0, alpha: float = 1.0) -> Any:
    from onnxscript import opset18 as op

    if (beta, alpha) != (1, 1):
        return op.Gemm(left, right, bias, alpha=alpha, beta=beta)
    return op.Add(op.MatMul(left, right), bias)


@contextmanager
def _quiet() -> Iterator[None]:
    """Inside the block, the exporter prints no warnings: they are about its own internals."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
