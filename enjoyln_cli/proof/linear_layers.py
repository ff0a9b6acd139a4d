"""Which nodes of a graph are linear layers: ``y = W x + b``, where ``W`` and ``b`` are parameters.

Three edits need to know: hidden units are added to such layers (``widening``), scales are merged
into them (``layer_scale``), and norms hand their weights on to them (``analysis.affine_merge``).
Each of them accepts some kinds of layers and not others, and checks that itself. An ``nn.Linear``
and a Conv1D store the same matrix transposed, so a layer says which dimension is whose.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch.fx import Node

from enjoyln_cli.graph.nodes import argument, aten, is_whole, occurrences, packet, rank_of, shape_of
from enjoyln_cli.plan.axis import Axis, feature_axis
from enjoyln_cli.proof.flow import readers_of
from enjoyln_cli.proof.pullback import Opaque, pull
from enjoyln_cli.proof.views import VIEWS
from enjoyln_cli.trace.trace import Trace

Kind = Literal["matrix", "product", "convolution", "embedding"]
"""A ``product`` is a matrix in an op that adds no bias. An ``embedding`` looks up rows of a table,
which is a product with one-hot rows."""

WHOLE_FEATURE_OPS = VIEWS | {
    aten.alias, aten.clone, aten.contiguous, aten.detach, aten.dropout, aten.permute,
    aten.numpy_T, aten.t, aten.transpose, aten.to, aten._to_copy,
}  # fmt: skip
"""Ops that keep every feature's values together, and do not tell features apart."""


class _Form(NamedTuple):
    """Where an op has its operands, and which dimension of the weight is that of its inputs."""

    kind: Kind
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
    """The first of the names that are tied to it."""
    node: Node
    reader: Node
    """The layer, or the first op on the way to it, such as a transposition."""


@dataclass(frozen=True, eq=False, kw_only=True)
class LinearLayer:
    """One op of a graph that is a linear layer."""

    node: Node
    kind: Kind
    x: Node
    weight: ReadParameter
    bias: ReadParameter | None
    input_dim: int
    """The dimension of the weight, as it is stored, that the features of ``x`` lie along.

    Those of the result lie along the other one of the first two.
    """
    scaled: bool
    """Whether the op multiplies its terms by numbers: ``alpha`` and ``beta`` of ``addmm``."""

    @property
    def in_features(self) -> int:
        return (shape_of(self.weight.node) or ())[self.input_dim]

    @property
    def out_features(self) -> int:
        return (shape_of(self.weight.node) or ())[1 - self.input_dim]

    @property
    def parameters(self) -> tuple[ReadParameter, ...]:
        """The weight, and the bias if there is one."""
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def reads_directly(self) -> bool:
        """Whether it reads its parameters as they are, with no op in between."""
        return all(parameter.reader is self.node for parameter in self.parameters)


def parameter_names(trace: Trace, groups: Mapping[str, str]) -> dict[Node, str]:
    """The parameters of a graph by name: ``groups`` has the first of all names that are tied."""
    return {node: groups[names[0]] for node, names in trace.parameters.items()}


def linear_layer(node: Node, named: Mapping[Node, str]) -> LinearLayer | None:
    """The node as a linear layer of the parameters ``named``; ``None`` for everything else."""
    form = _FORMS.get(packet(node))
    if form is None or len(node.args) <= max(form.x, form.weight):
        return None
    x, matrix, bias = node.args[form.x], node.args[form.weight], None
    if form.bias is not None:
        bias = argument(node, form.bias, "bias")
    if not isinstance(x, Node) or not _has_its_shape(form.kind, node, rank_of(matrix)):
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


def _has_its_shape(kind: Kind, node: Node, weight_rank: int) -> bool:
    """Whether the weight is a matrix; in a convolution, whether all outputs see all inputs."""
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
    """The layer with the vector as its bias that is added to its result; itself where none is.

    ``readers`` are all that read the result: that sum alone, or else there is no such bias.
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
    """Back over ops that move whole features and have one reader: the value, and who reads it."""
    while packet(node) in WHOLE_FEATURE_OPS:
        pairs = pull(node, axis)
        if isinstance(pairs, Opaque) or len(pairs) != 1 or readers_of(node) != {reader}:
            return None
        reader, (node, axis) = node, pairs[0]
        if not is_whole(axis, shape_of(node) or ()):
            return None
    return node, axis, reader


def _read_parameter(
    operand: Any, dim: int, layer: Node, named: Mapping[Node, str]
) -> tuple[ReadParameter, int] | None:
    """The parameter behind an operand, and which of its dimensions ``dim`` of the operand is."""
    if not isinstance(operand, Node) or occurrences(layer, operand) != 1:
        return None
    axis = feature_axis(shape_of(operand) or (0,), dim)
    found = follow_back(operand, axis, layer)
    if found is None or found[0] not in named or rank_of(found[0]) != rank_of(operand):
        return None
    node, below, reader = found
    return ReadParameter(named[node], node, reader), below.dim
