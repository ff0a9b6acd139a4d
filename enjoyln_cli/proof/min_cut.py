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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import networkx
from networkx.algorithms.flow import boykov_kolmogorov
from torch.fx import Node

from enjoyln_cli.graph.insertion_points import InsertionPoint, Where
from enjoyln_cli.graph.nodes import rank_of, shape_of
from enjoyln_cli.plan.axis import Axis, feature_axis, on_dimension
from enjoyln_cli.proof.flow import READS_ITS_MEAN, Flow, Observer, Value
from enjoyln_cli.proof.identity_ops import NormBehindTable
from enjoyln_cli.proof.linear_layers import parameter_nodes
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.proof.widening import Edge, Mlp, Widenings

SAVING, COST, WIDENING = 2, 3, 1
"""What a converted norm saves, and what a centring operation and a wider MLP cost."""


@dataclass(frozen=True)
class Parameter:
    """A parameter and an axis of it; ``name`` is the first of its tied names."""

    name: str
    axis: Axis


USES_ITS_MEAN = "uses its mean"
"""How the reason ends for a weight that cannot be centred because of an observer."""


@dataclass(frozen=True)
class CentringPoint:
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
    """Maps parameters to the scale that is fused into them before they are centred."""
    baked: Mapping[str, NormBehindTable] = field(default_factory=dict)
    """Maps embedding tables to the norm that is baked into them before they are centred."""
    widenings: Widenings = field(default_factory=Widenings)
    """Which MLPs can subtract which means."""
    nodes: Mapping[str, list[tuple[int, Node]]] = field(init=False)
    """The nodes of each parameter, each with the index of its trace."""
    _carried: dict[InsertionPoint, list[tuple[int, Node]]] = field(init=False, default_factory=dict)
    _points: dict[tuple[int, Node], InsertionPoint] = field(init=False, default_factory=dict)
    _centring_points: dict[Value, CentringPoint | None] = field(init=False, default_factory=dict)
    _sources: dict[Item, tuple[Item, ...] | Opaque] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        carried = defaultdict(list)
        self.nodes = parameter_nodes(self.flow.traces, self.groups)[1]
        unusable_points = {point for trace in self.flow.traces for point in trace.unusable_points}
        for position, trace in enumerate(self.flow.traces):
            for node, point in trace.places.items():
                if point not in unusable_points:
                    carried[point].append((position, node))
                    self._points[position, node] = point
        self._carried = dict(carried)

    def item(self, value: Value) -> Item:
        """The parameter that a value is; for any other value, the value itself."""
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
        if item.node in trace.inputs and not trace.required and self.centring_point(item):
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
        return f"{self.place(observer)} {USES_ITS_MEAN}" if observer else None

    def observer(self, item: Item) -> Observer | None:
        """An op that would notice a shift of ``item``, in any trace; ``None`` if none would."""
        if isinstance(item, Value):
            return self.flow.observer(item)
        values = (Value(t, node, item.axis) for t, node in self.nodes.get(item.name, ()))
        return next((seen for v in values if (seen := self.flow.observer(v))), None)

    def place(self, observer: Observer) -> str:
        """An observer, named for users."""
        trace = self.flow.traces[observer.trace]
        module = trace.module_of(observer.node)
        if observer.node.op == "output":
            return "the caller (the model returns it)"
        if module and observer.reason.endswith(READS_ITS_MEAN):
            return module
        return f"{module or 'the model'} ({observer.reason})"

    def centring_point(self, item: Item) -> CentringPoint | None:
        """Where ``item`` can be centred explicitly, unnoticed in all calls; ``None`` if nowhere."""
        if isinstance(item, Parameter):
            return None
        if item not in self._centring_points:
            self._centring_points[item] = self._find_centring_point(item)
        return self._centring_points[item]

    def _find_centring_point(self, item: Value) -> CentringPoint | None:
        from_end = on_dimension(item.axis, item.axis.dim - rank_of(item.node))
        name = self.flow.traces[item.trace].inputs.get(item.node)
        if name is not None:
            argument = name.isidentifier()  # a part of an argument cannot be centred on entry
            free = argument and self.observer(item) is None and from_end.dim == -1
            return CentringPoint(name, "entry", from_end) if free else None
        point = self._points.get((item.trace, item.node))
        if point is None:
            return None
        for trace, node in self._carried[point]:
            axis = on_dimension(from_end, from_end.dim + rank_of(node))
            if axis.dim < 0 or self.flow.observer(Value(trace, node, axis)) is not None:
                return None
        return CentringPoint(*point, from_end)

    def carried(self, centring_point: CentringPoint) -> list[tuple[int, Node]]:
        """Every value that an operation at ``carrier`` acts on, with the index of its trace."""
        return self._carried[centring_point.module, centring_point.place]


@dataclass(frozen=True)
class Support:
    """The edits that make the input of one norm zero-mean."""

    writers: tuple[Parameter, ...]
    ops: tuple[CentringPoint, ...]
    entries: tuple[str, ...]
    mlps: tuple[Mlp, ...] = ()
    """MLPs that subtract the mean of the value that they are added to."""


_NOTHING = Support((), (), ())


@dataclass(frozen=True)
class Cut:
    """The norms that are folded, each with its edits, and the items that keep a nonzero mean."""

    folded: dict[str, Support]
    impure: frozenset[Item]


@dataclass(frozen=True)
class _Way:
    """How an item gets zero mean: from its sources, unless it is cut off from them."""

    item: Item
    centring_point: CentringPoint | None
    sources: tuple[tuple[int, Mlp | None], ...] | None
    """The numbers of the sources, each with the MLP that can subtract its mean; ``None`` if the
    item cannot be made zero-mean."""


@dataclass(frozen=True)
class _Edits:
    """The edits at one item, and the numbers of the items that need zero mean, too."""

    here: Support
    sources: tuple[int, ...] = ()


def solve(problem: Problem) -> Cut:
    """Find the minimum cut nearest to the sources: operations stand as early as possible."""
    ways, norms = _ways(problem)
    impure_side = _source_side(_network(problem, ways, norms))
    impure = frozenset(way.item for n, way in enumerate(ways) if _out(n) in impure_side)
    edits = [_edits(problem, n, way, impure_side) for n, way in enumerate(ways)]
    folded = {}
    for norm, inputs in norms.items():
        if inputs and not any(_out(n) in impure_side for n in inputs):
            folded[norm] = _support(edits, inputs)
    return Cut(folded, impure)


def _ways(problem: Problem) -> tuple[list[_Way], dict[str, list[int]]]:
    """The items that the norms' inputs are computed from, and the numbers of each norm's inputs.

    The number of an item is its place in the list. Numbers are hashed much faster than items.
    """
    items: list[Item] = []
    numbers: dict[Item, int] = {}

    def number(item: Item) -> int:
        known = numbers.setdefault(item, len(items))
        if known == len(items):
            items.append(item)
        return known

    norms = {
        norm: [number(problem.item(value)) for value in inputs]
        for norm, inputs in problem.norms.items()
    }
    ways: dict[int, _Way] = {}
    waiting = [one for inputs in norms.values() for one in inputs]
    while waiting:
        this = waiting.pop()
        if this in ways:
            continue
        item = items[this]
        centring_point, found = problem.centring_point(item), problem.sources(item)
        if isinstance(found, Opaque):
            ways[this] = _Way(item, centring_point, None)
            continue
        sources = tuple((number(one), problem.subtracting(item, one)) for one in found)
        ways[this] = _Way(item, centring_point, sources)
        waiting += (one for one, _ in sources)
    return [ways[this] for this in range(len(items))], norms


def _in(number: int) -> int:
    return 2 * number


def _out(number: int) -> int:
    return 2 * number + 1


def _network(
    problem: Problem, ways: list[_Way], norms: Mapping[str, list[int]]
) -> networkx.DiGraph:
    """The flow network, in which each item is an edge ``_in(number) -> _out(number)``.

    An edge without capacity cannot be cut. Costs are multiplied by ``scale``, and each operation
    and MLP costs 1 more, so that among equally cheap cuts the fewest edits win. Another place than
    a leaf or a block costs 2 more.
    """
    graph = networkx.DiGraph()
    graph.add_nodes_from(("source", "sink"))
    traces = problem.flow.traces
    scale = 1 + sum(3 * len(trace.leaves) + 2 * len(trace.places) for trace in traces)
    usual = frozenset().union(*(trace.leaves | trace.blocks for trace in traces))
    for norm, inputs in norms.items():
        graph.add_edge(("norm", norm), "sink", capacity=SAVING * scale)
        graph.add_edges_from((_out(number), ("norm", norm)) for number in inputs)
    for number, way in enumerate(ways):
        begin, end = _in(number), _out(number)
        if way.centring_point is None:
            graph.add_edge(begin, end)
        else:
            before, after = ("before", way.centring_point), ("after", way.centring_point)
            graph.add_edge(begin, before)
            more = (
                1
                if way.centring_point.place == "entry" or way.centring_point.module in usual
                else 2
            )
            graph.add_edge(before, after, capacity=COST * scale + more)
            graph.add_edge(after, end)
        if way.sources is None:
            graph.add_edge("source", begin)
            continue
        for source, mlp in way.sources:
            if mlp is None:
                graph.add_edge(_out(source), begin)
            else:
                graph.add_edge(_out(source), ("before", mlp))
                graph.add_edge(("before", mlp), ("after", mlp), capacity=WIDENING * scale + 1)
                graph.add_edge(("after", mlp), begin)
    return graph


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


def _edits(problem: Problem, number: int, way: _Way, impure_side: set[Any]) -> _Edits:
    """What gives an item zero mean, if it has zero mean in the cut."""
    item, centring_point = way.item, way.centring_point
    if isinstance(item, Parameter):
        return _Edits(Support((item,), (), ()))
    if centring_point is not None and _in(number) in impure_side:
        entries = (centring_point.module,) if centring_point.place == "entry" else ()
        return _Edits(Support((), (centring_point,), entries))
    if centring_point is not None and item.node in problem.flow.traces[item.trace].inputs:
        return _Edits(Support((), (), (centring_point.module,)))
    subtracted, sources = [], []
    for source, mlp in way.sources or ():
        if mlp is not None and _out(source) in impure_side:
            subtracted.append(mlp)
        else:
            sources.append(source)
    here = Support((), (), (), tuple(subtracted)) if subtracted else _NOTHING
    return _Edits(here, tuple(sources))


def _support(edits: Sequence[_Edits], inputs: Iterable[int]) -> Support:
    """Go back from zero-mean inputs to the parameters, operations and MLPs that make them so."""
    writers: dict[Parameter, None] = {}
    ops: dict[CentringPoint, None] = {}
    entries: dict[str, None] = {}
    mlps: dict[Mlp, None] = {}
    waiting, visited = list(inputs), set(inputs)
    while waiting:
        one = edits[waiting.pop()]
        for source in one.sources:
            if source not in visited:
                visited.add(source)
                waiting.append(source)
        if one.here is not _NOTHING:
            writers.update(dict.fromkeys(one.here.writers))
            ops.update(dict.fromkeys(one.here.ops))
            entries.update(dict.fromkeys(one.here.entries))
            mlps.update(dict.fromkeys(one.here.mlps))
    return Support(tuple(writers), tuple(ops), tuple(entries), tuple(mlps))
