"""Explain why a norm folds or stays LayerNorm, by its zero-mean graph (Enjoy-LN, Definition 4).

The graph leads from the norm's input back to the parameters and other sources. It leaves out views,
casts and dropout, and shows a residual stream as one sum of all values that are added to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from enjoyln_cli.graph.nodes import aten, op_name, packet, rank_of
from enjoyln_cli.plan.axis import on_dimension
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.proof.flow import Value
from enjoyln_cli.proof.min_cut import USES_ITS_MEAN, CentringPoint, Cut, Item, Parameter, Problem
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.proof.widening import Mlp


@dataclass(frozen=True)
class Tree:
    """One value of a zero-mean graph, and the values that it is computed from."""

    text: str
    zero_mean: bool
    children: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class Obstacle:
    """A source whose mean keeps a norm LayerNorm; ``path`` leads from the norm to the source."""

    reason: str
    culprit: str
    path: tuple[str, ...]
    source: Item | None = None


def obstacle(problem: Problem, cut: Cut, norm: str) -> Obstacle:
    """The first of ``obstacles``; the norm itself if there is none."""
    unknown = Obstacle("its input could not be traced", norm, ())
    return next(obstacles(problem, cut, norm), unknown)


def obstacles(problem: Problem, cut: Cut, norm: str) -> Iterator[Obstacle]:
    """The sources whose mean reaches the norm's input, nearest first.

    Sources whose mean an MLP can subtract are listed only if there is no other source.
    """
    starts = [problem.item(value) for value in problem.norms[norm]]
    for through_mlps in (False, True):
        before: dict[Item, Item | None] = {item: None for item in starts if item in cut.impure}
        waiting, reached = deque(before), False
        while waiting:
            item = waiting.popleft()
            found = problem.sources(item)
            if isinstance(found, Opaque):
                reached, path = True, _path(problem, before, item)
                reason = _reason(found) + _not_subtracted(problem, before, item)
                yield Obstacle(reason, _culprit(problem, item), path, item)
                continue
            for source in found:
                passes = through_mlps or problem.subtracting(item, source) is None
                if source in cut.impure and source not in before and passes:
                    before[source] = item
                    waiting.append(source)
        if reached:
            return


def _reason(found: Opaque) -> str:
    if found.reason.endswith(USES_ITS_MEAN):
        return "a weight that produces its input is also read by a layer whose output would change"
    return found.reason


def _not_subtracted(problem: Problem, before: dict[Item, Item | None], item: Item) -> str:
    """Why no MLP on the way subtracts the mean; empty if there is none, or without widening."""
    source, able = item, False
    while (after := before[source]) is not None:
        if reason := problem.not_subtracting(after, source):
            return f", and the MLP cannot subtract it: {reason}"
        able = able or problem.subtracting(after, source) is not None
        source = after
    return ", and subtracting it would take more MLPs than norms would convert" if able else ""


def _culprit(problem: Problem, item: Item) -> str:
    if isinstance(item, Parameter):
        observer = problem.observer(item)
        return f"{item.name}, read by {problem.place(observer)}" if observer else item.name
    trace = problem.flow.traces[item.trace]
    return trace.inputs.get(item.node) or trace.module_of(item.node) or op_name(item.node)


def _path(problem: Problem, before: dict[Item, Item | None], item: Item) -> tuple[str, ...]:
    steps: list[str] = []
    current: Item | None = item
    while current is not None:
        name = label(problem, current)
        if not steps or steps[-1] != name:
            steps.append(name)
        current = before[current]
    return tuple(reversed(steps))


def label(problem: Problem, item: Item) -> str:
    """``transformer.h.0 (add)`` for a value; the name of a parameter or an input."""
    if isinstance(item, Parameter):
        return item.name
    trace = problem.flow.traces[item.trace]
    if item.node in trace.inputs:
        return trace.inputs[item.node]
    module = trace.module_of(item.node)
    return f"{module} ({op_name(item.node)})" if module else op_name(item.node)


def own_mean(problem: Problem, centring_point: CentringPoint) -> str:
    """Why the value at ``carrier`` has a mean that cannot be removed in the weights."""
    trace, node = problem.carried(centring_point)[0]
    axis = on_dimension(centring_point.axis, centring_point.axis.dim + rank_of(node))
    waiting = [problem.item(Value(trace, node, axis))]
    while waiting:
        current = waiting.pop()
        found = problem.sources(current)
        if isinstance(found, tuple):
            waiting.extend(found)
        elif isinstance(current, Parameter):
            return f"{current.name} cannot be centred, since {found.reason}"
        else:
            return found.reason
    return "its mean cannot be removed in the weights"


def tree(problem: Problem, cut: Cut, norm: str) -> Tree:
    """The zero-mean graph of one norm, with a branch for each different way of calling it."""
    folded = norm in cut.folded
    verdict = "becomes RMSNorm: its input is zero-mean" if folded else "stays LayerNorm"
    found: dict[Tree, str] = {}
    for value in problem.norms[norm]:
        branch = _branch(problem, cut, problem.item(value))
        found.setdefault(branch, problem.flow.traces[value.trace].label)
    if len(found) == 1:
        return Tree(f"{norm} {verdict}", folded, tuple(found))
    calls = (Tree(f"called with {text}", t.zero_mean, (t,)) for t, text in found.items())
    return Tree(f"{norm} {verdict}", folded, tuple(calls))


def fusion_in_words(plan: Plan, norm: str) -> Tree | None:
    """Which parameters of a folded norm are fused, or why not; ``None`` if fusing is not asked."""
    for one in plan.fused:
        if one.norm == norm:
            moving = " and ".join(part for part in ("weight", "bias") if getattr(one, part))
            into = tuple(Tree(reader.weight.parameter, True) for reader in one.readers)
            return Tree(f"its {moving} can be fused: all its readers are linear layers", True, into)
    for kept in plan.unfused:
        if kept.norm == norm:
            where = f" ({kept.culprit})" if kept.culprit else ""
            return Tree(f"nothing is fused: {kept.reason}{where}", False)
    return None


def _branch(problem: Problem, cut: Cut, item: Item) -> Tree:
    pure = item not in cut.impure
    found = problem.sources(item)
    centring_point = problem.centring_point(item)
    if isinstance(item, Parameter):
        return Tree(_parameter_text(problem, cut, item, found), pure)
    if centring_point in _inserted(cut):
        return Tree(f"{label(problem, item)}: centred by an added mean subtraction", True)
    if isinstance(found, Opaque):
        return Tree(f"{label(problem, item)}: {found.reason}", pure)
    if not found:
        centred = item.node in problem.flow.traces[item.trace].inputs
        return Tree(
            f"{label(problem, item)}: {'centred on entry' if centred else 'zero-mean'}", pure
        )
    if packet(item.node) is aten.add:
        terms = [_term(problem, cut, *term) for term in _terms(problem, cut, item)]
        return Tree(f"sum of {len(terms)} terms: zero-mean if each is", pure, tuple(terms))
    if len(found) == 1 and not isinstance(found[0], Parameter):
        return _branch(problem, cut, found[0])
    children = tuple(_branch(problem, cut, source) for source in found)
    return Tree(f"{label(problem, item)}: zero-mean if these are", pure, children)


def _term(problem: Problem, cut: Cut, item: Item, mlp: Mlp | None) -> Tree:
    if mlp is None:
        return _branch(problem, cut, item)
    units = f"hidden units of {mlp.second}"
    return Tree(f"{label(problem, item)}: its mean is subtracted by {units}", True)


def _inserted(cut: Cut) -> set[CentringPoint | None]:
    return {centring_point for support in cut.folded.values() for centring_point in support.ops}


def _terms(problem: Problem, cut: Cut, item: Item) -> list[tuple[Item, Mlp | None]]:
    """All addends of nested sums, in the order of the graph.

    Each comes with the MLP that subtracts its mean, if any. Views and other ops with a single
    source are skipped.
    """
    terms: dict[tuple[Item, Mlp | None], None] = {}
    waiting: list[tuple[Item, Mlp | None]] = [(item, None)]
    visited: set[Item] = set()
    widened = {mlp for support in cut.folded.values() for mlp in support.mlps}
    while waiting:
        current, mlp = waiting.pop()
        if current in visited:
            continue
        visited.add(current)
        found = problem.sources(current)
        if mlp or isinstance(current, Parameter) or isinstance(found, Opaque):
            terms[current, mlp] = None
            continue
        single = len(found) == 1 and not isinstance(found[0], Parameter)
        inserted = problem.centring_point(current) in _inserted(cut)
        if not inserted and (packet(current.node) is aten.add or single):
            for source in found:
                by = problem.subtracting(current, source)
                subtracted = by in widened and source in cut.impure and current not in cut.impure
                waiting.append((source, by if subtracted else None))
        else:
            terms[current, None] = None
    return list(reversed(terms))


def _parameter_text(
    problem: Problem, cut: Cut, item: Parameter, found: Opaque | tuple[Item, ...]
) -> str:
    axis, scale = item.axis, problem.scales.get(item.name)
    groups = "" if axis.outer == axis.inner == 1 else f", {axis.outer * axis.inner} groups"
    where = f"{item.name} (dimension {axis.dim}, {axis.size} elements{groups})"
    if isinstance(found, Opaque):
        return f"{where}: {found.reason}"
    used = any(item in support.writers for support in cut.folded.values())
    fused = f" after {scale} is fused into it" if scale else ""
    return f"{where}: {'' if used else 'could be '}centred in the weights{fused}"
