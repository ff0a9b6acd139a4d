"""The pull-back of one op: what a rule is, and how the rule of an op is found.

``pull(node, axis)`` lists (operand, axis) pairs. With all other operands fixed, the op is jointly
linear in the listed operands and commutes with centring them: ``f(P x) = P f(x)``. So:

* if the listed operands have zero mean, so has the output;
* a shift of the listed operands is a shift of the output. A shift is an added tensor that is
  constant along ``size`` and arbitrary along every other index.

Most rules say more: the op treats ``size`` as one free index, and commutes with every matrix on it,
``f(M x) = M f(x)``. ``rotation.rotation_groups`` relies on that. The exceptions are registered as
``centring_only``.

The rules are in ``rules.py``, ``index_rules.py`` and ``weight_rules.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from enjoyln_cli.graph.nodes import centred_operand, is_floating, op_name, packet, shape_of
from enjoyln_cli.plan.axis import Axis

Pairs = tuple[tuple[Node, Axis], ...]


@dataclass(frozen=True)
class Opaque:
    """The op does not keep a zero mean; ``reason`` is the explanation that users read."""

    reason: str
    is_general: bool = False
    """Whether the reason says no more than that there is no rule for the op."""


Pull = Pairs | Opaque


Rule = Callable[[Node, Axis], Pull]


_RULES: dict[Any, Rule] = {}
_CENTRING_ONLY: set[Any] = set()


WRITTEN = "its memory is written in place"
"""The reason for values that share memory with a tensor that an in-place op writes to.

Such nodes have ``meta["written"]``.
"""


def rule(*ops: Any, centring_only: bool = False) -> Callable[[Rule], Rule]:
    """Register one rule for several ops, given as op packets: the rule serves all their overloads.

    Ops that exist only after another library is imported are given by their qualified names. With
    ``centring_only``, the ops commute with centring, but not with every matrix.
    """

    def register(function: Rule) -> Rule:
        _RULES.update(dict.fromkeys(ops, function))
        if centring_only:
            _CENTRING_ONLY.update(ops)
        return function

    return register


def commutes_with_every_matrix(node: Node, axis: Axis) -> bool:
    """Whether ``f(M x) = M f(x)`` for the operands that ``pull`` lists and any matrix ``M``."""
    centred = centred_operand(node)
    return packet(node) not in _CENTRING_ONLY and (centred is None or centred[1] != axis)


def pull(node: Node, axis: Axis) -> Pull:
    """The operands that must have zero mean for ``node`` to have zero mean over ``axis``."""
    if node.op != "call_function":
        return Opaque("it is an input or a constant, not computed from weights")
    if node.meta.get("written"):
        return Opaque(WRITTEN)
    if axis.size == 1:
        return Opaque("the mean is over a single element")
    tensors = [o for o in node.all_input_nodes if isinstance(o.meta.get("val"), torch.Tensor)]
    if any(shape_of(tensor) is None for tensor in (node, *tensors)):
        return Opaque(f"{op_name(node)} reads or returns a tensor whose shape depends on values")
    found = _RULES.get(packet(node)) or _RULES.get(getattr(packet(node), "_qualified_op_name", ""))
    if found is None:
        return Opaque(f"{op_name(node)} does not keep a zero mean", is_general=True)
    if not _has(node, axis) or not _is_called_in_order(node):
        reason = f"{op_name(node)} returns a tensor of an unexpected shape"
        return Opaque(reason, is_general=True)
    pairs = found(node, axis)
    if isinstance(pairs, Opaque):
        return pairs
    if not all(_has(operand, below) for operand, below in pairs):
        return Opaque(f"{op_name(node)} has operands of shapes for which a zero mean is not proven")
    if not all(map(is_floating, (node, *(operand for operand, _ in pairs)))):
        return Opaque(f"{op_name(node)} reads or returns numbers that are not floating-point")
    return pairs


def _has(value: Any, axis: Axis) -> bool:
    """Whether ``value`` is a tensor of known shape that contains all elements of the axis."""
    shape = shape_of(value) or ()
    if not 0 <= axis.dim < len(shape):
        return False
    return axis.start >= 0 and axis.stop <= shape[axis.dim]


def _is_called_in_order(node: Node) -> bool:
    """Whether only keyword-only arguments are passed by name, as tracing does.

    Rules read all other arguments by position.
    """
    if not hasattr(node.target, "_schema"):
        return True
    needed, named = _places(node.target)
    return len(node.args) >= needed and named.issuperset(node.kwargs)


@cache
def _places(target: Any) -> tuple[int, frozenset[str]]:
    """The number of required positional arguments, and the names of keyword-only arguments."""
    ordered = [a for a in target._schema.arguments if not a.kwarg_only]
    needed = sum(not argument.has_default_value() for argument in ordered)
    return needed, frozenset(a.name for a in target._schema.arguments if a.kwarg_only)
