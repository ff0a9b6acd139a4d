"""Every rule, on any operands that its op takes, against the real op in float64.

``judge`` checks answers of ``origin`` and ``outcomes`` against the op itself. Zero-mean operands
must give a zero-mean result, a shift of the operands must be a shift of the result, and a shift
that is absorbed must change nothing. Calls are drawn at random.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from random_calls import axes
from random_ops import FAMILIES
from torch.fx import Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from enjoyln_cli.graph.nodes import centred_operand, is_floating, occurrences, packet, shape_of
from enjoyln_cli.plan.axis import Axis, blocks, centre
from enjoyln_cli.proof.flow import Absorbed, consumers, origin, outcomes
from enjoyln_cli.proof.pullback import _RULES, Opaque, Pull, commutes_with_every_matrix

aten = torch.ops.aten


class Values(Interpreter):
    """Runs a graph and keeps the value of every node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)

    def run_node(self, n: Node) -> Any:
        result = super().run_node(n)
        return result.clone() if isinstance(result, torch.Tensor) else result


def recomputed(node: Node, values: dict[Node, Any], changed: dict[Node, torch.Tensor]) -> Any:
    """The value of ``node`` for changed values of other nodes; its other inputs stay the same."""
    between, at = set(), node
    while changed and not set(changed) & set(at.all_input_nodes):
        at = at.args[0]  # type: ignore[assignment]
        between.add(at)

    def value(n: Node) -> Any:
        if n in changed:
            return changed[n].clone()
        return call(n) if n in between else values[n]

    def call(n: Node) -> Any:
        args, kwargs = torch.fx.map_arg((n.args, n.kwargs), value)
        return n.target(*args, **kwargs)  # type: ignore[operator]

    return call(node)


def shift_of(x: torch.Tensor, axis: Axis, seed: int) -> torch.Tensor:
    """A tensor that is constant over every group, and zero outside of the axis."""
    free = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=x.dtype)
    return 3 * (free - centre(free, axis))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    fine = max(1e-9, 2**13 * torch.finfo(found.dtype).eps) if found.is_floating_point() else 0
    torch.testing.assert_close(found, expected, atol=fine, rtol=fine, equal_nan=True)


def judge(node: Node, axis: Axis, values: dict[Node, Any], rough: bool) -> Pull:
    """The result of ``origin``, checked on values."""
    pairs = origin(node, axis)
    if isinstance(pairs, Opaque):
        assert pairs.reason
        return pairs
    out = values[node]
    out = out.float() if rough and out.dtype is torch.float64 else out
    centred, shifted, once = {}, {}, True
    for operand, below in dict.fromkeys(pairs):
        x = values[operand]
        assert x.dtype.is_floating_point
        once &= occurrences(node, operand) == pairs.count((operand, below))
        centred[operand] = centre(centred.get(operand, x), below)
        shifted[operand] = shifted.get(operand, x) + shift_of(x, below, 7)
    result = recomputed(node, values, centred).to(out.dtype)
    close(result, centre(result, axis))
    if not once:  # linear in one argument, while the operand is in two: a shift of both shows
        return pairs
    close(centre(result, axis), centre(out, axis))
    moved = recomputed(node, values, shifted).to(out.dtype)
    close(centre(moved, axis), centre(out, axis))
    change = moved - out
    close(change - centre(change, axis), change)
    if commutes_with_every_matrix(node, axis):
        matrix = values_of_matrix(axis.size)
        mixed: dict[Node, torch.Tensor] = {}
        for operand, below in dict.fromkeys(pairs):
            mixed[operand] = multiplied(mixed.get(operand, values[operand]), below, matrix)
        close(recomputed(node, values, mixed).to(out.dtype), multiplied(out, axis, matrix))
    return pairs


def values_of_matrix(size: int) -> torch.Tensor:
    """A matrix with no property that a rule could rely on."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, size, generator=generator, dtype=torch.float64)


def multiplied(x: torch.Tensor, axis: Axis, matrix: torch.Tensor) -> torch.Tensor:
    """The matrix times every group of an axis; other elements stay as they are."""
    x = x.clone()
    for block in blocks(axis):
        part = x.narrow(block.dim, block.start, block.length)
        groups = part.unflatten(block.dim, (block.outer, block.size, block.inner))
        new = groups.movedim(block.dim + 1, -1) @ matrix.to(x.dtype).T
        part.copy_(new.movedim(-1, block.dim + 1).flatten(block.dim, block.dim + 2))
    return x


def judge_outcome(
    node: Node,
    operand: Node,
    axis: Axis,
    found: Axis | Absorbed | Opaque,
    values: dict[Node, Any],
    rough: bool,
) -> str:
    """The result of ``outcomes`` for a shift of one operand, checked on values."""
    out = values[node]
    if isinstance(found, Opaque):
        return "seen"
    x = values[operand]
    changed = {operand: x + shift_of(x, axis, 11)}
    if packet(node) is aten.mean and isinstance(found, Absorbed):
        return "absorbed"  # by the node that subtracts it, which has its own check
    if centred_operand(node) == (operand, axis):
        mean = node.args[1]
        changed[mean] = recomputed(mean, values, changed)
    after = recomputed(node, values, changed)
    if isinstance(found, Absorbed):
        exact = torch.float32 if rough else torch.float64
        close(after.to(exact), out.to(exact))
        return "absorbed"
    change = (after - out).float() if rough else after - out
    close(change - centre(change, found), change)
    return "passed"


def judge_case(name: str, seed: int) -> Counter[Any]:
    """Check every op of one random call under every axis; counts by op and outcome."""
    r, counted = Random(f"{name} {seed}"), Counter[Any]()
    function, inputs = FAMILIES[name](r)
    try:
        function(*(x.clone() for x in inputs))
        module = make_fx(function, pre_dispatch=True)(*inputs)
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return counted  # torch refuses such operands
    interpreter = Values(module)
    interpreter.run(*inputs)
    values = interpreter.env
    sources: dict[Node, dict[Axis, None]] = {}
    for node in module.graph.nodes:
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, torch.Tensor):
            continue
        read = [n for n in values if isinstance(values[n], torch.Tensor)]
        rough = any(values[n].dtype is torch.float32 for n in read)
        for axis in axes(tuple(val.shape)):
            pairs = judge(node, axis, values, rough)
            for found, below in () if isinstance(pairs, Opaque) else pairs:
                sources.setdefault(found, {})[below] = None
            key = packet(node) if packet(node) in _RULES else op_key(node)
            counted[key, not isinstance(pairs, Opaque)] += 1
    for operand in module.graph.nodes:
        if operand not in values or shape_of(operand) is None or not is_floating(operand):
            continue
        for node in consumers(operand):
            if node.op == "output" or shape_of(node) is None:
                continue
            for axis in {
                **dict.fromkeys(axes(shape_of(operand) or ())),
                **sources.get(operand, {}),
            }:
                for reader, _, found in outcomes(node, operand, axis):
                    result = "seen"
                    if reader.op != "output":
                        result = judge_outcome(reader, operand, axis, found, values, rough)
                    counted[result] += 1
                    counted["passed views"] += result == "passed" and reader is not node
    return counted


def op_key(node: Node) -> Any:
    return getattr(packet(node), "_qualified_op_name", packet(node))


FEW = 8
CALLS = {
    "copies": 200,
    "views": 60,
    "dimensions": 170,
    "orders": 190,
    "casts": 90,
    "gathers": 180,
    "images": 140,
    "paddings": 620,
    "matrices": 235,
    "factors": 90,
    "reductions": 170,
    "narrower": 170,
    "convolutions": 120,
}
"""More calls for families with many ops, with calls that torch often refuses, or long chains."""
ALWAYS = {"_same", "_permute", "_zeros", "_cast", "_view", "_matmul", "_reduce"}
"""Rules that refuse floating-point operands rarely or never."""


@pytest.mark.parametrize("name", FAMILIES)
def test_rules_hold_for_a_few_operands(name: str) -> None:
    for seed in range(FEW):
        judge_case(name, seed)


@pytest.mark.parametrize("op", ["layer_norm", "sub"])
def test_some_rules_hold_for_centring_only(op: str) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        return torch.layer_norm(x, [6]) if op == "layer_norm" else x - mean

    x, whole = torch.randn(4, 6, dtype=torch.float64), Axis(1, 0, 1, 6, 1)
    node = list(make_fx(function, pre_dispatch=True)(x).graph.nodes)[-2]
    assert origin(node, whole) == () and not commutes_with_every_matrix(node, whole)
    matrix = values_of_matrix(6)
    assert not torch.allclose(function(x), multiplied(function(x), whole, matrix))


@pytest.mark.slow
def test_rules_hold_for_any_operands() -> None:
    """Thousands of calls, among which every op with a rule is both accepted and refused."""
    counted = Counter[Any]()
    for name in FAMILIES:
        for seed in range(CALLS.get(name, 45)):
            counted += judge_case(name, seed)
    met = {key[0] for key in counted if isinstance(key, tuple)}
    untested = {aten.dropout_, aten._grouped_mm}  # in place; not for float64, as its fallback
    untested |= {aten.empty, aten.empty_like, aten.new_empty}  # hold no values
    assert set(_RULES) - met <= untested, set(_RULES) - met
    rules = met & set(_RULES)
    assert all(counted[op, True] for op in rules), [op for op in rules if not counted[op, True]]
    never = {op for op in rules if not counted[op, False]}
    assert {_RULES[op].__name__ for op in never} <= ALWAYS, never
    assert min(counted[how] for how in ("passed", "passed views", "absorbed", "seen")) > 10
