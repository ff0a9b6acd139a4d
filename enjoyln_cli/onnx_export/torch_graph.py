"""Capture a call of a model as a graph of torch's operators that ``torch.onnx`` can translate.

``torch.onnx`` traces a captured graph a second time, to write it in operators that it translates
and without writing in place. That takes longer than capturing it. Most models use only operators
that it translates, beside some that are renamed here. Their graphs are translated as they are.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config as symbolic

aten = torch.ops.aten
SAME_VALUE = (aten.detach_.default, aten.detach.default, aten.alias.default)
"""They return their operand, where no gradients are computed."""
CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device)
RENAMED = {aten.__and__.Tensor: aten.bitwise_and.Tensor, aten.__or__.Tensor: aten.bitwise_or.Tensor}


def captured(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], axes: Sequence[Mapping[int, str]]
) -> ExportedProgram:
    """The graph of one call of ``module``; ``axes`` are the dynamic axes of each input.

    Raises what ``torch.export`` and the code of the module raise.
    """
    dynamic = tuple(dict.fromkeys(each, Dim.DYNAMIC) for each in axes)
    # as torch.onnx does, so that an axis of size 1 stays dynamic
    with symbolic.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        program = torch.export.export(module, tuple(inputs), dynamic_shapes=(dynamic,))
    _rename(program.graph)
    decompose: Any = program.run_decompositions

    def run_decompositions(table: Container[Any], **other: Any) -> ExportedProgram:
        return program if _is_translated(program, table) else decompose(table, **other)

    program.run_decompositions = run_decompositions
    return program


def _rename(graph: torch.fx.Graph) -> None:
    """Write what is a cast, or no operation at all, in operators that ``torch.onnx`` translates."""
    for node in list(graph.nodes):
        if node.target in RENAMED:
            node.target = RENAMED[node.target]
        value = node.args[0] if node.target in (*SAME_VALUE, *CASTS) else None
        if not isinstance(value, torch.fx.Node):
            continue
        dtype, may_copy = node.meta["val"].dtype, True in (*node.args, *node.kwargs.values())
        is_returned = any(user.op == "output" for user in node.users)  # then its name is kept
        if value.meta["val"].dtype == dtype and not (may_copy or is_returned):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        else:
            node.target, node.args, node.kwargs = aten._to_copy.default, (value,), {"dtype": dtype}


def _is_translated(program: ExportedProgram, table: Container[Any]) -> bool:
    """Whether no operator is in the ``table`` of decompositions, and none writes in place."""
    return all(
        not isinstance(node.target, torch._ops.OperatorBase)
        or (
            isinstance(node.target, torch._ops.OpOverload)
            and node.target not in table
            and not node.target._schema.is_mutable
        )
        for node in program.graph.nodes
        if node.op == "call_function"
    )
