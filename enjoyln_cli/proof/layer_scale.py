"""Feature scales (LayerScale) that can be merged into the weight and bias before them.

    λ ⊙ (W x + b) = (diag(λ) W) x + λ ⊙ b

If the right side is stored and λ becomes 1, the product is the identity and keeps a zero mean. This
is exact if nothing else reads λ, W or b:

* every reader of λ is such a product;
* every reader of W and b is a linear op whose result is read only by a product with the same λ.

Only ops that keep features apart may stand in between, so that scaling before or after them gives
the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from enjoyln_cli.graph.nodes import aten, broadcast, is_whole, packet, shape_of
from enjoyln_cli.plan.axis import Axis, feature_axis
from enjoyln_cli.proof.flow import readers_of
from enjoyln_cli.proof.linear_layers import follow_back, linear_layer, parameter_names
from enjoyln_cli.proof.pullback import Opaque, pull
from enjoyln_cli.trace.trace import Trace

_PRODUCTS = {aten.mul, aten.multiply}
_KINDS = {"matrix", "convolution", "embedding"}
"""The kinds of layers that a scale can be merged into."""


@dataclass(frozen=True)
class Scales:
    """Which products become the identity, and which parameters take their scales."""

    products: dict[Node, Node] = field(default_factory=dict)
    """Each product that becomes the identity, to its other factor."""
    into: dict[str, str] = field(default_factory=dict)
    """Each scaled parameter to its scale, both by the first of their tied names."""
    refused: dict[Node, str] = field(default_factory=dict)
    """Products with a scale that cannot be merged, and why."""


@dataclass(frozen=True, kw_only=True)
class _Product:
    """``scale * moved(linear(...))``."""

    node: Node
    rest: Node
    scale: str
    writers: frozenset[str]
    reader: Node
    """The op that reads the scale: the product, or a view in between."""
    linear: Node


def find_scales(
    traces: Iterable[Trace], groups: dict[str, str], single: Callable[[str], bool]
) -> Scales:
    """Every scale that can be merged, in all traces at once.

    ``groups`` maps any parameter name to the first of its tied names. ``single(name)`` says whether
    a tied group is stored as one tensor with the parameter's own layout.
    """
    readers: dict[str, set[Node]] = {}
    found: dict[str, list[_Product]] = {}
    for trace in traces:
        named = parameter_names(trace, groups)
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
    """Why a scale cannot be merged into the layer before it."""
    if len({product.writers for product in products}) > 1:
        return "a scale of the features is applied to the outputs of several layers"
    own = {scale: {p.reader for p in products}}
    own |= dict.fromkeys(products[0].writers - {scale}, {p.linear for p in products})
    for name, nodes in own.items():
        if not readers[name] <= nodes:
            return (
                "a scale of the features, and it or a weight that it scales is also used elsewhere"
            )
        if not single(name):
            return (
                "a scale of the features, and it or a weight that it scales is tied, or stored in"
                " another layout"
            )
    return None


def _product(node: Node, named: Mapping[Node, str]) -> _Product | None:
    """The node as the product of a scale and a linear layer's output; ``None`` if it is none."""
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
        given = follow_back(factor, broadcast(factor, axis, len(shape)), node)
        written = follow_back(rest, axis, node)
        if given is None or given[0] not in named or written is None:
            continue
        writers = _writers(written[0], written[1], named)
        if writers and readers_of(written[0]) == {written[2]}:
            return _Product(
                node=node,
                rest=rest,
                scale=named[given[0]],
                writers=writers,
                reader=given[2],
                linear=written[0],
            )
    return None


def _scaled_axis(factor: Any, shape: tuple[int, ...]) -> Axis | None:
    """The feature axis of the one dimension along which the factor varies, if there is only one."""
    own = shape_of(factor) or ()
    varying = [dim - len(own) for dim, size in enumerate(own) if size != 1]
    if len(varying) != 1 or own[varying[0]] != shape[varying[0]]:
        return None
    return feature_axis(shape, varying[0])


def _writers(node: Node, axis: Axis, named: Mapping[Node, str]) -> frozenset[str] | None:
    """The parameters of a linear layer that hold one slice for each feature of its output."""
    layer = linear_layer(node, named)
    if layer is None or layer.kind not in _KINDS or not layer.reads_directly:
        return None
    pairs, own = pull(node, axis), {parameter.node for parameter in layer.parameters}
    if isinstance(pairs, Opaque):
        return None
    if not all(at in own and is_whole(below, shape_of(at) or ()) for at, below in pairs):
        return None
    return frozenset(named[operand] for operand, _ in pairs)
