"""The pull-back of one op: what a rule is, and how it is looked up.

``pull(node, axis)`` lists (operand, axis) pairs such that the op is linear jointly in those
operands, all others fixed, and commutes with centring: ``f(P x) = P f(x)``. Two facts follow.
Zero-mean operands give a zero-mean output, and a shift of the operands (a tensor constant along
``size``, free in every other index) is a shift of the output. The rules themselves are in
``rules.py``, ``index_rules.py`` and ``weight_rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from enjoyln_cli.graph.nodes import is_floating, op_name, packet, shape_of
from enjoyln_cli.plan.axis import Axis

Pairs = tuple[tuple[Node, Axis], ...]


@dataclass(frozen=True)
class Opaque:
    """No zero mean can be followed through this op; ``reason`` says why in a user's words."""

    reason: str


Pull = Pairs | Opaque


Rule = Callable[[Node, Axis], Pull]


_RULES: dict[Any, Rule] = {}


WRITTEN = "its memory is written in place"
"""Of a value that shares memory with one that an op writes into (``meta["written"]``)."""


def rule(*ops: Any) -> Callable[[Rule], Rule]:
    """Register one rule for a family of ops, given as packets: all their overloads.

    An op that exists only after another library is imported is given by its qualified name.
    """

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, function))
        return function

    return register


def pull(node: Node, axis: Axis) -> Pull:
    """The operands whose zero mean makes the value of ``node`` zero-mean over ``axis``."""
    if node.op != "call_function":
        return Opaque("it is an input or a constant, not computed from weights")
    if node.meta.get("written"):
        return Opaque(WRITTEN)
    if axis.size == 1:
        return Opaque("a mean over one element")
    tensors = [o for o in node.all_input_nodes if isinstance(o.meta.get("val"), torch.Tensor)]
    if any(shape_of(tensor) is None for tensor in (node, *tensors)):
        return Opaque(f"a shape that {op_name(node)} reads or gives depends on values")
    found = _RULES.get(packet(node)) or _RULES.get(getattr(packet(node), "_qualified_op_name", ""))
    if found is None:
        return Opaque(f"{op_name(node)} does not keep a zero mean")
    if not _has(node, axis) or not _is_called_in_order(node):
        return Opaque(f"{op_name(node)} gives a tensor of an unexpected shape")
    pairs = found(node, axis)
    if isinstance(pairs, Opaque):
        return pairs
    if not all(_has(operand, below) for operand, below in pairs):
        return Opaque(f"{op_name(node)} takes operands of shapes for which no zero mean is proven")
    if not all(map(is_floating, (node, *(operand for operand, _ in pairs)))):
        return Opaque(f"{op_name(node)} takes or gives other numbers than floating-point ones")
    return pairs


def _has(value: Any, axis: Axis) -> bool:
    """Whether ``value`` is a tensor of known shape that has all elements of the axis."""
    shape = shape_of(value)
    if shape is None or not 0 <= axis.dim < len(shape):
        return False
    return axis.start >= 0 and axis.stop <= shape[axis.dim]


def _is_called_in_order(node: Node) -> bool:
    """Whether every argument stands where the op's schema has it, as tracing writes them.

    Rules read arguments by position; only those that the schema takes by name alone are named.
    """
    if not hasattr(node.target, "_schema"):
        return True
    needed, named = _places(node.target)
    return len(node.args) >= needed and named.issuperset(node.kwargs)


@cache
def _places(target: Any) -> tuple[int, frozenset[str]]:
    """How many arguments have to stand in order, and the names of those that never do."""
    ordered = [a for a in target._schema.arguments if not a.kwarg_only]
    needed = sum(not argument.has_default_value() for argument in ordered)
    return needed, frozenset(a.name for a in target._schema.arguments if a.kwarg_only)
