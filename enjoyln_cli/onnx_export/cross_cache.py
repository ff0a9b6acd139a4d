"""The keys and values of a cross attention in a decoder's program: computed once, then read.

They do not depend on the tokens. While ``past_key_values.N.encoder.key`` is empty, the program
computes ``present.N.encoder.key`` from the encoder's states. Afterwards it reads the past, and
returns nothing (length 0): clients keep the first result, so that no call copies it.

The nodes that compute them stand in a branch of one ``If``, and each attention in another, which
has the same nodes in both branches: these read the new or the past keys and values. No weight is
stored twice, since the nodes of an attention between its values and the next weight have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from enjoyln_cli.onnx_export.call import BATCH, LENGTH
from enjoyln_cli.plan.cache_argument import CACHE

PRESENT = "present"
"""What the names of outputs begin with that are keys and values."""
LENGTH_OF_CROSS = f"encoder_{LENGTH}_out"
"""The dynamic size of the cached keys and values: 0 at first, then the length of the states."""


def keep_cross_cache(
    program: Any, outputs: Sequence[str], is_parameter: Callable[[Any], bool]
) -> None:
    """Let an ``onnx_ir.Model`` read a cache for its cross attention, by inputs that it gets.

    ``outputs`` are the names of the keys and values that it computes. ``is_parameter`` says which
    inputs stand for weights.
    """
    graph = program.graph
    computed = [value for name in outputs for value in graph.outputs if value.name == name]
    past = [_like(value, value.name.replace(PRESENT, CACHE, 1)) for value in computed]
    graph.inputs.extend(past)
    condition = _is_empty(graph, past[0])
    weights = _weights(graph, is_parameter)
    attentions = [_nodes_after(computed[at : at + 2], weights) for at in range(0, len(computed), 2)]
    new = _compute_once(graph, condition, computed, past)
    pairs = dict(zip(new, past, strict=True))
    for nodes in attentions:
        _read_either(graph, condition, nodes, pairs)
    graph.sort()
    for values in (graph.inputs, graph.outputs):
        values[:] = sorted(values, key=_layer)


def _compute_once(
    graph: Any, condition: Any, computed: Sequence[Any], past: Sequence[Any]
) -> list[Any]:
    """Move what computes keys and values into an ``If``; returns its results."""
    moved = _nodes_for(computed)
    results = [_like(value, value.name) for value in computed]
    for value, result in zip(computed, results, strict=True):
        value.name = f"computed.{value.name}"
        for user, at in list(value.uses()):
            if user not in moved:
                user.replace_input_with(at, result)
        for at, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[at] = result
    nodes = [node for node in graph if node in moved]
    graph.remove(nodes)
    bounds = _constants(0, 0, 2)
    empty = [_node("Slice", [value, *(one.outputs[0] for one in bounds)]) for value in past]
    for node, value in zip(empty, past, strict=True):
        node.outputs[0].name = f"empty.{value.name}"
        node.outputs[0].shape, node.outputs[0].type = value.shape, value.type
    _add_choice(
        graph,
        condition,
        results,
        (nodes, computed),
        ([*bounds, *empty], [node.outputs[0] for node in empty]),
    )
    return results


def _read_either(graph: Any, condition: Any, nodes: Sequence[Any], past: Mapping[Any, Any]) -> None:
    """Let the ``nodes`` of an attention read the keys of ``past`` or, if not empty, its values."""
    import onnx_ir

    inside = set(nodes)
    results = [
        value
        for node in nodes
        for value in node.outputs
        if any(user not in inside for user, _ in value.uses())
    ]
    copies: dict[Any, Any] = dict(past)
    copied = []
    for node in nodes:
        copy = onnx_ir.Node(
            node.domain,
            node.op_type,
            [copies.get(value, value) for value in node.inputs],
            node.attributes.values(),
            overload=node.overload,
            num_outputs=len(node.outputs),
            metadata_props=dict(node.metadata_props),
        )
        for value, made in zip(node.outputs, copy.outputs, strict=True):
            made.shape, made.type, made.name = value.shape, value.type, f"past.{value.name}"
            copies[value] = made
        copied.append(copy)
    chosen = []
    for value in results:
        made = onnx_ir.Value(name=f"chosen.{value.name}", shape=value.shape, type=value.type)
        for user, at in list(value.uses()):
            if user not in inside:
                user.replace_input_with(at, made)
        chosen.append(made)
    graph.remove(nodes)
    _add_choice(
        graph, condition, chosen, (nodes, results), (copied, [copies[value] for value in results])
    )


def _add_choice(
    graph: Any,
    condition: Any,
    results: Sequence[Any],
    then: tuple[Sequence[Any], Sequence[Any]],
    otherwise: tuple[Sequence[Any], Sequence[Any]],
) -> None:
    """Add an ``If`` with these ``results``; each branch has its nodes and their results."""
    import onnx_ir

    choice = onnx_ir.Node("", "If", [condition], outputs=results)
    for name, (nodes, found) in (("then_branch", then), ("else_branch", otherwise)):
        branch = onnx_ir.Graph([], found, nodes=nodes, name=name)
        choice.attributes.add(onnx_ir.AttrGraph(name, branch))
    graph.append(choice)


def _weights(graph: Any, is_parameter: Callable[[Any], bool]) -> set[Any]:
    """The values that are computed from parameters, and from no other input."""
    found = {value for value in graph.inputs if is_parameter(value)}
    others = set(graph.inputs) - found
    for node in graph:
        read = [value for value in node.inputs if value is not None]
        if any(value in others for value in read):
            others.update(node.outputs)
        elif any(value in found for value in read):
            found.update(node.outputs)
    return found


def _nodes_after(values: Sequence[Any], weights: set[Any]) -> list[Any]:
    """The nodes that read ``values``, and nodes after them, until a node reads a weight."""
    found: set[Any] = set()
    waiting = [user for value in values for user, _ in value.uses()]
    while waiting:
        node = waiting.pop()
        if node not in found and not any(value in weights for value in node.inputs):
            found.add(node)
            waiting += [user for value in node.outputs for user, _ in value.uses()]
    return [node for node in values[0].graph if node in found]


def _layer(value: Any) -> int:
    """The number of a key's or value's layer: optimum takes each layer together."""
    name, *path = str(value.name).split(".")
    return int(path[0]) if name in (CACHE, PRESENT) else -1


def _like(value: Any, name: str) -> Any:
    """A new value with the type of a key or value, whose batch and length are dynamic."""
    import onnx_ir

    _, heads, _, features = value.shape
    sizes = (BATCH, heads, LENGTH_OF_CROSS, features)
    return onnx_ir.Value(name=name, shape=onnx_ir.Shape(sizes), type=value.type)


def _nodes_for(values: Sequence[Any]) -> set[Any]:
    """The nodes that compute ``values``, with all nodes before them that nothing else needs."""
    found = {value.producer() for value in values}
    waiting = list(found)
    while waiting:
        for value in waiting.pop().inputs:
            node = value and value.producer()
            if node and node not in found and _is_read_only_by(node, found):
                found.add(node)
                waiting.append(node)
    return found


def _is_read_only_by(node: Any, readers: set[Any]) -> bool:
    return all(
        not value.is_graph_output() and all(user in readers for user, _ in value.uses())
        for value in node.outputs
    )


def _is_empty(graph: Any, cache: Any) -> Any:
    """A condition that is true if a cache has length 0."""
    (zero,) = _constants(0)
    length = _node("Shape", [cache], {"start": 2, "end": 3})
    condition = _node("Equal", [length.outputs[0], zero.outputs[0]])
    number = _node("Squeeze", [condition.outputs[0]])
    graph.extend([zero, length, condition, number])
    return number.outputs[0]


def _constants(*values: int) -> list[Any]:
    return [_node("Constant", [], {"value_ints": [value]}) for value in values]


def _node(kind: str, inputs: Sequence[Any], attributes: Mapping[str, Any] | None = None) -> Any:
    import onnx_ir

    return onnx_ir.node(kind, inputs, attributes or {})
