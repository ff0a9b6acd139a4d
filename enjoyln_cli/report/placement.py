"""Where each norm of a model stands, and whether it is a LayerNorm or an RMSNorm.

A residual sum adds a branch to a value that goes around the branch: ``x + f(x)``. In a traced graph
it is a sum one of whose terms (the skip) is, or contains as a term, a value that the other term
(the branch) is computed from. A value that is the skip of several sums is none, but something that
each layer adds, such as positions. A norm has the first of these places that fits:

* ``pre``: it reads a value that also goes past it into the skip: ``x + f(norm(x))``;
* ``final``: it reads a sum with norms in its branches, and nothing goes past it: the last norm of a
  pre-norm model;
* ``post``: it reads a sum without norms in its branches: ``norm(x + f(x))``;
* ``branch_end``: it ends a branch: ``x + norm(f(x))``;
* ``inside``: it is inside a branch, as norms of queries and keys are;
* ``other``: none of these, as a norm after the embeddings or in a head.

One rule serves all architectures: no class or module name is read. This describes a model; no
proof rests on it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.fx import Node

from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.graph.nodes import SPLITS, aten, is_floating, is_part, packet, shape_of
from enjoyln_cli.proof.views import MOVES
from enjoyln_cli.trace.capture import Captures
from enjoyln_cli.trace.trace import Trace
from enjoyln_cli.trace.traced_calls import likely_calls, trace_calls

if TYPE_CHECKING:
    from enjoyln_cli.analysis.analyze import Analysis

Kind = Literal["LayerNorm", "RMSNorm"]
Place = Literal["pre", "branch_end", "final", "post", "inside", "other"]
PLACES: tuple[Place, ...] = ("pre", "post", "branch_end", "final", "inside", "other")

_SUMS = {aten.add, aten.sub}
_PRODUCTS = {aten.mul, aten.div}
_PASSES = MOVES | SPLITS | {
    aten._to_copy, aten.dropout, aten.expand, aten.narrow, aten.neg, aten.select, aten.slice,
    aten.to, aten.unbind,
}  # fmt: skip
"""Ops that hand a value on: all of it or a part, under other indices, in another dtype."""
_JOINS = {aten.cat, aten.stack, aten.roll, aten.flip}
"""Ops that rearrange values. A branch of nothing but these (rotary embeddings) is none."""
_BARE: dict[Any, Kind] = {aten.layer_norm: "LayerNorm", aten.rms_norm: "RMSNorm"}


@dataclass(eq=False)
class _Norm:
    """One call of a norm."""

    path: str
    reads: dict[Node, None] = field(default_factory=dict)
    nodes: set[Node] = field(default_factory=set)
    own: int = 0
    """The bit of its result."""


@dataclass(frozen=True)
class _Sum:
    """A residual sum. The fields are sets of values as bits (see ``_Sets``)."""

    own: int
    around: int
    """The skip alone, without its terms."""
    skip: int
    """The skip and its terms."""
    branch: int
    """The branch and its terms."""
    inside: int
    """The branch and all that it is computed from."""


@dataclass(eq=False)
class _Sets:
    """Sets of values of a graph, each as an integer with a bit for every value in it.

    Values that are handed on unchanged (see ``_PASSES``), or only scaled, have one bit in common.
    """

    own: dict[Node, int] = field(default_factory=dict)
    terms: dict[Node, int] = field(default_factory=dict)
    """The value itself; for a sum also its terms, and their terms."""
    above: dict[Node, int] = field(default_factory=dict)
    """The values that it is computed from."""
    varying: set[Node] = field(default_factory=set)
    """The nodes that depend on an input of the model."""
    bits: int = 0
    """How many bits are in use."""
    works: int = 0
    """The values that are computed, not just added up, scaled or rearranged."""
    sums: list[_Sum] = field(default_factory=list)

    def new(self) -> int:
        """A bit for another value."""
        self.bits += 1
        return 1 << (self.bits - 1)

    def whole(self, node: Node) -> int:
        """The value and all that it is computed from."""
        return self.own[node] | self.above[node]


def norm_places(analysis: Analysis) -> dict[Kind, dict[Place, int]]:
    """How many LayerNorms and RMSNorms of the model stand at which place.

    A module counts once. If its calls stand at different places, or no trace runs it, it counts as
    ``other``. A model without LayerNorms was not traced before; its first call is traced now. The
    result is empty if that fails.
    """
    model = analysis.subject.reference.model
    try:
        traces = analysis.subject.traced[0].traces if analysis.subject.traced else _trace(model)
    except EnjoyLNError:
        return {}
    classes = {name for name, _ in analysis.plan.other_norms}
    modules = {path: type(module).__name__ for path, module in model.named_modules()}
    kinds: dict[str, Kind] = {path: "RMSNorm" for path, name in modules.items() if name in classes}
    kinds.update((verdict.norm, "LayerNorm") for verdict in analysis.plan.norms)
    places: dict[str, set[Place]] = {path: set() for path in kinds}
    for trace in traces:
        for path, kind, place in _places(trace, kinds):
            kinds.setdefault(path, kind)
            places.setdefault(path, set()).add(place)
    counts: dict[Kind, Counter[Place]] = {}
    for path, here in places.items():
        place = here.pop() if len(here) == 1 else "other"
        counts.setdefault(kinds[path], Counter())[place] += 1
    return {
        kind: {place: counter[place] for place in PLACES if counter[place]}
        for kind, counter in sorted(counts.items())
    }


def _trace(model: nn.Module) -> tuple[Trace, ...]:
    captures = Captures(model)
    return trace_calls(captures, likely_calls(captures)[:1]).traces


def _places(trace: Trace, kinds: Mapping[str, Kind]) -> Iterable[tuple[str, Kind, Place]]:
    """Path, kind and place of every call of a norm in one graph."""
    inner = _norm_calls(trace, kinds)
    norms = list(dict.fromkeys(inner.values()))
    sets = _sets(trace, inner)
    skips = Counter(one.around for one in sets.sums)
    sums = [one for one in sets.sums if skips[one.around] == 1]
    for norm in norms:
        kind = kinds.get(norm.path) or _BARE[packet(next(iter(norm.nodes)))]
        yield norm.path, kind, _place(norm, norms, sums, sets)


def _norm_calls(trace: Trace, kinds: Mapping[str, Kind]) -> dict[Node, _Norm]:
    """The nodes inside of calls of norms, each with its call.

    An op that normalises outside of a norm module is a call of the module that runs it.
    """
    inner: dict[Node, _Norm] = {}
    calls: dict[str, _Norm] = {}
    for node in trace.graph.nodes:
        if node.op != "call_function":
            continue
        around = next(((c, path) for c, path in trace.calls_of(node) if path in kinds), None)
        if around:
            inner[node] = calls.setdefault(around[0], _Norm(around[1]))
        elif packet(node) in _BARE:
            inner[node] = _Norm(trace.module_of(node))
    for node, norm in inner.items():
        norm.nodes.add(node)
    for node, norm in inner.items():
        outside = [n for n in node.all_input_nodes if n not in norm.nodes and is_floating(n)]
        norm.reads.update(dict.fromkeys(n for n in outside if n not in trace.parameters))
    return inner


def _sets(trace: Trace, inner: Mapping[Node, _Norm]) -> _Sets:
    """Go through the graph once, from the inputs to the outputs."""
    sets = _Sets()
    computed: set[Node] = set()  # by norms: not handed on unchanged, as by a cast to the same dtype
    for node in trace.graph.nodes:
        operands = node.all_input_nodes
        above = 0
        for operand in operands:
            above |= sets.whole(operand)
        varying = [operand for operand in operands if operand in sets.varying]
        if varying or node in trace.inputs:
            sets.varying.add(node)
        norm, terms = inner.get(node), 0
        source = _source(node, operands, varying)
        if norm is not None and (source is None or source in computed):
            computed.add(node)
            is_result = any(user not in norm.nodes for user in node.users)
            own = sets.new() if is_result else 0
            norm.own |= own
            sets.works |= own
        elif source is not None:
            own, terms, above = sets.own[source], sets.terms[source], sets.above[source]
        elif _is_sum(node, operands, varying):
            own = sets.new()
            for operand in operands:
                terms |= sets.terms[operand]
            if residual := _residual(operands, own, sets):
                sets.sums.append(residual)
        else:
            own = sets.new()
            if varying and packet(node) not in _JOINS | _SUMS:
                sets.works |= own
        sets.own[node], sets.terms[node], sets.above[node] = own, terms | own, above
    return sets


def _source(node: Node, operands: list[Node], varying: list[Node]) -> Node | None:
    """The value that ``node`` hands on or only scales, by numbers or weights."""
    if packet(node) in _PASSES or is_part(node):
        return operands[0] if operands else None
    if packet(node) in _PRODUCTS and node.args[0] in operands:
        if len(operands) == 1 and node.args[1] is not operands[0]:  # not a square
            return operands[0]
        if len(operands) == 2 and len(varying) == 1:
            return varying[0]
    return None


def _is_sum(node: Node, operands: list[Node], varying: list[Node]) -> bool:
    """Whether ``node`` adds two values of the same shape, or something constant to a value."""
    if packet(node) not in _SUMS or not is_floating(node):
        return False
    if len(varying) == 2:
        return shape_of(operands[0]) == shape_of(operands[1]) is not None
    return len(varying) == 1


def _residual(operands: list[Node], own: int, sets: _Sets) -> _Sum | None:
    """The sum as a residual sum, if it is one."""
    if len(operands) != 2:
        return None
    for skip, branch in (operands, operands[::-1]):
        inside, terms = sets.whole(branch), sets.terms[skip]
        if terms & inside and inside & ~sets.whole(skip) & sets.works:
            return _Sum(own, sets.own[skip], terms, sets.terms[branch], inside)
    return None


def _place(norm: _Norm, norms: Iterable[_Norm], sums: Iterable[_Sum], sets: _Sets) -> Place:
    reads = _union(sets.own[node] for node in norm.reads)
    if any(reads & one.skip and norm.own & one.inside for one in sums):
        return "pre"
    terms = _union(sets.terms[node] for node in norm.reads)
    read = [one for one in sums if one.own & terms]
    if any(_is_within(other, one, sets) for one in read for other in norms):
        return "final"
    if read:
        return "post"
    if any(norm.own & one.branch and not norm.own & one.skip for one in sums):
        return "branch_end"
    return "inside" if any(_is_within(norm, one, sets) for one in sums) else "other"


def _is_within(norm: _Norm, one: _Sum, sets: _Sets) -> bool:
    """Whether ``norm`` is between the skip and the end of the branch."""
    reads = _union(sets.whole(node) for node in norm.reads)
    return bool(reads & one.skip and norm.own & one.inside)


def _union(sets: Iterable[int]) -> int:
    found = 0
    for one in sets:
        found |= one
    return found
