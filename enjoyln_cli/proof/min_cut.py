"""Choose which norms to convert by which edits, at the least total cost: a minimum cut.

Values that cannot be centred are the source side of the graph; norms are the sink side. Cutting an
edge means one of these:

* a norm stays LayerNorm, which loses its saving (2);
* an explicit centring operation (a mean subtraction) is inserted, which costs 3;
* an MLP subtracts the mean of the residual stream that it is added to, which costs 1.

Centring a parameter costs nothing; it is possible if nothing would notice a shift of the parameter.
Norms, operations and MLPs belong to modules. They count once, however often the module is called
and in however many traces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import networkx
from networkx.algorithms.flow import boykov_kolmogorov
from torch.fx import Node

from enjoyln_cli.graph.insertion_points import Spot, Where
from enjoyln_cli.graph.nodes import rank_of, shape_of
from enjoyln_cli.plan.axis import Axis, feature_axis, on_dimension
from enjoyln_cli.proof.flow import Flow, Observer, Value
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.proof.widening import Edge, Mlp, Widenings

SAVING, COST, WIDENING = 2, 3, 1
"""What a converted norm saves, and what a centring operation and a wider MLP cost."""


@dataclass(frozen=True)
class Parameter:
    """A parameter and an axis of it; ``name`` is the first of its tied names."""

    name: str
    axis: Axis


@dataclass(frozen=True)
class Carrier:
    """A place where an operation can be inserted: a module's output or input, or a model input."""

    module: str
    """Path of the module; if ``place`` is ``entry``, the name of an argument of ``forward``."""
    place: Where
    axis: Axis
    """Its ``dim`` counts from the end (-1 is the last)."""


Item = Value | Parameter


@dataclass(eq=False, kw_only=True)
class Problem:
    """The norms, the values that their inputs are computed from, and the possible edits."""

    flow: Flow
    norms: dict[str, tuple[Value, ...]]
    """For each norm that can be swapped: the input of each of its calls."""
    locked: Callable[[Parameter], str | None]
    """Why a parameter's stored tensors cannot be centred over its axis; ``None`` if they can."""
    groups: dict[str, str]
    """Maps any parameter name to the first of its tied names."""
    scales: Mapping[str, str] = field(default_factory=dict)
    """Maps parameters to the scale that is merged into them before they are centred."""
    widenings: Widenings = field(default_factory=Widenings)
    """Which MLPs can subtract which means."""
    _readers: dict[str, list[tuple[int, Node]]] = field(default_factory=dict)
    _carried: dict[Spot, list[tuple[int, Node]]] = field(default_factory=dict)
    _spots: dict[tuple[int, Node], Spot] = field(default_factory=dict)
    _carriers: dict[Value, Carrier | None] = field(default_factory=dict)
    _sources: dict[Item, tuple[Item, ...] | Opaque] = field(default_factory=dict)

    def __post_init__(self) -> None:
        readers, carried = defaultdict(list), defaultdict(list)
        lost = {spot for trace in self.flow.traces for spot in trace.lost}
        for position, trace in enumerate(self.flow.traces):
            for node, names in trace.parameters.items():
                readers[self.groups[names[0]]].append((position, node))
            for node, spot in trace.places.items():
                if spot not in lost:
                    carried[spot].append((position, node))
                    self._spots[position, node] = spot
        self._readers, self._carried = dict(readers), dict(carried)

    def item(self, value: Value) -> Item:
        """The parameter that a value is; the value itself if it is none."""
        names = self.flow.traces[value.trace].parameters.get(value.node)
        return Parameter(self.groups[names[0]], value.axis) if names else value

    def sources(self, item: Item) -> tuple[Item, ...] | Opaque:
        """The items that must have zero mean so that ``item`` has it too.

        Empty if ``item`` has zero mean already or can be centred.
        """
        if item not in self._sources:
            self._sources[item] = self._find_sources(item)
        return self._sources[item]

    def _find_sources(self, item: Item) -> tuple[Item, ...] | Opaque:
        if isinstance(item, Parameter):
            obstacle = self.obstacle(item)
            return () if obstacle is None else Opaque(obstacle)
        trace = self.flow.traces[item.trace]
        if item.node in trace.inputs and not trace.required and self.carrier(item):
            return ()
        found = self.flow.sources(item)
        return found if isinstance(found, Opaque) else tuple(self.item(v) for v in found)

    def subtracting(self, item: Item, source: Item) -> Mlp | None:
        """The MLP that can subtract the mean of ``source``, where the sum of both is ``item``."""
        edge = self._edge(item, source)
        return self.widenings.edges.get(edge) if edge else None

    def not_subtracting(self, item: Item, source: Item) -> str | None:
        """Why the MLP cannot subtract the mean of ``source``, where the sum of both is ``item``."""
        edge = self._edge(item, source)
        return self.widenings.refused.get(edge) if edge else None

    def _edge(self, item: Item, source: Item) -> Edge | None:
        if isinstance(item, Parameter) or isinstance(source, Parameter):
            return None
        whole = item.axis == source.axis == feature_axis(shape_of(item.node) or (0,))
        return (item.trace, item.node, source.node) if whole else None

    def obstacle(self, parameter: Parameter) -> str | None:
        """Why a parameter cannot be centred in place."""
        if reason := self.locked(parameter):
            return reason
        observer = self.observer(parameter)
        return f"centring it would be noticed by {self.place(observer)}" if observer else None

    def observer(self, item: Item) -> Observer | None:
        """An op that would notice a shift of ``item``, in any trace; ``None`` if none would."""
        if isinstance(item, Value):
            return self.flow.observer(item)
        values = (Value(t, node, item.axis) for t, node in self._readers[item.name])
        return next((seen for v in values if (seen := self.flow.observer(v))), None)

    def place(self, observer: Observer) -> str:
        """An observer, named for users."""
        trace = self.flow.traces[observer.trace]
        module = trace.module_of(observer.node)
        if observer.node.op == "output":
            return "the caller (the model returns it)"
        return f"{module or 'the model'} ({observer.reason})"

    def carrier(self, item: Item) -> Carrier | None:
        """Where ``item`` can be centred explicitly, unnoticed in all calls; ``None`` if nowhere."""
        if isinstance(item, Parameter):
            return None
        if item not in self._carriers:
            self._carriers[item] = self._find_carrier(item)
        return self._carriers[item]

    def _find_carrier(self, item: Value) -> Carrier | None:
        from_end = on_dimension(item.axis, item.axis.dim - rank_of(item.node))
        name = self.flow.traces[item.trace].inputs.get(item.node)
        if name is not None:
            argument = name.isidentifier()  # a part of an argument cannot be centred on entry
            free = argument and self.observer(item) is None and from_end.dim == -1
            return Carrier(name, "entry", from_end) if free else None
        spot = self._spots.get((item.trace, item.node))
        if spot is None:
            return None
        for trace, node in self._carried[spot]:
            axis = on_dimension(from_end, from_end.dim + rank_of(node))
            if axis.dim < 0 or self.flow.observer(Value(trace, node, axis)) is not None:
                return None
        return Carrier(*spot, from_end)

    def carried(self, carrier: Carrier) -> list[tuple[int, Node]]:
        """Every value that an operation at ``carrier`` acts on, with the index of its trace."""
        return self._carried[carrier.module, carrier.place]


@dataclass(frozen=True)
class Support:
    """The edits that make the input of one norm zero-mean."""

    writers: tuple[Parameter, ...]
    ops: tuple[Carrier, ...]
    entries: tuple[str, ...]
    mlps: tuple[Mlp, ...] = ()
    """MLPs that subtract the mean of the value that they are added to."""


@dataclass(frozen=True)
class Cut:
    """The norms that are folded, each with its edits, and the items that keep a nonzero mean."""

    folded: dict[str, Support]
    impure: frozenset[Item]


def solve(problem: Problem) -> Cut:
    """Find the minimum cut nearest to the sources: operations stand as early as possible."""
    graph, items = _network(problem)
    impure_side = _source_side(graph)
    centred = {i for i in items if ("out", i) not in impure_side}
    folded = {}
    for norm, inputs in problem.norms.items():
        if inputs and all(problem.item(value) in centred for value in inputs):
            folded[norm] = _support(problem, [problem.item(v) for v in inputs], impure_side)
    return Cut(folded, frozenset(items - centred))


def _network(problem: Problem) -> tuple[networkx.DiGraph, set[Item]]:
    """The flow network, in which each item is an edge ``("in", item) -> ("out", item)``.

    An edge without capacity cannot be cut. Costs are multiplied by ``scale``, and each operation
    and MLP costs 1 more, so that of two equally cheap cuts the one with fewer edits wins.
    """
    graph = networkx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    scale = 1 + 3 * sum(len(trace.leaves) for trace in problem.flow.traces)
    waiting: list[Item] = []
    for norm, inputs in problem.norms.items():
        graph.add_edge(("norm", norm), "sink", capacity=SAVING * scale)
        for value in inputs:
            graph.add_edge(("out", problem.item(value)), ("norm", norm))
            waiting.append(problem.item(value))
    items: set[Item] = set()
    while waiting:
        item = waiting.pop()
        if item in items:
            continue
        items.add(item)
        carrier = problem.carrier(item)
        if carrier is None:
            graph.add_edge(("in", item), ("out", item))
        else:
            graph.add_edge(("in", item), ("before", carrier))
            graph.add_edge(("before", carrier), ("after", carrier), capacity=COST * scale + 1)
            graph.add_edge(("after", carrier), ("out", item))
        found = problem.sources(item)
        if isinstance(found, Opaque):
            graph.add_edge("source", ("in", item))
            continue
        for source in found:
            mlp = problem.subtracting(item, source)
            if mlp is None:
                graph.add_edge(("out", source), ("in", item))
            else:
                graph.add_edge(("out", source), ("before", mlp))
                graph.add_edge(("before", mlp), ("after", mlp), capacity=WIDENING * scale + 1)
                graph.add_edge(("after", mlp), ("in", item))
            waiting.append(source)
    return graph, items


def _source_side(graph: networkx.DiGraph) -> set[Any]:
    """The nodes that the residual graph reaches from the source."""
    residual = boykov_kolmogorov(graph, "source", "sink")
    reached, waiting = {"source"}, ["source"]
    while waiting:
        node = waiting.pop()
        for after, edge in residual[node].items():
            if edge["flow"] < edge["capacity"] and after not in reached:
                reached.add(after)
                waiting.append(after)
    return reached


def _support(problem: Problem, inputs: Iterable[Item], impure_side: set[Any]) -> Support:
    """Go back from zero-mean inputs to the parameters, operations and MLPs that make them so."""
    writers: dict[Parameter, None] = {}
    ops: dict[Carrier, None] = {}
    entries: dict[str, None] = {}
    mlps: dict[Mlp, None] = {}
    waiting, visited = list(inputs), set(inputs)
    while waiting:
        item = waiting.pop()
        carrier = problem.carrier(item)
        if isinstance(item, Parameter):
            writers[item] = None
            continue
        if ("in", item) in impure_side and carrier is not None:
            ops[carrier] = None
            if carrier.place == "entry":
                entries[carrier.module] = None
            continue
        if item.node in problem.flow.traces[item.trace].inputs and carrier is not None:
            entries[carrier.module] = None
            continue
        found = problem.sources(item)
        for source in () if isinstance(found, Opaque) else found:
            mlp = problem.subtracting(item, source)
            if mlp is not None and ("out", source) in impure_side:
                mlps[mlp] = None
            elif source not in visited:
                visited.add(source)
                waiting.append(source)
    return Support(tuple(writers), tuple(ops), tuple(entries), tuple(mlps))
