"""Record the operations of a model while they run without weights, and do not decompose them.

``record`` works on example inputs. Inputs and buffers, and everything computed from these alone,
have values (see ``models.meta_device``); everything else has shapes only. What reads or writes
values is recorded as any other operation: ``graph.in_place`` then replaces writes that no other op
can see. If Python reads a value, the graph holds for calls with these values only. If an
operation fails, as reading a value that depends on a weight does, the call is refused, even if the
model's code catches the exception.

``record_symbolic`` shows for which sizes, or for which values, such a graph holds.

Neither of them can record an operator with a subgraph, such as ``torch.cond``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._functorch.autograd_function import custom_function_call
from torch._subclasses import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _len_torch_dispatch_stack

from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.models.meta_device import (
    Memory,
    meta_weights,
    on_cpu,
    takes_device,
    tensors_of,
    without_values,
)
from enjoyln_cli.trace import meta_results
from enjoyln_cli.trace.escapes import PythonReads
from enjoyln_cli.trace.graph_builder import GraphBuilder, NotRecorded
from enjoyln_cli.trace.steps import Steps

aten = torch.ops.aten

_OF_SHAPES = {
    aten.scaled_dot_product_attention.default, aten.take_along_dim.default,
    aten.linalg_multi_dot.default, aten.gru.input, aten.lstm.input, aten.rnn_relu.input,
    aten.rnn_tanh.input,
}  # fmt: skip
"""Composed ops that read no values of an operand if another one has none. Torch runs them with all
operands on one device, or in many steps."""
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@dataclass(frozen=True, eq=False, kw_only=True)
class RecordedRun:
    """The graph of one run."""

    graph: Graph
    parameters: Mapping[Node, str]
    """The first name of the parameter or stored buffer that each of these nodes stands for."""
    inputs: list[Node]
    """The nodes of the flattened steps, in order."""
    constants: Mapping[Node, torch.Tensor]
    """Other tensors that the graph reads, such as constants in the code."""
    layout: pytree.TreeSpec
    """The structure of the result of ``Steps``, whose values the graph returns."""
    read_values: bool
    """Whether Python read the value of a tensor."""
    called_with_more: frozenset[str]
    """Paths of the modules without children that were called with other arguments than a tensor."""


def record(runner: Steps, steps: Any) -> tuple[RecordedRun, Memory]:
    """The graph of ``runner`` for ``steps`` with these values, and the memory that it computes.

    The parameters of its model have to be on the meta device. Raises ``TraceFailed`` if the model's
    code catches an exception of torch, ``NotRecorded``, or any exception of the model.
    """
    with meta_weights() as computed:
        recorder = _Recorder(GraphBuilder(), computed=computed)
        recording, _ = _record(runner, recorder, *pytree.tree_flatten(on_cpu(steps)))
    if recorder.reads.failed:
        raise TraceFailed(
            "forward catches an exception of torch; it runs without weights here, so reading a "
            "value fails, and with weights it may take another path; do without the try there"
        )
    return recording, computed


class Symbols(ShapeEnv):
    """Symbols for sizes, and for numbers that depend on values."""

    def __init__(self) -> None:
        super().__init__(trace_asserts=True)
        self.in_operation = False
        """Whether an operation runs: torch itself asks about sizes, and can do without answers."""
        self.undecided = False
        """Whether the code had to know a value, even if it caught the exception."""

    def _make_data_dependent_error(self, *args: Any, **kwargs: Any) -> Any:
        self.undecided |= not self.in_operation
        return super()._make_data_dependent_error(*args, **kwargs)


def record_symbolic(runner: Steps, steps: Any, sizes: Symbols, free: bool = True) -> Graph:
    """The graph of ``runner`` for ``steps`` without values, in which sizes may be symbols.

    Its nodes have no ``meta["val"]``: a shape with symbols takes torch longer than the operation.

    If ``free``, every size of an input but 1 is a symbol of ``sizes``, and whenever Python reads
    a symbol, ``sizes`` gets a condition under which the path stays the same. Sizes and numbers that
    depend on values are always symbols. A condition on these alone raises an exception, unless it
    is checked, so that a call in which it does not hold fails. All tensors count as on the CPU, and
    none has values.

    Raises ``NotRecorded``, or any exception of the model.
    """
    fake = FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)
    lists = (part for part in runner.modules() if isinstance(part, nn.ModuleList | nn.Sequential))
    fake.cache_enabled = any(len(blocks) > 2 for blocks in lists)  # for fewer it costs time
    with fake:
        runner.to_empty(device="cpu")

    def with_symbols(tensor: torch.Tensor) -> torch.Tensor:
        tensor = torch.empty_like(tensor, device="cpu")
        fixed, varying = DimDynamic.STATIC, DimDynamic.DYNAMIC
        kinds = [varying if free and size > 1 else fixed for size in tensor.shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        return fake.from_tensor(tensor, symbolic_context=context)

    leaves, layout = pytree.tree_flatten(pytree.tree_map_only(torch.Tensor, with_symbols, steps))
    recorder = _Recorder(GraphBuilder(keeps_shapes=False), symbols=sizes)
    with fake, torch.backends.nnpack.flags(enabled=False):  # which is chosen by the number of rows
        recording, _ = _record(runner, recorder, leaves, layout)
    if recorder.reads.failed or sizes.undecided:
        raise NotRecorded("a call reads a value")
    return recording.graph


def _record(
    runner: Steps, recorder: _Recorder, leaves: list[Any], layout: pytree.TreeSpec
) -> tuple[RecordedRun, Any]:
    """What ``recorder`` records of ``runner``, and its result; ``leaves`` are its inputs."""
    tracer = recorder.tracer
    parameters: dict[Node, str] = {}
    known: set[int] = set()
    for name, tensor in stored_weights(runner.model).items():
        if id(tensor) not in known:
            parameters[tracer.placeholder(tensor)] = name
            known.add(id(tensor))
    for buffer in runner.buffers():
        if id(buffer) not in known:
            tracer.placeholder(buffer)
    inputs = [tracer.placeholder(leaf) for leaf in leaves]
    tracer.follow_module_calls(runner)
    with recorder.reads, enable_python_dispatcher(), recorder:
        result = runner(*pytree.tree_unflatten(leaves, layout))
    results, results_layout = pytree.tree_flatten(result)
    nodes = [tracer.node_of(tensor) for tensor in results]
    tracer.graph.output(nodes)
    recording = RecordedRun(
        graph=tracer.graph,
        parameters=parameters,
        inputs=inputs,
        constants=tracer.constants,
        layout=results_layout,
        read_values=recorder.reads.read_values,
        called_with_more=frozenset(tracer.called_with_more),
    )
    return recording, result


class _Recorder(ProxyTorchDispatchMode):
    """Records every operation before autograd, where ``linear`` etc. are single operations.

    It is registered in place of torch's own proxy mode, so that ``get_proxy_mode`` finds it.
    """

    def __init__(
        self,
        tracer: GraphBuilder,
        computed: Memory | None = None,
        symbols: Symbols | None = None,
    ) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack: list[Any] = []
        self.pre_dispatch = True
        self.tracer: Any = tracer
        self.computed = computed
        """The memory that a run without weights computes."""
        self.symbols = symbols
        """The symbols of sizes, which only torch's operations in Python leave free."""
        self.reads = PythonReads(symbols is not None)
        self.numbers: set[Any] = set()
        """Symbols of the numbers that Python read from tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._recorded(func, args, kwargs or {})

    def __sym_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return func(*args, **kwargs)  # arithmetic of sizes is not recorded

    def marked(self, value: torch.Tensor, marks: dict[str, Any]) -> torch.Tensor:
        """``aten.alias(value)``, recorded without a way through torch's slower dispatcher.

        Its node has ``marks`` as metadata. With symbols, nobody reads these: returns ``value``.
        """
        if self.symbols is not None:
            return value
        with torch._C.DisableTorchFunction():
            alias: torch.Tensor = self._recorded(aten.alias.default, (value,), {})
        self.tracer.node_of(alias).meta["custom"] = marks
        return alias

    def _recorded(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            with no_python_dispatcher():
                return self._record(func, args, kwargs)
        except BaseException:
            self.reads.failed = True
            raise

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation, which may read and write values.

        What runs inside a transform such as ``vmap`` works on tensors that stand for one row, so it
        is not recorded; its result is a tensor of unknown origin.
        """
        if not isinstance(func, torch._ops.OpOverload):
            raise NotRecorded(f"{func} has a subgraph")
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            if func._schema.is_mutable and func is not aten.detach_.default:
                raise NotRecorded(f"{func} writes in place inside a transform")
            return func(*args, **kwargs)
        nodes, named = self._with_nodes(args), self._with_nodes(kwargs)
        if self.symbols is None:
            return self._called(func, args, nodes, named, self._result_of(func, args, kwargs))
        self.symbols.in_operation = True
        try:
            with enable_python_dispatcher():
                value = func(*args, **kwargs)
            return self._called(func, args, nodes, named, value)
        finally:
            self.symbols.in_operation = False

    def _result_of(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operation in a run without weights.

        If no operand has values, it needs none of what ``meta_weights`` does, which takes time.
        """
        operands = tensors_of((args, kwargs))
        mixed = func in _OF_SHAPES and any(operand.is_meta for operand in operands)
        if (
            self.computed is None
            or not operands
            or not (mixed or all(map(meta_results.is_plain, operands)))
            or _len_torch_dispatch_stack() > 1
            or takes_device(func)
        ):
            return func(*args, **kwargs)
        with torch._C._DisableTorchDispatch():
            if mixed:
                args, kwargs = pytree.tree_map_only(torch.Tensor, without_values, (args, kwargs))
            if func._schema.is_mutable:
                value = func(*args, **kwargs)
            else:
                value = meta_results.compute(func, args, kwargs)
        self.computed.add(value, operands, func._schema.is_mutable)
        return value

    def _called(self, func: Any, args: tuple[Any, ...], nodes: Any, named: Any, value: Any) -> Any:
        """Add the call to the graph; returns its result ``value``, which gets nodes."""
        if func is aten.dropout.default and value is args[0]:
            value = aten.alias(value)  # a new tensor, as in all of torch's own tracers
        if func is aten.lift_fresh.default:
            func = aten.lift_fresh_copy.default
        node = self.tracer.called(func, nodes, named, value)
        if isinstance(value, _SYMBOLIC):
            self.numbers |= value.node.expr.free_symbols
        if isinstance(value, torch.Tensor):
            self._give(value, node)
        elif isinstance(value, (tuple, list)):
            for place, part in enumerate(value):
                taken = self.tracer.called(operator.getitem, (node, place), {}, part)
                self._give(part, taken)
        return value

    def _give(self, value: Any, node: Node) -> None:
        if isinstance(value, torch.Tensor):
            self.tracer.give(value, node)

    def _with_nodes(self, value: Any) -> Any:
        """Arguments with tensors replaced by nodes."""
        if isinstance(value, torch.Tensor):
            return self.tracer.node_of(value)
        if type(value) in (tuple, list):
            return type(value)([self._with_nodes(item) for item in value])
        if type(value) is dict:
            return {key: self._with_nodes(item) for key, item in value.items()}
        if isinstance(value, _SYMBOLIC):
            if not self.numbers.isdisjoint(value.node.expr.free_symbols):
                raise NotRecorded("an operation takes a number that Python read from a tensor")
            return None  # a node would read its number
        return value


@custom_function_call.py_impl(_Recorder)  # type: ignore[untyped-decorator]
def _inside_a_transform(recorder: _Recorder, *args: Any, **kwargs: Any) -> Any:
    """A function with a derivative of its own inside a transform, where nothing is recorded."""
    return custom_function_call(*args, **kwargs)
