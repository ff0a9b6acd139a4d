"""Where a product with the matrix of a rotation group can be added: at the first input of a block.

Everything after it is rotated, and nothing before it. So every value that the block is called with
has to be outside of the rotation group, and every product inside.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from enjoyln_cli.graph.nodes import shape_of
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.proof.flow import Flow, Value

MOST_HEADS = 3
"""How many blocks are tried as the head of a stream."""


def heads_of(flow: Flow, values: Collection[Value]) -> list[str]:
    """The first blocks whose first input is one of the ``values`` that have to rotate together."""
    unusable_points = {point for trace in flow.traces for point in trace.unusable_points}
    paths = [
        path
        for position, trace in enumerate(flow.traces)
        for node, (path, where) in trace.places.items()
        if where == "input" and path in trace.blocks and (path, where) not in unusable_points
        if _as_features(position, node) in values
    ]
    return list(dict.fromkeys(paths))[:MOST_HEADS]


def is_online_rotation(flow: Flow, block: str, trace: int, node: Node) -> bool:
    """Whether a value is the product in front of ``block``; false if that is empty."""
    return bool(block) and flow.traces[trace].places.get(node) == (block, "input")


def misplaced_rotation(
    flow: Flow, block: str, values: Collection[Value]
) -> tuple[int, Node] | None:
    """A product in front of ``block`` that does not rotate what the ``values`` of a group need.

    It is given by the index of its trace and its node; ``None`` if there is no such product.
    """
    rotated = {(value.trace, value.node) for value in values}
    for position, trace in enumerate(flow.traces):
        for node in trace.places:
            if not is_online_rotation(flow, block, position, node):
                continue
            if _as_features(position, node) not in values or (position, node.args[0]) in rotated:
                return position, node
    return None


def _as_features(trace: int, node: Node) -> Value | None:
    shape = shape_of(node)
    return Value(trace, node, feature_axis(shape)) if shape else None
