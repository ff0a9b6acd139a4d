"""Where a product with the matrix of a basis can be added: at the first input of a block.

Everything after it is turned, and nothing before it. So every value that the block is called with
has to be outside of the basis, and every product inside.
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
    """The first blocks whose first input is one of the ``values`` that have to turn together."""
    lost = {spot for trace in flow.traces for spot in trace.lost}
    paths = [
        path
        for position, trace in enumerate(flow.traces)
        for node, (path, where) in trace.places.items()
        if where == "input" and path in trace.blocks and (path, where) not in lost
        if _as_features(position, node) in values
    ]
    return list(dict.fromkeys(paths))[:MOST_HEADS]


def is_product(flow: Flow, block: str, trace: int, node: Node) -> bool:
    """Whether a value is the product in front of ``block``; false if that is empty."""
    return bool(block) and flow.traces[trace].places.get(node) == (block, "input")


def misplaced_product(flow: Flow, block: str, values: Collection[Value]) -> tuple[int, Node] | None:
    """A product in front of ``block`` that does not turn what the ``values`` of a basis need.

    It is given by the index of its trace and its node; ``None`` if there is no such product.
    """
    turned = {(value.trace, value.node) for value in values}
    for position, trace in enumerate(flow.traces):
        for node in trace.places:
            if not is_product(flow, block, position, node):
                continue
            if _as_features(position, node) not in values or (position, node.args[0]) in turned:
                return position, node
    return None


def _as_features(trace: int, node: Node) -> Value | None:
    shape = shape_of(node)
    return Value(trace, node, feature_axis(shape)) if shape else None
