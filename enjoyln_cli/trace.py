"""From a model and a call of it to a graph, with its parameters named.

A model class is built on the meta device (no weights) and captured by ``torch.export``. Where that
fails, or leaves a norm's input without a shape, since shapes depend on the values of inputs, the
ops of one run on example values are recorded instead (see ``weightless``), and the graph holds for
calls of that kind. Names are those of the plan's reference class, whichever class a graph came
from.
"""

from __future__ import annotations

import gc
import inspect
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node
from torch.fx import config as fx_config
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from enjoyln_cli.calls import Call
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.examples import accepted_by
from enjoyln_cli.nodes import packet, shape_of
from enjoyln_cli.returned import by_field, is_fed_back, tensors_in
from enjoyln_cli.weightless import (
    beside,
    on_cpu,
    weightless,
    without_weights,
)
from enjoyln_cli.writes import hides_sharing, mark_written, mutating, replace_private_writes

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
    by_example: bool = False
    """Whether the graph is that of the example's values, rather than of any."""

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


def uncast(node: Node) -> Node:
    """The value behind casts; one that changes nothing hands out the tensor it was given."""
    while getattr(node.target, "overloadpacket", None) in (aten.to, aten._to_copy, aten.alias):
        node = node.args[0]  # type: ignore[assignment]
    return node


class Steps(nn.Module):
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


def capture(model: nn.Module, call: Call, naming: Naming = str, inner: str | None = None) -> Trace:
    """The graph of one call in eval mode, with ``aten.linear``, ``layer_norm`` and others whole.

    What the submodule ``inner`` returns counts as returned, so that the graph also proves the class
    of that submodule.

    Raises ``TraceFailed`` where the model neither exports nor runs without its weights.
    """
    exported, exporting = None, None
    try:
        with ready(model):
            exported = _exported(model, call, naming, inner)
    except Exception as error:  # torch.export raises what it meets, of any class
        exporting = error
    if exported is not None and not _normalises_unknown_shapes(exported.graph):
        return exported
    try:
        bare = without_weights(model)
        with ready(bare):
            return _recorded(bare, call, naming, inner)
    except Exception as error:
        if exported is not None:
            return exported
        first = str(error).strip().split("\n")[0][:300]
        raise TraceFailed(
            f"{type(model).__name__} could not be traced ({call.label}): "
            f"{type(error).__name__}: {first}"
        ) from exporting


def _normalises_unknown_shapes(graph: Graph) -> bool:
    """Whether a LayerNorm reads a tensor whose shape values decide, so that no axis is known."""
    called = (node for node in graph.nodes if packet(node) is aten.layer_norm)
    return any(shape_of(node) is None for node in called)


def accepts(model: nn.Module, call: Call) -> bool:
    """Whether the model takes inputs of this form, tried without weights."""
    bare = without_weights(model)
    try:
        with ready(bare), weightless():
            Steps(bare, call.flags, None)(*on_cpu(call.steps))
    except Exception:  # whatever a model raises at inputs of a wrong form
        return False
    return True


@contextmanager
def ready(model: nn.Module) -> Iterator[None]:
    """In eval mode, without gradients, without warnings, with the inputs of blocks marked."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with warnings.catch_warnings(), torch.no_grad(), _brief_export(), _marked_inputs(model):
            warnings.simplefilter("ignore")
            yield
    finally:
        for module in training:
            module.training = True


def _exported(model: nn.Module, call: Call, naming: Naming, inner: str | None) -> Trace:
    runner = Steps(model, call.flags, inner)
    program = torch.export.export(runner, beside(model, call.steps), strict=False)
    replace_private_writes(program.graph)
    if mutating(program.graph):
        if hides_sharing(program.graph):
            raise TraceFailed("a write in place may be seen where no schema says so")
        program = program.run_decompositions({})
    if left := mutating(program.graph):
        raise TraceFailed(f"{left[0].target} writes in place, so the graph cannot be analysed")
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    named = dict(model.named_parameters(remove_duplicate=False))
    parameters: dict[Node, torch.Tensor] = {}
    inputs: list[Node | None] = []
    for spec in program.graph_signature.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind.name == "USER_INPUT":
            inputs.append(node)
        elif spec.kind.name == "PARAMETER" and node is not None:
            parameters[node] = named[_inner(spec.target)]
    given_out = program.graph.output_node().args[0]
    outputs = list(zip(program.graph_signature.output_specs, given_out, strict=True))
    returned = _fields(
        [node for spec, node in outputs if spec.kind.name == "USER_OUTPUT"],
        program.call_spec.out_spec,
    )
    for spec, node in outputs:
        if spec.kind.name != "USER_OUTPUT":
            returned.pop(node, None)  # it is written into a buffer too
    return _named(program.graph, parameters, inputs, returned, model, call, naming)


def _recorded(model: nn.Module, call: Call, naming: Naming, inner: str | None) -> Trace:
    runner = Steps(model, call.flags, inner)
    leaves, layout = pytree.tree_flatten(on_cpu(call.steps))
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

    with weightless(), fx_traceback.preserve_node_meta(), _recorded_modules(runner):
        recorded = make_fx(run, pre_dispatch=True, _error_on_data_dependent_ops=False)(*tensors)
    replace_private_writes(recorded.graph)
    mark_written(recorded.graph)
    held = {id(parameter) for parameter in model.parameters()}
    parameters: dict[Node, torch.Tensor] = {}
    for node in recorded.graph.nodes:
        if node.op == "get_attr":
            value = node.meta["val"] = getattr(recorded, node.target)
            if id(value) in held:
                parameters[node] = value
    given = iter([node for node in recorded.graph.nodes if node.op == "placeholder"])
    inputs = [next(given) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
    given_out: Any = recorded.graph.output_node().args[0]
    returned = _fields(list(given_out), layouts[-1])
    found = _named(recorded.graph, parameters, inputs, returned, model, call, naming)
    return replace(found, by_example=True)


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
        if block is not None and any(block.children())
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
    """Without what torch says about exceptions that it raises anyway, and a quarter faster.

    No Python stack is recorded with each node, and nothing looks for garbage while a graph grows.
    """
    logged, collecting = logging.root.manager.disable, gc.isenabled()
    unrecorded = getattr(fx_config, "do_not_emit_stack_traces", False)  # since torch 2.13
    logging.disable(logging.ERROR)
    fx_config.do_not_emit_stack_traces = True
    gc.disable()
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(logged)
        fx_config.do_not_emit_stack_traces = unrecorded
        if collecting:
            gc.enable()


def _named(
    graph: Graph,
    parameters: Mapping[Node, torch.Tensor],
    inputs: Iterable[Node | None],
    returned: dict[Node, tuple[str, ...]],
    model: nn.Module,
    call: Call,
    naming: Naming,
) -> Trace:
    """The trace of a graph; ``inputs`` are the nodes of the flattened steps, in their order."""
    aliases: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(tensor), []).append(naming(name))
    names = [_key(path) for path, _ in pytree.tree_flatten_with_path(call.steps)[0]]
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
    """The fields of each value that ``Steps`` returned; none for what ``inner`` alone returned."""
    fields: dict[Node, dict[str, None]] = {node: {} for node in returned}
    for by_name, _ in pytree.tree_unflatten(returned, layout):
        for name, nodes in by_name.items():
            for node in nodes:
                fields[node][name] = None
    return {node: tuple(names) for node, names in fields.items()}


def _key(path: Any) -> str:
    last = path[-1]
    return str(getattr(last, "key", getattr(last, "idx", last)))
