"""Which values of a model can be rotated by an orthogonal matrix, together.

A *rotation group* is a set of values that have to be rotated alike: the residual stream, or the
values that attention carries from one projection to the next. If every tensor that writes it and
every tensor that reads it is rotated by the same ``Q``, no output changes:

* An op that treats features as one free index passes ``Q`` on: ``f(Q x) = Q f(x)``. Nearly all
  rules of ``pullback`` say this for any matrix; the others are listed in ``centring_only``.
* A product that sums over the features cancels it: ``(W Qᵀ)(Q x) = W x``. So a reader is rotated
  over its inputs as a writer is over its outputs, and a tied weight stays tied.
* A sum of squares does not see an orthogonal matrix.
* LayerNorm without weight passes ``Q`` on if ``Q 1 = 1``: then means and variances stay as well.
* Where ``k`` tokens become a token of ``k`` times as many features (pixel shuffle, patch merger),
  these rotate by ``diag(Q, ..., Q)``: an axis of ``k`` groups. Each group keeps its sum and its sum
  of squares, so a norm over all of them passes the matrix on as well.
* A norm's weight has to be fused into the layers that read the norm first (``NormGain``). Its bias
  becomes ``Q (bias / weight)``.

A group with any other reader or source stays as it is, and names it. A program that can run an
added operation has one more way: a product with ``Q`` at the head of a stream that nothing linear
writes (``FoundGroup.online_rotation``).
"""

# Arguments of fx nodes are typed as a wide union.
# mypy: disable-error-code="arg-type,union-attr,misc,index"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Node

from enjoyln_cli.graph.nodes import (
    argument,
    aten,
    centred_operand,
    constant_along,
    is_covered,
    is_part,
    op_name,
    packet,
    rank_of,
    reads_no_values,
    shape_of,
)
from enjoyln_cli.plan.axis import Axis, on_dimension
from enjoyln_cli.proof.flow import Flow, Value, consumers, origin, outcomes, takes_other_elements
from enjoyln_cli.proof.linear_layers import parameter_nodes
from enjoyln_cli.proof.min_cut import Parameter
from enjoyln_cli.proof.pullback import WRITTEN, Opaque, commutes_with_every_matrix
from enjoyln_cli.rotation.feature_sums import (
    RMS_NORMS,
    is_normed_over_last,
    is_statistic,
    is_sum_of_squares,
    summed_with,
)
from enjoyln_cli.rotation.found_group import FoundGroup, LayerObstacle, NormGain, writers_in
from enjoyln_cli.rotation.online_rotations import heads_of, is_online_rotation, misplaced_rotation
from enjoyln_cli.rotation.starts import starting_values
from enjoyln_cli.rotation.tensor_uses import TensorUses, computed_from_inputs, tensor_uses
from enjoyln_cli.trace.trace import uncast


@dataclass(eq=False)
class _GroupSearch:
    """Collects everything that has to be rotated with one value, in all traces."""

    flow: Flow
    groups: Mapping[str, str]
    named: Sequence[Mapping[Node, str]]
    nodes: Mapping[str, Sequence[tuple[int, Node]]]
    """The nodes of each parameter, with the index of the trace."""
    found: FoundGroup
    waiting: list[Value] = field(default_factory=list)

    def run(self, value: Value) -> None:
        self.visit(value)
        while self.waiting:
            current = self.waiting.pop()
            self.up(current)
            self.down(current)

    def visit(self, value: Value) -> None:
        if value in self.found.values:
            return
        self.found.values.add(value)
        if value.axis.size == self.found.size:
            self.waiting.append(value)
        else:
            self.stop("a group of features of another size is read", value.trace, value.node)

    def stop(self, reason: str, trace: int, node: Node) -> None:
        if self.found.obstacle is None:
            name = self.named[trace].get(node)
            where = name or self.flow.traces[trace].module_of(node)
            self.found.obstacle = LayerObstacle(reason, where)

    def up(self, value: Value) -> None:
        """Visit everything that the value is computed from."""
        trace, node, axis = value.trace, value.node, value.axis
        if is_online_rotation(self.flow, self.found.online_rotation, trace, node):
            return
        if node in self.named[trace]:
            self.parameter(Parameter(self.named[trace][node], axis))
        elif node.op != "call_function":
            self.given(value)
        elif node.meta.get("written"):
            self.stop(WRITTEN, trace, node)
        elif node in self.flow.identities:
            self.found.fused[node] = None
            if packet(node) is aten.layer_norm:  # its table holds rows of zero mean
                self.found.fixes_ones = True
            self.visit(Value(trace, self.flow.identities[node], axis))
        elif (norm := self.norm(value)) is not None:
            self.visit(Value(trace, norm, axis))
        else:
            pairs = origin(node, axis)
            if isinstance(pairs, Opaque):
                self.stop(_in_words(pairs, node), trace, node)
                return
            if not commutes_with_every_matrix(node, axis):
                self.stop(f"{op_name(node)} does not commute with a rotation", trace, node)
            for operand, below in pairs:
                self.visit(Value(trace, operand, below))

    def norm(self, value: Value) -> Any:
        """The operand that the value is rotated with, if its op is part of a norm; records why."""
        trace, node, axis = value.trace, value.node, value.axis
        covered = is_covered(axis, shape_of(node) or ())
        centred = centred_operand(node)
        if centred is not None and centred[1].dim == axis.dim and covered:
            self.found.fixes_ones = True
            return centred[0]
        over_last = axis.dim == rank_of(node) - 1 and covered
        if packet(node) is aten.layer_norm and over_last and is_normed_over_last(node, axis):
            self.found.fixes_ones = True
            return self.affine(value, argument(node, 2, "weight"), argument(node, 3, "bias"))
        if packet(node) in RMS_NORMS and over_last and is_normed_over_last(node, axis):
            return self.affine(value, argument(node, 2, "weight"), None)
        if packet(node) in (aten.mul, aten.multiply) and covered and not node.kwargs:
            for factor, other in (node.args[:2], node.args[1::-1]):
                if not isinstance(factor, Node) or rank_of(other) != rank_of(node):
                    continue
                gain = self.gain(value, factor)
                if gain is not None and not constant_along(other, axis, rank_of(node)):
                    self.found.gains.setdefault(gain, {})[trace, node] = None
                    return other
        return None

    def affine(self, value: Value, weight: Any, bias: Any) -> Any:
        """The input of a norm op; its weight becomes a gain, and its bias is rotated."""
        trace, node = value.trace, value.node
        names = self.named[trace]
        if any(part is not None and part not in names for part in (weight, bias)):
            self.stop("a norm whose weight or bias is not a parameter", trace, node)
        elif weight is not None:
            path = self.flow.traces[trace].module_of(node)
            of_bias = None if bias is None else names[bias]
            gain = NormGain(path, names[weight], of_bias, 0.0)
            self.found.gains.setdefault(gain, {})[trace, node] = None
        if bias is not None and bias in names:
            self.parameter(Parameter(names[bias], on_dimension(value.axis, 0)))
        return node.args[0]

    def gain(self, product: Value, factor: Node) -> NormGain | None:
        """The weight that a product multiplies by: a vector parameter, or 1 plus this vector."""
        inner, offset = uncast(factor), 0.0
        if packet(inner) is aten.add and not inner.kwargs and 1 in inner.args:
            others = [term for term in inner.args if isinstance(term, Node)]
            if len(others) != 1 or inner.args[1 - inner.args.index(others[0])] != 1:
                return None
            inner, offset = uncast(others[0]), 1.0
        name = self.named[product.trace].get(inner)
        if name is None or shape_of(inner) != (product.axis.length,):
            return None
        module = self.flow.traces[product.trace].module_of(product.node)
        return NormGain(module, name, None, offset)

    def parameter(self, parameter: Parameter) -> None:
        """Rotate a parameter, wherever a trace reads it."""
        if parameter in self.found.parameters:
            return
        self.found.parameters[parameter] = TensorUses(writes=False, reads=False)
        for trace, node in self.nodes[parameter.name]:
            self.visit(Value(trace, node, parameter.axis))

    def given(self, value: Value) -> None:
        """Visit a value that no op computes: only an input that may be left out can be rotated."""
        trace = self.flow.traces[value.trace]
        name = trace.inputs.get(value.node)
        if name is not None and not trace.required:
            self.found.inputs[name] = None
        elif self.found.obstacle is None and name is not None:
            self.found.obstacle = LayerObstacle("it is an input of the model", name)
        elif self.found.obstacle is None:
            where = next((path for user in value.node.users if (path := trace.module_of(user))), "")
            reason = "it is a constant that the checkpoint does not store"
            self.found.obstacle = LayerObstacle(reason, where)

    def require_own_inputs(self) -> None:
        """Stop at an input of the rotation group that the model never computes by itself.

        Callers can take ``inputs_embeds`` from the rotated model; ``input_features`` come from
        elsewhere, and so are not rotated.
        """
        reached = {seen.trace for seen in self.found.values if seen.node.op == "call_function"}
        for name in self.found.inputs:
            needed = all(name in self.flow.traces[at].inputs.values() for at in reached)
            if needed and self.found.obstacle is None:
                self.found.obstacle = LayerObstacle(
                    "it is an input that the model never computes", name
                )

    def down(self, value: Value) -> None:
        """Visit everything that is computed from the value."""
        trace, node, axis = value.trace, value.node, value.axis
        for reader in consumers(node):
            if reader.op == "output":
                self.returned(value)
            elif reads_no_values(reader, node) or reader.meta.get("unread"):
                continue
            elif reader in self.flow.unneeded:
                self.changed(value.trace, reader)
            elif reader.meta.get("written") or node.meta.get("written"):
                self.stop(WRITTEN, trace, reader)
            elif self.flow.identities.get(reader) is node:
                self.visit(Value(trace, reader, axis))
            elif (pair := summed_with(reader, node, axis)) is not None:
                self.visit(Value(trace, *pair))
            elif self.is_invariant(reader, node, axis):
                continue
            elif self.is_normed(value, reader):
                self.visit(Value(trace, reader, axis))
            elif (groups := _beside_others(value, reader)) is not None:
                self.visit(replace(value, axis=groups))
            elif packet(reader) is aten.layer_norm and argument(reader, 3, "bias") is node:
                self.visit(Value(trace, reader, on_dimension(axis, rank_of(reader) - 1)))
            else:
                self.passed_on(value, reader)

    def passed_on(self, value: Value, reader: Node) -> None:
        for below, read, found in outcomes(reader, value.node, value.axis, takes_other_elements):
            if below.op == "output":
                self.returned(Value(value.trace, read, value.axis))
            elif isinstance(found, Opaque):
                self.stop(_in_words(found, below), value.trace, below)
            elif isinstance(found, Axis):
                self.visit(Value(value.trace, below, found))

    def returned(self, value: Value) -> None:
        """Visit a value that the model returns: only state such as a cache may change."""
        trace = self.flow.traces[value.trace]
        fields = trace.returned.get(value.node)
        may_change = not self.flow.is_required(value.trace, value.node)
        if may_change or (fields and trace.fed_back.issuperset(fields)):
            self.changed(value.trace, value.node)
        else:
            self.stop("the model returns it", value.trace, value.node)

    def changed(self, trace: int, node: Node) -> None:
        """Note the output fields that hold a value, or are computed from it; caches are not."""
        returned, fed_back = self.flow.traces[trace].returned, self.flow.traces[trace].fed_back
        waiting, seen = [node], {node}
        while waiting:
            current = waiting.pop()
            self.found.outputs.update(
                dict.fromkeys(f for f in returned.get(current, ()) if f not in fed_back)
            )
            users = current.users.keys() - seen
            waiting += [user for user in users if user in self.flow.unneeded]
            seen |= users

    def is_invariant(self, reader: Node, node: Node, axis: Axis) -> bool:
        """Whether the reader's result does not change: a mean, variance or sum of squares."""
        if is_statistic(reader, node, axis):
            self.found.fixes_ones = True
            return True
        return is_sum_of_squares(reader, node, axis)

    def is_normed(self, value: Value, reader: Node) -> bool:
        """Whether the reader is the part of a norm that rotates with the value."""
        same = shape_of(reader) == shape_of(value.node)
        return same and self.norm(Value(value.trace, reader, value.axis)) is value.node


def _beside_others(value: Value, reader: Node) -> Axis | None:
    """The groups of all features, if ``reader`` norms others together with the value."""
    axis, shape = value.axis, shape_of(value.node) or ()
    normed = packet(reader) is aten.layer_norm or packet(reader) in RMS_NORMS
    if not normed or reader.args[0] is not value.node or axis.dim != len(shape) - 1:
        return None
    if axis.inner != 1 or axis.step or is_covered(axis, shape):
        return None
    if axis.start % axis.size or shape[-1] % axis.size:
        return None
    return replace(axis, start=0, outer=shape[-1] // axis.size)


def _in_words(found: Opaque, node: Node) -> str:
    """Why an op neither passes a matrix on nor cancels it."""
    whole: Any = node.args[0] if is_part(node) else node
    if not node.all_input_nodes:
        return "it is an input or a constant, not computed from weights"
    if not found.is_general:
        return found.reason
    return f"{op_name(whole)} acts on single features, so it does not commute with a rotation"


def find_rotation_groups(
    flow: Flow, groups: Mapping[str, str], *, values: bool, online_rotations: bool = False
) -> list[FoundGroup]:
    """Every group that holds the input of a norm; with ``values`` also the values of attention.

    With ``online_rotations``, a stream that cannot be rotated is tried with a product at its head.
    If each group of features of a norm's input can be rotated, the whole input is not listed as
    well. ``groups`` maps any parameter name to the first of its tied names.
    """
    named, nodes = parameter_nodes(flow.traces, groups)
    computed = [computed_from_inputs(trace.inputs) for trace in flow.traces]
    found: dict[Value, FoundGroup] = {}
    seen: set[Value] = set()

    def group_of(value: Value, carries: bool, online_rotation: str) -> FoundGroup:
        group = FoundGroup(
            size=value.axis.size, carries_values=carries, online_rotation=online_rotation
        )
        search = _GroupSearch(flow, groups, named, nodes, group)
        search.run(value)
        search.require_own_inputs()
        group.parameters |= tensor_uses(group.values, group.parameters, nodes, computed)
        if (misplaced := misplaced_rotation(flow, online_rotation, group.values)) is not None:
            search.stop("a product there would act on other values too", *misplaced)
        return group

    for value, carries in starting_values(flow, values):
        if value in seen:
            continue
        group = group_of(value, carries, "")
        seen |= group.values
        if group.obstacle and online_rotations and not carries:
            others = (group_of(value, carries, block) for block in heads_of(flow, group.values))
            rotating = (other for other in others if not other.obstacle and writers_in(other))
            group = next(rotating, group)
        found[value] = group
    rotated = {
        (at.trace, at.node) for one in found.values() if not one.obstacle for at in one.values
    }
    return [
        group
        for start, group in found.items()
        if not group.obstacle or (start.trace, start.node) not in rotated
    ]
