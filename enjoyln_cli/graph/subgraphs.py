"""Nested graphs: inline the regions that ``torch.export`` separates, and inspect all others.

``torch.export`` puts code under ``autocast`` or ``enable_grad`` into a separate graph. In exact
arithmetic this makes no difference, so such a region is inlined again. Other higher-order ops
(``cond``, ``while_loop``, ``scan``, ``map``) are not opened: the proof assumes that they read all
their operands, and all tensors that their graphs name.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

_REGIONS = {"wrap_with_set_grad_enabled": 1, "wrap_with_autocast": 4}
"""Higher-order ops that do not change values, with the number of arguments before the graph."""


def put_back_regions(module: GraphModule) -> None:
    """Inline every region under ``autocast`` or ``enable_grad`` into the graph around it."""
    for node in list(module.graph.nodes):
        before = _REGIONS.get(getattr(node.target, "__name__", ""))
        if node.op != "call_function" or before is None or not _is_higher_order(node):
            continue
        place = node.args[before]
        inside = _attribute(module, str(place.target)) if isinstance(place, Node) else None
        if isinstance(inside, GraphModule) and _gives_parts(node):
            put_back_regions(inside)
            _put_back(module, node, inside, node.args[before + 1 :])


def _put_back(module: GraphModule, node: Node, inside: GraphModule, operands: Any) -> None:
    graph = module.graph
    given = [found for found in inside.graph.nodes if found.op == "placeholder"]
    names: dict[str, str] = {}
    for found in inside.graph.nodes:
        if found.op == "get_attr" and found.target not in names:
            name = f"{node.name}_{str(found.target).replace('.', '_')}"
            setattr(module, name, _attribute(inside, str(found.target)))
            names[str(found.target)] = name
    for found in inside.graph.nodes:
        if found.op == "get_attr":
            found.target = names[str(found.target)]
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(inside.graph, dict(zip(given, operands, strict=True)))
    results = result if isinstance(result, (tuple, list)) else (result,)
    for part in list(node.users):
        value = results[part.args[1]]  # type: ignore[index]
        name, leaves = part.name, any(user.op == "output" for user in part.users)
        part.replace_all_uses_with(value)
        graph.erase_node(part)
        if leaves and isinstance(value, Node) and value.op == "call_function":
            value._rename(name)  # the signature of the exported program refers to this name
    graph.erase_node(node)


def graphs_of_higher_order_ops(module: GraphModule) -> Iterator[GraphModule]:
    """Every graph that a higher-order op of ``module`` runs, including nested ones."""
    for node in module.graph.nodes:
        found = _attribute(module, str(node.target)) if node.op == "get_attr" else None
        if isinstance(found, GraphModule):
            yield found
            yield from graphs_of_higher_order_ops(found)


def read_inside(module: GraphModule) -> list[torch.Tensor]:
    """Tensors that the graphs of higher-order ops read without being passed them as operands."""
    found = [
        _attribute(inside, str(node.target))
        for inside in graphs_of_higher_order_ops(module)
        for node in inside.graph.nodes
        if node.op == "get_attr"
    ]
    return [value for value in found if isinstance(value, torch.Tensor)]


def has_closed(graph: Graph) -> bool:
    """Whether the graph has a higher-order op."""
    return any(node.op == "call_function" and _is_higher_order(node) for node in graph.nodes)


def read_by_closed(node: Node) -> bool:
    """Whether the value is an operand of a higher-order op."""
    return any(_is_higher_order(user) for user in node.users)


def _is_higher_order(node: Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator)


def _gives_parts(node: Node) -> bool:
    return all(user.target is operator.getitem for user in node.users)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
