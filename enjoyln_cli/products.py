"""The pull-back table, second part: ops that multiply by weights, and attention.

Each is linear in a weight (and in its bias, jointly), and keeps the weight's output features apart:
centring these is centring the result, ``P (W x + b) = (P W) x + P b``.
"""

# Arguments of fx nodes are typed as a wide union; a rule knows its op's schema.
# mypy: disable-error-code="arg-type,union-attr,misc,index,return-value,operator,call-overload"

from __future__ import annotations

from torch.fx import Node

from enjoyln_cli.axis import Axis, moved
from enjoyln_cli.nodes import (
    Opaque,
    Pull,
    argument,
    aten,
    broadcast,
    constant_along,
    is_whole,
    op_name,
    rank_of,
    rule,
    shape_of,
)


def _weight_and_bias(node: Node, axis: Axis) -> Pull:
    bias, rows = argument(node, 2, "bias"), moved(axis, 0)
    return ((node.args[1], rows),) if bias is None else ((node.args[1], rows), (bias, rows))


@rule(aten.embedding)
def _embedding(node: Node, axis: Axis) -> Pull:
    """Rows of a table are looked up: each has to be zero-mean."""
    if axis.dim != rank_of(node) - 1:
        return Opaque("a mean over tokens")
    return ((node.args[0], moved(axis, 1)),)


@rule(aten.linear)
def _linear(node: Node, axis: Axis) -> Pull:
    """``P (W x + b) = (P W) x + P b``: the weight's rows and the bias (CBWC, Enjoy-LN def. 2)."""
    if axis.dim != rank_of(node) - 1:
        return Opaque("a mean over tokens")
    return _weight_and_bias(node, axis)


@rule(aten.matmul, aten.mm, aten.bmm)
def _matmul(node: Node, axis: Axis) -> Pull:
    """A product of matrices keeps the columns of its right factor and the rows of its left one."""
    left, right = node.args[:2]
    rank = rank_of(node)
    if min(rank_of(left), rank_of(right)) < 2:
        return Opaque("a product with a vector")
    if axis.dim == rank - 1:
        return ((right, moved(axis, rank_of(right) - 1)),)
    if axis.dim == rank - 2:
        return ((left, moved(axis, rank_of(left) - 2)),)
    return Opaque("a product that treats the elements of the mean apart")


@rule(aten.einsum)
def _einsum(node: Node, axis: Axis) -> Pull:
    """Linear in the one operand that carries the mean's letter, all others fixed."""
    terms, output = _letters(node.args[0], [rank_of(operand) for operand in node.args[1]])
    if len(output) != rank_of(node):
        return Opaque("a product whose equation does not say what it gives")
    letter = output[axis.dim]
    carrying = [
        (operand, term)
        for operand, term in zip(node.args[1], terms, strict=True)
        if letter in term and shape_of(operand)[term.index(letter)] == shape_of(node)[axis.dim]
    ]
    if len(carrying) != 1 or carrying[0][1].count(letter) != 1:
        return Opaque("a product of factors that differ along the mean")
    operand, term = carrying[0]
    return ((operand, moved(axis, term.index(letter))),)


def _letters(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]]:
    """The letter of each dimension of every operand and of the result.

    An ellipsis stands for as many dimensions as the others leave, counted from the end.
    """
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    hidden = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True)]

    def spelled(term: str, count: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(f"...{i}" for i in range(count if dots else 0, 0, -1)), *after]

    spelled_out = [spelled(term, count) for term, count in zip(terms, hidden, strict=True)]
    return spelled_out, spelled(output, max(hidden, default=0))


@rule(aten._grouped_mm, "transformers::grouped_mm_fallback")
def _grouped_matmul(node: Node, axis: Axis) -> Pull:
    """Each row is multiplied by the matrix of its expert, whose columns (all experts') it keeps."""
    left, right = node.args[:2]
    if (rank_of(left), rank_of(right)) != (2, 3) or axis.dim != 1:
        return Opaque("a grouped product along something else than its columns")
    if argument(node, 3, "bias") is not None:
        return Opaque("a grouped product with a bias of its own")
    return ((right, moved(axis, 2)),)


@rule(aten.addmm, aten.baddbmm)
def _addmm(node: Node, axis: Axis) -> Pull:
    """``β C + α A B``: the columns of ``B`` and of ``C`` (Conv1D stores its weight as ``B``)."""
    added, left, right = node.args[:3]
    rank = rank_of(node)
    if axis.dim != rank - 1 or constant_along(added, axis, rank):
        return Opaque("a product whose added term is the same for every element of the mean")
    return ((right, moved(axis, rank_of(right) - 1)), (added, broadcast(added, axis, rank)))


@rule(aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution)
def _convolution(node: Node, axis: Axis) -> Pull:
    """A convolution over all channels is linear over its output channels, position by position."""
    general = op_name(node) == "convolution"
    groups = argument(node, 8 if general else 6, "groups", 1)
    transposed = general and node.args[6]
    if groups != 1:
        return Opaque("a grouped convolution, whose channels see different inputs")
    if transposed or axis.dim != rank_of(node) - rank_of(node.args[1]) + 1:
        return Opaque("a convolution along the mean")
    return _weight_and_bias(node, axis)


@rule(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)
def _transposed_convolution(node: Node, axis: Axis) -> Pull:
    """As a convolution; its weight has the output channels second."""
    weight, bias = node.args[1], argument(node, 2, "bias")
    if argument(node, 6, "groups", 1) != 1:
        return Opaque("a grouped convolution, whose channels see different inputs")
    if axis.dim != rank_of(node) - rank_of(weight) + 1:
        return Opaque("a convolution along the mean")
    pairs = ((weight, moved(axis, 1)),)
    return pairs if bias is None else (*pairs, (bias, moved(axis, 0)))


@rule(aten.scaled_dot_product_attention)
def _attention(node: Node, axis: Axis) -> Pull:
    """Attention is linear in the values, and keeps their features apart from the positions."""
    if axis.dim != rank_of(node) - 1 or argument(node, 4, "dropout_p", 0.0):
        return Opaque("attention over the mean, or with dropout")
    return ((node.args[2], axis),)


@rule(aten.layer_norm)
def _layer_norm(node: Node, axis: Axis) -> Pull:
    """``γ ⊙ x̂ + β``: ``x̂`` is zero-mean, the product with γ is not (trap 1)."""
    shape = shape_of(node) or ()
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    if len(node.args[1]) != 1 or axis.dim != len(shape) - 1 or not is_whole(axis, shape):
        return Opaque("a LayerNorm over other elements than the mean")
    if weight is not None:
        return Opaque("the output of a LayerNorm with weights is not zero-mean")
    return () if bias is None else ((bias, moved(axis, 0)),)
