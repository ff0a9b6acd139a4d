"""The two questions that the pull-back table answers, over all traces of a model.

* ``sources``: which operands need zero mean so that a value has zero mean? This looks up the graph.
* ``observer``: which op, if any, would give another result if a value were shifted? This looks down
  the graph. Every consumer of the value must either absorb the shift, or pass it on as a shift of
  its own result, which must have no observer either.

Each answer is computed once per (value, axis).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import Graph, Node

from enjoyln_cli.graph.nodes import (
    SHAPE_ONLY,
    SPLITS,
    argument,
    aten,
    centred_operand,
    is_part,
    is_whole,
    occurrences,
    offsets,
    op_name,
    packet,
    reads_no_values,
    shape_of,
    slice_bounds,
)
from enjoyln_cli.plan.axis import Axis, on_dimension
from enjoyln_cli.proof import index_rules, rules, weight_rules  # noqa: F401  (they fill pull's table)
from enjoyln_cli.proof.pullback import WRITTEN, Opaque, Pull, pull
from enjoyln_cli.proof.views import (
    MOVES,
    pull_through_view,
    push_through_view,
    source_of,
    through_view,
)
from enjoyln_cli.trace.trace import Trace


@dataclass(frozen=True)
class Value:
    """A node of a graph and an axis of it; ``trace`` is the graph's index in ``Flow.traces``."""

    trace: int
    node: Node
    axis: Axis


@dataclass(frozen=True)
class Absorbed:
    """The result of the op does not change when this operand is shifted."""


Absorbs = Callable[[Node, Node, Axis], bool]
"""Whether the result of a node stays the same when an operand changes along an axis."""


READS_ITS_MEAN = "reads its mean"
"""How the reason ends for an op that observes a shift without a reason of its own."""


@dataclass(frozen=True)
class Observer:
    """A consumer whose result changes in another way than by a shift, and why."""

    trace: int
    node: Node
    reason: str


@dataclass(eq=False, kw_only=True)
class Flow:
    """All traces of one model, and the answers computed so far."""

    traces: tuple[Trace, ...]
    required: frozenset[str] | None = None
    """The output fields that must stay unchanged; ``None`` for all outputs."""
    identities: Mapping[Node, Node] = field(default_factory=dict)
    """Ops that become the identity since weights take over what they do (see ``identity_ops``), to
    the value that they pass on."""
    refused: Mapping[Node, str] = field(default_factory=dict)
    """Products whose scale cannot be fused, and why."""
    _pulls: dict[Value, Pull] = field(default_factory=dict)
    _observers: dict[Value, Observer | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for trace in self.traces:
            _mark_unread(trace.graph)

    def sources(self, value: Value) -> Opaque | tuple[Value, ...]:
        """The operands that must have zero mean, or why the value cannot be made zero-mean."""
        if value not in self._pulls:
            self._pulls[value] = self._pull(value.node, value.axis)
        found = self._pulls[value]
        if isinstance(found, Opaque):
            return found
        return tuple(Value(value.trace, node, axis) for node, axis in found)

    def _pull(self, node: Node, axis: Axis) -> Pull:
        if node in self.identities:
            return ((self.identities[node], axis),)
        if node in self.refused:
            return Opaque(self.refused[node])
        return origin(node, axis)

    def observer(self, value: Value) -> Observer | None:
        """An op that would notice a shift of the value along its axis; ``None`` if none would.

        It is enough to look at one consumer at a time: each consumer must absorb the shift, or pass
        it on without being noticed, for any values of its other operands.
        """
        waiting = [(value, False)]
        while waiting:
            current, visited = waiting.pop()
            if current in self._observers:
                continue
            steps = list(self.steps(current))
            seen = next((step for step in steps if isinstance(step, Observer)), None)
            open_values = [s for s in steps if isinstance(s, Value) and s not in self._observers]
            if seen is not None or visited or not open_values:
                passed = (self._observers[s] for s in steps if isinstance(s, Value) and not seen)
                self._observers[current] = seen or next((o for o in passed if o), None)
            else:
                waiting.append((current, True))
                waiting.extend((step, False) for step in open_values)
        return self._observers[value]

    def steps(self, value: Value) -> Iterator[Value | Observer]:
        """For each direct consumer: its result if that is shifted too, or an observer."""
        for consumer in consumers(value.node):
            if consumer.op == "output" and not self.is_required(value.trace, value.node):
                continue
            if self.identities.get(consumer) is value.node:
                yield Value(value.trace, consumer, value.axis)
                continue
            for reader, read, found in outcomes(consumer, value.node, value.axis):
                if reader.op == "output" and not self.is_required(value.trace, read):
                    continue
                if isinstance(found, Opaque):
                    yield Observer(value.trace, reader, found.reason)
                elif isinstance(found, Axis):
                    yield Value(value.trace, reader, found)

    def is_required(self, trace: int, node: Node) -> bool:
        """Whether a value that the model returns must stay unchanged."""
        fields = self.traces[trace].returned.get(node)
        return self.required is None or fields is None or not self.required.isdisjoint(fields)

    @cached_property
    def unneeded(self) -> frozenset[Node]:
        """The nodes that nothing is computed from but outputs that may change.

        If they read a parameter, nothing else in any trace reads it.
        """
        if self.required is None:
            return frozenset()
        needed: frozenset[str] = frozenset()
        held = [parameters_within(trace) for trace in self.traces]
        while True:
            parts = (self._unneeded(at, held[at], needed) for at in range(len(self.traces)))
            found = frozenset[Node]().union(*parts)
            read = (
                name
                for within in held
                for operand, names in within.items()
                if not found.issuperset(operand.users)
                for name in names
            )
            if (more := needed.union(read)) == needed:
                return found
            needed = more

    def _unneeded(
        self, at: int, held: Mapping[Node, frozenset[str]], needed: AbstractSet[str]
    ) -> set[Node]:
        """The unneeded nodes of one trace, if these parameters are ``needed``.

        ``held`` are the parameters that its values consist of (see ``parameters_within``).
        """
        found: set[Node] = set()
        for node in reversed(self.traces[at].graph.nodes):
            used = any(
                self.is_required(at, node) if user.op == "output" else user not in found
                for user in node.users
                if not (reads_no_values(user, node) or user.meta.get("unread"))
            )
            reads = (held.get(operand, frozenset()) for operand in node.all_input_nodes)
            if _hides_values(node) and not used and needed.isdisjoint(frozenset().union(*reads)):
                found.add(node)
        return found

    def narrowed(self, traces: int, required: frozenset[str]) -> Flow:
        """A flow over the first ``traces`` traces in which ``required`` outputs must not change."""
        return replace(self, traces=self.traces[:traces], required=required, _observers={})

    def reached(self) -> Iterator[tuple[str, ...]]:
        """The output fields that hold each returned value that ``observer`` has met."""
        for value in self._observers:
            if fields := self.traces[value.trace].returned.get(value.node):
                yield fields


def parameters_within(trace: Trace) -> dict[Node, frozenset[str]]:
    """The names of the parameters that a value consists of, for values of parameters alone."""
    found = {node: frozenset(names) for node, names in trace.parameters.items()}
    for node in trace.graph.nodes:
        operands = node.all_input_nodes
        if operands and found.keys() >= set(operands):
            found[node] = frozenset().union(*(found[operand] for operand in operands))
    return found


def consumers(node: Node) -> Iterator[Node]:
    """The nodes that read a value; instead of a split, its parts that are used."""
    for user in node.users:
        if packet(user) in TAKEN_APART:
            yield from (part if is_part(part) else user for part in user.users if part.users)
        else:
            yield user


def origin(node: Node, axis: Axis) -> Pull:
    """As ``pull``, but for elements selected from a view, the pair is the value that was viewed.

    This requires less: the axis on that value covers only the selected elements. ``pull`` would
    require a zero mean of all elements of the view.
    """
    found = pull(node, axis)
    pick = None if isinstance(found, Opaque) else pull_through_view(node, axis)
    return found if pick is None else (pick,)


def push(
    node: Node, operand: Node, axis: Axis, absorbs: Absorbs | None = None
) -> Axis | Absorbed | Opaque:
    """How a shift of ``operand`` along ``axis`` changes the value of ``node``.

    An ``Axis`` if the value is shifted along that axis, ``Absorbed`` if it does not change, and
    otherwise the reason that the shift is noticed. The value counts as shifted only if ``pull``
    lists every occurrence of the operand among the arguments. For another change than a shift,
    ``absorbs`` says which nodes do not change.
    """
    if node.op == "output":
        return Opaque("the model returns it")
    if node.op != "call_function":
        return Opaque(f"{node.op} reads it")
    if node.meta.get("written"):
        return Opaque(WRITTEN)
    if (absorbs or _absorbs)(node, operand, axis) or node.meta.get("unread"):
        return Absorbed()
    reasons = []
    for candidate in candidates(node, operand, axis):
        pairs = pull(node, candidate)
        if isinstance(pairs, Opaque):
            reasons.append(pairs)
        elif pairs.count((operand, axis)) == occurrences(node, operand):
            return candidate
    if reasons:
        return reasons[0]
    return Opaque(f"{op_name(node)} {READS_ITS_MEAN}", is_general=True)


def outcomes(
    node: Node, operand: Node, axis: Axis, absorbs: Absorbs | None = None
) -> Iterator[tuple[Node, Node, Axis | Absorbed | Opaque]]:
    """``(reader, value it reads, how a shift of operand changes the reader's result)``.

    The reader usually is ``node`` itself. If ``node`` is a view that spreads the elements of the
    axis over several dimensions, the readers are the ops that select elements from the view.
    ``absorbs`` is as for ``push``.
    """
    found = push(node, operand, axis, absorbs)
    if not isinstance(found, Opaque) or packet(node) not in MOVES or source_of(node) is not operand:
        yield node, operand, found
        return
    waiting = [node]
    while waiting:
        read = waiting.pop()
        for reader in consumers(read):
            if reads_no_values(reader, read) or reader.meta.get("unread"):
                continue
            moves = source_of(reader) is read
            below = push_through_view(reader, operand, axis) if moves else None
            if below is None and moves:
                waiting.append(reader)
            elif below is None:
                seen = found if reader.op != "output" else Opaque("the model returns it")
                yield reader, read, seen
            else:
                yield reader, read, below[0] if below else Absorbed()


TAKEN_APART = SPLITS | {aten.unbind, aten.embedding_bag}
"""Ops with several results, each of which has a rule."""
_SOFTMAX = {aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax}
_SPREADS = {aten.var, aten.std}


def _absorbs(node: Node, operand: Node, axis: Axis) -> bool:
    """Whether the result of ``node`` stays the same when ``operand`` is shifted along ``axis``.

    So it is for norms, softmax, variances and ``x - mean(x)`` over this axis, and for ops that read
    only the operand's shape or other elements of it.
    """
    op, shape = packet(node), shape_of(operand)
    if reads_no_values(node, operand):
        return True
    if not shape or occurrences(node, operand) != 1:
        return False
    if op is aten.layer_norm:
        sizes: Any = node.args[1]  # leading sizes of 1 do not matter
        over_last = set(sizes[:-1]) <= {1} and axis.dim == len(shape) - 1
        return node.args[0] is operand and over_last and is_whole(axis, shape)
    if op is aten.group_norm and len(shape) == 2:  # with more, it also normalises over positions
        groups = int(node.args[1])  # type: ignore[arg-type]
        return axis == Axis(1, 0, groups, shape[1] // groups, 1)
    if op in _SOFTMAX:
        same = argument(node, 1, "dim") % len(shape) == axis.dim
        return same and is_whole(axis, shape)
    if op in _SPREADS:
        dims = argument(node, 1, "dim")
        same = isinstance(dims, (list, tuple)) and [dim % len(shape) for dim in dims] == [axis.dim]
        return same and is_whole(axis, shape)
    if op is aten.mean:
        return all(centred_operand(user) == (operand, axis) for user in node.users)
    if op is aten.sub:
        return centred_operand(node) == (operand, axis)
    return takes_other_elements(node, operand, axis)


def takes_other_elements(node: Node, operand: Node, axis: Axis) -> bool:
    """Whether ``node`` is a slice of ``operand``, or a part of a split, without the axis."""
    part = slice_bounds(node)
    if part is None or part[0] != axis.dim:
        return False
    return part[2] <= axis.start or part[1] >= axis.stop


def _mark_unread(graph: Graph) -> None:
    """Set ``meta["unread"]`` on every node of which nothing but the shape is used."""
    for node in reversed(graph.nodes):
        if _hides_values(node):
            users = (packet(user) in SHAPE_ONLY or "unread" in user.meta for user in node.users)
            if all(users):
                node.meta["unread"] = True


def _hides_values(node: Node) -> bool:
    """Whether an op writes to nothing and returns one tensor, of a value-independent shape."""
    if not isinstance(node.target, torch._ops.OpOverload) or shape_of(node) is None:
        return False
    schema = node.target._schema
    decided = torch.Tag.dynamic_output_shape in node.target.tags
    return not schema.is_mutable and not decided


def candidates(node: Node, operand: Node, axis: Axis) -> list[Axis]:
    """Guess output axes that the shift may become; ``push`` checks each of them with ``pull``."""
    shape, into = shape_of(node), shape_of(operand)
    if shape is None or into is None:
        return []
    if packet(node) in rules.VIEWS:
        found = through_view(axis, into, shape)
        return [found] if found else []
    found_axes = [
        on_dimension(axis, dim) for dim, size in enumerate(shape) if size == into[axis.dim]
    ]
    if (part := slice_bounds(node)) is not None and part[0] == axis.dim:
        found_axes.append(replace(axis, start=axis.start - part[1]))
    if packet(node) is aten.cat:
        found_axes += [replace(axis, start=axis.start + at) for at in offsets(node, operand)]
    return found_axes
