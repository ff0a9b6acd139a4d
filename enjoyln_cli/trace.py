"""From a model and a call of it to a graph, with its parameters named.

A model class is built on the meta device (no weights) and captured by ``torch.export``. Names are
those of the plan's reference class, whichever class a graph came from.
"""

from __future__ import annotations

import gc
import inspect
import logging
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx import config as fx_config
from torch.utils import _pytree as pytree

from enjoyln_cli.calls import Call
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.examples import accepted_by
from enjoyln_cli.returned import by_field, is_fed_back

Naming = Callable[[str], str]


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
    model_class: str = ""
    returned: dict[Node, tuple[str, ...]] = field(default_factory=dict)
    """The fields of the class's output that hold a value; a value that goes out in another way than
    by a field, and so has to stay whichever fields a user wants, is not among them."""
    fed_back: frozenset[str] = frozenset()
    """Fields that a later call may be given."""

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

    def _from_outside(self, node: Node, call: str, path: str) -> list[Node]:
        return [
            operand
            for operand in node.all_input_nodes
            if isinstance(operand.meta.get("val"), torch.Tensor)
            and call not in dict(self.calls_of(operand))
            and not self._held_by(uncast(operand), path)
        ]

    def _held_by(self, node: Node, path: str) -> bool:
        """Whether a module brings the value along: as its parameter, or as a constant."""
        if node.op == "get_attr":
            return True
        names = self.parameters.get(node)
        if names is None:
            return node.op == "placeholder" and node not in self.inputs
        return any(name.rpartition(".")[0] == path for name in names)


def uncast(node: Node) -> Node:
    """The value behind casts; one that changes nothing hands out the tensor it was given."""
    while getattr(node.target, "overloadpacket", None) in (aten.to, aten._to_copy, aten.alias):
        node = node.args[0]  # type: ignore[assignment]
    return node


class _Steps(nn.Module):
    """Runs a model's calls in one graph and returns every tensor that it gives out."""

    def __init__(self, model: nn.Module, flags: Mapping[str, Any], inner: str | None) -> None:
        super().__init__()
        self.model = model
        self.flags = dict(flags)
        self.inner = inner

    def forward(self, *steps: Any) -> list[tuple[dict[str, list[torch.Tensor]], Any]]:
        """For each step the model's output by field, and all that ``inner`` returned."""
        returned: list[tuple[dict[str, list[torch.Tensor]], Any]] = []
        cache: dict[str, Any] = {}
        inside: list[Any] = []
        if self.inner is not None:
            base = self.model.get_submodule(self.inner)
            hook = base.register_forward_hook(lambda *call: inside.append(call[-1]))
        for args, kwargs in steps:
            result = self.model(*args, **kwargs, **cache, **self.flags)
            returned.append((by_field(result), tensors_in(inside)))
            if getattr(result, "past_key_values", None) is None:
                break
            cache = {"past_key_values": result.past_key_values}
        if self.inner is not None:
            hook.remove()
        return returned


def _inner(path: str) -> str:
    return path.removeprefix("model").removeprefix(".")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Every tensor that a model returned, those inside of caches and nested outputs too."""
    return [tensor for tensors in by_field(value).values() for tensor in tensors]


def capture(model: nn.Module, call: Call, naming: Naming = str, inner: str | None = None) -> Trace:
    """The graph of one call in eval mode, with ``aten.linear``, ``layer_norm`` and others whole.

    What the submodule ``inner`` returns counts as returned, so that the graph also proves the class
    of that submodule.

    Raises ``TraceFailed`` where the model does not export, or writes into tensors in place in a
    way that functionalisation cannot undo.
    """
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with warnings.catch_warnings(), torch.no_grad(), _brief_export(), _marked_inputs(model):
            warnings.simplefilter("ignore")
            runner = _Steps(model, call.flags, inner)
            program = torch.export.export(runner, call.steps, strict=False)
            _replace_private_writes(program.graph)
            if _mutating(program.graph):
                program = program.run_decompositions({})
    except Exception as error:  # torch.export raises what it meets, of any class
        first = str(error).strip().split("\n")[0][:300]
        raise TraceFailed(
            f"{type(model).__name__} could not be traced ({call.label}): "
            f"{type(error).__name__}: {first}"
        ) from error
    finally:
        for module in training:
            module.training = True
    if left := _mutating(program.graph):
        raise TraceFailed(
            f"{type(model).__name__} ({call.label}): {left[0].target} writes in place, "
            "so the graph cannot be analysed"
        )
    return _named(program, model, call, naming)


@contextmanager
def _marked_inputs(model: nn.Module) -> Iterator[None]:
    """The first input of each block appears as an ``alias`` inside of the block's call.

    Blocks are modules with children that stand in a list. Their input is a place where a value can
    be changed, and the graph by itself does not tell which of its values that is.
    """

    def mark(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (_marked(args[0]), *args[1:]), kwargs
        first = next(iter(inspect.signature(module.forward).parameters), "")
        if first in kwargs:
            kwargs = {**kwargs, first: _marked(kwargs[first])}
        return args, kwargs

    hooks = [
        block.register_forward_pre_hook(mark, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        for block in module
        if any(block.children())
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _marked(value: Any) -> Any:
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return aten.alias(value) if floating else value


@contextmanager
def _brief_export() -> Iterator[None]:
    """Without what torch logs about exceptions that it raises anyway, and a quarter faster.

    No Python stack is recorded with each node, and nothing looks for garbage while a graph grows.
    """
    logged, collecting = logging.root.manager.disable, gc.isenabled()
    unrecorded = getattr(fx_config, "do_not_emit_stack_traces", False)  # since torch 2.13
    logging.disable(logging.ERROR)
    fx_config.do_not_emit_stack_traces = True
    gc.disable()
    try:
        yield
    finally:
        logging.disable(logged)
        fx_config.do_not_emit_stack_traces = unrecorded
        if collecting:
            gc.enable()


def _mutating(graph: Graph) -> list[Node]:
    harmless = {torch.ops.aten.detach_.default}
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.target not in harmless
    ]


aten = torch.ops.aten
_FRESH = {
    aten.add, aten.addmm, aten.baddbmm, aten.bmm, aten.cat, aten.conv1d, aten.conv2d, aten.div,
    aten.embedding, aten.gelu, aten.layer_norm, aten.linear, aten.matmul, aten.mm, aten.mul,
    aten.sub,
}  # fmt: skip
"""Ops whose result never shares memory with an operand."""


def _replace_private_writes(graph: Graph) -> None:
    """``x.add_(y)`` becomes ``x.add(y)`` where nothing else can see the memory of ``x`` any more.

    That is so if ``x`` is fresh and its other readers came before and gave out fresh memory. It
    spares a model with a residual ``+=`` the full functionalisation, ten times as slow.
    """
    position = {node: i for i, node in enumerate(graph.nodes)}
    for node in _mutating(graph):
        target: Any = node.target
        written: Any = node.args[0] if node.args else None
        plain = getattr(aten, target.overloadpacket.__name__.rstrip("_"), None)
        if plain not in _FRESH or not isinstance(written, Node):
            continue
        others = [user for user in written.users if user is not node]
        private = all(_is_fresh(user) and position[user] < position[node] for user in others)
        if private and _is_fresh(written) and node.all_input_nodes.count(written) == 1:
            node.target = getattr(plain, target._overloadname)


def _is_fresh(node: Node) -> bool:
    return getattr(node.target, "overloadpacket", None) in _FRESH


def _named(program: Any, model: nn.Module, call: Call, naming: Naming) -> Trace:
    aliases: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(tensor), []).append(naming(name))
    by_name = {
        name: aliases[id(tensor)] for name, tensor in model.named_parameters(remove_duplicate=False)
    }
    inputs = iter([_key(path) for path, _ in pytree.tree_flatten_with_path((call.steps, {}))[0]])
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    parameters: dict[Node, tuple[str, ...]] = {}
    named_inputs: dict[Node, str] = {}
    for spec in program.graph_signature.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind.name == "USER_INPUT":
            name = next(inputs)
            if node is not None:
                named_inputs[node] = name
        elif spec.kind.name == "PARAMETER" and node is not None:
            parameters[node] = tuple(by_name[_inner(spec.target)])
    accepted, returned = accepted_by(model), _returned(program)
    leaves = {naming(path) for path, module in model.named_modules() if not any(module.children())}
    return Trace(
        call.label,
        program.graph,
        parameters,
        named_inputs,
        naming,
        call.required,
        frozenset(leaves),
        type(model).__name__,
        returned,
        frozenset(f for fields in returned.values() for f in fields if is_fed_back(f, accepted)),
    )


def _returned(program: Any) -> dict[Node, tuple[str, ...]]:
    """The fields of each value that ``_Steps`` returned; none for what ``inner`` alone returned."""
    given_out = program.graph.output_node().args[0]
    outputs = list(zip(program.graph_signature.output_specs, given_out, strict=True))
    users = [node for spec, node in outputs if spec.kind.name == "USER_OUTPUT"]
    fields: dict[Node, dict[str, None]] = {node: {} for node in users}
    for by_name, _ in pytree.tree_unflatten(users, program.call_spec.out_spec):
        for name, nodes in by_name.items():
            for node in nodes:
                fields[node][name] = None
    written = {node for spec, node in outputs if spec.kind.name != "USER_OUTPUT"}
    return {node: tuple(names) for node, names in fields.items() if node not in written}


def _key(path: Any) -> str:
    last = path[-1]
    return str(getattr(last, "key", getattr(last, "idx", last)))
