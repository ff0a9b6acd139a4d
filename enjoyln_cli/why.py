"""Why a norm folds or stays: its zero-mean graph in words, down to the sources.

Definition 4 of Enjoy-LN calls this the zero-mean graph. Views, casts and dropout are left out, and
a residual stream is shown as one sum of its writers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from enjoyln_cli.cut import Cut, Item, Parameter, Problem
from enjoyln_cli.nodes import Opaque, aten, op_name, packet


@dataclass(frozen=True)
class Tree:
    """One value of a zero-mean graph and what it is computed from."""

    text: str
    zero_mean: bool
    children: tuple[Tree, ...] = ()


@dataclass(frozen=True)
class Obstacle:
    """The source that keeps a norm: why, what, and the way from the norm up to it."""

    reason: str
    culprit: str
    path: tuple[str, ...]


def obstacle(problem: Problem, cut: Cut, norm: str) -> Obstacle:
    """The nearest source whose mean reaches the norm's input."""
    starts = [problem.item(value) for value in problem.norms[norm]]
    before: dict[Item, Item | None] = {item: None for item in starts if item in cut.impure}
    waiting = deque(before)
    while waiting:
        item = waiting.popleft()
        found = problem.sources(item)
        if isinstance(found, Opaque):
            return Obstacle(_reason(found), _culprit(problem, item), _path(problem, before, item))
        for source in found:
            if source in cut.impure and source not in before:
                before[source] = item
                waiting.append(source)
    return Obstacle("its input could not be followed", norm, ())


def _reason(found: Opaque) -> str:
    if found.reason.startswith("centring it would be seen"):
        return "a weight that it rests on is read elsewhere, where centring it would show"
    return found.reason


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
    """``transformer.h.0 (add)`` for a value, its name for a parameter or an input."""
    if isinstance(item, Parameter):
        return item.name
    trace = problem.flow.traces[item.trace]
    if item.node in trace.inputs:
        return trace.inputs[item.node]
    module = trace.module_of(item.node)
    return f"{module} ({op_name(item.node)})" if module else op_name(item.node)


def tree(problem: Problem, cut: Cut, norm: str) -> Tree:
    """The zero-mean graph of one norm, over each different way in which it is called."""
    branches = [_branch(problem, cut, problem.item(value)) for value in problem.norms[norm]]
    different = tuple(dict.fromkeys(branches))
    folded = norm in cut.folded
    verdict = "folds: its input is zero-mean" if folded else "stays a LayerNorm"
    return Tree(f"{norm} {verdict}", folded, different)


def _branch(problem: Problem, cut: Cut, item: Item) -> Tree:
    pure = item not in cut.impure
    found = problem.sources(item)
    carrier = problem.carrier(item)
    if isinstance(item, Parameter):
        return Tree(_parameter_text(problem, item, found), pure)
    if carrier is not None and any(carrier in support.ops for support in cut.folded.values()):
        return Tree(f"{label(problem, item)}: centred by an explicit operation", True)
    if isinstance(found, Opaque):
        return Tree(f"{label(problem, item)}: {found.reason}", pure)
    if not found:
        centred = item.node in problem.flow.traces[item.trace].inputs
        return Tree(
            f"{label(problem, item)}: {'centred on entry' if centred else 'zero-mean'}", pure
        )
    if packet(item.node) is aten.add:
        terms = [_branch(problem, cut, term) for term in _terms(problem, item)]
        return Tree(f"sum of {len(terms)} terms: zero-mean if each is", pure, tuple(terms))
    if len(found) == 1 and not isinstance(found[0], Parameter):
        return _branch(problem, cut, found[0])
    children = tuple(_branch(problem, cut, source) for source in found)
    return Tree(f"{label(problem, item)}: zero-mean if these are", pure, children)


def _terms(problem: Problem, item: Item) -> Iterator[Item]:
    """The addends of a sum of sums, oldest first, looking through views and dropout."""
    waiting, visited = [item], set()
    while waiting:
        current = waiting.pop()
        if current in visited:
            continue
        visited.add(current)
        found = problem.sources(current)
        passes = not isinstance(found, Opaque) and found and problem.carrier(current) is None
        if isinstance(current, Parameter) or isinstance(found, Opaque) or not passes:
            yield current
        elif packet(current.node) is aten.add or len(found) == 1 and found[0] != current:
            inner = found[0]
            if packet(current.node) is not aten.add and isinstance(inner, Parameter):
                yield current
            else:
                waiting.extend(found)
        else:
            yield current


def _parameter_text(problem: Problem, item: Parameter, found: Opaque | tuple[Item, ...]) -> str:
    axis = item.axis
    groups = "" if axis.outer == axis.inner == 1 else f", {axis.outer * axis.inner} groups apart"
    where = f"{item.name} (dimension {axis.dim}, {axis.size} elements{groups})"
    if isinstance(found, Opaque):
        return f"{where}: {found.reason}"
    return f"{where}: centred in the weights"
