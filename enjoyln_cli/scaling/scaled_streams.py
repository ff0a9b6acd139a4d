"""Which values have to be held at another scale together, and by which edits.

A residual stream is held as ``2^-k x`` if

* what writes it is multiplied by ``2^-k``: the weight and bias of a linear layer, an embedding, the
  weight and bias of a norm after which the stream goes on;
* the eps of each norm that reads it is multiplied by ``4^-k``: then the norm returns the same;
* a linear layer that reads it without a norm has its weight multiplied by ``2^k``.

``LN(2^-k x; 4^-k eps) = LN(x; eps)``, and a power of two rounds nothing that is not too small for
the dtype. The search proposes an exponent for each value (see ``degrees``), in units of ``k``, and
a check of every op of every trace decides whether the proposal holds.
"""

# Arguments of fx nodes are typed as a wide union.
# mypy: disable-error-code="arg-type,union-attr"

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    aten,
    is_part,
    occurrences,
    op_name,
    packet,
    readers_of,
    reads_no_values,
    shape_of,
)
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.proof.flow import Flow, parameters_within
from enjoyln_cli.proof.linear_layers import parameter_nodes
from enjoyln_cli.proof.min_cut import Parameter, Problem
from enjoyln_cli.proof.pullback import WRITTEN
from enjoyln_cli.rotation.found_group import LayerObstacle
from enjoyln_cli.rotation.starts import inputs_of_norms
from enjoyln_cli.scaling.degrees import Degrees, degrees, eps_of
from enjoyln_cli.trace.trace import uncast

DOWN = Fraction(-1)
"""The exponent of the stream itself."""
RETURNED = "the model returns it"
TracedNode = tuple[int, Node]
"""The index of a trace, and a node of its graph."""


@dataclass(eq=False)
class ScaledStream:
    """What changes with a stream, in units of ``k``; or the obstacle."""

    norm: str
    """Path of the first norm that reads it."""
    exponents: dict[TracedNode, Fraction] = field(default_factory=dict)
    """All values that are held at another scale."""
    parameters: dict[str, Fraction] = field(default_factory=dict)
    """Parameters by the first of their tied names."""
    shifted: dict[str, tuple[Fraction, float]] = field(default_factory=dict)
    """Parameters ``w`` that are read as ``c + w`` alone: the exponent of that sum, and ``c``."""
    norms: dict[str, tuple[Fraction, float]] = field(default_factory=dict)
    """For the module of each norm: the exponent of its eps, and its eps."""
    inputs: dict[str, None] = field(default_factory=dict)
    """Optional inputs of the model (``inputs_embeds``) that have to be given at the new scale."""
    obstacle: LayerObstacle | None = None

    @property
    def is_scaled(self) -> bool:
        return self.obstacle is None


def calls_of_norms(flow: Flow) -> dict[str, list[TracedNode]]:
    """The inputs of each module that norms over the last dimension, by its path."""
    calls: dict[str, list[TracedNode]] = {}
    for value, node in inputs_of_norms(flow):
        module = flow.traces[value.trace].module_of(node)
        calls.setdefault(module, []).append((value.trace, value.node))
    return calls


def scaled_streams(problem: Problem, *, keeps_all: bool = True) -> list[ScaledStream]:
    """Every stream that a norm reads, in the order of the norms.

    Without ``keeps_all``, an output that need not stay unchanged may be at another scale.
    """
    named, nodes = parameter_nodes(problem.flow.traces, problem.groups)
    held = [frozenset(parameters_within(trace)) for trace in problem.flow.traces]
    order = _order_of(problem.flow)
    calls = calls_of_norms(problem.flow)
    found: list[ScaledStream] = []
    seen: set[TracedNode] = set()
    for norm, (start, *_) in calls.items():
        if start in seen:
            continue
        search = _Search(problem, keeps_all, named, nodes, held, order, calls, ScaledStream(norm))
        search.run(start)
        found.append(search.stream)
        seen |= search.stream.exponents.keys()
    return found


@dataclass(eq=False)
class _Search:
    problem: Problem
    keeps_all: bool
    named: Sequence[Mapping[Node, str]]
    nodes: Mapping[str, Sequence[TracedNode]]
    held: Sequence[frozenset[Node]]
    """The nodes of each trace that are computed from parameters alone."""
    order: Mapping[TracedNode, int]
    """Where each node stands in the graphs."""
    calls: Mapping[str, Sequence[TracedNode]]
    """The inputs of each norm."""
    stream: ScaledStream
    waiting: list[TracedNode] = field(default_factory=list)
    products: dict[TracedNode, None] = field(default_factory=dict)
    """Products of several values, whose exponents are not settled yet."""

    @property
    def flow(self) -> Flow:
        return self.problem.flow

    def run(self, start: TracedNode) -> None:
        """Propose exponents until nothing is open, then check them."""
        self.visit(start, DOWN)
        while not self.stream.obstacle and (self.waiting or self.products):
            if self.waiting:
                place = self.waiting.pop()
                self.up(place)
                self.down(place)
            else:
                self.settle(min(self.products, key=self.order.__getitem__))
        if not self.stream.obstacle:
            self.check()

    def exponent(self, position: int, node: Node) -> Fraction:
        return self.stream.exponents.get((position, node), Fraction(0))

    def visit(self, place: TracedNode, exponent: Fraction) -> None:
        known = self.stream.exponents.get(place)
        if known is None and exponent:
            self.stream.exponents[place] = exponent
            self.waiting.append(place)
        elif known is not None and known != exponent:
            self.stop_at_two_scales(place)

    def stop_at_two_scales(self, place: TracedNode) -> None:
        position, node = place
        way = ", which --untie avoids for a tied head" if node in self.named[position] else ""
        self.stop(f"it would have to be held at two scales{way}", place)

    def stop(self, reason: str, place: TracedNode) -> None:
        if self.stream.obstacle is None:
            position, node = place
            where = self.named[position].get(node) or self.flow.traces[position].module_of(node)
            self.stream.obstacle = LayerObstacle(reason, where)

    def up(self, place: TracedNode) -> None:
        """Propose exponents for what a value is computed from."""
        position, node = place
        exponent = self.stream.exponents[place]
        if node in self.named[position]:
            self.parameter(self.named[position][node], place, exponent)
        elif node.op != "call_function":
            self.given(place)
        elif node.meta.get("written"):
            self.stop(WRITTEN, place)
        elif (rule := degrees(node)) is None:
            self.stop(f"{op_name(node)} gives another function at another scale", place)
        elif rule.adds_number and node in self.held[position]:
            self.shifted(place, exponent)
        else:
            for operand in rule.alike:
                self.visit((position, operand), exponent)
            if rule.adds_number:
                self.eps(place, exponent)
            if len(rule.factors) == 1:
                ((operand, power),) = rule.factors
                self.visit((position, operand), exponent / power)
            elif rule.factors:
                self.products[place] = None

    def down(self, place: TracedNode) -> None:
        """Propose exponents for what is computed from a value."""
        position, node = place
        exponent = self.stream.exponents[place]
        for reader in node.users:
            if reader.op == "output":
                if self.keeps_all or self.flow.is_required(position, node):
                    self.stop(RETURNED, place)
            elif reads_no_values(reader, node) or self.is_unread(reader):
                continue
            elif reader.meta.get("written") or node.meta.get("written"):
                self.stop(WRITTEN, place)
            elif (rule := degrees(reader)) is None:
                self.stop(f"{op_name(reader)} reads its scale", (position, reader))
            elif rule.normed is node:
                self.eps((position, reader), 2 * exponent)
            elif node in rule.alike:
                self.visit((position, reader), exponent)
            elif len(rule.factors) == 1 and rule.factors[0][0] is node:
                self.visit((position, reader), exponent * rule.factors[0][1])
            elif any(factor is node for factor, _ in rule.factors):
                self.products[position, reader] = None
            else:
                self.stop(f"{op_name(reader)} reads its scale", (position, reader))

    def settle(self, place: TracedNode) -> None:
        """Propose an exponent for a product, or for the parameter in it."""
        del self.products[place]
        position, node = place
        rule = degrees(node)
        assert rule is not None
        owned = [(x, p) for x, p in rule.factors if x in self.held[position]]
        total = _total(self, position, rule)
        if len(owned) == 1 and len(rule.factors) > 1:
            ((factor, power),) = owned
            missing = self.exponent(position, node) - total
            self.visit((position, factor), self.exponent(position, factor) + missing / power)
        elif place not in self.stream.exponents:
            self.visit(place, total)
        elif total != self.stream.exponents[place]:
            missing = self.stream.exponents[place] - total
            open_ = [(x, p) for x, p in rule.factors if (position, x) not in self.stream.exponents]
            if not open_:
                self.stop_at_two_scales(place)
                return
            factor, power = open_[0]
            self.visit((position, factor), missing / power)

    def parameter(self, name: str, place: TracedNode, exponent: Fraction) -> None:
        """Scale a parameter, wherever a trace reads it."""
        if self.stream.parameters.setdefault(name, exponent) != exponent:
            self.stop_at_two_scales(place)
        shape = shape_of(place[1])
        if shape and (why := self.problem.locked(Parameter(name, feature_axis(shape, 0)))):
            self.stop(why, place)
        for other in self.nodes[name]:
            self.visit(other, exponent)

    def shifted(self, place: TracedNode, exponent: Fraction) -> None:
        """Scale the sum of a number and a parameter that is read in such sums alone."""
        position, node = place
        source = uncast(node.all_input_nodes[0])
        name, number = self.named[position].get(source), eps_of(node)
        if name is None or number is None or packet(node) is not aten.add:
            self.stop("it adds a number to a weight in an unusual way", place)
            return
        if self.stream.shifted.setdefault(name, (exponent, number)) != (exponent, number):
            self.stop_at_two_scales(place)
        for at, parameter in self.nodes[name]:
            for reader in _past_casts(parameter):
                if packet(reader) is not aten.add or eps_of(reader) != number:
                    self.stop("a weight of it is read in two ways", (at, reader))
                self.visit((at, reader), exponent)

    def given(self, place: TracedNode) -> None:
        position, node = place
        trace = self.flow.traces[position]
        name = trace.inputs.get(node)
        if name is not None and not trace.required:
            self.stream.inputs[name] = None
            return
        reason = "it is an input of the model" if name else "it is a constant that is not stored"
        self.stop(reason, place)

    def eps(self, place: TracedNode, exponent: Fraction) -> None:
        """Note the eps of a norm, or of a mean of squares that a number is added to."""
        position, node = place
        module, eps = self.flow.traces[position].module_of(node), eps_of(node)
        if eps is None or module not in self.calls:
            self.stop("a number is added to it that is no eps of a norm", place)
        elif self.stream.norms.setdefault(module, (exponent, eps)) != (exponent, eps):
            self.stop("a norm in it would need two values of eps", place)
        else:
            for call in self.calls[module]:
                self.visit(call, exponent / 2)

    def check(self) -> None:
        """Stop at the first op of a trace whose exponents do not fit together."""
        for position, trace in enumerate(self.flow.traces):
            for node in trace.graph.nodes:
                if not self.fits((position, node)):
                    self.stop(
                        "its scale does not follow from the scales of its operands",
                        (position, node),
                    )

    def is_unread(self, node: Node) -> bool:
        """Whether nothing is computed from a node but outputs that may change."""
        if node.meta.get("unread"):
            return True
        return not self.keeps_all and node in self.flow.unneeded

    def fits(self, place: TracedNode) -> bool:
        """Whether the exponents of a node and its operands agree with its rule."""
        position, node = place
        own = self.exponent(position, node)
        read = [x for x in node.all_input_nodes if self.exponent(position, x)]
        if not own and not read:
            return True
        if node.op != "call_function":  # a parameter, or what the call returns
            is_given = self.flow.traces[position].inputs.get(node) in self.stream.inputs
            return node.op == "output" or node in self.named[position] or is_given
        if self.is_unread(node):
            return True
        if all(reads_no_values(node, x) for x in read) and not own:
            return True
        rule = degrees(node)
        if rule is None:
            return False
        if own and rule.adds_number and node in self.held[position]:
            name = self.named[position].get(uncast(node.all_input_nodes[0]), "")
            return self.stream.shifted.get(name) == (own, eps_of(node))
        listed = [*rule.alike, *(x for x, _ in rule.factors), rule.normed]
        number = rule.adds_number and own
        normed = rule.normed is not None and self.exponent(position, rule.normed)
        if number or normed:
            needed = own if number else 2 * self.exponent(position, rule.normed)
            module = self.flow.traces[position].module_of(node)
            if self.stream.norms.get(module) != (needed, eps_of(node)):
                return False
        if rule.factors and own != _total(self, position, rule):
            return False
        if any(self.exponent(position, x) != own for x in rule.alike):
            return False
        return is_part(node) or all(
            listed.count(x) == occurrences(node, x) or reads_no_values(node, x) for x in read
        )


def _total(search: _Search, position: int, rule: Degrees) -> Fraction:
    return sum((p * search.exponent(position, x) for x, p in rule.factors), Fraction(0))


def _past_casts(node: Node) -> Iterator[Node]:
    for reader in readers_of(node):
        if packet(reader) in (aten.to, aten._to_copy, aten.alias):
            yield from _past_casts(reader)
        else:
            yield reader


def _order_of(flow: Flow) -> dict[TracedNode, int]:
    places = ((at, node) for at, trace in enumerate(flow.traces) for node in trace.graph.nodes)
    return {place: index for index, place in enumerate(places)}
