"""Where the search for groups starts: at the inputs of norms, and at the values of attentions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Node

from enjoyln_cli.graph.nodes import aten, packet, shape_of
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.proof.flow import Flow, Value
from enjoyln_cli.proof.linear_layers import WHOLE_FEATURE_OPS
from enjoyln_cli.rotation.feature_sums import RMS_NORMS, is_square, is_sum_of_squares


def starting_values(flow: Flow, values: bool) -> Iterator[tuple[Value, bool]]:
    """The inputs of all norms, then the values of all attentions."""
    yield from ((value, False) for value, _ in inputs_of_norms(flow))
    if values:
        yield from ((value, True) for value, _ in _operands(flow, _attended))


def inputs_of_norms(flow: Flow) -> Iterator[tuple[Value, Node]]:
    """The values that a norm over the last dimension reads, each with the node that reads it."""
    return _operands(flow, _normed_operand)


def _operands(flow: Flow, operand_of: Callable[[Node], Any]) -> Iterator[tuple[Value, Node]]:
    for position, trace in enumerate(flow.traces):
        for node in trace.graph.nodes:
            if node.meta.get("unread") or node in flow.unneeded:
                continue
            read = operand_of(node)
            shape = shape_of(read) if read is not None else None
            if shape:
                yield Value(position, read, feature_axis(shape)), node


def _normed_operand(node: Any) -> Any:
    """The value that a norm over the last dimension reads at this node."""
    x = node.args[0] if node.args else None
    if packet(node) is aten.layer_norm or packet(node) in RMS_NORMS:
        return x if set(node.args[1][:-1]) <= {1} else None
    shape = shape_of(x)
    if not shape or not isinstance(x, Node) or not is_square(node, x):
        return None
    return x if is_sum_of_squares(node, x, feature_axis(shape)) else None


def _attended(node: Any) -> Any:
    """The values that an attention mixes over positions at this node."""
    if packet(node) is aten.scaled_dot_product_attention:
        return node.args[2]
    if packet(node) in (aten.matmul, aten.bmm) and isinstance(node.args[1], Node):
        weights = node.args[0]
        while packet(weights) in WHOLE_FEATURE_OPS:
            weights = weights.args[0]
        if packet(weights) in (aten.softmax, aten._softmax):
            return node.args[1]
    return None
