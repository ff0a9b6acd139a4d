"""Ops that become the identity since stored weights take over what they do.

LayerScale, feature scales that fuse into the weight and bias before them:

    λ ⊙ (W x + b) = (diag(λ) W) x + λ ⊙ b

If the right side is stored and λ becomes 1, the product is the identity and keeps a zero mean. This
is exact if nothing else reads λ, W or b:

* every reader of λ is such a product;
* every reader of W and b is a linear op whose result is read only by a product with the same λ.

Only ops that keep features apart may stand in between, so that scaling before or after them gives
the same result.

A norm behind an embedding table: ``norm(E_t)`` is a function of the token t alone, so a table E'
can hold what the norm makes of it (see ``edits.baked_rows``). With the new table, lookup and norm
together are one lookup of the wanted rows. This is exact if nothing else reads the table, or the
norm's weight and bias:

* every reader of the table is a lookup whose rows only a call of this norm reads;
* every call of the norm reads such rows, or an input that takes their place (``inputs_embeds``).
  Callers have to take such inputs from the new table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    argument,
    aten,
    broadcast,
    is_whole,
    op_name,
    packet,
    readers_of,
    shape_of,
)
from enjoyln_cli.plan.axis import Axis, feature_axis
from enjoyln_cli.proof.linear_layers import follow_back, linear_layer, parameter_readers
from enjoyln_cli.proof.pullback import Opaque, pull
from enjoyln_cli.trace.trace import Trace

_PRODUCTS = {aten.mul, aten.multiply}
_KINDS = {"matrix", "convolution", "embedding"}
"""The kinds of layers that a scale can be fused into."""


@dataclass(frozen=True)
class Scales:
    """Which products become the identity, and which parameters take their scales."""

    identities: dict[Node, Node] = field(default_factory=dict)
    """Each product that becomes the identity, to its other factor."""
    into: dict[str, str] = field(default_factory=dict)
    """Each scaled parameter to its scale, both by the first of their tied names."""
    refused: dict[Node, str] = field(default_factory=dict)
    """Products with a scale that cannot be fused, and why."""


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
    traces: Sequence[Trace], groups: Mapping[str, str], single: Callable[[str], bool]
) -> Scales:
    """Every scale that can be fused, in all traces at once.

    ``groups`` maps any parameter name to the first of its tied names. ``single(name)`` says whether
    a tied group is stored as one tensor with the parameter's own layout.
    """
    named, readers = parameter_readers(traces, groups)
    found: dict[str, list[_Product]] = {}
    for trace, names in zip(traces, named, strict=True):
        for node in trace.graph.nodes:
            if product := _product(node, names):
                found.setdefault(product.scale, []).append(product)
    scales = Scales()
    for scale, products in found.items():
        reason = _obstacle(scale, products, readers, single)
        if reason:
            scales.refused.update({p.node: reason for p in products})
            continue
        scales.identities.update({p.node: p.rest for p in products})
        scales.into.update(dict.fromkeys(products[0].writers, scale))
    return scales


def _obstacle(
    scale: str,
    products: list[_Product],
    readers: dict[str, set[Node]],
    single: Callable[[str], bool],
) -> str | None:
    """Why a scale cannot be fused into the layer before it."""
    if len({product.writers for product in products}) > 1:
        return "a scale of the features is applied to the outputs of several layers"
    own = {scale: {p.reader for p in products}}
    own |= dict.fromkeys(products[0].writers - {scale}, {p.linear for p in products})
    for name, nodes in own.items():
        if others := readers[name] - nodes:
            what = "it" if name == scale else "a weight that it scales"
            other = min(map(op_name, others))
            return f"a scale of the features, and {what} is also read by {other}"
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
    """The feature axis along which the factor varies; ``None`` if there is not exactly one."""
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


@dataclass(frozen=True)
class NormBehindTable:
    """A norm by its weight, bias and eps. Parameters have the first of their tied names."""

    weight: str
    bias: str
    eps: float


@dataclass(frozen=True)
class BakedNorms:
    """Which norms can be baked into which tables."""

    identities: dict[Node, Node] = field(default_factory=dict)
    """Each call of such a norm, to the value that it reads."""
    tables: dict[str, NormBehindTable] = field(default_factory=dict)
    """Each table to its norm."""
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each table: the inputs of ``forward`` that take the place of its rows."""


@dataclass(frozen=True)
class _NormCall:
    """A call of a norm that reads rows of a table, or an input that may be left out."""

    node: Node
    x: Node
    """The value that it reads, perhaps by way of views of the rows."""
    lookup: Node | None
    """The op that looks up the rows."""
    name: str
    """The name of the table, or of the input."""


def find_baked_norms(
    traces: Sequence[Trace], groups: Mapping[str, str], single: Callable[[str], bool]
) -> BakedNorms:
    """Every norm that can be baked into a table, in all traces at once.

    ``groups`` maps any parameter name to the first of its tied names. ``single(name)`` says whether
    a tied group is stored as one tensor with the parameter's own layout.
    """
    named, readers = parameter_readers(traces, groups)
    calls: dict[NormBehindTable, list[_NormCall | None]] = {}
    for trace, names in zip(traces, named, strict=True):
        for node in trace.graph.nodes:
            if (norm := _norm(node, names)) is not None:
                calls.setdefault(norm, []).append(_norm_call(node, names, trace))
    baked = BakedNorms()
    for norm, some in calls.items():
        known = [call for call in some if call is not None]
        tables = {call.name for call in known if call.lookup}
        if len(tables) != 1 or len(known) < len(some):
            continue
        (table,) = tables
        lookups, nodes = {call.lookup for call in known}, {call.node for call in known}
        alone = readers[table] <= lookups and readers[norm.weight] | readers[norm.bias] <= nodes
        if alone and all(map(single, (table, norm.weight, norm.bias))):
            baked.identities.update({call.node: call.x for call in known})
            baked.tables[table] = norm
            inputs = (call.name for call in known if not call.lookup)
            baked.inputs[table] = tuple(dict.fromkeys(inputs))
    return baked


def _norm(node: Node, named: Mapping[Node, str]) -> NormBehindTable | None:
    """The node as a LayerNorm over the last dimension with weight and bias; ``None`` if not."""
    if packet(node) is not aten.layer_norm:
        return None
    weight, bias = argument(node, 2, "weight"), argument(node, 3, "bias")
    eps = argument(node, 4, "eps")
    if weight not in named or bias not in named or len(shape_of(weight) or ()) != 1:
        return None
    eps = 1e-5 if eps is None else eps
    return NormBehindTable(named[weight], named[bias], float(eps)) if eps else None


def _norm_call(node: Node, named: Mapping[Node, str], trace: Trace) -> _NormCall | None:
    """What a norm reads, if it is rows of a table, or an input that may be left out."""
    shape = shape_of(node)
    if not shape or node.meta.get("written") or not isinstance(node.args[0], Node):
        return None
    x = node.args[0]
    found = follow_back(x, feature_axis(shape), node)
    if found is None:
        return None
    value, _, reader = found
    if value in trace.inputs and not trace.required:
        return _NormCall(node, x, None, trace.inputs[value])
    layer = linear_layer(value, named)
    if layer is None or layer.kind != "embedding" or not layer.reads_directly:
        return None
    if readers_of(value) != {reader}:
        return None
    return _NormCall(node, x, value, layer.weight.name)
