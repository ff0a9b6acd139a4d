"""The keys and values of a cross attention in a decoder's program: computed once, then passed on.

They do not depend on the tokens. The nodes that compute them from the encoder's states move into a
branch of one ``If``: ``present.N.encoder.key`` is computed while ``past_key_values.N.encoder.key``
is empty, and the same as that afterwards. No weight is stored twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from enjoyln_cli.onnx_export.call import BATCH, LENGTH
from enjoyln_cli.plan.cache_argument import CACHE

PRESENT = "present"
"""What the names of outputs begin with that are keys and values."""
LENGTH_OF_CROSS = f"encoder_{LENGTH}_out"
"""The dynamic size of the cached keys and values: 0 at first, then the length of the states."""


def keep_cross_cache(program: Any, outputs: Sequence[str]) -> None:
    """Add an input for each of ``outputs`` to an ``onnx_ir.Model``, which it returns unless empty.

    ``outputs`` are the names of the keys and values that the program computes.
    """
    import onnx_ir

    graph = program.graph
    computed = [value for name in outputs for value in graph.outputs if value.name == name]
    past = [
        _like(value, name.replace(PRESENT, CACHE, 1))
        for value, name in zip(computed, outputs, strict=True)
    ]
    graph.inputs.extend(past)
    moved = _nodes_for(computed)
    kept = [_like(value, value.name) for value in computed]
    choice = onnx_ir.Node("", "If", [_is_empty(graph, past[0])], outputs=kept)
    for value, result in zip(computed, kept, strict=True):
        value.name = f"computed.{value.name}"
        for user, at in list(value.uses()):
            if user not in moved:
                user.replace_input_with(at, result)
        for at, output in enumerate(graph.outputs):
            if output is value:
                graph.outputs[at] = result
    ordered = [node for node in graph if node in moved]
    graph.remove(ordered)
    passed = [onnx_ir.node("Identity", [value]) for value in past]
    for node, value in zip(passed, past, strict=True):
        (output,) = node.outputs
        output.name, output.shape, output.type = f"passed.{value.name}", value.shape, value.type
    branches = {
        "then_branch": (ordered, computed),
        "else_branch": (passed, [node.outputs[0] for node in passed]),
    }
    for name, (nodes, results) in branches.items():
        branch = onnx_ir.Graph([], results, nodes=nodes, name=name)
        choice.attributes.add(onnx_ir.AttrGraph(name, branch))
    graph.append(choice)
    graph.sort()


def _like(value: Any, name: str) -> Any:
    """A new value with the type of a key or value, whose batch and length are dynamic."""
    import onnx_ir

    _, heads, _, features = value.shape
    sizes = (BATCH, heads, LENGTH_OF_CROSS, features)
    return onnx_ir.Value(name=name, shape=onnx_ir.Shape(sizes), type=value.type)


def _nodes_for(values: Sequence[Any]) -> set[Any]:
    """The nodes whose results nothing needs but ``values``, with those that compute these."""
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
    import onnx_ir

    zero = onnx_ir.node("Constant", [], {"value_int": 0})
    length = onnx_ir.node("Shape", [cache], {"start": 2, "end": 3})
    number = onnx_ir.node("Squeeze", [length.outputs[0]])
    condition = onnx_ir.node("Equal", [number.outputs[0], zero.outputs[0]])
    graph.extend([zero, length, number, condition])
    return condition.outputs[0]
