"""Run the exporters of other libraries, which print and raise what they like.

``torch.onnx`` traces a captured graph a second time, to write it in operators that it translates
and without writing in place. That takes longer than capturing it. Most models use only operators
that it translates, beside some that are renamed here. Their graphs are translated as they are, and
traced again if that fails.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.load import refusing, said_by, silent
from enjoyln_cli.trace.failure_reasons import say_why_not_exported

if TYPE_CHECKING:
    from torch.export import ExportedProgram

aten = torch.ops.aten
SAME_VALUE = (aten.detach_.default, aten.detach.default, aten.alias.default)
"""They return their operand, where no gradients are computed."""
CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device)
RENAMED = {aten.__and__.Tensor: aten.bitwise_and.Tensor, aten.__or__.Tensor: aten.bitwise_or.Tensor}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers and other libraries from printing and warning inside the block."""
    with (
        silent(),
        warnings.catch_warnings(),
        redirect_stdout(io.StringIO()),
        redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


@contextmanager
def exporting(model: Any, exporter: str, advice: str = "") -> Iterator[None]:
    """Let an ``exporter`` run on ``model`` inside the block, and print nothing.

    torch prints the whole graph that it has so far if it cannot export a model. Its cache of fake
    tensors, which costs more than it saves if sizes are symbols, is off. Any exception of the
    exporter or of the model's code becomes ``UnsupportedModel``, with ``advice`` behind it.
    """
    from torch._dynamo import config as dynamo

    def why(error: Exception) -> str:
        return (say_why_not_exported(error) or said_by(_first_cause(error))) + advice

    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    words = f"{exporter} cannot export {type(model).__name__}"
    try:
        with (
            refusing(UnsupportedModel, words, why),
            torch.no_grad(),
            quiet(),
            dynamo.patch(fake_tensor_cache_enabled=False),
        ):
            yield
    finally:
        log.setLevel(level)


def _first_cause(error: BaseException) -> BaseException:
    """The exception that started it."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def exported(exporter: Any, model: Any, inputs: Mapping[str, Any], config: Any) -> Any:
    """The ``transformers.exporters.ExportedModel`` of one call of ``model`` with ``inputs``.

    ``exporter`` and ``config`` are an exporter of transformers and its settings. Raises
    ``UnsupportedModel`` if the model cannot be exported.
    """
    advice = "; --format torchao quantises a model without exporting it"
    with exporting(model, "transformers", advice):
        return exporter.export(model, dict(inputs), config)


def captured(
    module: torch.nn.Module, inputs: Sequence[torch.Tensor], axes: Sequence[Mapping[int, str]]
) -> ExportedProgram:
    """The graph of one call of ``module``; ``axes`` are the dynamic axes of each input.

    Raises what ``torch.export`` and the code of the module raise.
    """
    from torch.export import Dim
    from torch.fx.experimental import _config as symbolic

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


def translated(program: ExportedProgram, **options: Any) -> Any:
    """The ``torch.onnx.ONNXProgram`` of a captured graph; ``options`` are torch's.

    Operators such as ``numpy_T`` are composed of others, and in no table of decompositions. If
    ``torch.onnx`` does not translate the graph as it is, it is traced again.
    """
    try:
        return torch.onnx.export(program, **options)  # type: ignore[arg-type]
    except torch.onnx.OnnxExporterError:
        del program.run_decompositions
        return torch.onnx.export(program, **options)  # type: ignore[arg-type]


def _rename(graph: torch.fx.Graph) -> None:
    """Write what is a cast, or no operation at all, in operators that ``torch.onnx`` translates.

    Where it promotes the types of operands itself, it cannot subtract whole numbers from a
    fraction (``1.0 - mask``). These are cast before.
    """
    for node in list(graph.nodes):
        if node.target in RENAMED:
            node.target = RENAMED[node.target]
        if node.target == aten.rsub.Scalar:
            _cast(graph, node, node.args[0])
        value = node.args[0] if node.target in (*SAME_VALUE, *CASTS) else None
        if not isinstance(value, torch.fx.Node):
            continue
        dtype = node.meta["val"].dtype
        may_copy = True in (*node.args, *node.kwargs.values())
        is_returned = any(user.op == "output" for user in node.users)  # then its name is kept
        if value.meta["val"].dtype == dtype and not (may_copy or is_returned):
            node.replace_all_uses_with(value)
            graph.erase_node(node)
        else:
            node.target = aten._to_copy.default
            node.args = (value,)
            node.kwargs = {"dtype": dtype}


def _cast(graph: torch.fx.Graph, node: torch.fx.Node, operand: Any) -> None:
    """Let ``node`` read its ``operand`` in the dtype of its result."""
    value, dtype = operand.meta["val"], node.meta["val"].dtype
    if value.dtype != dtype:
        with graph.inserting_before(node):
            cast = graph.call_function(aten._to_copy.default, (operand,), {"dtype": dtype})
        cast.meta = {**node.meta, "val": value.to(dtype)}
        node.replace_input_with(operand, cast)


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
