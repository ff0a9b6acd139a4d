"""Which linear layers read the result of a norm, directly or through ops that mix no features.

    W (g * x) = (W diag(g)) x

A layer is any op that sums the products of features with a parameter over the features: a matrix
product, or the product with one of the matrices of a mixture of experts, which an index chooses
from a stack of them. Between the parameter and the op, only ops may stand that treat all features
alike, so that they do the same to ``W diag(g)`` as to ``W``.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    aten,
    is_part,
    occurrences,
    op_name,
    packet,
    rank_of,
    reads_no_values,
    shape_of,
)
from enjoyln_cli.plan.axis import Axis, on_dimension
from enjoyln_cli.proof.flow import Flow, Value, candidates, consumers
from enjoyln_cli.proof.linear_layers import (
    WHOLE_FEATURE_OPS,
    ReadParameter,
    linear_layer,
    with_added_bias,
)
from enjoyln_cli.proof.pullback import Opaque, commutes_with_every_matrix, pull
from enjoyln_cli.rotation.feature_sums import summed_with
from enjoyln_cli.rotation.found_group import LayerObstacle

_TRANSPARENT = WHOLE_FEATURE_OPS | {
    aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.broadcast_to, aten.cat, aten.expand,
    aten.expand_as, aten.flip, aten.gather, aten.index, aten.index_select, aten.mean,
    aten.movedim, aten.mT, aten.repeat, aten.repeat_interleave, aten.roll, aten.select, aten.slice,
    aten.swapaxes, aten.tile, aten.type_as,
}  # fmt: skip
"""Ops whose result holds elements of one operand, or averages of them, feature by feature."""
_KINDS = {"matrix", "product"}
"""The kinds of layers that a norm with a bias can be fused into."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Use:
    """A linear layer that reads a norm's result."""

    trace: int
    """The index of the trace."""
    layer: Node
    weight: ReadParameter
    axis: Axis
    """Axis of the weight: the features of the norm, once for each group."""
    bias: ReadParameter | None = None
    between: tuple[tuple[Node, Node], ...] = ()
    """The values between the parameter and the layer, each with the op that reads it here."""

    @property
    def parameters(self) -> tuple[ReadParameter, ...]:
        """The weight, and the bias if any."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def to_edit(self) -> ToEdit:
        """What to edit if the norm is fused."""
        bias = self.bias.name if self.bias else None
        return ToEdit(self.weight.name, self.axis.dim, bias, self.weight.outputs)


class ToEdit(NamedTuple):
    """The parameters of a linear layer that change if a norm is fused into it."""

    weight: str
    dim: int
    """The dimension of inputs in the weight."""
    bias: str | None
    outputs: tuple[int, int] | None
    """The range of outputs of both that change; ``None`` for all of them."""

    def overlaps(self, outputs: tuple[int, int] | None) -> bool:
        """Whether some of these outputs change; ``None`` for all outputs of the weight."""
        if self.outputs is None or outputs is None:
            return True
        return outputs[0] < self.outputs[1] and self.outputs[0] < outputs[1]


def find_readers(
    flow: Flow, named: Mapping[Node, str], centred: AbstractSet[Node], value: Value, *, alone: bool
) -> list[Use] | LayerObstacle:
    """The linear layers that read a value, directly or through transparent ops.

    ``named`` has the name of each parameter node of the value's trace, and ``centred`` the values
    that an explicit operation acts on. ``alone`` says that no bias moves, so that more ops may
    stand in between, and more ops count as layers.
    """
    uses: list[Use] = []
    trace, waiting = flow.traces[value.trace], [value]
    while waiting:
        current = waiting.pop(0)  # the readers of a value in the order of the graph
        reads = nodes_that_read(current.node)
        for reader in consumers(current.node):
            if reader not in reads or reader in flow.unneeded:
                continue
            if reader.op == "output":
                if flow.is_required(current.trace, current.node):
                    return LayerObstacle("the model returns its result", "")
                continue
            if current.node in centred:
                return LayerObstacle("an added mean subtraction acts on its result", "")
            written = current.node.meta.get("written")
            found = None if written else _through_transparent_op(reader, current, alone=alone)
            if found is not None:
                waiting.append(found)
                continue
            use = _linear(named, reader, current)
            if use is None and alone and not written:
                use = _summed_product(named, reader, current)
            if use is None:
                whole: Any = reader.args[0] if is_part(reader) else reader
                name = op_name(whole)
                why = "which is not a linear layer"
                if packet(reader) is aten.linear:
                    why = _why_not_stored(reader, named)
                return LayerObstacle(
                    f"its result is read by {name}, {why}", trace.module_of(reader)
                )
            uses.append(use)
    return uses


def _why_not_stored(layer: Node, named: Mapping[Node, str]) -> str:
    """Why a linear layer's weight or bias are not parameters that it alone reads."""
    weight: Any = layer.args[1]
    others = set() if weight in named else nodes_that_read(weight) - {layer}
    if others:
        return f"whose weight is also read by {min(map(op_name, others))}"
    return "whose weight or bias is computed"


def nodes_that_read(node: Node) -> set[Node]:
    """The nodes that read the values of another, and whose own values are used.

    Instead of a split, these are its parts.
    """
    return {
        user
        for user in consumers(node)
        if not reads_no_values(user, node) and "unread" not in user.meta
    }


def _through_transparent_op(reader: Node, value: Value, *, alone: bool) -> Value | None:
    """The result of ``reader`` if that is a transparent op; ``None`` otherwise.

    If a weight moves alone, every op is that commutes with multiplying each feature by a number.
    """
    if packet(reader) not in _TRANSPARENT and not is_part(reader) and not alone:
        return None
    for axis in candidates(reader, value.node, value.axis):
        if not commutes_with_every_matrix(reader, axis):
            continue
        if pull(reader, axis) == ((value.node, value.axis),):
            return Value(value.trace, reader, axis)
    return None


def _linear(named: Mapping[Node, str], node: Node, value: Value) -> Use | None:
    """The node as a linear layer that reads ``value``; ``None`` if it is none."""
    rank = rank_of(value.node)
    if occurrences(node, value.node) != 1 or value.axis.dim != rank - 1 or rank < 2:
        return None
    layer = linear_layer(node, named)
    if layer is None or layer.kind not in _KINDS or layer.scaled or layer.x is not value.node:
        return None
    layer = with_added_bias(layer, nodes_that_read(node), named)
    if any(parameter.node.meta.get("written") for parameter in layer.parameters):
        return None
    if layer.bias is not None:
        same_outputs = layer.bias.outputs == layer.weight.outputs
        if not same_outputs or shape_of(layer.bias.node) != (layer.out_features,):
            return None
    axis = on_dimension(value.axis, layer.input_dim)
    return Use(trace=value.trace, layer=node, weight=layer.weight, axis=axis, bias=layer.bias)


def _summed_product(named: Mapping[Node, str], node: Node, value: Value) -> Use | None:
    """The node as a product of ``value`` with a parameter, summed over the features.

    ``None`` if it is none. A bias that is added to the product is not looked for.
    """
    pair = summed_with(node, value.node, value.axis)
    if pair is None:
        return None
    reader = node
    operand, axis = pair
    between: list[tuple[Node, Node]] = []
    while operand not in named:
        found = _operand_below(operand, axis, reader)
        if found is None:
            return None
        between.append((operand, reader))
        reader = operand
        operand, axis = found
    if occurrences(reader, operand) != 1 or operand.meta.get("written"):
        return None
    weight = ReadParameter(named[operand], operand, reader)
    return Use(trace=value.trace, layer=node, weight=weight, axis=axis, between=tuple(between))


def _operand_below(node: Node, axis: Axis, reader: Node) -> tuple[Node, Axis] | None:
    """What ``node`` takes its features from, if it mixes none and ``reader`` reads it once."""
    pairs = pull(node, axis)
    if isinstance(pairs, Opaque) or len(pairs) != 1 or not commutes_with_every_matrix(node, axis):
        return None
    return pairs[0] if occurrences(reader, node) == 1 else None
