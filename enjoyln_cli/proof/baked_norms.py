"""Norms behind an embedding table that can be baked into it (see ``plan.baked_rows``).

    norm(E_t) is a function of the token t alone, so a table E' can hold what the norm makes of it

With the new table, norm and lookup together are one lookup of the wanted rows: the norm passes on
what the table is edited to return, as if it were the identity. This is exact if nothing else reads
the table, or the norm's weight and bias:

* every reader of the table is a lookup whose rows only a call of this norm reads;
* every call of the norm reads such rows, or an input that takes their place (``inputs_embeds``).
  Who gives these has to take them from the new table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from enjoyln_cli.graph.nodes import argument, aten, packet, shape_of
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.proof.flow import readers_of
from enjoyln_cli.proof.linear_layers import follow_back, linear_layer, parameter_names
from enjoyln_cli.trace.trace import Trace


@dataclass(frozen=True)
class NormBehindTable:
    """A norm by its weight, bias and eps. Parameters have the first of their tied names."""

    weight: str
    bias: str
    eps: float


@dataclass(frozen=True)
class BakedNorms:
    """Which norms can be baked into which tables."""

    products: dict[Node, Node] = field(default_factory=dict)
    """Each call of such a norm, to the value that it reads."""
    tables: dict[str, NormBehindTable] = field(default_factory=dict)
    """Each table to its norm."""
    inputs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """For each table: the inputs of ``forward`` that take the place of its rows."""


@dataclass(frozen=True)
class _Call:
    """A call of a norm that reads rows of a table, or an input that may be left out."""

    node: Node
    x: Node
    """The value that it reads, perhaps by way of views of the rows."""
    lookup: Node | None
    """The op that looks up the rows."""
    name: str
    """The name of the table, or of the input."""


def find_baked_norms(
    traces: Iterable[Trace], groups: Mapping[str, str], single: Callable[[str], bool]
) -> BakedNorms:
    """Every norm that can be baked into a table, in all traces at once.

    ``groups`` maps any parameter name to the first of its tied names. ``single(name)`` says whether
    a tied group is stored as one tensor with the parameter's own layout.
    """
    readers: dict[str, set[Node]] = {}
    calls: dict[NormBehindTable, list[_Call | None]] = {}
    for trace in traces:
        named = parameter_names(trace, groups)
        for node, name in named.items():
            readers.setdefault(name, set()).update(readers_of(node))
        for node in trace.graph.nodes:
            if (norm := _norm(node, named)) is not None:
                calls.setdefault(norm, []).append(_call(node, named, trace))
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
            baked.products.update({call.node: call.x for call in known})
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


def _call(node: Node, named: Mapping[Node, str], trace: Trace) -> _Call | None:
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
        return _Call(node, x, None, trace.inputs[value])
    layer = linear_layer(value, named)
    if layer is None or layer.kind != "embedding" or not layer.reads_directly:
        return None
    if readers_of(value) != {reader}:
        return None
    return _Call(node, x, value, layer.weight.name)
