"""Record the operations of a model on the meta device while they run, without decomposing them.

``record`` is strict: weights, buffers and inputs have shapes only. So no value can choose a path,
and one run stands for all runs with these shapes. Everything else is left to ``record_example``: a
number that Python reads from a tensor, a write to memory that existed before the call, a tensor
from elsewhere, any exception. Then ``NotRecorded`` is raised, even if the model's code catches the
first exception. Writes to memory of the call itself are recorded as they are; ``graph.in_place``
then replaces those that no other op can see.

``record_example`` is lenient. Inputs and buffers, and everything computed from these alone, have
values (see ``models.meta_device``). What reads or writes values is recorded as any other operation.
If Python reads a value, the graph holds for calls with these values only.

``record_symbolic`` shows for which sizes, or for which values, such a graph holds.

None of them can record an operator with a subgraph, such as ``torch.cond``.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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
from torch.utils._python_dispatch import TorchDispatchMode

from enjoyln_cli.graph.nodes import depends_on_values, packet
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.models.meta_device import Memory, is_mask, on_cpu, weightless
from enjoyln_cli.models.norm_modules import PLAIN
from enjoyln_cli.trace import meta_results
from enjoyln_cli.trace.escapes import PythonReads
from enjoyln_cli.trace.graph_builder import GraphBuilder, NotRecorded
from enjoyln_cli.trace.steps import Steps

aten = torch.ops.aten

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_CONSTANT = {aten.lift_fresh_copy, aten.detach, aten._to_copy, aten.to}
"""Ops whose result is a constant if their operand is one."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Recording:
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


def record(runner: Steps, steps: Any) -> Recording:
    """The graph of ``runner`` for ``steps`` without values.

    All weights and buffers of its model are on the meta device. Raises ``NotRecorded``, or any
    exception of the model.
    """
    if not all(type(tensor) in PLAIN for tensor in (*runner.parameters(), *runner.buffers())):
        raise NotRecorded("a parameter is not a plain tensor")
    bare = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), steps)
    leaves, layout = pytree.tree_flatten(bare)
    if any(isinstance(leaf, torch.Tensor) and type(leaf) is not torch.Tensor for leaf in leaves):
        raise NotRecorded("an input is not a plain tensor")
    recorder = _Recorder(GraphBuilder())
    recording, (*returned, (_, others)) = _record(runner, recorder, leaves, layout)
    repeated = len(returned) > len(steps) or bool(others)
    if recorder.reads.failed or repeated or runner.replaced or runner.written:
        raise NotRecorded("a call reads a value, or leaves something behind")
    return recording


def record_example(runner: Steps, steps: Any) -> tuple[Recording, Memory]:
    """The graph of ``runner`` for ``steps`` with these values, and the memory that it computes.

    The parameters of its model have to be on the meta device. Raises ``NotRecorded``, or any
    exception of the model.
    """
    recorder = _Recorder(GraphBuilder(), lenient=True)
    with weightless() as computed:
        recording, _ = _record(runner, recorder, *pytree.tree_flatten(on_cpu(steps)))
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
    one, ``sizes`` gets a condition under which the path stays the same. Sizes and numbers that
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
    recorder = _Recorder(GraphBuilder(keeps_shapes=False), lenient=True, symbols=sizes)
    with fake, torch.backends.nnpack.flags(enabled=False):  # which is chosen by the number of rows
        recording, _ = _record(runner, recorder, leaves, layout)
    if recorder.reads.failed or sizes.undecided:
        raise NotRecorded("a call reads a value")
    return recording.graph


def _record(
    runner: Steps, recorder: _Recorder, leaves: list[Any], layout: pytree.TreeSpec
) -> tuple[Recording, Any]:
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
    nodes = [tracer.node_of(tensor, recorder.lenient) for tensor in results]
    tracer.graph.output(nodes)
    recording = Recording(
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
        self, tracer: GraphBuilder, lenient: bool = False, symbols: Symbols | None = None
    ) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self._mode_key = torch._C._TorchDispatchModeKey.PROXY
        self.enter_stack: list[Any] = []
        self.pre_dispatch = True
        self.tracer: Any = tracer
        self.lenient = lenient
        """Whether operations may read and write values."""
        self.symbols = symbols
        """The symbols of sizes, which only torch's operations in Python leave free."""
        self.reads = PythonReads(lenient, symbols is not None)
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
        if not isinstance(func, torch._ops.OpOverload):
            raise NotRecorded(f"{func} has a subgraph")
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if self.lenient:
            return self._record_any(func, args, kwargs)
        if func is aten.index.Tensor:
            if any(index is not None and is_mask(index) for index in args[1]):
                raise NotRecorded("the number of selected elements depends on a mask")
            kind = ""
        else:
            kind = _kind_of(func)
        if kind == "reads":
            return self._number(func, args, kwargs)
        if func is aten.detach_.default:  # the last op of torch.tensor, also of another tensor
            if self.reads.writing and args[0] not in self.tracer.nodes:
                self.tracer.stand_in(args[0])
            if self.reads.writing and self._is_in_code(args[0]):
                return func(*args, **kwargs)
            raise NotRecorded("a tensor is copied without a recorded operation")
        devices: dict[str, None] = {}
        if func is aten.lift_fresh.default and self.reads.writing:
            self.tracer.stand_in(args[0])
        nodes = self._with_nodes(args, devices)
        named = self._with_nodes(kwargs, devices)
        if kind == "writes" and not self._writes_own_memory(args):
            raise NotRecorded(f"{func} writes to memory that existed before the call")
        if len(devices) > 1:
            raise NotRecorded(f"{func} mixes tensors with and without values")
        if kind == "writes":
            value = func(*args, **kwargs)
        else:
            value = meta_results.compute(func, args, kwargs)
        return self._called(func, args, nodes, named, value)

    def _record_any(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record an operation that may read and write values.

        What runs inside a transform such as ``vmap`` works on tensors that stand for one row, so it
        is not recorded; its result is a tensor of unknown origin.
        """
        if torch._C._functorch.peek_interpreter_stack() is not None:
            if func._schema.is_mutable and func is not aten.detach_.default:
                raise NotRecorded(f"{func} writes in place inside a transform")
            return func(*args, **kwargs)
        nodes, named = self._with_nodes(args, {}), self._with_nodes(kwargs, {})
        if self.symbols is None:
            return self._called(func, args, nodes, named, func(*args, **kwargs))
        self.symbols.in_operation = True
        try:
            with enable_python_dispatcher():
                value = func(*args, **kwargs)
            return self._called(func, args, nodes, named, value)
        finally:
            self.symbols.in_operation = False

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

    def _writes_own_memory(self, args: tuple[Any, ...]) -> bool:
        """Whether the op writes to memory of the call: most ops write to their first argument."""
        return isinstance(args[0], torch.Tensor) and self.tracer.made(args[0])

    def _give(self, value: Any, node: Node) -> None:
        if type(value) not in PLAIN:
            if not self.lenient:
                raise NotRecorded("an operation returns something other than tensors")
            if not isinstance(value, torch.Tensor):
                return
        self.tracer.give(value, node)

    def _with_nodes(self, value: Any, devices: dict[str, None]) -> Any:
        """Arguments with tensors replaced by nodes; adds the devices of tensors with dimensions."""
        if isinstance(value, torch.Tensor):
            if value.dim():
                devices[value.device.type] = None
            return self.tracer.node_of(value, self.lenient)
        if type(value) in (tuple, list):
            return type(value)([self._with_nodes(item, devices) for item in value])
        if type(value) is dict:
            return {key: self._with_nodes(item, devices) for key, item in value.items()}
        if isinstance(value, _SYMBOLIC):
            if not self.numbers.isdisjoint(value.node.expr.free_symbols):
                raise NotRecorded("an operation takes a number that Python read from a tensor")
            return None  # a node would read its number
        return value

    def _number(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The value of a constant in the code, which is the same in every run."""
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if not all(map(self._is_constant, tensors)):
            raise NotRecorded(f"{func} reads values")
        return func(*args, **kwargs)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        known = not tensor.is_meta and tensor.numel() == 1
        return known and self._is_in_code(tensor)

    def _is_in_code(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a constant in the code, or a copy or cast of one."""
        node = self.tracer.node_of(tensor)
        while node.op == "call_function" and packet(node) in _CONSTANT:
            node = node.args[0]
        return node in self.tracer.constants


@custom_function_call.py_impl(_Recorder)  # type: ignore[untyped-decorator]
def _inside_a_transform(recorder: _Recorder, *args: Any, **kwargs: Any) -> Any:
    """A function with a derivative of its own inside a transform, where nothing is recorded."""
    return custom_function_call(*args, **kwargs)


@cache
def _kind_of(func: Any) -> str:
    """``"reads"`` for an op that returns values, ``"writes"`` for an in-place op, else ``""``."""
    schema = func._schema
    tensors = all(str(result.type) in ("Tensor", "List[Tensor]") for result in schema.returns)
    if not tensors or not schema.returns or depends_on_values(func):
        return "reads"
    return "writes" if schema.is_mutable else ""
