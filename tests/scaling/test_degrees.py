"""Each rule, against the op itself: from operands at other scales comes the stated scale."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from enjoyln_cli.scaling.degrees import Degrees, degrees, eps_of

ONES = torch.ones(2, 3, 4, dtype=torch.float64)
Op = Callable[..., torch.Tensor]
SHAPES = {
    "x": (2, 3, 4),
    "y": (2, 3, 4),
    "square": (2, 4, 5),
    "weight": (6, 4),
    "bias": (6,),
    "vector": (4,),
}
HOMOGENEOUS: dict[str, tuple[Op, tuple[str, ...]]] = {
    "add": (lambda x, y: x + y, ("x", "y")),
    "sub": (lambda x, y: x - 2 * y, ("x", "y")),
    "cat": (lambda x, y: torch.cat([x, y], 1), ("x", "y")),
    "stack": (lambda x, y: torch.stack([x, y]), ("x", "y")),
    "where": (lambda x, y: torch.where(torch.ones(3, 1).bool(), x, y), ("x", "y")),
    "maximum": (torch.maximum, ("x", "y")),
    "relu": (torch.relu, ("x",)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.3), ("x",)),
    "abs": (torch.abs, ("x",)),
    "neg": (torch.neg, ("x",)),
    "mean": (lambda x: x.mean(-1), ("x",)),
    "sum": (lambda x: x.sum(1), ("x",)),
    "amax": (lambda x: x.amax(-1), ("x",)),
    "std": (lambda x: x.std(-1), ("x",)),
    "norm": (lambda x: torch.linalg.vector_norm(x, dim=-1), ("x",)),
    "split": (lambda x: x.split(2, -1)[1], ("x",)),
    "chunk": (lambda x: x.chunk(3, 1)[2], ("x",)),
    "roll": (lambda x: x.roll(1, 1), ("x",)),
    "flip": (lambda x: x.flip(-1), ("x",)),
    "gather": (lambda x: x.gather(-1, torch.zeros(2, 3, 1).long()), ("x",)),
    "index": (lambda x: x[:, torch.tensor([2, 0])], ("x",)),
    "masked_fill": (lambda x: x.masked_fill(torch.ones(3, 1).bool(), 0.0), ("x",)),
    "masked_fill_inf": (lambda x: x.masked_fill(torch.zeros(4).bool(), -torch.inf), ("x",)),
    "pad": (lambda x: F.pad(x, (1, 2)), ("x",)),
    "max_pool": (lambda x: F.max_pool1d(x, 2), ("x",)),
    "avg_pool": (lambda x: F.avg_pool1d(x, 2), ("x",)),
    "upsample": (lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"), ("x",)),
    "to": (lambda x: x.float().double(), ("x",)),
    "mul": (lambda x, y: x * y, ("x", "y")),
    "mul_self": (lambda x: x * x, ("x",)),
    "mul_number": (lambda x: 3 * x, ("x",)),
    "div": (lambda x, y: x / y, ("x", "y")),
    "div_number": (lambda x: x / 3, ("x",)),
    "pow": (lambda x: x.pow(2), ("x",)),
    "square": (torch.square, ("x",)),
    "sqrt": (lambda x: x.abs().sqrt(), ("x",)),
    "rsqrt": (lambda x: x.abs().rsqrt(), ("x",)),
    "reciprocal": (torch.reciprocal, ("x",)),
    "var": (lambda x: x.var(-1), ("x",)),
    "matmul": (torch.matmul, ("x", "square")),
    "bmm": (torch.bmm, ("x", "square")),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), ("x", "square")),
    "linear": (F.linear, ("x", "weight", "bias")),
    "addmm": (lambda b, x, w: torch.addmm(b, x[0], w.T), ("bias", "x", "weight")),
    "conv": (lambda x, w, b: F.conv1d(x.mT, w[:, :, None], b), ("x", "weight", "bias")),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 5]]), w), ("weight",)),
    "attention": (lambda v: F.scaled_dot_product_attention(ONES, ONES, v), ("x",)),
}  # fmt: skip
"""Ops and the names of their operands (see ``SHAPES``)."""
NOT_HOMOGENEOUS: dict[str, Op] = {
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "exp": torch.exp,
    "hardtanh": F.hardtanh,
    "clamp": lambda x: x.clamp(max=1),
    "masked_fill": lambda x: x.masked_fill(torch.ones(4).bool(), 2.0),
    "where_number": lambda x: torch.where(torch.ones(4).bool(), x, 2.0),
    "pad_number": lambda x: F.pad(x, (1, 1), value=2.0),
    "argmax": lambda x: x.argmax(-1),
    "zero_norm": lambda x: torch.linalg.vector_norm(x, 0, dim=-1),
    "to_integer": lambda x: x.to(torch.int64),
    "add_integers": lambda x: x + torch.arange(4),
    "where_integers": lambda x: torch.where(torch.ones(4).bool(), x, torch.arange(4)),
    "maximum_integers": lambda x: torch.maximum(x, torch.arange(4)),
    "cumprod": lambda x: x.cumprod(-1),
}


class Call(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.op(*args)


def graph_of(op: Op, args: tuple[torch.Tensor, ...]) -> tuple[list[Node], Node, list[Node]]:
    """The nodes of a call in their order, its result, and its operands."""
    program = torch.export.export(Call(op), args).run_decompositions({})
    nodes = list(program.graph.nodes)
    given = [node for node in nodes if node.name in program.graph_signature.user_inputs]
    return nodes, nodes[-1].args[0][0], given  # type: ignore[index,return-value]


def exponent_of(rule: Degrees, exponents: dict[Node, Fraction]) -> Fraction | None:
    """The exponent of a result; ``None`` if its operands' exponents do not fit together."""
    made = [sum((p * exponents.get(x, Fraction(0)) for x, p in rule.factors), Fraction(0))]
    found = {exponents.get(x, Fraction(0)) for x in rule.alike}
    found |= set(made if rule.factors else ())
    return found.pop() if len(found) == 1 else None


@pytest.mark.parametrize("name", HOMOGENEOUS)
def test_the_result_has_the_stated_scale(name: str) -> None:
    op, operands = HOMOGENEOUS[name]
    torch.manual_seed(0)
    args = tuple(torch.randn(SHAPES[each]).double() for each in operands)
    nodes, result, given = graph_of(op, args)
    tried = 0
    for first in (-2, 2):
        for second in (-2, 0, 2):
            for third in (first + second, first, 0):
                chosen = [Fraction(e) for e in (first, second, third)[: len(args)]]
                exponents: dict[Node, Fraction] = dict(zip(given, chosen, strict=True))
                for node in nodes:
                    if not exponents.keys() & set(node.all_input_nodes) or node.op == "output":
                        continue
                    if "assert" in str(node.target):
                        continue
                    rule = degrees(node)
                    assert rule is not None, node.target
                    found = exponent_of(rule, exponents)
                    if found is None:
                        break
                    exponents[node] = found
                else:
                    tried += 1
                    scaled = (x * 2.0 ** float(e) for x, e in zip(args, chosen, strict=True))
                    expected = op(*args) * 2.0 ** float(exponents[result])
                    torch.testing.assert_close(op(*scaled), expected, rtol=1e-13, atol=0)
    assert tried


@pytest.mark.parametrize("name", NOT_HOMOGENEOUS)
def test_other_ops_have_no_rule(name: str) -> None:
    _, result, _ = graph_of(NOT_HOMOGENEOUS[name], (torch.randn(2, 3, 4).double(),))
    assert degrees(result) is None


@pytest.mark.parametrize(("shape", "scale"), [("layer", 8.0), ("group", 0.25), ("rms", 8.0)])
def test_a_norm_takes_the_scale_from_its_eps(shape: str, scale: float) -> None:
    torch.manual_seed(0)
    x, weight, bias = (
        torch.randn(2, 3, 4).double(),
        torch.randn(4).double(),
        torch.randn(4).double(),
    )

    def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float = 0.1) -> Any:
        if shape == "layer":
            return F.layer_norm(x, (4,), weight, bias, eps)
        if shape == "rms":
            return F.rms_norm(x, (4,), weight, eps) + 0 * bias
        return F.group_norm(x.mT, 2, weight, bias, eps)

    nodes, _, given = graph_of(norm, (x, weight, bias))
    (node,) = (n for n in nodes if "norm" in str(n.target))
    rule = degrees(node)
    assert rule is not None
    assert rule.normed is not None
    assert eps_of(node) == 0.1
    assert (given[1], Fraction(1)) in rule.factors
    scaled = norm(x * scale, weight, bias, 0.1 * scale**2)
    torch.testing.assert_close(scaled, norm(x, weight, bias), rtol=1e-13, atol=1e-13)


def test_a_number_that_is_added_has_the_scale_too() -> None:
    _, result, _ = graph_of(lambda x: x + 1e-3, (torch.randn(2).double(),))
    rule = degrees(result)
    assert rule is not None
    assert rule.adds_number
    assert eps_of(result) == 1e-3
    plain = degrees(graph_of(lambda x: x + 0, (torch.randn(2).double(),))[1])
    assert plain is None or not plain.adds_number
