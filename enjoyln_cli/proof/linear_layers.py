"""Which nodes of a graph are linear layers: ``y = W x + b``, where ``W`` and ``b`` are parameters.

Three edits change such layers: ``widening`` adds hidden units to them, ``identity_ops`` fuses
scales into them, and ``rotation.norm_fusion`` fuses the weights and biases of norms into them.
Each edit checks by itself which kinds of layers it accepts. An ``nn.Linear`` and a Conv1D store the
same matrix transposed, so a layer records which dimension of its weight is the inputs'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    argument,
    aten,
    is_whole,
    occurrences,
    packet,
    rank_of,
    readers_of,
    shape_of,
    slice_bounds,
)
from enjoyln_cli.plan.axis import Axis, feature_axis
from enjoyln_cli.proof.pullback import Opaque, pull
from enjoyln_cli.proof.views import VIEWS, source_of
from enjoyln_cli.trace.trace import Trace

LayerKind = Literal["matrix", "product", "convolution", "embedding"]
"""A ``matrix`` is in an op that can add a bias, a ``product`` in an op that cannot. An
``embedding`` looks up rows of a table, which is a product with one-hot rows."""

WHOLE_FEATURE_OPS = VIEWS | {
    aten.alias, aten.clone, aten.contiguous, aten.detach, aten.dropout, aten.permute,
    aten.numpy_T, aten.t, aten.transpose, aten.to, aten._to_copy,
}  # fmt: skip
"""Ops that treat all features alike and mix no features."""


class _Form(NamedTuple):
    """The argument positions of an op's operands, and the dimension of the inputs in its weight."""

    kind: LayerKind
    x: int
    weight: int
    bias: int | None
    input_dim: int


_CONVOLUTION = _Form("convolution", 0, 1, 2, 1)
_PRODUCT = _Form("product", 0, 1, None, 0)
_FORMS = {
    aten.linear: _Form("matrix", 0, 1, 2, 1),
    aten.addmm: _Form("matrix", 1, 2, 0, 0),
    aten.matmul: _PRODUCT,
    aten.mm: _PRODUCT,
    aten.conv1d: _CONVOLUTION,
    aten.conv2d: _CONVOLUTION,
    aten.conv3d: _CONVOLUTION,
    aten.convolution: _CONVOLUTION,
    aten.embedding: _Form("embedding", 1, 0, None, 0),
}


@dataclass(frozen=True, eq=False)
class ReadParameter:
    """A parameter of a layer, and how the layer reads it."""

    name: str
    """The first of its tied names."""
    node: Node
    reader: Node
    """The op that reads the parameter: the layer, or an op in between such as a transposition."""
    outputs: tuple[int, int] | None = None
    """The range of the parameter's outputs that the layer reads; ``None`` for all of them."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearLayer:
    """One op of a graph that is a linear layer."""

    node: Node
    kind: LayerKind
    x: Node
    weight: ReadParameter
    bias: ReadParameter | None
    input_dim: int
    """The dimension (0 or 1) of the stored weight that belongs to the input features.

    The output features belong to the other dimension.
    """
    scaled: bool
    """Whether the op is an ``addmm`` that may multiply its terms by ``alpha`` and ``beta``."""

    @property
    def in_features(self) -> int:
        return (shape_of(self.weight.node) or ())[self.input_dim]

    @property
    def out_features(self) -> int:
        return (shape_of(self.weight.node) or ())[1 - self.input_dim]

    @property
    def parameters(self) -> tuple[ReadParameter, ...]:
        """The weight, and the bias if any."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def reads_directly(self) -> bool:
        """Whether no op stands between the parameters and the layer."""
        return all(parameter.reader is self.node for parameter in self.parameters)


def parameter_nodes(
    traces: Sequence[Trace], groups: Mapping[str, str]
) -> tuple[list[dict[Node, str]], dict[str, list[tuple[int, Node]]]]:
    """For each trace the name of each parameter's node, and for each name its nodes in all traces.

    ``groups`` maps any parameter name to the first of its tied names.
    """
    named = [
        {node: groups[names[0]] for node, names in trace.parameters.items()} for trace in traces
    ]
    nodes: dict[str, list[tuple[int, Node]]] = {}
    for position, names in enumerate(named):
        for node, name in names.items():
            nodes.setdefault(name, []).append((position, node))
    return named, nodes


def parameter_readers(
    traces: Sequence[Trace], groups: Mapping[str, str]
) -> tuple[list[dict[Node, str]], dict[str, set[Node]]]:
    """As ``parameter_nodes``, with the readers of each parameter's nodes in place of the nodes."""
    named, nodes = parameter_nodes(traces, groups)
    return named, {
        name: set().union(*(readers_of(node) for _, node in found)) for name, found in nodes.items()
    }


def linear_layer(node: Node, named: Mapping[Node, str]) -> LinearLayer | None:
    """The node as a linear layer whose weight and bias are in ``named``; ``None`` if it is none."""
    form = _FORMS.get(packet(node))
    if form is None or len(node.args) <= max(form.x, form.weight):
        return None
    x, matrix, bias = node.args[form.x], node.args[form.weight], None
    if form.bias is not None:
        bias = argument(node, form.bias, "bias")
    if not isinstance(x, Node) or not _weight_has_layer_shape(form.kind, node, rank_of(matrix)):
        return None
    weight = _read_parameter(matrix, form.input_dim, node, named)
    if weight is None:
        return None
    added = None if bias is None else _read_parameter(bias, -1, node, named)
    if bias is not None and added is None:
        return None
    return LinearLayer(
        node=node,
        kind=form.kind,
        x=x,
        weight=weight[0],
        bias=added[0] if added else None,
        input_dim=weight[1],
        scaled=packet(node) is aten.addmm and bool(node.kwargs),
    )


def _weight_has_layer_shape(kind: LayerKind, node: Node, weight_rank: int) -> bool:
    """Whether the weight is a matrix, or a convolution in which all outputs see all inputs."""
    if kind != "convolution":
        return weight_rank == 2
    shape = shape_of(node)
    if shape is None:
        return False
    channels = feature_axis(shape, len(shape) - weight_rank + 1)
    return not isinstance(pull(node, channels), Opaque)


def with_added_bias(
    layer: LinearLayer, readers: AbstractSet[Node], named: Mapping[Node, str]
) -> LinearLayer:
    """The layer with the vector parameter that is added to its result as its bias.

    ``readers`` are all ops that read the result. The layer is returned unchanged if it has a bias,
    or if its only reader is not a sum with a vector parameter.
    """
    if layer.bias is not None or layer.node.meta.get("written") or len(readers) != 1:
        return layer
    (total,) = readers
    terms = [term for term in total.args if term is not layer.node]
    if packet(total) is not aten.add or total.kwargs or len(total.args) != 2 or len(terms) != 1:
        return layer
    (term,) = terms
    if not isinstance(term, Node) or rank_of(term) != 1 or term not in named:
        return layer
    return replace(layer, bias=ReadParameter(named[term], term, total))


def follow_back(node: Any, axis: Axis, reader: Node) -> tuple[Node, Axis, Node] | None:
    """Go back over ops that keep features apart and have a single reader.

    Returns the value found, the axis on it, and the op that reads it. ``None`` if an op on the way
    has other readers or does not keep the axis whole.
    """
    while packet(node) in WHOLE_FEATURE_OPS:
        pairs = pull(node, axis)
        if isinstance(pairs, Opaque) or len(pairs) != 1 or readers_of(node) != {reader}:
            return None
        reader = node
        node, axis = pairs[0]
        if not is_whole(axis, shape_of(node) or ()):
            return None
    return node, axis, reader


def _read_parameter(
    operand: Any, dim: int, layer: Node, named: Mapping[Node, str]
) -> tuple[ReadParameter, int] | None:
    """The parameter behind an operand, and its dimension that ``dim`` of the operand comes from.

    The operand may be some outputs of a parameter, as in ``nn.MultiheadAttention``.
    """
    if not isinstance(operand, Node) or occurrences(layer, operand) != 1:
        return None
    axis = feature_axis(shape_of(operand) or (0,), dim)
    found = follow_back(operand, axis, layer)
    if found is None or rank_of(found[0]) != rank_of(operand):
        return None
    node, below, reader = found
    if node in named:
        return ReadParameter(named[node], node, reader), below.dim
    taken, source = slice_bounds(node), source_of(node)
    other = 0 if rank_of(node) == 1 else 1 - below.dim
    if source is None or source not in named or taken is None or taken[0] != other:
        return None
    if readers_of(node) != {reader}:
        return None
    return ReadParameter(named[source], source, node, taken[1:]), below.dim
