"""The pull-back table, third part: ops that take rows by number, or put them there.

What an index or a mask picks whole is linear in what it is picked from, and keeps its mean; what it
puts in the place of other rows is a choice between two values, linear in both.
"""

# Arguments of fx nodes are typed as a wide union; a rule knows its op's schema.
# mypy: disable-error-code="arg-type,union-attr,misc,index,return-value,operator,call-overload"

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from enjoyln_cli.graph.nodes import argument, aten, op_name, packet, rank_of, shape_of
from enjoyln_cli.plan.axis import Axis, on_dimension
from enjoyln_cli.proof.pullback import Opaque, Pull, rule

REPEATS = {
    aten.expand,
    aten.expand_as,
    aten.repeat,
    aten.to,
    aten._to_copy,
}
"""Ops whose result is the same all along a dimension that its operand has one element of."""


def _reached(indices: list[Node | None]) -> int:
    """The leading dimensions up to the last that is indexed; a mask indexes all of its own."""
    used = max((place + 1 for place, index in enumerate(indices) if index is not None), default=0)
    masks = (torch.bool, torch.uint8)
    return sum(
        rank_of(index) if index is not None and index.meta["val"].dtype in masks else 1
        for index in indices[:used]
    )


@rule(aten.index)
def _index(node: Node, axis: Axis) -> Pull:
    """Advanced indexing of dimensions before the mean's own picks whole groups."""
    source, indices = node.args[0], list(node.args[1])
    used = [place for place, index in enumerate(indices) if index is not None]
    rank, trailing = rank_of(source), rank_of(source) - _reached(indices)
    side_by_side = used == list(range(used[0], used[-1] + 1)) if used else False
    if not side_by_side or axis.dim < rank_of(node) - trailing:
        return Opaque("an index along the features")
    return ((source, on_dimension(axis, axis.dim - rank_of(node) + rank)),)


@rule(aten.index_put)
def _index_put(node: Node, axis: Axis) -> Pull:
    """Whole groups are put in the place of others, or added to them."""
    source, indices, values = node.args[0], list(node.args[1]), node.args[2]
    dim = axis.dim - rank_of(node) + rank_of(values)
    if axis.dim < _reached(indices):
        return Opaque("an index along the features")
    if dim < 0 or shape_of(values)[dim] != shape_of(node)[axis.dim]:
        return Opaque("one value in the place of many")
    return ((source, axis), (values, on_dimension(axis, dim)))


@rule(aten.index_add, aten.index_copy)
def _index_add(node: Node, axis: Axis) -> Pull:
    """Rows are added to others, or take their place."""
    source, dim, rows = node.args[0], node.args[1], node.args[3]
    if dim % rank_of(node) == axis.dim:
        return Opaque(f"{op_name(node)} along the features")
    return ((source, axis), (rows, axis))


@rule(aten.repeat_interleave)
def _repeat_interleave(node: Node, axis: Axis) -> Pull:
    """Rows are repeated one by one, along another dimension than the mean."""
    dim = argument(node, 2, "dim")
    if dim is None or dim % rank_of(node) == axis.dim:
        return Opaque("elements that are repeated along the features")
    return ((node.args[0], axis),)


@rule(aten.gather, aten.take_along_dim)
def _gather(node: Node, axis: Axis) -> Pull:
    """Whole groups are picked where the index is one for every element of the mean."""
    source, rank = node.args[0], rank_of(node)
    along = op_name(node) == "take_along_dim"  # which broadcasts, and has the index before
    dim, index = argument(node, 2, "dim") if along else node.args[1], node.args[1 if along else 2]
    if dim is None or rank_of(source) != rank or rank_of(index) != rank:
        return Opaque("an index over all elements")
    one = (along and shape_of(index)[axis.dim] == 1) or _is_repeated(index, axis.dim - rank)
    if dim % rank == axis.dim or not one:
        return Opaque("an index that is not the same for all features")
    if shape_of(source)[axis.dim] != shape_of(node)[axis.dim]:
        return Opaque("an index that takes a part of the features")
    return ((source, axis),)


@rule(aten.scatter_add)
def _scatter_add(node: Node, axis: Axis) -> Pull:
    """Whole rows are added to others where the index is one for every element of the mean."""
    source, dim, index, rows = node.args
    if dim % rank_of(node) == axis.dim or not _is_repeated(index, axis.dim - rank_of(node)):
        return Opaque("an index that is not the same for all features")
    lengths = {shape_of(value)[axis.dim] for value in (source, index, rows)}
    return ((source, axis), (rows, axis)) if len(lengths) == 1 else Opaque("a part of every row")


@rule(aten.masked_scatter)
def _masked_scatter(node: Node, axis: Axis) -> Pull:
    """Whole rows are replaced, by the rows of the source in turn: a choice between two values."""
    source, mask, values = node.args
    shape, rows = shape_of(node), shape_of(values)
    if axis.dim != rank_of(node) - 1 or not _is_repeated(mask, -1) or shape_of(source) != shape:
        return Opaque("a mask that is not the same for all features")
    if not rows or rows[-1] != shape[-1]:
        return Opaque("rows that are scattered across the features")
    return ((source, axis), (values, on_dimension(axis, len(rows) - 1)))


def _is_repeated(value: Any, dim: int) -> bool:
    """Whether a value is the same all along ``dim`` (from the end): it was repeated."""
    while isinstance(value, Node) and packet(value) in REPEATS and not value.meta.get("written"):
        value = value.args[0]
        shape = shape_of(value)
        if shape is not None and (-dim > len(shape) or shape[dim] == 1):
            return True
    return False
