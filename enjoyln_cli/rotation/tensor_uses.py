"""Whether a weight writes the features that are rotated, or reads them.

A reader is multiplied by the features and the products are summed, ``W x`` over the inputs; an
index may choose it from a stack, as for experts. All other weights write: as they are (a table, a
bias), or over their outputs. A tied weight may do both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import Node

from enjoyln_cli.graph.nodes import is_floating, is_part
from enjoyln_cli.proof.flow import Value, consumers
from enjoyln_cli.proof.min_cut import Parameter
from enjoyln_cli.rotation.feature_sums import summed_with


class TensorUses(NamedTuple):
    """What the model does with a weight along the features that are rotated."""

    writes: bool
    reads: bool


def tensor_uses(
    values: Iterable[Value],
    parameters: Iterable[Parameter],
    nodes: Mapping[str, Sequence[tuple[int, Node]]],
    computed: Sequence[Collection[Node]],
) -> dict[Parameter, TensorUses]:
    """The uses of each of the ``parameters``; ``values`` are all values that rotate with them.

    ``nodes`` has the nodes of each parameter, with the index of the trace, and ``computed`` the
    result of ``computed_from_inputs`` for each trace.
    """
    rotated: defaultdict[tuple[int, Node], list[Value]] = defaultdict(list)
    for value in values:
        rotated[value.trace, value.node].append(value)
    uses = {}
    for parameter in parameters:
        waiting = [
            value
            for place in nodes[parameter.name]
            for value in rotated[place]
            if value.axis == parameter.axis
        ]
        writes = reads = False
        while waiting:
            value = waiting.pop()
            for reader in consumers(value.node):
                results = rotated[value.trace, reader]
                pair = summed_with(reader, value.node, value.axis)
                if pair is not None:
                    chosen, partner = (n in computed[value.trace] for n in (value.node, pair[0]))
                    is_feature = chosen and not partner  # a row of a table, which a weight reads
                    reads, writes = reads or not is_feature, writes or is_feature
                elif _only_moves(reader, value.node):
                    waiting += results
                else:
                    writes = writes or bool(results)
        uses[parameter] = TensorUses(writes, reads)
    return uses


def _only_moves(reader: Node, operand: Node) -> bool:
    """Whether the result holds numbers of ``operand`` alone: transposed, cast, or chosen."""
    op: Any = reader.args[0] if is_part(reader) else reader
    return [node for node in op.all_input_nodes if is_floating(node)] == [operand]


def computed_from_inputs(inputs: Iterable[Node]) -> set[Node]:
    """All nodes whose values depend on the inputs of the model."""
    waiting, computed = list(inputs), set(inputs)
    while waiting:
        users = set(waiting.pop().users) - computed
        computed |= users
        waiting += users
    return computed
