"""MLPs that can subtract the mean of their own residual input if they get more hidden units.

For an activation with ``act(u) - act(-u) = u``, two hidden units that read ``s * sum(h)`` and
``-s * sum(h)`` and write ``-1 / (s d)`` and ``1 / (s d)`` to every feature add ``-mean(h)``:

    h + mlp(h)    becomes    h - mean(h) + mlp(h)

If ``mlp(h)`` has zero mean, so has the new sum, and no extra operation is needed. This is exact if,
at every call, nothing else reads the hidden values or the weights, and all readers of the sum
absorb a shift of it. MLPs are found in the graph; the activation is checked numerically in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node, map_arg

from enjoyln_cli.graph.nodes import (
    SPLITS,
    argument,
    aten,
    is_floating,
    is_part,
    op_name,
    packet,
    readers_of,
    shape_of,
)
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.proof.flow import Flow, Value
from enjoyln_cli.proof.linear_layers import LinearLayer, linear_layer, parameter_readers
from enjoyln_cli.proof.rules import VIEWS
from enjoyln_cli.trace.trace import Trace

PROBES = 600
"""How many magnitudes from 1e-6 to 1e5 an activation is checked at."""
CLOSE = 1e-12
"""Largest error of ``act(u) - act(-u) = u`` in float64, relative to ``u``."""

_SAME = {
    aten.alias, aten.clone, aten.contiguous, aten.detach, aten.positive, aten.to, aten._to_copy,
    aten.type_as,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """``second(act(first(x)))``; each parameter is given by the first of its tied names."""

    first: str
    """The first layer's weight; its dimension ``1 - dim`` counts the hidden units."""
    bias: str | None
    """The first layer's bias."""
    second: str
    """The second layer's weight; its dimension ``dim`` counts the hidden units."""
    dim: int
    """1 for ``nn.Linear``, 0 for a Conv1D, which stores its weight transposed."""
    size: int
    """Number of hidden units."""
    features: int

    @property
    def parts(self) -> dict[str, int]:
        """Every parameter that grows with the hidden units, to its dimension of hidden units."""
        bias = {} if self.bias is None else {self.bias: 0}
        return {self.first: 1 - self.dim, **bias, self.second: self.dim}


@dataclass(frozen=True)
class Resize:
    """A config attribute that sets the number of hidden units of some MLPs, and nothing else."""

    attribute: str
    """Dotted where the config is nested: ``text_config.intermediate_size``."""
    size: int
    to: int
    mlps: tuple[Mlp, ...]


Edge = tuple[int, Node, Node]
"""The index of a trace, a residual sum in it, and the addend that is not the MLP's output."""

Resizing = Callable[[tuple[Mlp, ...], tuple[Mlp, ...]], tuple[Resize, ...]]
"""Maps the MLPs that would subtract a mean, and all MLPs that can grow, to config changes."""


@dataclass(frozen=True, eq=False)
class Widenings:
    """Which MLPs can subtract which means."""

    edges: Mapping[Edge, Mlp] = field(default_factory=dict)
    refused: Mapping[Edge, str] = field(default_factory=dict)
    """Residual sums whose MLP cannot subtract the mean, and why."""
    resizes: tuple[Resize, ...] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class _Call:
    """One call of an MLP."""

    mlp: Mlp
    first: Node
    between: tuple[Node, ...]
    """The ops from the hidden values to the second layer's input, in order of computation."""
    second: Node
    edge: Edge | None
    """The residual sum that adds the MLP's output to its own input."""
    trace: int


def find_widenings(
    flow: Flow, groups: Mapping[str, str], single: Callable[[str], bool], resizing: Resizing
) -> Widenings:
    """Every MLP that can subtract the mean of its residual input, in all traces at once.

    ``groups`` maps any parameter name to the first of its tied names. ``single(name)`` says whether
    a tied group is stored as one tensor with the parameter's own layout.
    """
    calls: dict[Mlp, list[_Call]] = {}
    refused: dict[Edge, str] = {}
    named, readers = parameter_readers(flow.traces, groups)
    for position, trace in enumerate(flow.traces):
        for call in _calls(position, trace, named[position]):
            if isinstance(call, _Call):
                calls.setdefault(call.mlp, []).append(call)
            else:
                refused[call] = "it is gated: the product of the outputs of two layers"
    why = {mlp: _cannot_grow(mlp, calls[mlp], readers, single) for mlp in calls}
    able = tuple(mlp for mlp in calls if why[mlp] is None)
    why |= {mlp: _cannot_subtract(flow, calls[mlp]) for mlp in able}
    wanted = tuple(mlp for mlp in calls if why[mlp] is None)
    resizes = resizing(wanted, able) if wanted else ()
    counted = {mlp for resize in resizes for mlp in resize.mlps}
    edges: dict[Edge, Mlp] = {}
    for mlp, own in calls.items():
        reason = why[mlp]
        if reason is None and mlp not in counted:
            reason = "no attribute of the config sets its number of hidden units and nothing else"
        for edge in (call.edge for call in own if call.edge):
            if reason is None:
                edges[edge] = mlp
            else:
                refused[edge] = reason
    return Widenings(edges, refused, resizes)


def _cannot_grow(
    mlp: Mlp,
    calls: list[_Call],
    readers: Mapping[str, set[Node]],
    single: Callable[[str], bool],
) -> str | None:
    """Why the MLP cannot get more hidden units, even units whose weights are zero."""
    for call in calls:
        inside = {*call.between, call.second}
        for node in (call.first, *call.between):
            if other := next((user for user in readers_of(node) if user not in inside), None):
                return f"its hidden values are read by {op_name(other)} too"
    own = {c.first for c in calls}
    reading = dict.fromkeys(mlp.parts, own) | {mlp.second: {c.second for c in calls}}
    for name, nodes in reading.items():
        if others := readers[name] - nodes:
            return f"one of its weights is also read by {min(map(op_name, others))}"
        if not single(name):
            return "one of its weights is tied, or stored in another layout"
    return None


def _cannot_subtract(flow: Flow, calls: list[_Call]) -> str | None:
    """Why units that subtract the mean would change the model's outputs."""
    for call in calls:
        if call.edge is None:
            return "its output is not always added to its own input"
        if reason := _wrong_activation(call):
            return reason
        shape = shape_of(call.second) or ()
        seen = flow.observer(Value(call.trace, call.second, feature_axis(shape)))
        if seen is not None:
            return f"its output has another reader, which uses its mean ({seen.reason})"
    return None


def _wrong_activation(call: _Call) -> str | None:
    """Check ``act(u) - act(-u) = u`` at 0 and from 1e-6 to 1e5; the reason if it does not hold."""
    u = torch.cat([torch.zeros(1, dtype=torch.float64), torch.logspace(-6, 5, PROBES).double()])
    names = ", ".join(
        dict.fromkeys(op_name(n) for n in call.between if _unchanged_operand(n) is None)
    )
    try:
        found = _activated(call, u) - _activated(call, -u)
    except Exception as error:  # an op may raise anything
        return f"its activation ({names}) cannot be checked: {type(error).__name__}"
    wrong = ~((found - u).abs() <= CLOSE * u)
    if not wrong.any():
        return None
    at = int(wrong.nonzero()[0])
    what = f"its activation ({names})" if names else "it has no activation, and"
    return f"{what} gives act(u) - act(-u) = {float(found[at]):.3g} at u = {float(u[at]):.3g}"


def _activated(call: _Call, u: torch.Tensor) -> torch.Tensor:
    """Apply the ops between the two layers to the hidden values ``u``."""
    values: dict[Node, Any] = {call.first: u}
    for node in call.between:
        source = _unchanged_operand(node)
        if source is not None:
            values[node] = values[source]
            continue
        target: Any = node.target
        args: Any = map_arg(node.args, values.__getitem__)
        kwargs: Any = map_arg(node.kwargs, values.__getitem__)
        values[node] = target(*args, **kwargs)
    return values[call.between[-1]] if call.between else u  # type: ignore[no-any-return]


def _calls(trace: int, graph: Trace, named: Mapping[Node, str]) -> Iterator[_Call | Edge]:
    """Every MLP of a graph; for a gated MLP, only the residual sum that it is added in."""
    for node in graph.graph.nodes:
        second = _linear(node, named)
        if second is None:
            continue
        roots, between = _elementwise(second.x)
        layers = [
            _linear(root if _split_source(root) is None else _split_source(root), named)
            for root in roots
        ]
        first = layers[0] if layers else None
        if first is None or None in layers:
            continue
        edge = _residual(trace, node, _origin(first.x))
        if len(roots) > 1 or _split_source(roots[0]) is not None:
            if edge is not None:
                yield edge
            continue
        mlp = _mlp(first, second)
        if mlp is not None:
            yield _Call(
                mlp=mlp, first=roots[0], between=between, second=node, edge=edge, trace=trace
            )


def _mlp(first: LinearLayer, second: LinearLayer) -> Mlp | None:
    size, features, dim = second.in_features, second.out_features, second.input_dim
    if first.out_features != size or first.input_dim != dim:
        return None
    if first.weight.name == second.weight.name:
        return None
    return Mlp(
        first=first.weight.name,
        bias=first.bias.name if first.bias else None,
        second=second.weight.name,
        dim=dim,
        size=size,
        features=features,
    )


def _linear(node: Any, named: Mapping[Node, str]) -> LinearLayer | None:
    """The linear layer that ``node`` is and that reads its weight and bias directly, if any."""
    layer = linear_layer(node, named)
    if layer is None or layer.kind != "matrix" or layer.scaled or not layer.reads_directly:
        return None
    return None if node.meta.get("written") or shape_of(node) is None else layer


def _elementwise(node: Node) -> tuple[list[Node], tuple[Node, ...]]:
    """Go back over elementwise ops: the values that they start from, and the ops in order."""
    roots: dict[Node, None] = {}
    done: dict[Node, None] = {}
    waiting = [(node, False)]
    while waiting:
        current, visited = waiting.pop()
        if current in done or current in roots:
            continue
        operands = _operands(current)
        if operands is None:
            roots[current] = None
        elif visited:
            done[current] = None
        else:
            waiting += [(current, True), *((operand, False) for operand in operands)]
    return list(roots), tuple(done)


def _operands(node: Node) -> list[Node] | None:
    """The operands of an elementwise op, all of the same shape; ``None`` for other ops."""
    source = _unchanged_operand(node)
    if source is not None:
        return [source]
    if not isinstance(node.target, torch._ops.OpOverload) or node.meta.get("written"):
        return None
    tags = node.target.tags
    if torch.Tag.pointwise not in tags or torch.Tag.nondeterministic_seeded in tags:
        return None
    operands = node.all_input_nodes
    same = all(shape_of(operand) == shape_of(node) for operand in operands)
    return operands if operands and same and not node.target._schema.is_mutable else None


def _unchanged_operand(node: Node) -> Node | None:
    """The operand of an op that changes neither values nor the last dimension; or ``None``."""
    if not node.args or not isinstance(node.args[0], Node) or node.meta.get("written"):
        return None
    source = node.args[0]
    shape, into = shape_of(source), shape_of(node)
    if not shape or not into or shape[-1] != into[-1]:
        return None
    if not (is_floating(source) and is_floating(node)):
        return None
    same_dtype = source.meta["val"].dtype == node.meta["val"].dtype
    if packet(node) in _SAME or (packet(node) in VIEWS and same_dtype):
        return source
    return source if packet(node) is aten.dropout and not argument(node, 2, "train") else None


def _same_as(node: Node) -> Iterator[Node]:
    """The node, and all nodes before it that hold the same values."""
    yield node
    while (source := _unchanged_operand(node)) is not None:
        yield (node := source)


def _origin(node: Node) -> Node:
    return list(_same_as(node))[-1]


def _split_source(node: Node) -> Node | None:
    """The value that ``node`` takes part of the features from, as a gate in a fused layer does."""
    source: Any = node.args[0] if node.args else None
    if is_part(node) and packet(source) in SPLITS:
        return _origin(source.args[0])
    return _origin(source) if packet(node) in (aten.glu, aten.slice) else None


def _residual(trace: int, node: Node, x: Node) -> Edge | None:
    """The sum of the value and ``x``, if nothing else reads the value."""
    while True:
        users = readers_of(node)
        if len(users) != 1:
            return None
        user = users.pop()
        if _unchanged_operand(user) is not node:
            break
        node = user
    if packet(user) is not aten.add or len(user.args) != 2 or user.kwargs.get("alpha", 1) != 1:
        return None
    others = [operand for operand in user.args if operand is not node]
    if len(others) != 1 or not isinstance(others[0], Node) or user.meta.get("written"):
        return None
    other, behind = others[0], list(_same_as(others[0]))
    if behind[-1] is not x or any(value.meta.get("written") for value in behind):
        return None
    same = shape_of(other) == shape_of(user) == shape_of(node)
    return (trace, user, other) if same else None
