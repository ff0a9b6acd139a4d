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
from typing import Any

from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    argument,
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
from enjoyln_cli.plan.axis import Axis, feature_axis
from enjoyln_cli.plan.plan import Merge, Named, Reader, Unmerged
from enjoyln_cli.proof.flow import LIKE, Flow, Value, candidates, consumers, readers_of
from enjoyln_cli.proof.layer_scale import MOVES, origin
from enjoyln_cli.proof.pullback import pull
from enjoyln_cli.trace.capture import Trace, uncast

_TRANSPARENT = MOVES | {
    aten.adaptive_avg_pool1d, aten.adaptive_avg_pool2d, aten.broadcast_to, aten.expand,
    aten.expand_as, aten.flip, aten.gather, aten.index, aten.index_select, aten.mean, aten.movedim,
    aten.repeat, aten.repeat_interleave, aten.roll, aten.select, aten.slice, aten.swapaxes,
    aten.tile, aten.type_as,
}  # fmt: skip
"""Ops of one operand that give out its elements, or averages of them, each under its feature."""


@dataclass(frozen=True)
class _Linear:
    """One call of a linear layer on what a norm gives."""

    trace: int
    weight: str
    dim: int
    bias: str | None
    reading: frozenset[tuple[str, Node]]
    """Its parameters with the nodes that read them, all by the first of their tied names."""


@dataclass(frozen=True)
class _Obstacle:
    reason: str
    culprit: str


@dataclass(frozen=True, eq=False)
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
) -> tuple[tuple[Merge, ...], tuple[Unmerged, ...]]:
    """What becomes of each of ``norms`` that has something to hand on.

    ``groups`` names the first of all names tied to a parameter, ``stored`` the tensor of each
    parameter that is tied to no other and is one tensor of its own layout. ``centred`` are the
    values that an explicit operation acts on. With ``affine`` the weights move too, else the biases
    alone.
    """
    named = [{n: groups[names[0]] for n, names in t.parameters.items()} for t in flow.traces]
    readers: dict[str, set[tuple[int, Node]]] = {}
    for position, nodes in enumerate(named):
        for node, name in nodes.items():
            readers.setdefault(name, set()).update((position, user) for user in _reads(node))
    results = _results(flow.traces, norms.keys())
    search = _Search(flow, tuple(named), readers, stored.__contains__, centred, results)
    merged, unmerged = [], []
    for norm, form in norms.items():
        own = f"{norm}.weight", f"{norm}.bias"
        moving = own[: affine and form.gain != "1"] + own[1:] * form.biased
        if not moving:
            continue
        if (form.weight, form.bias) != ("weight", "bias"):
            reason = "its parameters have other names than weight and bias"
            unmerged.append(Unmerged(norm, reason, norm))
            continue
        found = _own_obstacle(search, norm, moving) or _linears(search, norm, form)
        if isinstance(found, _Obstacle):
            unmerged.append(Unmerged(norm, found.reason, found.culprit))
            continue
        layers = dict.fromkeys((one.weight, one.dim, one.bias) for one in found)
        made = tuple(
            Reader(Named(w, stored[w]), dim, Named(b, stored[b]) if b else None)
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


def _linears(search: _Search, norm: str, form: LayerNormForm) -> list[_Linear] | _Obstacle:
    """The linear layers that read a norm, in every call; or who reads it otherwise."""
    linears: list[_Linear] = []
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
            linears += found if form.biased else [replace(one, bias=None) for one in found]
    if not linears:
        return _Obstacle("no traced call reads its result", norm)
    for named in search.named:
        for node, name in named.items():
            if name in (f"{norm}.weight", f"{norm}.bias") and {shape_of(node)} != sizes:
                return _Obstacle("its parameters are not one number for each feature", norm)
    return _layers_obstacle(search, linears, form.biased) or linears


def _read(search: _Search, value: Value) -> list[_Linear] | _Obstacle:
    """The linear layers that read a value, also through ops that leave each feature as it is."""
    linears: list[_Linear] = []
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
            linear = _linear(search, reader, current)
            if linear is None:
                name = op_name(whole if isinstance(whole, Node) else reader)
                where = trace.module_of(reader)
                return _Obstacle(
                    f"its result is read by {name}, which is not a linear layer", where
                )
            linears.append(linear)
    return linears


def _passed(reader: Node, value: Value) -> Value | None:
    """The result of an op that gives out the elements of ``value``, each under its feature."""
    if packet(reader) not in _TRANSPARENT and not is_part(reader):
        return None
    for axis in candidates(reader, value.node, value.axis):
        if pull(reader, axis) == ((value.node, value.axis),):
            whole = is_whole(axis, shape_of(reader) or ())
            return Value(value.trace, reader, axis) if whole else None
    return None


def _linear(search: _Search, node: Node, value: Value) -> _Linear | None:
    """The node as a linear layer of parameters that reads ``value``, if it is one."""
    rank, op = rank_of(value.node), packet(node)
    if occurrences(node, value.node) != 1 or value.axis.dim != rank - 1 or rank < 2:
        return None
    bias: Any = None
    if op is aten.linear:
        read, weight, dim, bias = node.args[0], node.args[1], 1, argument(node, 2, "bias")
    elif op is aten.addmm and not node.kwargs:
        (bias, read, weight), dim = node.args[:3], 0
    elif op in (aten.matmul, aten.mm):
        (read, weight), dim = node.args[:2], 0
    else:
        return None
    if read is not value.node or rank_of(weight) != 2:
        return None
    named, reader = search.named[value.trace], node
    if bias is None:
        bias, reader = _added(named, node)
    matrix = _parameter(named, weight, feature_axis(shape_of(weight) or (), dim), node)
    if matrix is None:
        return None
    added = None
    if bias is not None:
        into = (shape_of(weight) or ())[1 - dim]
        added = _parameter(named, bias, feature_axis(shape_of(bias) or (0,)), reader)
        if added is None or shape_of(bias) != (into,):
            return None
    reading = frozenset((name, first) for name, _, first in (matrix, added or matrix))
    return _Linear(value.trace, matrix[0], matrix[1].dim, added[0] if added else None, reading)


def _added(named: Mapping[Node, str], node: Node) -> tuple[Node | None, Node]:
    """A parameter that is added to a product, if that is all that reads it, and the sum."""
    sums = list(_reads(node))
    if len(sums) != 1 or packet(sums[0]) is not aten.add or sums[0].kwargs:
        return None, node
    terms = [term for term in sums[0].args if term is not node]
    written = node.meta.get("written") or len(sums[0].args) != 2
    if written or len(terms) != 1 or rank_of(terms[0]) != 1 or terms[0] not in named:
        return None, node
    return terms[0], sums[0]  # type: ignore[return-value]


def _parameter(
    named: Mapping[Node, str], operand: Any, axis: Axis, reader: Node
) -> tuple[str, Axis, Node] | None:
    """The parameter behind an operand, its axis, and the first node that reads it."""
    found = origin(operand, axis, reader)
    if found is None or found[0] not in named or found[0].meta.get("written"):
        return None
    node, below, first = found
    return (named[node], below, first) if rank_of(node) == rank_of(operand) else None


def _layers_obstacle(search: _Search, linears: list[_Linear], biased: bool) -> _Obstacle | None:
    """Why the parameters of linear layers cannot change, where they cannot."""
    own: dict[str, set[tuple[int, Node]]] = {}
    for one in linears:
        for name, node in one.reading:
            own.setdefault(name, set()).add((one.trace, node))
    for one in linears:
        if biased and one.bias is None:
            reason = "a linear layer that reads it has no bias for what it adds"
            return _Obstacle(reason, one.weight)
        for name in filter(None, (one.weight, one.bias)):
            if not search.readers[name] <= own[name]:
                reason = "a linear layer that reads it has a parameter that is used elsewhere, too"
                return _Obstacle(reason, name)
            if not search.single(name):
                reason = "a linear layer that reads it is tied, or stored in another layout"
                return _Obstacle(reason, name)
    layers = {(one.weight, one.dim, one.bias) for one in linears}
    names = [name for weight, _, bias in layers for name in (weight, bias) if name]
    if twice := sorted(name for name in names if names.count(name) > 1):
        return _Obstacle("linear layers that read it share a parameter", twice[0])
    return None
