"""The pull-back table, third part: ops that read or write rows by index or mask.

Reading whole rows is linear in the tensor that they are read from, and keeps each row's mean.
Writing whole rows chooses, row by row, between two tensors, and is linear in both.
"""

# Arguments of fx nodes are typed as a wide union; a rule knows its op's schema.
# mypy: disable-error-code="arg-type,union-attr,misc,index,return-value,operator,call-overload"

from __future__ import annotations

from typing import Any

from torch.fx import Node

from enjoyln_cli.graph.nodes import argument, aten, op_name, packet, rank_of, shape_of
from enjoyln_cli.models.meta_device import is_mask
from enjoyln_cli.plan.axis import Axis, on_dimension
from enjoyln_cli.proof.pullback import Opaque, Pull, rule

REPEATS = {
    aten.expand,
    aten.expand_as,
    aten.repeat,
    aten.to,
    aten._to_copy,
}
"""Ops whose result is constant along each dimension in which their operand has size 1."""


def _indexed_dims(indices: list[Node | None]) -> int:
    """How many leading dimensions are indexed; a mask counts for as many as it has itself."""
    used = max((place + 1 for place, index in enumerate(indices) if index is not None), default=0)
    return sum(
        rank_of(index) if index is not None and is_mask(index.meta["val"]) else 1
        for index in indices[:used]
    )


@rule(aten.index)
def _index(node: Node, axis: Axis) -> Pull:
    """Advanced indexing of dimensions before the axis selects whole groups.

    The dimensions after the last index come last in the result, wherever torch puts the indices'
    dimensions.
    """
    source = node.args[0]
    rank, trailing = rank_of(source), rank_of(source) - _indexed_dims(node.args[1])
    if axis.dim < rank_of(node) - trailing:
        return Opaque("an index along the features")
    return ((source, on_dimension(axis, axis.dim - rank_of(node) + rank)),)


@rule(aten.index_put)
def _index_put(node: Node, axis: Axis) -> Pull:
    """Whole groups replace other groups, or are added to them."""
    source, indices, values = node.args[0], list(node.args[1]), node.args[2]
    dim = axis.dim - rank_of(node) + rank_of(values)
    if axis.dim < _indexed_dims(indices):
        return Opaque("an index along the features")
    if dim < 0 or shape_of(values)[dim] != shape_of(node)[axis.dim]:
        return Opaque("a single value that is written to several features")
    return ((source, axis), (values, on_dimension(axis, dim)))


@rule(aten.index_add, aten.index_copy)
def _index_add(node: Node, axis: Axis) -> Pull:
    """Whole rows are added to other rows, or replace them."""
    source, dim, rows = node.args[0], node.args[1], node.args[3]
    if dim % rank_of(node) == axis.dim:
        return Opaque(f"{op_name(node)} along the features")
    return ((source, axis), (rows, axis))


@rule(aten.repeat_interleave)
def _repeat_interleave(node: Node, axis: Axis) -> Pull:
    """Elements are repeated one by one, along another dimension than the axis."""
    dim = argument(node, 2, "dim")
    if dim is None or dim % rank_of(node) == axis.dim:
        return Opaque("elements that are repeated along the features")
    return ((node.args[0], axis),)


@rule(aten.gather, aten.take_along_dim)
def _gather(node: Node, axis: Axis) -> Pull:
    """Whole groups are selected if the index is constant along the axis."""
    source, rank = node.args[0], rank_of(node)
    along = op_name(node) == "take_along_dim"  # it broadcasts, and takes the index before dim
    dim = argument(node, 2, "dim") if along else node.args[1]
    index = node.args[1 if along else 2]
    if dim is None:
        return Opaque("an index over all elements")
    one = (along and shape_of(index)[axis.dim] == 1) or _is_repeated(index, axis.dim - rank)
    if dim % rank == axis.dim or not one:
        return Opaque("an index that is not the same for all features")
    if shape_of(source)[axis.dim] != shape_of(node)[axis.dim]:
        return Opaque("an index that takes a part of the features")
    return ((source, axis),)


@rule(aten.scatter_add)
def _scatter_add(node: Node, axis: Axis) -> Pull:
    """Whole rows are added to other rows if the index is constant along the axis."""
    source, dim, index, rows = node.args
    if dim % rank_of(node) == axis.dim or not _is_repeated(index, axis.dim - rank_of(node)):
        return Opaque("an index that is not the same for all features")
    lengths = {shape_of(value)[axis.dim] for value in (source, index, rows)}
    return ((source, axis), (rows, axis)) if len(lengths) == 1 else Opaque("a part of every row")


@rule(aten.scatter)
def _scatter(node: Node, axis: Axis) -> Pull:
    """Whole rows replace other rows if the index is constant along the axis."""
    rows = node.args[3]
    if not isinstance(rows, Node) or node.kwargs:
        return Opaque("numbers that are written to single features")
    return _scatter_add(node, axis)


@rule(aten.select_scatter)
def _select_scatter(node: Node, axis: Axis) -> Pull:
    """One index along another dimension is replaced."""
    source, rows = node.args[:2]
    dim = node.args[2] % rank_of(node)
    if dim == axis.dim:
        return Opaque("a value that is written to one feature")
    return ((source, axis), (rows, on_dimension(axis, axis.dim - (axis.dim > dim))))


@rule(aten.slice_scatter)
def _slice_scatter(node: Node, axis: Axis) -> Pull:
    """Some indices along another dimension are replaced."""
    if argument(node, 2, "dim", 0) % rank_of(node) == axis.dim:
        return Opaque("values that are written to a part of the features")
    return tuple((operand, axis) for operand in node.args[:2])


@rule(aten.masked_scatter)
def _masked_scatter(node: Node, axis: Axis) -> Pull:
    """Masked rows are replaced by the rows of ``values`` in order: a choice of two tensors."""
    source, mask, values = node.args
    shape, rows = shape_of(node), shape_of(values)
    if axis.dim != len(shape) - 1 or not _is_repeated(mask, -1):
        return Opaque("a mask that is not the same for all features")
    if rows[-1:] != shape[-1:]:
        return Opaque("rows that are scattered across the features")
    return ((source, axis), (values, on_dimension(axis, len(rows) - 1)))


def _is_repeated(value: Any, dim: int) -> bool:
    """Whether a value is constant along ``dim`` (from the end) because it was expanded there."""
    while isinstance(value, Node) and packet(value) in REPEATS and not value.meta.get("written"):
        value = value.args[0]
        shape = shape_of(value)
        if shape is not None and (-dim > len(shape) or shape[dim] == 1):
            return True
    return False
