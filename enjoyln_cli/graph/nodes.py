"""Read the nodes of a captured graph: their ops, arguments and shapes."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from enjoyln_cli.plan.axis import Axis, on_dimension

aten = torch.ops.aten
DROPOUTS = {aten.dropout, aten.feature_dropout}
"""Ops that return their operand itself in eval mode, although their schemas do not say so."""


def packet(node: Node) -> Any:
    """The op of a node without its overload; for a node that calls no op, its target."""
    return getattr(node.target, "overloadpacket", node.target)


def op_name(node: Node) -> str:
    """The short name of the op: ``cat``, ``layer_norm``."""
    return str(getattr(packet(node), "__name__", packet(node)))


def depends_on_values(target: Any) -> bool:
    """Whether an op returns a number to Python, or a tensor whose shape depends on values."""
    told = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not told.isdisjoint(getattr(target, "tags", ()))


_INT = frozenset({int})


def shape_of(node: Any) -> tuple[int, ...] | None:
    """The traced shape of a node; ``None`` if it is not a tensor or its shape depends on values."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    if not isinstance(value, torch.Tensor):
        return None
    shape = tuple(value.shape)
    return shape if _INT.issuperset(map(type, shape)) else None


def rank_of(node: Any) -> int:
    """Number of dimensions; 0 if the node is not a tensor."""
    return len(shape_of(node) or ())


def is_floating(node: Node) -> bool:
    """Whether the node is a tensor of a floating dtype."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def argument(node: Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of the node's op, which may be passed by position or by name."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def is_part(node: Node) -> bool:
    """Whether the node selects one of several results of another node (``getitem``)."""
    return node.target is operator.getitem


def occurrences(node: Node, operand: Node) -> int:
    """How often ``operand`` is an argument of the node; of a ``getitem``, of the op it reads."""
    whole: Any = node.args[0] if is_part(node) else node
    found: list[Node] = []
    torch.fx.map_arg((whole.args, whole.kwargs), lambda argument: found.append(argument))
    return sum(argument is operand for argument in found)


SHAPE_ONLY = {
    aten._assert_tensor_metadata,
    aten.empty_like,
    aten.full_like,
    aten.new_empty,
    aten.new_full,
    aten.new_ones,
    aten.new_zeros,
    aten.ones_like,
    aten.sym_numel,
    aten.sym_size,
    aten.zeros_like,
}
LIKE = {aten.type_as, aten.view_as, aten.expand_as, aten.reshape_as}
"""Ops that read the dtype or shape of their second operand, not its values."""


def reads_no_values(node: Node, operand: Node) -> bool:
    """Whether an op reads nothing of ``operand`` but its shape and dtype.

    How many elements an index chooses depends on the index alone.
    """
    op = packet(node)
    if op is aten.copy:
        return node.args[0] is operand and node.args[1] is not operand
    if op is aten.index and occurrences(node, operand) == 1:
        sized = all(packet(user) in SHAPE_ONLY for user in node.users)
        return node.args[0] is operand and sized
    return op in SHAPE_ONLY or (op in LIKE and node.args[0] is not operand)


def readers_of(node: Node) -> set[Node]:
    """The nodes that read the values of another, not just its shape."""
    return {user for user in node.users if packet(user) not in SHAPE_ONLY}


def constant_along(value: Any, axis: Axis, rank: int) -> bool:
    """Whether ``value``, broadcast to ``rank`` dimensions, is constant along ``axis.dim``."""
    if not isinstance(value, Node):
        return True
    shape = shape_of(value)
    if shape is None:
        return False
    dim = axis.dim - (rank - len(shape))
    return dim < 0 or shape[dim] == 1


def broadcast(operand: Node, axis: Axis, rank: int) -> Axis:
    """The axis of an operand that, broadcast to ``rank`` dimensions, becomes ``axis``."""
    return on_dimension(axis, axis.dim - (rank - rank_of(operand)))


def is_whole(axis: Axis, shape: tuple[int, ...]) -> bool:
    """Whether the axis covers its whole dimension as one group."""
    return axis.start == 0 and axis.outer == axis.inner == 1 and axis.size == shape[axis.dim]


def is_covered(axis: Axis, shape: tuple[int, ...]) -> bool:
    """Whether the groups of the axis hold every element of its dimension."""
    return axis.start == axis.step == 0 and axis.length == shape[axis.dim]


SPLITS = {aten.split, aten.split_with_sizes, aten.chunk}


def slice_bounds(node: Node) -> tuple[int, int, int] | None:
    """``(dim, start, stop)`` of the elements that a slice, or one part of a split, selects."""
    source: Any = node.args[0] if node.args else None
    if packet(node) is aten.narrow:
        into = shape_of(source)
        dim, start, length = node.args[1:4]
        if into is None or not (isinstance(dim, int) and isinstance(start, int)):
            return None
        if not isinstance(length, int):
            return None
        start %= max(into[dim], 1)
        return dim % len(into), start, start + length
    if packet(node) is aten.slice:
        into = shape_of(source)
        bounds = [argument(node, 2, "start"), argument(node, 3, "end")]
        dim, step = argument(node, 1, "dim", 0), argument(node, 4, "step", 1)
        if into is None or step != 1 or any(isinstance(bound, Node) for bound in bounds):
            return None
        start, stop, _ = slice(*bounds).indices(into[dim % len(into)])
        return dim % len(into), start, stop
    if not is_part(node) or packet(source) not in SPLITS:
        return None
    dim = argument(source, 2, "dim", 0) % rank_of(source.args[0])
    part = int(str(node.args[1]))
    sizes = [value.shape[dim] for value in source.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        return None
    start = sum(sizes[:part])
    return dim, start, start + sizes[part]


def offsets(node: Node, part: Node) -> list[int]:
    """The offsets of ``part`` in a concatenation, one for each time that it occurs."""
    parts: Any = node.args[0]
    dim = argument(node, 1, "dim", 0) % rank_of(node)
    starts, at = [], 0
    for other in parts:
        shape = shape_of(other)
        if other is part:
            starts.append(at)
        at += shape[dim] if shape and len(shape) > dim else 0
    return starts


def centred_operand(node: Node) -> tuple[Node, Axis] | None:
    """``(x, axis)`` if the node is ``x - x.mean(dim, keepdim=True)``."""
    if packet(node) is not aten.sub or len(node.args) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    x, mean = node.args
    if not isinstance(x, Node) or not isinstance(mean, Node) or mean.target is not aten.mean.dim:
        return None
    if x.meta.get("written") or mean.meta.get("written"):
        return None  # x may be written between the mean and the subtraction
    dims, shape = argument(mean, 1, "dim"), shape_of(x)
    if mean.args[0] is not x or mean.kwargs.get("dtype") is not None or not shape:
        return None
    if not argument(mean, 2, "keepdim", False) or dims is None or len(dims) != 1:
        return None
    return x, Axis(dims[0] % len(shape), 0, 1, shape[dims[0] % len(shape)], 1)
