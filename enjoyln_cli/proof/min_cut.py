"""Where the means go: the cheapest set of edits, as a minimum cut.

Values that cannot be centred stand on one side, the norms on the other. An edge of the cut is
either a norm given up (its saving) or an explicit centring operation (its cost, 3 for every 2 that
a norm saves). A parameter whose shift nobody sees is centred for free. Norms and operations belong
to modules and count once, however often the module is called and in however many traces. So do MLPs
that can subtract the mean of what they are added to: the edge from that into the sum costs 1.
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
"""What a folded norm saves, and a centring operation and a wider MLP cost, in proportion."""


@dataclass(frozen=True)
class Parameter:
    """A parameter under an axis: the first of its names stands for all that are tied to it."""

    name: str
    axis: Axis


@dataclass(frozen=True)
class Carrier:
    """A place where an operation can be inserted: a module's output or input, or the model's."""

    module: str
    """Path of the module, or for ``entry`` the name of the input of ``forward``."""
    place: Where
    axis: Axis
    """``axis.dim`` counted from the end."""


Item = Value | Parameter


@dataclass(eq=False, kw_only=True)
class Problem:
    """Norms, the values behind them, and what may be edited."""

    flow: Flow
    norms: dict[str, tuple[Value, ...]]
    """For each norm that can be swapped: the input of each of its calls."""
    locked: Callable[[Parameter], str | None]
    """Why the stored tensors behind a parameter cannot be centred over its axis, if so."""
    groups: dict[str, str]
    """Any parameter name to the first name of its tied group."""
    scales: Mapping[str, str] = field(default_factory=dict)
    """Parameters that a scale is merged into before they are centred, to that scale."""
    widenings: Widenings = field(default_factory=Widenings)
    """The means that MLPs can subtract."""
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
        """The parameter behind a value, or the value itself."""
        names = self.flow.traces[value.trace].parameters.get(value.node)
        return Parameter(self.groups[names[0]], value.axis) if names else value

    def sources(self, item: Item) -> tuple[Item, ...] | Opaque:
        """What has to be zero-mean for ``item`` to be; empty for what is or can be made so."""
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
        """The MLP that can subtract the mean of ``source`` where it is added to give ``item``."""
        edge = self._edge(item, source)
        return self.widenings.edges.get(edge) if edge else None

    def not_subtracting(self, item: Item, source: Item) -> str | None:
        """Why the MLP that is added to ``source`` to give ``item`` cannot subtract its mean."""
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
        """Somebody who sees a shift of ``item``, in any trace."""
        if isinstance(item, Value):
            return self.flow.observer(item)
        values = (Value(t, node, item.axis) for t, node in self._readers[item.name])
        return next((seen for v in values if (seen := self.flow.observer(v))), None)

    def place(self, observer: Observer) -> str:
        """An observer in a user's words."""
        trace = self.flow.traces[observer.trace]
        module = trace.module_of(observer.node)
        if observer.node.op == "output":
            return "the caller (the model returns it)"
        return f"{module or 'the model'} ({observer.reason})"

    def carrier(self, item: Item) -> Carrier | None:
        """Where a centring of ``item`` can be inserted: a place none of whose calls is observed."""
        if isinstance(item, Parameter):
            return None
        if item not in self._carriers:
            self._carriers[item] = self._find_carrier(item)
        return self._carriers[item]

    def _find_carrier(self, item: Value) -> Carrier | None:
        from_end = on_dimension(item.axis, item.axis.dim - rank_of(item.node))
        name = self.flow.traces[item.trace].inputs.get(item.node)
        if name is not None:
            argument = name.isidentifier()  # else a part of one, which nobody centres on entry
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
        """Every value, with the position of its trace, that an operation at ``carrier`` acts on."""
        return self._carried[carrier.module, carrier.place]


@dataclass(frozen=True)
class Support:
    """What the zero mean of one norm's input rests on."""

    writers: tuple[Parameter, ...]
    ops: tuple[Carrier, ...]
    entries: tuple[str, ...]
    mlps: tuple[Mlp, ...] = ()
    """Those that subtract the mean of what they are added to."""


@dataclass(frozen=True)
class Cut:
    """The folded norms with their support, and the items that keep a mean."""

    folded: dict[str, Support]
    impure: frozenset[Item]


def solve(problem: Problem) -> Cut:
    """The minimum cut nearest to the sources, so that operations stand as early as possible."""
    graph, items = _network(problem)
    impure_side = _source_side(graph)
    centred = {i for i in items if ("out", i) not in impure_side}
    folded = {}
    for norm, inputs in problem.norms.items():
        if inputs and all(problem.item(value) in centred for value in inputs):
            folded[norm] = _support(problem, [problem.item(v) for v in inputs], impure_side)
    return Cut(folded, frozenset(items - centred))


def _network(problem: Problem) -> tuple[networkx.DiGraph, set[Item]]:
    """Split nodes ``("in", item) -> ("out", item)``; no capacity means that it cannot be cut.

    Where several things can be cut, what counts first is in units of ``scale``, and then how many.
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
    """Source side of the residual graph, so that operations stand as early as possible."""
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
    """Walk back over zero-mean values to the parameters and operations that make them so."""
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
