"""From a model and a call of it to a graph, with its parameters named.

A model class is built on the meta device (no weights), and what it runs is recorded (see
``recorder``), or captured by ``torch.export`` where a recording cannot tell all. Where that fails,
or leaves a norm's input without a shape, since shapes depend on the values of inputs, the ops of
one run on example values are recorded instead (see ``models.meta_device``), and the graph holds for
calls of that kind. Names are those of the plan's reference class, whichever class a graph came
from.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.calls.input_forms import accepted_by
from enjoyln_cli.effects.isolated_run import Steps, Watchers, ready
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.in_place import hides_sharing, mark_written, mutating, replace_private_writes
from enjoyln_cli.graph.insertion_points import Spot, lost_places, places_of, settle
from enjoyln_cli.graph.nodes import packet, shape_of
from enjoyln_cli.graph.subgraphs import (
    closed,
    has_closed,
    put_back_regions,
    read_by_closed,
    read_inside,
)
from enjoyln_cli.models.meta_device import (
    beside,
    on_cpu,
    weightless,
    without_weights,
)
from enjoyln_cli.models.norm_modules import first_names
from enjoyln_cli.models.outputs import is_fed_back
from enjoyln_cli.trace.failure_reasons import say_why
from enjoyln_cli.trace.recorder import is_recordable, record
from enjoyln_cli.trace.shared_storage import (
    kept_outside,
    read_without_torch,
    shared_otherwise,
    ties,
)

Naming = Callable[[str], str]

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Trace:
    """One captured graph, functional, with its placeholders named."""

    label: str
    graph: Graph
    parameters: dict[Node, tuple[str, ...]]
    """All names of the parameter behind a placeholder: several where weights are tied."""
    inputs: dict[Node, str]
    naming: Naming
    required: bool
    """Whether every user makes this call; otherwise it only adds optional inputs."""
    leaves: frozenset[str]
    """Paths of the modules without children, whose output can be replaced by class."""
    model_class: str
    returned: dict[Node, tuple[str, ...]]
    """The fields of the class's output that hold a value; a value that goes out in another way than
    by a field, and so has to stay whichever fields a user wants, is not among them."""
    fed_back: frozenset[str]
    """Fields that a later call may be given."""
    call: Call
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Norms that run where the graph does not show it, or in another way than by a call, and why.
    """
    locked: Mapping[str, str] = field(default_factory=dict)
    """Parameters that others see under no name of theirs, or that a call changes, and why."""
    places: Mapping[Node, Spot] = field(default_factory=dict)
    """The values that an operation can act on, with where it stands."""
    lost: frozenset[Spot] = frozenset()
    """Places that act on something else, too, and so cannot be used."""
    hidden: frozenset[str] = frozenset()
    """Modules that a control flow operator may call, whose graph is not this one."""
    by_example: bool = False
    """Whether the graph is that of the example's values, rather than of any."""
    by_values: bool = False
    """Whether Python read such a value, so that others may have another graph."""

    def module_of(self, node: Node) -> str:
        """Path of the innermost module whose forward computed the node."""
        stack = list(node.meta.get("nn_module_stack", {}).values())
        return self.naming(_inner(stack[-1][0])) if stack else ""

    def calls_of(self, node: Node) -> tuple[tuple[str, str], ...]:
        """``(call, module path)`` from the outermost module call around the node inwards.

        ``call`` tells several calls of one module apart.
        """
        stack = node.meta.get("nn_module_stack", {})
        return tuple((key, self.naming(_inner(path))) for key, (path, _) in stack.items())

    def entering(self, paths: Container[str]) -> Iterator[tuple[str, list[Node]]]:
        """For every call of the modules ``paths``: the values from outside that it computes with.

        The module's own parameters and constants of the model are not among them.
        """
        found: dict[str, tuple[str, dict[Node, None]]] = {}
        for node in self.graph.nodes:
            for call, path in self.calls_of(node):
                if path in paths:
                    values = found.setdefault(call, (path, {}))[1]
                    values.update(dict.fromkeys(self._from_outside(node, call, path)))
        yield from ((path, list(values)) for path, values in found.values())

    def leaving_unreturned(self, paths: Container[str]) -> set[str]:
        """Those of the modules without children out of which more goes than what they return."""
        return {
            path
            for node in self.graph.nodes
            for call, path in self.calls_of(node)
            if path in paths and self.places.get(node) != (path, "output")
            if any(call not in dict(self.calls_of(user)) for user in node.users)
            if not self._is_given(node, call)
        }

    def _is_given(self, node: Node, call: str) -> bool:
        """Whether a value of a call is one from outside: a cast that changes nothing, of that.

        What is not computed, such as a weight, comes from outside wherever it was first read.
        """
        source = uncast(node)
        dtypes = {getattr(n.meta.get("val"), "dtype", n) for n in (node, source)}
        outside = source.op != "call_function" or call not in dict(self.calls_of(source))
        return len(dtypes) == 1 and outside

    def _from_outside(self, node: Node, call: str, path: str) -> list[Node]:
        return [
            operand
            for operand in node.all_input_nodes
            if isinstance(operand.meta.get("val"), torch.Tensor)
            and (operand in self.parameters or call not in dict(self.calls_of(operand)))
            and not self._held_by(uncast(operand), path)
        ]

    def _held_by(self, node: Node, path: str) -> bool:
        """Whether a module brings the value along: as its parameter, or as a constant."""
        names = self.parameters.get(node)
        if names is None:
            given = node.op == "placeholder" and node not in self.inputs
            return given or node.op == "get_attr"
        return any(name.rpartition(".")[0] == path for name in names)


@dataclass(frozen=True)
class _Weights:
    """The parameters of a model that is captured, by its own names."""

    model: nn.Module
    ties: Mapping[str, tuple[str, ...]]
    locked: Mapping[str, str]


@dataclass(frozen=True)
class _Capture:
    """A call of a model while it is captured; the model may have no weights."""

    model: nn.Module
    call: Call
    naming: Naming
    inner: str | None
    weights: _Weights
    watchers: Watchers

    def runner(self) -> Steps:
        return Steps(self.model, self.call.flags, self.inner, self.watchers, self.call.cache)


def uncast(node: Node) -> Node:
    """The value behind casts; one that changes nothing hands out the tensor it was given."""
    while getattr(node.target, "overloadpacket", None) in (aten.to, aten._to_copy, aten.alias):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _inner(path: str) -> str:
    return path.removeprefix("model").removeprefix(".")


class Captures:
    """The graphs of the calls of one model; each that can be recorded is recorded once."""

    def __init__(self, model: nn.Module, naming: Naming = str, inner: str | None = None) -> None:
        """``naming`` gives the plan's name of a path in ``model``.

        What the submodule ``inner`` returns counts as returned, so that a graph also proves the
        class of that submodule.
        """
        self.model = model
        self.naming = naming
        self.inner = inner
        self._recordings: dict[int, tuple[Call, Trace | None]] = {}
        """By the identity of a call. The call is kept too, so that no other gets its identity."""

    def accepts(self, call: Call) -> bool:
        """Whether the model takes inputs of this form: recorded, or tried without weights."""
        return self._recording(call) is not None or accepts(self.model, call)

    def capture(self, call: Call) -> Trace:
        """The graph of one call in eval mode, with ``aten.linear``, ``layer_norm`` etc. whole.

        Raises ``TraceFailed`` where the model neither exports nor runs without its weights.
        """
        if recording := self._recording(call):
            return recording
        model, exported, exporting = self.model, None, None
        weights = self._weights
        try:
            with ready(model) as watchers:
                exported = _exported(self._of(model, call, weights, watchers))
        except Exception as error:  # torch.export raises what it meets, of any class
            exported, exporting = None, error
        if exported is not None and not _normalises_unknown_shapes(exported.graph):
            return exported
        try:
            copied: list[torch.Tensor] = []
            bare = without_weights(model, copied)
            weights = replace(weights, locked={**weights.locked, **kept_outside(model, copied)})
            with ready(bare) as watchers:
                return _recorded(self._of(bare, call, weights, watchers))
        except Exception as error:
            if exported is not None:
                return exported
            raise TraceFailed(
                f"{type(model).__name__} could not be traced ({call.label}): {say_why(error)}"
            ) from exporting

    def _recording(self, call: Call) -> Trace | None:
        """The graph of a call as it was recorded; ``None`` where export has to tell."""
        if id(call) not in self._recordings:
            self._recordings[id(call)] = call, self._record(call)
        return self._recordings[id(call)][1]

    def _record(self, call: Call) -> Trace | None:
        if is_recordable(self.model):
            with suppress(Exception), ready(self.model) as watchers:  # whatever it is, export tells
                return _drawn(self._of(self.model, call, self._weights, watchers))
        return None

    @cached_property
    def _weights(self) -> _Weights:
        model = self.model
        return _Weights(
            model, ties(model), {**read_without_torch(model), **shared_otherwise(model)}
        )

    def _of(self, model: nn.Module, call: Call, weights: _Weights, watchers: Watchers) -> _Capture:
        aliases = first_names(self.model)

        def named(path: str) -> str:
            return self.naming(aliases.get(path, path))

        return _Capture(model, call, named, self.inner, weights, watchers)


def _normalises_unknown_shapes(graph: Graph) -> bool:
    """Whether a LayerNorm reads a tensor whose shape values decide, so that no axis is known."""
    called = (node for node in graph.nodes if packet(node) is aten.layer_norm)
    return any(shape_of(node) is None for node in called)


def accepts(model: nn.Module, call: Call) -> bool:
    """Whether the model takes inputs of this form, tried without weights."""
    bare = without_weights(model)
    try:
        with ready(bare), weightless():
            Steps(bare, call.flags, None, cache=call.cache)(*on_cpu(call.steps))
    except Exception:  # whatever a model raises at inputs of a wrong form
        return False
    return True


def _drawn(this: _Capture) -> Trace:
    runner = this.runner()
    found = record(runner, this.call.steps)
    settle(found.graph)
    replace_private_writes(found.graph)
    if left := mutating(found.graph):
        raise TraceFailed(f"{left[0].target} writes where others may read")
    returned = _fields(found.returned, found.layout)
    trace = _named(this, found.graph, found.parameters, found.inputs, returned)
    return _with_memory(this, trace, runner.replaced, found.constants)


def _exported(this: _Capture) -> Trace:
    runner = this.runner()
    program = torch.export.export(runner, beside(this.model, this.call.steps), strict=False)
    put_back_regions(program.graph_module)
    settle(program.graph)
    if any(mutating(inside.graph) for inside in closed(program.graph_module)):
        raise TraceFailed("a control flow operator writes in place, which cannot be analysed")
    replace_private_writes(program.graph)
    if mutating(program.graph):
        if hides_sharing(program.graph):
            raise TraceFailed("a write in place may be seen where no schema says so")
        program = program.run_decompositions({})
    if left := mutating(program.graph):
        raise TraceFailed(f"{left[0].target} writes in place, so the graph cannot be analysed")
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    named = dict(this.model.named_parameters(remove_duplicate=False))
    parameters: dict[Node, torch.Tensor] = {}
    inputs: list[Node | None] = []
    constants: list[Any] = []
    for spec in program.graph_signature.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind.name == "USER_INPUT":
            inputs.append(node)
        elif spec.kind.name == "PARAMETER" and node is not None:
            parameters[node] = named[_inner(spec.target)]
        elif spec.kind.name == "CONSTANT_TENSOR":
            constants.append(program.constants.get(spec.target))
    given_out = program.graph.output_node().args[0]
    outputs = list(zip(program.graph_signature.output_specs, given_out, strict=True))
    returned = _fields(
        [node for spec, node in outputs if spec.kind.name == "USER_OUTPUT"],
        program.call_spec.out_spec,
    )
    for spec, node in outputs:
        if spec.kind.name != "USER_OUTPUT":
            returned.pop(node, None)  # it is written into a buffer too
    found = _named(this, program.graph, parameters, inputs, returned)
    outside = [*constants, *read_inside(program.graph_module)]
    return _with_memory(this, found, runner.replaced, outside)


def _recorded(this: _Capture) -> Trace:
    runner = this.runner()
    leaves, layout = pytree.tree_flatten(on_cpu(this.call.steps))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    layouts: list[pytree.TreeSpec] = []

    def run(*values: torch.Tensor) -> list[torch.Tensor]:
        given = iter(values)
        filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        results, results_layout = pytree.tree_flatten(
            runner(*pytree.tree_unflatten(filled, layout))
        )
        layouts.append(results_layout)
        return results

    with weightless() as computed, fx_traceback.preserve_node_meta(), _recorded_modules(runner):
        recorded = make_fx(run, pre_dispatch=True, _error_on_data_dependent_ops=False)(*tensors)
    settle(recorded.graph)
    replace_private_writes(recorded.graph)
    held = {id(parameter) for parameter in this.model.parameters()}
    parameters: dict[Node, torch.Tensor] = {}
    constants: list[Any] = [read_inside(recorded)]
    for node in recorded.graph.nodes:
        if node.op == "get_attr":
            value = node.meta["val"] = getattr(recorded, node.target)
            if id(value) in held:
                parameters[node] = value
            else:
                constants.append(value)
    known = [value for value in pytree.tree_leaves(constants) if torch.is_tensor(value)]
    if any(map(computed.holds_real, known)):
        raise TraceFailed("a value leaves the graph as a parameter or a tensor of another class")
    mark_written(recorded.graph, _sharing(this, parameters))
    given = iter([node for node in recorded.graph.nodes if node.op == "placeholder"])
    inputs = [next(given) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    given_out: Any = recorded.graph.output_node().args[0]
    returned = _fields(list(given_out), layouts[-1])
    found = _named(this, recorded.graph, parameters, inputs, returned)
    found = _with_memory(this, found, runner.replaced, constants)
    read = runner.read_values or any(map(_tells_python, recorded.graph.nodes))
    read |= any(map(computed.holds, known))
    return replace(found, by_example=True, by_values=read)


def _tells_python(node: Node) -> bool:
    """Whether values decide what comes after: they became a number, or a number of rows."""
    told = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not told.isdisjoint(getattr(node.target, "tags", ()))


def _sharing(this: _Capture, parameters: Mapping[Node, torch.Tensor]) -> list[Node]:
    """The nodes of parameters that lie in memory of others."""
    locked, tied = this.weights.locked, this.weights.ties
    named = {id(t): name for name, t in this.model.named_parameters(remove_duplicate=False)}
    names = {node: named[id(tensor)] for node, tensor in parameters.items()}
    return [node for node, name in names.items() if name in locked or len(tied[name]) > 1]


def _with_memory(
    this: _Capture, trace: Trace, replaced: Iterable[str], outside: Iterable[Any]
) -> Trace:
    """The trace with what is known of the memory of parameters, of norms and of places.

    A module that a control flow operator may call has no place: that call is not in the graph.
    """
    tensors = [value for value in pytree.tree_leaves(list(outside)) if torch.is_tensor(value)]
    locked = dict.fromkeys(replaced, "a call of the model changes it")
    locked |= kept_outside(this.weights.model, tensors)
    outside_names = {trace.naming(name) for name in locked}
    locked |= this.weights.locked
    lost = this.watchers.places.lost | lost_places(trace.graph)
    found = places_of(trace.graph)
    hidden: set[str] = set()
    if has_closed(trace.graph):
        read = set(outside_names)
        for node, names in trace.parameters.items():
            if read_by_closed(node):
                read.update(names)
        hidden = _may_call(this.model, trace.naming, read)
        lost |= {(path, at) for path in hidden for at in ("input", "output")}
    return replace(
        trace,
        locked={trace.naming(name): reason for name, reason in locked.items()},
        places={node: (trace.naming(path), at) for node, (path, at) in found.items()},
        lost=frozenset((trace.naming(path), at) for path, at in lost),
        unseen={trace.naming(path): why for path, why in this.watchers.norms.unseen.items()},
        hidden=frozenset(map(trace.naming, hidden)),
    )


def _may_call(model: nn.Module, naming: Naming, read: Container[str]) -> set[str]:
    """The modules that may be called where parameters ``read`` are: theirs, and those of none."""
    found = set()
    for path, module in model.named_modules():
        own = [naming(f"{path}.{name}" if path else name) for name, _ in module.named_parameters()]
        if not own or any(name in read for name in own):
            found.add(path)
    return found


@contextmanager
def _recorded_modules(root: nn.Module) -> Iterator[None]:
    """Every recorded op carries the module calls around it, as ``torch.export`` writes them."""
    names = {module: name for name, module in root.named_modules()}
    calls: Counter[str] = Counter()
    stack: dict[str, tuple[str, type]] = {}

    def enter(module: nn.Module, args: Any) -> None:
        name = names[module]
        calls[name] += 1
        stack[f"{name}@{calls[name]}"] = (name, type(module))
        fx_traceback.get_current_meta()["nn_module_stack"] = dict(stack)

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        stack.popitem()
        fx_traceback.get_current_meta()["nn_module_stack"] = dict(stack)

    hooks = [module.register_forward_pre_hook(enter, prepend=True) for module in names]
    hooks += [module.register_forward_hook(leave, always_call=True) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _named(
    this: _Capture,
    graph: Graph,
    parameters: Mapping[Node, torch.Tensor],
    inputs: Iterable[Node | None],
    returned: dict[Node, tuple[str, ...]],
) -> Trace:
    """The trace of a graph; ``inputs`` are the nodes of the flattened steps, in their order."""
    model, call, naming = this.model, this.call, this.naming
    aliases: dict[int, dict[str, None]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        tied = (naming(other) for other in this.weights.ties[name])
        aliases.setdefault(id(tensor), {}).update(dict.fromkeys(tied))
    order = inspect.signature(model.forward).parameters
    names = [_input_name(path, order) for path, _ in pytree.tree_flatten_with_path(call.steps)[0]]
    accepted = accepted_by(model)
    leaves = {naming(path) for path, module in model.named_modules() if not any(module.children())}
    return Trace(
        call.label,
        graph,
        {node: tuple(aliases[id(tensor)]) for node, tensor in parameters.items()},
        {node: name for node, name in zip(inputs, names, strict=True) if node is not None},
        naming,
        call.required,
        frozenset(leaves),
        type(model).__name__,
        returned,
        frozenset(f for fields in returned.values() for f in fields if is_fed_back(f, accepted)),
        call,
    )


def _fields(returned: list[Node], layout: pytree.TreeSpec) -> dict[Node, tuple[str, ...]]:
    """The fields of each value that ``Steps`` returned; none for what ``inner`` alone returned.

    What leaves in another way than by being returned, which comes last, is not among them.
    """
    fields: dict[Node, dict[str, None]] = {node: {} for node in returned}
    *steps, (_, others) = pytree.tree_unflatten(returned, layout)
    for by_name, _ in steps:
        for name, nodes in by_name.items():
            for node in nodes:
                fields[node][name] = None
    return {node: tuple(names) for node, names in fields.items() if node not in others}


def _input_name(path: Any, order: Mapping[str, inspect.Parameter]) -> str:
    """The argument of ``forward`` that is a value in ``steps``; ``extra.add`` for one inside of it.

    One of ``*args`` has no name: ``*2``.
    """
    _, kind, *places = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
    if kind == "0":  # by position
        named = [name for name, p in order.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
        place = int(places[0])
        places[0] = named[place] if place < len(named) else f"*{place}"
    return ".".join(places)
