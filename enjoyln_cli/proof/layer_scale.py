"""Scales along the features (LayerScale) that can be merged into the parameters before them.

    λ ⊙ (W x + b) = (diag(λ) W) x + λ ⊙ b

With the right side stored and ``λ = 1`` the product is the identity, and a mean passes it. That is
exact where nobody else reads λ, W or b: each reader of λ has to be such a product, each reader of W
and b a linear op whose value reaches nothing but such a product with the same λ. In between stand
only ops that move whole features, so that scaling before or after them is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from enjoyln_cli.graph.nodes import aten, broadcast, is_whole, occurrences, packet, shape_of
from enjoyln_cli.plan.axis import Axis, feature_axis
from enjoyln_cli.proof import rules
from enjoyln_cli.proof.flow import readers_of
from enjoyln_cli.proof.pullback import Opaque, pull
from enjoyln_cli.trace.capture import Trace

_PRODUCTS = {aten.mul, aten.multiply}
MOVES = rules.VIEWS | {
    aten.alias, aten.clone, aten.contiguous, aten.detach, aten.dropout, aten.permute,
    aten.numpy_T, aten.t, aten.transpose, aten.to, aten._to_copy,
}  # fmt: skip
"""Ops that keep every feature's values together, and do not tell features apart."""
_LINEAR = {
    aten.linear, aten.addmm, aten.conv1d, aten.conv2d, aten.conv3d, aten.convolution,
    aten.embedding,
}  # fmt: skip
"""Ops whose every output feature is linear in its own slice of the parameters."""


@dataclass(frozen=True)
class Scales:
    """Which products become the identity, and where their scales go."""

    products: dict[Node, Node] = field(default_factory=dict)
    """Each product to the factor that remains."""
    into: dict[str, str] = field(default_factory=dict)
    """The parameters that are scaled, to their scale (all by the first of their tied names)."""
    refused: dict[Node, str] = field(default_factory=dict)
    """Products with a scale that cannot be merged, and why."""


@dataclass(frozen=True)
class _Product:
    """``scale * moved(linear(...))``."""

    node: Node
    rest: Node
    scale: str
    writers: frozenset[str]
    reader: Node
    """What reads the scale: the product, or the first view on the way to it."""
    linear: Node


def find_scales(
    traces: Iterable[Trace], groups: dict[str, str], single: Callable[[str], bool]
) -> Scales:
    """Every scale that can be merged, in all traces at once.

    ``groups`` names the first of all names tied to a parameter; ``single`` says whether such a
    group is one stored tensor of the parameter's own layout.
    """
    readers: dict[str, set[Node]] = {}
    found: dict[str, list[_Product]] = {}
    for trace in traces:
        named = {node: groups[names[0]] for node, names in trace.parameters.items()}
        for node, name in named.items():
            readers.setdefault(name, set()).update(readers_of(node))
        for node in trace.graph.nodes:
            if product := _product(node, named):
                found.setdefault(product.scale, []).append(product)
    scales = Scales()
    for scale, products in found.items():
        reason = _obstacle(scale, products, readers, single)
        if reason:
            scales.refused.update({p.node: reason for p in products})
            continue
        scales.products.update({p.node: p.rest for p in products})
        scales.into.update(dict.fromkeys(products[0].writers, scale))
    return scales


def _obstacle(
    scale: str,
    products: list[_Product],
    readers: dict[str, set[Node]],
    single: Callable[[str], bool],
) -> str | None:
    """Why a scale cannot be merged into the parameters before it."""
    if len({product.writers for product in products}) > 1:
        return "a scale of the features is applied to what several layers write"
    own = {scale: {p.reader for p in products}}
    own |= dict.fromkeys(products[0].writers - {scale}, {p.linear for p in products})
    for name, nodes in own.items():
        if not readers[name] <= nodes:
            return "a scale of the features that is also read elsewhere, or scales such a value"
        if not single(name):
            return (
                "a scale of the features that is tied or stored otherwise, or scales such a weight"
            )
    return None


def _product(node: Node, named: dict[Node, str]) -> _Product | None:
    """The node as a product of a scale with what a linear op writes, if it is one."""
    shape = shape_of(node)
    if packet(node) not in _PRODUCTS or shape is None or len(node.args) != 2:
        return None
    if node.meta.get("written"):
        return None
    factor: Any
    rest: Any
    for factor, rest in (node.args, node.args[::-1]):
        axis = _scaled_axis(factor, shape)
        if axis is None or shape_of(rest) != shape:
            continue
        given = origin(factor, broadcast(factor, axis, len(shape)), node)
        written = origin(rest, axis, node)
        if given is None or given[0] not in named or written is None:
            continue
        writers = _writers(written[0], written[1], named)
        if writers and readers_of(written[0]) == {written[2]}:
            return _Product(node, rest, named[given[0]], writers, given[2], written[0])
    return None


def _scaled_axis(factor: Any, shape: tuple[int, ...]) -> Axis | None:
    """All of the one dimension of the product along which the factor varies."""
    own = shape_of(factor) or ()
    varying = [dim - len(own) for dim, size in enumerate(own) if size != 1]
    if len(varying) != 1 or own[varying[0]] != shape[varying[0]]:
        return None
    return feature_axis(shape, varying[0])


def origin(node: Any, axis: Axis, reader: Node) -> tuple[Node, Axis, Node] | None:
    """Back over ops that move whole features and have one reader: the value, and who reads it."""
    while packet(node) in MOVES:
        pairs = pull(node, axis)
        if isinstance(pairs, Opaque) or len(pairs) != 1 or readers_of(node) != {reader}:
            return None
        reader, (node, axis) = node, pairs[0]
        if not is_whole(axis, shape_of(node) or ()):
            return None
    return node, axis, reader


def _writers(linear: Node, axis: Axis, named: dict[Node, str]) -> frozenset[str] | None:
    """The parameters, one feature a slice, that write the value of a linear op."""
    pairs = pull(linear, axis) if packet(linear) in _LINEAR else ()
    if isinstance(pairs, Opaque):
        return None
    for operand, below in pairs:
        whole = is_whole(below, shape_of(operand) or ())
        if operand not in named or not whole or occurrences(linear, operand) != 1:
            return None
    return frozenset(named[operand] for operand, _ in pairs)
