"""The pull-back table: one rule for each family of aten ops, with its proof in one line.

A rule lists the operands in which the op is jointly linear and commutes with centring (see
``pullback.pull``), or returns ``Opaque`` with the reason that there are none. Of an op without a
rule it is assumed that it does not keep a zero mean and that it notices every shift. A missing rule
therefore costs converted norms, never correctness.

This module has the rules of ops that move, select and add elements. Ops that index are in
``index_rules.py``, and ops that multiply by weights in ``weight_rules.py``.
"""

# Arguments of fx nodes are typed as a wide union; a rule knows its op's schema.
# mypy: disable-error-code="arg-type,union-attr,misc,index,return-value,operator,call-overload"

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    argument,
    aten,
    broadcast,
    centred_operand,
    constant_along,
    is_floating,
    op_name,
    packet,
    rank_of,
    shape_of,
    slice_bounds,
)
from enjoyln_cli.plan.axis import Axis, on_dimension
from enjoyln_cli.proof.pullback import Opaque, Pull, rule
from enjoyln_cli.proof.views import VIEWS, through_view


@rule(*VIEWS)
def _view(node: Node, axis: Axis) -> Pull:
    """A row-major reshape moves no element, so the groups stay the same under other indices."""
    source, shape = node.args[0], shape_of(node)
    into = shape_of(source)
    if source.meta["val"].dtype != node.meta["val"].dtype:
        return Opaque("a view of the bits as another dtype")
    found = through_view(axis, shape, into)
    if found is None:
        return Opaque(
            f"{op_name(node)} from {into} to {shape} mixes the features with other dimensions"
        )
    return ((source, found),)


@rule(
    aten.clone, aten.contiguous, aten.alias, aten.detach, aten.detach_, aten.lift_fresh_copy,
    aten.neg, aten.positive,
)  # fmt: skip
def _same(node: Node, axis: Axis) -> Pull:
    """The identity, or a change of sign."""
    return ((node.args[0], axis),)


@rule(aten._to_copy, aten.to, aten.type_as)
def _cast(node: Node, axis: Axis) -> Pull:
    """A cast between floating dtypes is the identity up to rounding; other casts are not."""
    source = node.args[0]
    if isinstance(source, Node) and is_floating(source) and is_floating(node):
        return ((source, axis),)
    return Opaque("a cast that is not between floating dtypes")


@rule(aten.dropout, aten.dropout_, aten.feature_dropout)
def _dropout(node: Node, axis: Axis) -> Pull:
    """The identity in eval mode; in training mode dropout zeroes single elements of a group."""
    if argument(node, 2, "train") and argument(node, 1, "p") != 0:
        return Opaque("dropout in training mode breaks a zero mean")
    return ((node.args[0], axis),)


@rule(
    aten.permute, aten.transpose, aten.t, aten.numpy_T, aten.mT, aten.movedim, aten.moveaxis,
    aten.swapaxes, aten.swapdims,
)  # fmt: skip
def _permute(node: Node, axis: Axis) -> Pull:
    """A permutation of dimensions, found by applying the op to a meta tensor of distinct sizes."""
    source, rank = node.args[0], rank_of(node)
    probe = torch.empty(tuple(range(2, 2 + rank)), device="meta")
    order = [size - 2 for size in node.target(probe, *node.args[1:], **node.kwargs).shape]
    return ((source, on_dimension(axis, order[axis.dim])),)


def _terms(terms: Iterable[Any], node: Node, axis: Axis, constant: str, same: str) -> Pull:
    """The pairs of a sum: every term has to vary along the axis, or be the number 0.

    A nonzero term that is constant along the axis has a nonzero mean; ``constant`` and ``same`` end
    the sentences that say so.
    """
    rank, pairs = rank_of(node), []
    for term in terms:
        if not isinstance(term, Node):
            if term == 0:
                continue
            return Opaque(f"the constant {term} {constant}")
        if constant_along(term, axis, rank):
            return Opaque(f"a term that is the same for all features {same}")
        pairs.append((term, broadcast(term, axis, rank)))
    return tuple(pairs)


@rule(aten.add, aten.sub)
def _add(node: Node, axis: Axis) -> Pull:
    """Linear in both addends; ``x - mean(x)`` has zero mean for every ``x``."""
    centred = centred_operand(node)
    if centred is not None and centred[1] == axis:
        return ()
    return _terms(node.args[:2], node, axis, "is added to every element", "is added")


@rule(aten.mul, aten.multiply)
def _mul(node: Node, axis: Axis) -> Pull:
    """Linear in one factor if the other is constant along the axis."""
    rank = rank_of(node)
    varying = [f for f in node.args[:2] if not constant_along(f, axis, rank)]
    if len(varying) != 1:
        return Opaque("an elementwise product with a factor that is not the same for all features")
    return ((varying[0], broadcast(varying[0], axis, rank)),)


@rule(aten.div, aten.true_divide)
def _div(node: Node, axis: Axis) -> Pull:
    """Linear in the numerator if the divisor is constant along the axis."""
    numerator, divisor = node.args[:2]
    rank = rank_of(node)
    if node.kwargs.get("rounding_mode") is not None:
        return Opaque("a rounded division")
    if not constant_along(divisor, axis, rank):
        return Opaque("a division by numbers that are not the same for all features")
    return ((numerator, broadcast(numerator, axis, rank)),)


@rule(aten.where)
def _where(node: Node, axis: Axis) -> Pull:
    """If the condition is constant along the axis, the result is a masked sum of both branches."""
    condition, *branches = node.args
    if not constant_along(condition, axis, rank_of(node)):
        return Opaque("a choice that is not the same for all features")
    return _terms(branches, node, axis, "is filled in", "is filled in")


@rule(aten.lerp)
def _lerp(node: Node, axis: Axis) -> Pull:
    """``x + w (y - x)``: linear in both ends if ``w`` is constant along the axis."""
    if not constant_along(node.args[2], axis, rank_of(node)):
        return Opaque("a weight between two values that is not the same for all features")
    return _terms(node.args[:2], node, axis, "is mixed in", "is mixed in")


@rule(aten.masked_fill)
def _masked_fill(node: Node, axis: Axis) -> Pull:
    """Filling in zeros is a product with the inverted mask, constant along the axis."""
    source, mask, value = node.args
    if value != 0 or not constant_along(mask, axis, rank_of(node)):
        return Opaque("a mask that fills in a nonzero value, or is not the same for all features")
    return ((source, broadcast(source, axis, rank_of(node))),)


@rule(aten.expand, aten.expand_as, aten.broadcast_to)
def _expand(node: Node, axis: Axis) -> Pull:
    """Copies along other dimensions; a copy along the axis itself would be constant there."""
    source = node.args[0]
    if constant_along(source, axis, rank_of(node)):
        return Opaque("a value that is repeated along the features")
    return ((source, broadcast(source, axis, rank_of(node))),)


@rule(aten.repeat, aten.tile)
def _repeat(node: Node, axis: Axis) -> Pull:
    """As ``expand``: the dimension of the axis may occur only once."""
    source, rank = node.args[0], rank_of(node)
    times = [1] * (rank - len(node.args[1])) + list(node.args[1])  # tile may omit leading 1s
    if times[axis.dim] != 1:
        return Opaque("a value that is repeated along the features")
    return ((source, broadcast(source, axis, rank_of(node))),)


@rule(aten.slice, aten.narrow)
def _slice(node: Node, axis: Axis) -> Pull:
    """A slice along another dimension keeps the axis; a slice along the axis moves its start."""
    source, found = node.args[0], slice_bounds(node)
    if argument(node, 1, "dim", 0) % rank_of(node) != axis.dim:
        return ((source, axis),)
    if found is None:
        return Opaque("a strided slice of the features")
    return ((source, replace(axis, start=axis.start + found[1])),)


@rule(operator.getitem)
def _part(node: Node, axis: Axis) -> Pull:
    """A part of a split is a slice; a part of an unbind is a select."""
    whole, found = node.args[0], slice_bounds(node)
    if found is not None:
        start = axis.start + (found[1] if found[0] == axis.dim else 0)
        return ((whole.args[0], replace(axis, start=start)),)
    if packet(whole) is aten.unbind:
        dim = argument(whole, 1, "dim", 0) % (rank_of(node) + 1)
        return ((whole.args[0], on_dimension(axis, axis.dim + (axis.dim >= dim))),)
    if packet(whole) is aten.embedding_bag:
        return _bag(whole, axis)
    return Opaque(f"{op_name(whole)} does not keep a zero mean")


def _bag(node: Node, axis: Axis) -> Pull:
    """A sum or mean of the table's rows; the other results of an ``embedding_bag`` are integers."""
    if axis.dim != 1 or argument(node, 4, "mode", 0) not in (0, 1):
        return Opaque("a maximum of several rows, or a mean over rows")
    return ((node.args[0], axis),)


@rule(aten.select)
def _select(node: Node, axis: Axis) -> Pull:
    """One index along another dimension is selected."""
    source = node.args[0]
    dim = node.args[1] % (rank_of(node) + 1)
    return ((source, on_dimension(axis, axis.dim + (axis.dim >= dim))),)


@rule(aten.cat, aten.concat, aten.concatenate)
def _cat(node: Node, axis: Axis) -> Pull:
    """A concatenation; along the dimension of the axis, each part has to contain whole groups."""
    # torch ignores empty tensors of shape (0,) here, whatever the rank of the others
    parts = [part for part in node.args[0] if shape_of(part) != (0,)]
    if argument(node, 1, "dim", 0) % rank_of(node) != axis.dim:
        return tuple((part, axis) for part in parts)
    group, pairs, at = axis.size * axis.inner, [], 0
    for part in parts:
        end = at + shape_of(part)[axis.dim]
        if at <= axis.start and axis.stop <= end:
            return ((part, replace(axis, start=axis.start - at)),)
        first, last = max(at, axis.start), min(end, axis.stop)
        if first < last:
            if axis.step or (last - axis.start) % group:
                return Opaque("a concatenation along the features mixes the means of its parts")
            groups = (last - first) // group
            pairs.append((part, replace(axis, start=first - at, outer=groups)))
        at = end
    return tuple(pairs)


@rule(aten.stack)
def _stack(node: Node, axis: Axis) -> Pull:
    """A concatenation along a new dimension."""
    dim = argument(node, 1, "dim", 0) % rank_of(node)
    if dim == axis.dim:
        return Opaque("a stack along the features")
    below = on_dimension(axis, axis.dim - (axis.dim > dim))
    return tuple((part, below) for part in node.args[0])


@rule(aten.index_select, aten.roll, aten.flip)
def _reorder(node: Node, axis: Axis) -> Pull:
    """Whole groups are selected or reordered along other dimensions."""
    dims = node.args[1] if op_name(node) == "index_select" else node.args[-1]
    listed = [dims] if isinstance(dims, int) else list(dims)
    if op_name(node) == "roll" and (len(node.args) < 3 or not dims):
        return Opaque("a roll over all dimensions")
    if axis.dim in [dim % rank_of(node) for dim in listed]:
        return Opaque(f"{op_name(node)} along the features")
    return ((node.args[0], axis),)


@rule(aten.unfold)
def _unfold(node: Node, axis: Axis) -> Pull:
    """Windows along another dimension; a new last dimension holds the elements of each window."""
    source = node.args[0]
    if axis.dim in (node.args[1] % rank_of(source), rank_of(source)):
        return Opaque("windows along the features")
    return ((source, axis),)


@rule(aten.copy)
def _copy(node: Node, axis: Axis) -> Pull:
    """The values of one tensor, copied into another tensor."""
    source = node.args[1]
    if shape_of(source) != shape_of(node):
        return Opaque("a copy into another shape")
    return ((source, axis),)


@rule(aten.sum, aten.mean)
def _reduce(node: Node, axis: Axis) -> Pull:
    """A sum or mean over other dimensions is linear and the same for every feature."""
    source, dims = node.args[0], argument(node, 1, "dim")
    rank = rank_of(source)
    gone = {dim % rank for dim in dims}
    left = range(rank) if argument(node, 2, "keepdim", False) else {*range(rank)} - gone
    return ((source, on_dimension(axis, sorted(left)[axis.dim])),)


@rule(aten.cumsum)
def _cumsum(node: Node, axis: Axis) -> Pull:
    """A running sum along another dimension."""
    if argument(node, 1, "dim") % rank_of(node) == axis.dim:
        return Opaque("a running sum along the features")
    return ((node.args[0], axis),)


@rule(
    aten.avg_pool1d, aten.avg_pool2d, aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d,
    aten.upsample_nearest1d, aten.upsample_linear1d, aten.upsample_nearest2d,
    aten.upsample_bicubic2d, aten.upsample_bilinear2d,
    aten._upsample_bicubic2d_aa, aten._upsample_bilinear2d_aa,
)  # fmt: skip
def _resample(node: Node, axis: Axis) -> Pull:
    """Spatial resampling is the same linear map for every channel (dimension 1 of N, C, …)."""
    spatial = axis.dim - rank_of(node) + (1 if "1d" in op_name(node) else 2)
    if spatial >= 0 and not _leaves_alone(node, spatial):
        return Opaque(f"{op_name(node)} along the features")
    return ((node.args[0], axis),)


def _leaves_alone(node: Node, spatial: int) -> bool:
    """Whether a pooling leaves one of its spatial dimensions as it is (kernel 1, stride 1)."""
    if op_name(node) not in ("avg_pool1d", "avg_pool2d"):
        return False
    kernel, stride = list(node.args[1]), list(argument(node, 2, "stride") or node.args[1])
    padding = list(argument(node, 3, "padding", 0) or [0])
    sizes = [given[spatial % len(given)] for given in (kernel, stride, padding)]
    return sizes == [1, 1, 0]


@rule(
    aten.constant_pad_nd, aten.pad, aten.replication_pad1d, aten.replication_pad2d,
    aten.replication_pad3d, aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d,
)  # fmt: skip
def _pad(node: Node, axis: Axis) -> Pull:
    """New positions along other dimensions hold zeros or copies of whole groups."""
    constant = op_name(node) == "constant_pad_nd"
    if op_name(node) == "pad":
        constant = argument(node, 2, "mode", "constant") == "constant"
    value = argument(node, 3 if op_name(node) == "pad" else 2, "value", 0) if constant else 0
    padded = {rank_of(node) - 1 - i // 2 for i, width in enumerate(node.args[1]) if width != 0}
    if value not in (0, None) or axis.dim in padded:
        return Opaque("padding along the features, or with a nonzero number")
    return ((node.args[0], axis),)


@rule(
    aten.zeros, aten.zeros_like, aten.new_zeros, aten.empty, aten.empty_like, aten.new_empty
)  # fmt: skip
def _zeros(node: Node, axis: Axis) -> Pull:
    """Zeros have zero mean, and memory that holds no values yet may count as zeros."""
    return ()
