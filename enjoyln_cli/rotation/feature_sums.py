"""Which ops sum over features, so that rotating their operands does not change the result.

* A product of two values that is summed over the features of both: ``(W Qᵀ)(Q x) = W x``.
* A sum of squares, and with ``Q 1 = 1`` also a mean or a variance.
"""

# Arguments of fx nodes are typed as a wide union.
# mypy: disable-error-code="arg-type,union-attr,misc,index,return-value"

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    argument,
    aten,
    is_covered,
    occurrences,
    packet,
    rank_of,
    shape_of,
)
from enjoyln_cli.plan.axis import Axis, on_dimension
from enjoyln_cli.proof.weight_rules import is_grouped_product, letters_of

_PRODUCTS = {
    aten.linear: ("...j,ij->...i", 0),
    aten.matmul: ("...ij,...jk->...ik", 0),
    aten.mm: ("ij,jk->ik", 0),
    aten.bmm: ("bij,bjk->bik", 0),
    aten.addmm: ("ij,jk->ik", 1),
    aten.scaled_dot_product_attention: ("...ij,...kj->...ik", 0),
}
"""What each op sums, in einsum's notation, and where its two factors begin in its arguments."""
_CONVOLUTIONS = {aten.conv1d, aten.conv2d, aten.conv3d}
_SUMS = {aten.sum, aten.mean}
_STATISTICS = {aten.mean, aten.var, aten.std}
RMS_NORMS = {aten.rms_norm}


def is_normed_over_last(node: Node, axis: Axis) -> bool:
    """Whether a norm op normalises all groups of ``axis``, which is in the last dimension."""
    sizes: Any = node.args[1]
    return set(sizes[:-1]) <= {1} and sizes[-1] == axis.length


def is_sum_of_squares(reader: Node, node: Node, axis: Axis) -> bool:
    """Whether nothing but sums of squares over the whole ``axis`` is read at ``reader``."""
    if is_square(reader, node):
        return bool(reader.users) and all(_sums_over(u, reader, axis, _SUMS) for u in reader.users)
    if packet(reader) is aten.linalg_vector_norm:
        order, dims = argument(reader, 1, "ord", 2), argument(reader, 2, "dim")
        shape = shape_of(node) or ()
        return order == 2 and _is_only(dims, axis, len(shape)) and is_covered(axis, shape)
    return False


def is_statistic(reader: Node, node: Node, axis: Axis) -> bool:
    """Whether ``reader`` is a mean, variance or standard deviation over the whole ``axis``."""
    return _sums_over(reader, node, axis, _STATISTICS)


def is_square(reader: Node, node: Node) -> bool:
    """Whether ``reader`` squares each element of ``node``."""
    if packet(reader) in (aten.mul, aten.multiply):
        return occurrences(reader, node) == 2
    if packet(reader) is aten.square:
        return True
    return packet(reader) is aten.pow and reader.args == (node, 2)


def _is_only(dims: Any, axis: Axis, rank: int) -> bool:
    listed = [dims] if isinstance(dims, int) else list(dims or ())
    return [dim % rank for dim in listed] == [axis.dim]


def _sums_over(node: Node, operand: Node, axis: Axis, ops: Set[Any]) -> bool:
    """Whether a node is one of ``ops``, over exactly the whole axis of the operand."""
    shape = shape_of(operand)
    if packet(node) not in ops or not shape or node.args[0] is not operand:
        return False
    return _is_only(argument(node, 1, "dim"), axis, len(shape)) and is_covered(axis, shape)


def summed_with(reader: Node, node: Node, axis: Axis) -> tuple[Node, Axis] | None:
    """The other factor and its axis, if the reader sums a product of two factors over ``axis``.

    The reader's result depends on neither factor but through this sum.
    """
    if occurrences(reader, node) != 1:
        return None
    args = reader.args
    if packet(reader) in _PRODUCTS:
        equation, first = _PRODUCTS[packet(reader)]
        return _einsum_partner(equation, args[first : first + 2], node, axis)
    if packet(reader) is aten.einsum:
        return _einsum_partner(args[0], args[1], node, axis)
    if is_grouped_product(reader):  # an index chooses the matrix for each row
        return _einsum_partner("ij,ejk->ik", args[:2], node, axis)
    if packet(reader) in _CONVOLUTIONS and argument(reader, 6, "groups", 1) == 1:
        channels = rank_of(args[0]) - rank_of(args[1]) + 1
        if args[0] is node and axis.dim == channels:
            return args[1], on_dimension(axis, 1)
        if args[1] is node and axis.dim == 1:
            return args[0], on_dimension(axis, channels)
    return None


def _einsum_partner(
    equation: str, factors: Sequence[Any], node: Node, axis: Axis
) -> tuple[Node, Axis] | None:
    """The factor that is multiplied by ``node`` and summed over its ``axis``, with its axis."""
    spelled = letters_of(equation, [rank_of(factor) for factor in factors])
    if spelled is None or node not in factors:
        return None
    terms, output = spelled
    at = [*factors].index(node)
    letter = terms[at][axis.dim]
    others = [i for i, term in enumerate(terms) if letter in term and i != at]
    if letter in output or len(others) != 1 or terms[at].count(letter) != 1:
        return None
    other, term = factors[others[0]], terms[others[0]]
    dim = term.index(letter)
    same = (shape_of(other) or ())[dim] == (shape_of(node) or ())[axis.dim]
    return (other, on_dimension(axis, dim)) if same and term.count(letter) == 1 else None
