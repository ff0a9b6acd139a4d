"""Which folded norms can hand what they multiply by and add to the linear layers that read them.

    W (g * x + v) + b = (W diag(g)) x + (b + W v)

so the norm computes ``x`` alone, with a weight of ones and a bias of zeros, where every use of its
result is such a layer. In between stand only ops each of whose elements is one of the norm's, of
the same feature (or an average of such): they do the same to ``g * x + v`` as to ``x``. The layer's
parameters may be read by nothing else, in any trace: not by another norm's reader, and not as an
embedding. Whatever else reads the norm, or a layer without a bias for what a norm adds, keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    aten,
    is_part,
    is_whole,
    occurrences,
    op_name,
    packet,
    rank_of,
    shape_of,
)
from enjoyln_cli.models.norm_probe import LayerNormForm
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.plan.plan import Merge, NamedParameter, Reader, UnmergedNorm
from enjoyln_cli.proof.flow import LIKE, Flow, Value, candidates, consumers, readers_of
from enjoyln_cli.proof.linear_layers import (
    WHOLE_FEATURE_OPS,
    LinearLayer,
    linear_layer,
    parameter_names,
    with_added_bias,
)
from enjoyln_cli.proof.pullback import pull
from enjoyln_cli.trace.trace import Trace, uncast

_TRANSPARENT = WHOLE_FEATURE_OPS | {
    aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.broadcast_to, aten.expand,
    aten.expand_as, aten.flip, aten.gather, aten.index, aten.index_select, aten.mean, aten.movedim,
    aten.repeat, aten.repeat_interleave, aten.roll, aten.select, aten.slice, aten.swapaxes,
    aten.tile, aten.type_as,
}  # fmt: skip
"""Ops of one operand that give out its elements, or averages of them, each under its feature."""
_KINDS = {"matrix", "product"}
"""Layers that can take over what a norm multiplies by and adds."""


@dataclass(frozen=True, eq=False)
class _Use:
    """A call of a linear layer on what a norm gives, in the trace at this position."""

    trace: int
    layer: LinearLayer

    @property
    def to_edit(self) -> tuple[str, int, str | None]:
        """The weight, the dimension of its inputs, and the bias; parameters by name."""
        bias = self.layer.bias
        return self.layer.weight.name, self.layer.input_dim, bias.name if bias else None


@dataclass(frozen=True)
class _Obstacle:
    reason: str
    culprit: str


@dataclass(frozen=True, eq=False, kw_only=True)
class _Search:
    flow: Flow
    named: tuple[Mapping[Node, str], ...]
    """For each trace the parameters, by the first of their tied names."""
    readers: Mapping[str, set[tuple[int, Node]]]
    """Of each parameter, with the position of its trace."""
    single: Callable[[str], bool]
    centred: AbstractSet[Node]
    results: Mapping[str, list[tuple[int, list[Node]]]]
    """For each call of a norm, the values computed in it that are read outside of it."""


def find_merges(
    flow: Flow,
    norms: Mapping[str, LayerNormForm],
    groups: Mapping[str, str],
    stored: Mapping[str, str],
    centred: AbstractSet[Node],
    affine: bool,
) -> tuple[tuple[Merge, ...], tuple[UnmergedNorm, ...]]:
    """What becomes of each of ``norms`` that has something to hand on.

    ``groups`` names the first of all names tied to a parameter, ``stored`` the tensor of each
    parameter that is tied to no other and is one tensor of its own layout. ``centred`` are the
    values that an explicit operation acts on. With ``affine`` the weights move too, else the biases
    alone.
    """
    named = [parameter_names(trace, groups) for trace in flow.traces]
    readers: dict[str, set[tuple[int, Node]]] = {}
    for position, nodes in enumerate(named):
        for node, name in nodes.items():
            readers.setdefault(name, set()).update((position, user) for user in _reads(node))
    search = _Search(
        flow=flow,
        named=tuple(named),
        readers=readers,
        single=stored.__contains__,
        centred=centred,
        results=_results(flow.traces, norms.keys()),
    )
    merged, unmerged = [], []
    for norm, form in norms.items():
        own = f"{norm}.weight", f"{norm}.bias"
        moving = own[: affine and form.gain != "1"] + own[1:] * form.biased
        if not moving:
            continue
        if (form.weight, form.bias) != ("weight", "bias"):
            reason = "its parameters have other names than weight and bias"
            unmerged.append(UnmergedNorm(norm, reason, norm))
            continue
        found = _own_obstacle(search, norm, moving) or _uses(search, norm, form)
        if isinstance(found, _Obstacle):
            unmerged.append(UnmergedNorm(norm, found.reason, found.culprit))
            continue
        layers = dict.fromkeys(use.to_edit for use in found)
        made = tuple(
            Reader(NamedParameter(w, stored[w]), dim, NamedParameter(b, stored[b]) if b else None)
            for w, dim, b in layers
        )
        weight, bias = (stored[name] if name in moving else "" for name in own)
        offset = 1.0 if weight and form.gain == "1 + weight" else 0.0
        merged.append(Merge(norm, weight, bias, made, offset))
    return tuple(merged), tuple(unmerged)


def _reads(node: Node) -> set[Node]:
    """The nodes that read the values of another: neither its shape alone, nor for nobody."""
    return {
        user
        for user in readers_of(node)
        if not (packet(user) in LIKE and user.args[0] is not node) and "unread" not in user.meta
    }


def _results(
    traces: Iterable[Trace], norms: Container[str]
) -> dict[str, list[tuple[int, list[Node]]]]:
    found: dict[str, list[tuple[int, list[Node]]]] = {}
    for position, trace in enumerate(traces):
        calls: dict[str, list[Node]] = {}
        for node in trace.graph.nodes:
            for call, path in trace.calls_of(node):
                if path not in norms:
                    continue
                if call not in calls:
                    calls[call] = []
                    found.setdefault(path, []).append((position, calls[call]))
                outside = [u for u in _reads(node) if call not in dict(trace.calls_of(u))]
                if outside and not _brought(trace, node, call, path, outside):
                    calls[call].append(node)
    return found


def _brought(trace: Trace, node: Node, call: str, path: str, readers: list[Node]) -> bool:
    """Whether a value is one from outside of the call, cast: a cast that changes nothing may stand
    for the value itself from there on. One of the norm's own parameters is read by the norm alone.
    """
    given = uncast(node)
    if call in dict(trace.calls_of(given)):
        return False
    own = any(name.rpartition(".")[0] == path for name in trace.parameters.get(given, ()))
    return not own or all(path in dict(trace.calls_of(user)).values() for user in readers)


def _own_obstacle(search: _Search, norm: str, moving: Iterable[str]) -> _Obstacle | None:
    """Why a norm's own parameters cannot change."""
    for name in moving:
        if not search.single(name):
            return _Obstacle("its parameters are tied, or stored in another layout", name)
        for position, node in search.readers.get(name, ()):
            if norm not in dict(search.flow.traces[position].calls_of(node)).values():
                return _Obstacle("its parameters are used elsewhere, too", name)
    return None


def _uses(search: _Search, norm: str, form: LayerNormForm) -> list[_Use] | _Obstacle:
    """The linear layers that read a norm, in every call; or who reads it otherwise."""
    uses: list[_Use] = []
    sizes = set()
    for position, results in search.results.get(norm, ()):
        if len(results) > 1:
            return _Obstacle("more than its result is read", norm)
        for node in results:
            shape = shape_of(node)
            if shape is None:
                return _Obstacle("the shape of its result depends on values", norm)
            sizes.add((shape[form.dim],))
            found = _read(search, Value(position, node, feature_axis(shape, form.dim)))
            if isinstance(found, _Obstacle):
                return found
            uses += found if form.biased else map(_without_bias, found)
    if not uses:
        return _Obstacle("no traced call reads its result", norm)
    for named in search.named:
        for node, name in named.items():
            if name in (f"{norm}.weight", f"{norm}.bias") and {shape_of(node)} != sizes:
                return _Obstacle("its parameters are not one number for each feature", norm)
    return _layers_obstacle(search, uses, form.biased) or uses


def _without_bias(use: _Use) -> _Use:
    """For a norm that adds nothing: its layers keep their biases as they are."""
    return replace(use, layer=replace(use.layer, bias=None))


def _read(search: _Search, value: Value) -> list[_Use] | _Obstacle:
    """The linear layers that read a value, also through ops that leave each feature as it is."""
    uses: list[_Use] = []
    trace, waiting = search.flow.traces[value.trace], [value]
    while waiting:
        current = waiting.pop()
        reads = _reads(current.node)
        for reader in consumers(current.node):
            whole = reader.args[0] if is_part(reader) else reader
            if whole not in reads or "unread" in reader.meta:
                continue
            if reader.op == "output":
                if search.flow.is_required(current):
                    return _Obstacle("the model returns its result", "")
                continue
            if current.node in search.centred:
                return _Obstacle("its result is centred by an operation", "")
            found = None if current.node.meta.get("written") else _passed(reader, current)
            if found is not None:
                waiting.append(found)
                continue
            layer = _linear(search.named[value.trace], reader, current)
            if layer is None:
                name = op_name(whole if isinstance(whole, Node) else reader)
                where = trace.module_of(reader)
                return _Obstacle(
                    f"its result is read by {name}, which is not a linear layer", where
                )
            uses.append(_Use(value.trace, layer))
    return uses


def _passed(reader: Node, value: Value) -> Value | None:
    """The result of an op that gives out the elements of ``value``, each under its feature."""
    if packet(reader) not in _TRANSPARENT and not is_part(reader):
        return None
    for axis in candidates(reader, value.node, value.axis):
        if pull(reader, axis) == ((value.node, value.axis),):
            whole = is_whole(axis, shape_of(reader) or ())
            return Value(value.trace, reader, axis) if whole else None
    return None


def _linear(named: Mapping[Node, str], node: Node, value: Value) -> LinearLayer | None:
    """The node as a linear layer of parameters that reads ``value``, if it is one."""
    rank = rank_of(value.node)
    if occurrences(node, value.node) != 1 or value.axis.dim != rank - 1 or rank < 2:
        return None
    layer = linear_layer(node, named)
    if layer is None or layer.kind not in _KINDS or layer.scaled or layer.x is not value.node:
        return None
    layer = with_added_bias(layer, _reads(node), named)
    if any(parameter.node.meta.get("written") for parameter in layer.parameters):
        return None
    vector = layer.bias is None or shape_of(layer.bias.node) == (layer.out_features,)
    return layer if vector else None


def _layers_obstacle(search: _Search, uses: list[_Use], biased: bool) -> _Obstacle | None:
    """Why the parameters of linear layers cannot change, where they cannot."""
    own: dict[str, set[tuple[int, Node]]] = {}
    for use in uses:
        for parameter in use.layer.parameters:
            own.setdefault(parameter.name, set()).add((use.trace, parameter.reader))
    for use in uses:
        weight, _, bias = use.to_edit
        if biased and bias is None:
            reason = "a linear layer that reads it has no bias for what it adds"
            return _Obstacle(reason, weight)
        for name in filter(None, (weight, bias)):
            if not search.readers[name] <= own[name]:
                reason = "a linear layer that reads it has a parameter that is used elsewhere, too"
                return _Obstacle(reason, name)
            if not search.single(name):
                reason = "a linear layer that reads it is tied, or stored in another layout"
                return _Obstacle(reason, name)
    layers = {use.to_edit for use in uses}
    names = [name for weight, _, bias in layers for name in (weight, bias) if name]
    if twice := sorted(name for name in names if names.count(name) > 1):
        return _Obstacle("linear layers that read it share a parameter", twice[0])
    return None
