"""The pull-back table, second part: ops that multiply by weights, and attention.

Each op is jointly linear in its weight and bias, and output feature ``i`` depends on row ``i`` of
the weight alone. Centring the weight and the bias over their output features therefore centres the
result: ``P (W x + b) = (P W) x + P b``.
"""

# Arguments of fx nodes are typed as a wide union; a rule knows its op's schema.
# mypy: disable-error-code="arg-type,union-attr,misc,index,return-value,operator,call-overload"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    argument,
    aten,
    broadcast,
    constant_along,
    is_whole,
    op_name,
    packet,
    rank_of,
    shape_of,
)
from enjoyln_cli.plan.axis import Axis, on_dimension
from enjoyln_cli.proof.pullback import Opaque, Pull, rule

GROUPED_PRODUCTS = (aten._grouped_mm, "transformers::grouped_mm_fallback")
"""Products of each row with the matrix of its expert."""


def _weight_and_bias(node: Node, axis: Axis) -> Pull:
    bias, rows = argument(node, 2, "bias"), on_dimension(axis, 0)
    return ((node.args[1], rows),) if bias is None else ((node.args[1], rows), (bias, rows))


def _product(node: Node, axis: Axis, equation: str, factors: Sequence[Any]) -> Pull:
    """The pair of an einsum: the only factor whose letters include the letter of the axis.

    ``equation`` is in einsum's notation, with an arrow.
    """
    spelled = letters_of(equation, [rank_of(factor) for factor in factors])
    if spelled is None or len(spelled[1]) != rank_of(node):
        return Opaque("a product whose equation does not match the ranks of its tensors")
    terms, output = spelled
    letter = output[axis.dim]
    carrying = [
        (factor, term)
        for factor, term in zip(factors, terms, strict=True)
        if letter in term and shape_of(factor)[term.index(letter)] == shape_of(node)[axis.dim]
    ]
    if len(carrying) != 1 or carrying[0][1].count(letter) != 1:
        return Opaque("a product of factors that are not the same for all features")
    factor, term = carrying[0]
    return ((factor, on_dimension(axis, term.index(letter))),)


def letters_of(equation: str, ranks: list[int]) -> tuple[list[list[str]], list[str]] | None:
    """The letters of each factor's dimensions and of the result's; ``None`` if the ranks differ.

    An ellipsis becomes ``...n`` to ``...1``: a term for each dimension that the letters do not
    name, counted from the end as in broadcasting.
    """
    inputs, _, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ranks):
        return None
    hidden = [rank - len(t.replace("...", "")) for t, rank in zip(terms, ranks, strict=True)]
    if any(n < 0 or (n and "..." not in t) for n, t in zip(hidden, terms, strict=True)):
        return None

    def spelled(term: str, count: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(f"...{i}" for i in range(count if dots else 0, 0, -1)), *after]

    spelled_out = [spelled(term, count) for term, count in zip(terms, hidden, strict=True)]
    return spelled_out, spelled(output, max(hidden, default=0))


@rule(aten.embedding)
def _embedding(node: Node, axis: Axis) -> Pull:
    """Rows of a table are looked up, so each row has to have zero mean."""
    if axis.dim != rank_of(node) - 1:
        return Opaque("a mean over tokens")
    return ((node.args[0], on_dimension(axis, 1)),)


@rule(aten.linear)
def _linear(node: Node, axis: Axis) -> Pull:
    """``P (W x + b) = (P W) x + P b``: centre over the weight's rows (CBWC, Enjoy-LN def. 2)."""
    weight, bias = node.args[1], argument(node, 2, "bias")
    if axis.dim != rank_of(node) - 1:
        return Opaque("a mean over tokens")
    if rank_of(weight) != 2 or (bias is not None and rank_of(bias) != 1):
        return Opaque("a linear layer whose weight is not a matrix, or whose bias is not a vector")
    return _weight_and_bias(node, axis)


@rule(aten.matmul, aten.mm, aten.bmm)
def _matmul(node: Node, axis: Axis) -> Pull:
    """Each column of ``A B`` depends on one column of ``B``, each row on one row of ``A``."""
    return _product(node, axis, "...ij,...jk->...ik", node.args[:2])


@rule(aten.einsum)
def _einsum(node: Node, axis: Axis) -> Pull:
    """The equation says which factor each dimension of the result comes from."""
    return _product(node, axis, node.args[0], node.args[1])


@rule(*GROUPED_PRODUCTS)
def _grouped_matmul(node: Node, axis: Axis) -> Pull:
    """Each row is multiplied by its expert's matrix: centre the columns of all of them."""
    left, right = node.args[:2]
    if (rank_of(left), rank_of(right)) != (2, 3) or axis.dim != 1:
        return Opaque("a grouped matrix product, over another dimension than its columns")
    if argument(node, 3, "bias") is not None:
        return Opaque("a grouped matrix product with a bias")
    return ((right, on_dimension(axis, 2)),)


def is_grouped_product(node: Node) -> bool:
    """Whether a node is one of ``GROUPED_PRODUCTS``."""
    name = getattr(packet(node), "_qualified_op_name", "")
    return packet(node) in GROUPED_PRODUCTS or name in GROUPED_PRODUCTS


@rule(aten.addmm, aten.baddbmm)
def _addmm(node: Node, axis: Axis) -> Pull:
    """``β C + α A B``: the columns of ``B`` and ``C`` jointly (``B`` is a Conv1D's weight)."""
    added, rank = node.args[0], rank_of(node)
    if constant_along(added, axis, rank):
        return Opaque("a product whose added term is the same for all features")
    found = _product(node, axis, "...ij,...jk->...ik", node.args[1:3])
    if isinstance(found, Opaque):
        return found
    return (*found, (added, broadcast(added, axis, rank)))


@rule(aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution)
def _convolution(node: Node, axis: Axis) -> Pull:
    """At each position, an ungrouped convolution is a linear layer from all input channels."""
    general = op_name(node) == "convolution"
    groups = argument(node, 8 if general else 6, "groups", 1)
    transposed = general and node.args[6]
    if groups != 1:
        return Opaque("a grouped convolution, whose channels see different inputs")
    if transposed or axis.dim != rank_of(node) - rank_of(node.args[1]) + 1:
        return Opaque("a convolution along the features")
    return _weight_and_bias(node, axis)


@rule(aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d)
def _transposed_convolution(node: Node, axis: Axis) -> Pull:
    """As a convolution, with the output channels in dimension 1 of the weight."""
    weight, bias = node.args[1], argument(node, 2, "bias")
    if argument(node, 6, "groups", 1) != 1:
        return Opaque("a grouped convolution, whose channels see different inputs")
    if axis.dim != rank_of(node) - rank_of(weight) + 1:
        return Opaque("a convolution along the features")
    pairs = ((weight, on_dimension(axis, 1)),)
    return pairs if bias is None else (*pairs, (bias, on_dimension(axis, 0)))


@rule(aten.scaled_dot_product_attention)
def _attention(node: Node, axis: Axis) -> Pull:
    """Attention is linear in the values and mixes positions, never features.

    Dropout multiplies the probabilities by random numbers that do not depend on the values.
    """
    values = node.args[2]
    if axis.dim != rank_of(node) - 1:
        return Opaque("attention over the features")
    return ((values, on_dimension(axis, rank_of(values) - 1)),)


@rule(aten.layer_norm, centring_only=True)
def _layer_norm(node: Node, axis: Axis) -> Pull:
    """``γ ⊙ x̂ + β``: ``x̂`` has zero mean, but ``γ ⊙ x̂`` does not."""
    shape = shape_of(node) or ()
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    if len(node.args[1]) != 1 or axis.dim != len(shape) - 1 or not is_whole(axis, shape):
        return Opaque("a LayerNorm over other elements than this mean")
    if weight is not None:
        return Opaque("the output of a LayerNorm with weights is not zero-mean")
    return () if bias is None else ((bias, on_dimension(axis, 0)),)
