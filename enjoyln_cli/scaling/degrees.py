"""How the scale of an op's result follows from the scales of its operands.

A value has the *exponent* ``e`` if it is held as ``2^e x``. For each op, ``degrees`` lists what the
exponent of the result is made of:

    x + y, cat, where, relu       e(result) = e(x) = e(y): homogeneous of degree 1 jointly
    W x + b                       e(result) = e(W) + e(x) = e(b)
    x^p, sqrt, 1 / x              e(result) = p e(x)
    LayerNorm(x) weight + bias    e(result) = e(weight) = e(bias), and eps has the exponent 2 e(x)
    x + c                         e(result) = e(x), and the number c has this exponent, too

Every other operand needs the exponent 0, and so does the result of an op without a rule.
"""

# Arguments of fx nodes are typed as a wide union.
# mypy: disable-error-code="arg-type,union-attr,misc,index,return-value,operator"

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    DROPOUTS,
    SPLITS,
    argument,
    aten,
    is_floating,
    is_part,
    occurrences,
    packet,
    reads_no_values,
)
from enjoyln_cli.proof.views import MOVES

ONE, HALF = Fraction(1), Fraction(1, 2)


@dataclass(frozen=True)
class Degrees:
    """What the exponent of a result is made of. An operand may be listed several times."""

    factors: tuple[tuple[Node, Fraction], ...] = ()
    """The exponent of the result is the sum of these operands' exponents, each times a power."""
    alike: tuple[Node, ...] = ()
    """These operands have the exponent of the result."""
    normed: Node | None = None
    """An operand whose exponent does not change the result if the op's eps has twice this
    exponent."""
    adds_number: bool = False
    """Whether the op adds a number other than zero, which has the exponent of the result."""


_INDEXED = {
    aten.gather, aten.index, aten.index_add, aten.index_put, aten.index_select, aten.masked_scatter,
    aten.masked_select, aten.repeat_interleave, aten.scatter, aten.scatter_add,
}  # fmt: skip
"""These read integers and booleans as indices or masks."""
_SAME = MOVES | SPLITS | DROPOUTS | _INDEXED | {
    aten.abs, aten.absolute, aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.add,
    aten.amax, aten.amin, aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d, aten.cat,
    aten.cumsum, aten.detach, aten.diagonal, aten.expand, aten.expand_as, aten.flip, aten.im2col,
    aten.leaky_relu, aten.lift_fresh_copy, aten.max_pool1d, aten.max_pool2d, aten.maximum,
    aten.mean, aten.minimum, aten.narrow, aten.neg, aten.pixel_shuffle, aten.pixel_unshuffle,
    aten.relu, aten.repeat, aten.roll, aten.select, aten.select_scatter, aten.slice,
    aten.slice_scatter, aten.stack, aten.std, aten.sub, aten.sum, aten.to, aten._to_copy,
    aten.type_as, aten.unbind, aten.unfold, aten.upsample_bicubic2d, aten.upsample_bilinear2d,
    aten.upsample_linear1d, aten.upsample_nearest1d, aten.upsample_nearest2d, aten.where,
}  # fmt: skip
"""Homogeneous of degree 1 in all floating-point operands at once."""
_PRODUCTS = {
    aten.mul, aten.multiply, aten.matmul, aten.mm, aten.bmm, aten.einsum, aten.outer, aten.dot,
}  # fmt: skip
"""Linear in each operand by itself."""
_POWERS = {
    aten.sqrt: HALF, aten.rsqrt: -HALF, aten.reciprocal: -ONE, aten.square: 2 * ONE,
    aten.var: 2 * ONE,
}  # fmt: skip
_LAYERS = {
    aten.linear, aten.conv1d, aten.conv2d, aten.conv3d, aten.conv_transpose1d,
    aten.conv_transpose2d, aten.convolution,
}  # fmt: skip
"""Their arguments are an input, a weight and a bias."""
_SUMS_OF_PRODUCTS = {aten.addmm, aten.baddbmm, aten.addbmm}
NORMS: Mapping[Any, tuple[int, int | None, int, float | None]] = {
    aten.layer_norm: (2, 3, 4, 1e-5), aten.group_norm: (2, 3, 4, 1e-5),
    aten.rms_norm: (2, None, 3, None),
}  # fmt: skip
"""Where weight, bias and eps of a norm stand, and eps if it is not given."""
_FILLS = {aten.masked_fill, aten.pad, aten.constant_pad_nd}


def degrees(node: Node) -> Degrees | None:
    """The rule for the op of ``node``; ``None`` if its result is not known to be homogeneous."""
    op = packet(node)
    tensors = _floating(node)
    if is_part(node):
        return Degrees(alike=(node.args[0],)) if packet(node.args[0]) in _SAME else None
    if isinstance(node.meta.get("val"), torch.Tensor) and not is_floating(node):
        return None
    if op is aten.linalg_vector_norm:
        return Degrees(alike=tensors) if argument(node, 1, "ord", 2) != 0 else None
    if op in _SAME:
        values = node.args[1:] if op is aten.where else node.all_input_nodes
        if op not in _INDEXED and any(_is_whole_number(node, value) for value in values):
            return None
        is_sum, has_number = op in (aten.add, aten.sub), any(map(_is_number, node.args))
        if op is aten.where and has_number:
            return None
        return Degrees(alike=tensors, adds_number=is_sum and has_number)
    if op in _PRODUCTS:
        return Degrees(factors=tuple((tensor, ONE) for tensor in tensors))
    if op in (aten.div, aten.true_divide) and not node.kwargs:
        powers = (ONE, -ONE)
        pairs = zip(node.args[:2], powers, strict=True)
        return Degrees(factors=tuple((x, p) for x, p in pairs if isinstance(x, Node)))
    if op in _POWERS:
        return Degrees(factors=((node.args[0], _POWERS[op]),))
    if op is aten.pow and _is_real(node.args[1]) and isinstance(node.args[0], Node):
        return Degrees(factors=((node.args[0], Fraction(node.args[1])),))
    if op in _LAYERS:
        weight, bias = node.args[1], argument(node, 2, "bias")
        alike = (bias,) if isinstance(bias, Node) else ()
        return Degrees(((node.args[0], ONE), (weight, ONE)), alike)
    if op in _SUMS_OF_PRODUCTS:
        added, left, right = node.args[:3]
        return Degrees(((left, ONE), (right, ONE)), (added,))
    if op is aten.embedding:
        return Degrees(factors=((node.args[0], ONE),))
    if op is aten.scaled_dot_product_attention:
        return Degrees(factors=((node.args[2], ONE),))
    if op in NORMS:
        return _norm(node)
    if op in _FILLS:
        filled = argument(node, 3 if op is aten.pad else 2, "value", 0)
        if op is aten.pad and argument(node, 2, "mode", "constant") != "constant":
            filled = 0
        return Degrees(alike=(node.args[0],)) if _is_unscaled(filled or 0) else None
    return None


def eps_of(node: Node) -> float | None:
    """The number that a norm op, or a sum with a number, adds to a mean of squares."""
    if packet(node) in NORMS:
        *_, at, default = NORMS[packet(node)]
        eps = argument(node, at, "eps", default)
    else:
        eps = next((x for x in node.args[:2] if _is_real(x)), None)
    return float(eps) if _is_real(eps) else None


def _norm(node: Node) -> Degrees:
    at, bias_at, *_ = NORMS[packet(node)]
    weight = argument(node, at, "weight")
    bias = None if bias_at is None else argument(node, bias_at, "bias")
    factors = ((weight, ONE),) if isinstance(weight, Node) else ()
    return Degrees(factors, (bias,) if isinstance(bias, Node) else (), normed=node.args[0])


def _floating(node: Node) -> tuple[Node, ...]:
    """The floating operands, each as often as the op reads it."""
    operands = filter(is_floating, node.all_input_nodes)
    return tuple(x for operand in operands for x in [operand] * occurrences(node, operand))


def _is_whole_number(node: Node, operand: Any) -> bool:
    """Whether ``node`` reads the values of a tensor of another dtype, which has no scale."""
    value = operand.meta.get("val") if isinstance(operand, Node) else None
    is_other = isinstance(value, torch.Tensor) and not value.is_floating_point()
    return is_other and not reads_no_values(node, operand)


def _is_real(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    """Whether an argument is a number whose scale counts: neither zero nor infinite."""
    return _is_real(value) and not _is_unscaled(value)


def _is_unscaled(value: Any) -> bool:
    """Whether a number is the same at every scale."""
    return _is_real(value) and value in (0, float("inf"), float("-inf"))
