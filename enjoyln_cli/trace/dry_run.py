"""Run a call without weights: to test whether the model accepts it, or to record its graph.

Recording is for models that cannot be exported since shapes depend on the values of inputs. Inputs
have example values, and so has everything computed from inputs alone (see ``models.meta_device``).
The graph holds for calls of this kind only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.effects.isolated_run import Steps, ready
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.in_place import mark_written, replace_private_writes
from enjoyln_cli.graph.insertion_points import settle
from enjoyln_cli.graph.subgraphs import read_inside
from enjoyln_cli.models.meta_device import on_cpu, weightless, without_weights
from enjoyln_cli.trace.annotate import CallToTrace, annotate, fields_of
from enjoyln_cli.trace.trace import Trace


def accepts(model: nn.Module, call: Call) -> bool:
    """Whether the model accepts inputs of this form, found by a run without weights."""
    bare = without_weights(model)
    try:
        with ready(bare, call.training), weightless():
            Steps(bare, call.flags, None, cache=call.cache)(*on_cpu(call.steps))
    except Exception:  # with inputs of a wrong form, a model may raise any exception
        return False
    return True


def run_call(this: CallToTrace) -> Trace:
    """The graph of a call with its example inputs, for a model without weights."""
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
    found = annotate(
        this,
        recorded.graph,
        parameters=parameters,
        inputs=inputs,
        returned=fields_of(list(given_out), layouts[-1]),
        changed=runner.replaced | runner.written,
        outside=constants,
    )
    read = runner.read_values or any(map(_tells_python, recorded.graph.nodes))
    read |= any(map(computed.holds, known))
    return replace(found, by_example=True, by_values=read)


def _tells_python(node: Node) -> bool:
    """Whether the node's result makes later code depend on values: as a number or as a shape."""
    told = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not told.isdisjoint(getattr(node.target, "tags", ()))


def _sharing(this: CallToTrace, parameters: Mapping[Node, torch.Tensor]) -> list[Node]:
    """The nodes of parameters that share memory with other tensors."""
    locked, tied = this.weights.locked, this.weights.ties
    named = {id(t): name for name, t in this.model.named_parameters(remove_duplicate=False)}
    names = {node: named[id(tensor)] for node, tensor in parameters.items()}
    return [node for node, name in names.items() if name in locked or len(tied[name]) > 1]


@contextmanager
def _recorded_modules(root: nn.Module) -> Iterator[None]:
    """Inside the block, every recorded op gets ``nn_module_stack``, as ``torch.export`` sets it."""
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
