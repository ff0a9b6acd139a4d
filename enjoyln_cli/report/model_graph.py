"""Decides what the picture of a model shows, and what becomes one box.

It shows, for the first traced graph:

* the residual stream: the values that must have zero mean for norms to be converted;
* the layers that write to it, the norms, and the added mean subtractions;
* observers: layers that would notice a missing mean;
* the model's inputs and outputs.

Other operations are left out; a link says that a box is computed from another. Layers that look
alike are drawn once, with their number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from enjoyln_cli.analysis.analyze import Analysis
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.graph.nodes import op_name, packet
from enjoyln_cli.proof.explain import label
from enjoyln_cli.proof.flow import Value
from enjoyln_cli.proof.min_cut import Item, Parameter
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.report.layer_groups import ModelPart, collapse_groups
from enjoyln_cli.report.notes import counts
from enjoyln_cli.report.picture import Picture, Tone
from enjoyln_cli.trace.trace import Trace


@dataclass
class Sketch:
    """The parts of one traced graph, and the links between them."""

    trace: Trace
    parts: dict[tuple[str, str], ModelPart] = field(default_factory=dict)
    """All parts, by kind and path."""
    of_node: dict[Node, ModelPart] = field(default_factory=dict)
    """The part that shows a node."""
    after: dict[Node, ModelPart] = field(default_factory=dict)
    """The mean subtraction that is applied to a node's value."""
    links: dict[tuple[ModelPart, ModelPart], bool] = field(default_factory=dict)
    """For each link, whether its end observes the mean of its start."""

    def add(self, part: ModelPart) -> ModelPart:
        return self.parts.setdefault((part.kind, part.path), part)


def model_picture(name: str, analysis: Analysis) -> Picture:
    """The picture of a model. Raises ``EnjoyLNError`` if the model has no LayerNorm."""
    plan, others = analysis.plan, len(analysis.plan.classes) - 1
    if not analysis.problem.flow.traces:
        raise EnjoyLNError(f"{name}: no LayerNorm in this model, so there is nothing to draw")
    sketch = Sketch(analysis.problem.flow.traces[0])
    _add_norms(sketch, analysis)
    _add_stream(sketch, analysis)
    _add_ops(sketch, analysis)
    _add_links(sketch)
    more = f" and {others} other class{'es' if others > 1 else ''}"
    title = f"{name} ({plan.model_class}{more if others else ''})"
    boxes, links = collapse_groups(_sort_parts(sketch), sketch.links)
    return Picture(title, "converts " + counts(plan), boxes, links)


# The parts.


def _add_norms(sketch: Sketch, analysis: Analysis) -> None:
    verdicts = {v.norm: v for v in analysis.plan.norms}
    for node in sketch.trace.graph.nodes:
        path = next((p for _, p in sketch.trace.calls_of(node) if p in verdicts), None)
        if path is None:
            continue
        verdict = verdicts[path]
        word = "stays LayerNorm" if verdict.status == "stays_layernorm" else "becomes RMSNorm"
        why = verdict.reason + (f": {verdict.culprit}" if verdict.culprit else "")
        sketch.of_node[node] = sketch.add(ModelPart("norm", path, verdict.status, (word,), why))


def _add_stream(sketch: Sketch, analysis: Analysis) -> None:
    """Add the whole residual stream: the layers that write to it, its sums, and opaque values.

    These are the zero-mean graphs of all norms, and the sums after them that no norm reads, for
    example the sums of the last block before a concatenation.
    """
    problem = analysis.problem
    starts = (v for values in problem.norms.values() for v in values if v.trace == 0)
    proven = _trace_sources(analysis, [problem.item(value) for value in starts])
    items = _trace_sources(analysis, proven, onwards=True)
    numbers: Counter[str] = Counter()
    place = {node: at for at, node in enumerate(sketch.trace.graph.nodes)}
    values = sorted((i for i in items if isinstance(i, Value)), key=lambda v: place[v.node])
    for value in values:
        node, sources = value.node, items[value]
        if node in sketch.of_node or node in sketch.trace.inputs:
            continue
        if isinstance(sources, Opaque):
            lines = (op_name(node),)
            part = ModelPart("source", label(problem, value), "left", lines, sources.reason)
            sketch.of_node[node] = sketch.add(part)
            continue
        weights = [source for source in sources if isinstance(source, Parameter)]
        if weights and len(weights) == len(sources):
            sketch.of_node[node] = _writer(sketch, analysis, weights)
        elif len(sources) > 1:
            calls = sketch.trace.calls_of(node)
            call, module = calls[-1] if calls else ("", "")
            path = f"{module}.({op_name(node)} {numbers[call]})".lstrip(".")
            numbers[call] += 1
            zero = value in proven and value not in analysis.cut.impure
            tone: Tone = "zero" if zero else "mean"
            sketch.of_node[node] = sketch.add(ModelPart("sum", path, tone))
            for weight in weights:
                part = _writer(sketch, analysis, [weight])
                for held, names in sketch.trace.parameters.items():
                    if problem.groups[names[0]] == weight.name:
                        sketch.of_node[held] = part


def _trace_sources(
    analysis: Analysis, starts: Iterable[Item], onwards: bool = False
) -> dict[Item, Opaque | tuple[Item, ...]]:
    """All items from which a mean can reach ``starts``, each with its own sources.

    With ``onwards`` also all values that a mean can reach from these items.
    """
    sources_of: dict[Item, Opaque | tuple[Item, ...]] = {}
    waiting = list(starts)
    while waiting:
        item = waiting.pop()
        if item not in sources_of:
            sources_of[item] = sources = analysis.problem.sources(item)
            waiting += () if isinstance(sources, Opaque) else sources
            if onwards and isinstance(item, Value):
                steps = analysis.problem.flow.steps(item)
                waiting += [step for step in steps if isinstance(step, Value)]
    return sources_of


def _writer(sketch: Sketch, analysis: Analysis, weights: Sequence[Parameter]) -> ModelPart:
    problem, cut = analysis.problem, analysis.cut
    modules = dict.fromkeys(weight.name.rpartition(".")[0] for weight in weights)
    alone = len(weights) == 1 and weights[0].name.rpartition(".")[2] not in ("weight", "bias")
    path = weights[0].name if alone else ", ".join(modules)
    used = {w for support in cut.folded.values() for w in support.writers}
    blocked = [w for w in weights if problem.obstacle(w)]
    tone: Tone
    lines: tuple[str, ...]
    why = ""
    if blocked:
        tone, lines = "left", ("keeps its mean",)
        why = str(problem.obstacle(blocked[0]))
    elif any(weight in used for weight in weights):
        wider = {mlp.second.parameter for mlp in analysis.plan.widened if mlp.subtracts}
        subtracts = any(weight.name in wider for weight in weights)
        tone, lines = "writer", ("centred, subtracts a mean" if subtracts else "centred",)
    else:
        tone, lines = "plain", ()
    part = sketch.add(ModelPart("writer", path, tone, lines, why))
    for weight in blocked:
        _add_observer(sketch, analysis, weight, part)
    return part


def _add_observer(sketch: Sketch, analysis: Analysis, weight: Parameter, part: ModelPart) -> None:
    """Add the layer that would notice if the weight lost its mean.

    If that layer is in another model class, only its box is added, since its graph is not drawn.
    """
    seen = analysis.problem.observer(weight)
    if seen is None or seen.node.op == "output" or seen.node in sketch.of_node:
        return
    trace = analysis.problem.flow.traces[seen.trace]
    module = trace.module_of(seen.node) or op_name(seen.node)
    elsewhere = trace.model_class != sketch.trace.model_class
    lines = ("sees its mean", *[f"in {trace.model_class}"] * elsewhere)
    eye = sketch.add(ModelPart("observer", module, "observer", lines))
    sketch.links[part, eye] = True
    for node in sketch.trace.graph.nodes:
        same = packet(node) is packet(seen.node) and sketch.trace.module_of(node) == module
        if node is seen.node or same:
            sketch.of_node.setdefault(node, eye)


def _add_ops(sketch: Sketch, analysis: Analysis) -> None:
    centring_points = {op for support in analysis.cut.folded.values() for op in support.ops}
    for centring_point in centring_points:
        if centring_point.place == "entry":
            continue
        words = f"{centring_point.module}.(centre {centring_point.place})"
        part = sketch.add(ModelPart("op", words, "op"))
        for trace, node in analysis.problem.carried(centring_point):
            if trace == 0:
                sketch.after[node] = part


def _add_links(sketch: Sketch) -> None:
    """Link every part to the parts computed from it.

    Inputs are linked only to parts that are computed from no other part.
    """
    trace = sketch.trace
    reach: dict[Node, dict[ModelPart, None]] = {}
    computed_from: dict[ModelPart, dict[ModelPart, None]] = {}
    for node in trace.graph.nodes:
        if node.op == "output":
            continue
        before: dict[ModelPart, None] = {}
        for operand in node.all_input_nodes:
            before |= reach[operand]
        if node in trace.inputs:
            before = {ModelPart("input", trace.inputs[node], "plain"): None}
        part = sketch.of_node.get(node)
        if part:
            computed_from.setdefault(part, {}).update(before)
            before = {part: None}
        if (op := sketch.after.get(node)) is not None:
            computed_from.setdefault(op, {}).update(before)
            before = {op: None}
        reach[node] = before
    for node, fields in trace.returned.items():
        names = [name for name in fields if name not in trace.fed_back]
        if names and node in reach:
            out = ModelPart("output", names[0], "plain")
            computed_from.setdefault(out, {}).update(reach[node])
    for part, before in computed_from.items():
        computed = [p for p in before if p.kind != "input" and p is not part]
        for start in computed or before:
            sketch.add(start)
            if start is not part:
                sketch.links.setdefault((start, part), False)
        sketch.add(part)


def _sort_parts(sketch: Sketch) -> list[ModelPart]:
    """Inputs, then all other parts in the order of computation, then outputs."""
    ends = {"input": -1, "output": 2}
    order: dict[ModelPart, int] = {}
    for at, node in enumerate(sketch.trace.graph.nodes):
        for part in (sketch.of_node.get(node), sketch.after.get(node)):
            if part:
                order.setdefault(part, at)
    last = len(sketch.trace.graph.nodes)
    return sorted(sketch.parts.values(), key=lambda p: (ends.get(p.kind, 0), order.get(p, last)))
