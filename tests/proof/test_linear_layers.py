"""What counts as a linear layer in a captured graph, and how its parameters are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_live import Computing
from torch import nn
from torch.fx import Node

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.proof.linear_layers import (
    LinearLayer,
    linear_layer,
    parameter_nodes,
    with_added_bias,
)
from enjoyln_cli.trace.capture import Recorder

IN, OUT = 3, 4
X = torch.zeros(2, IN)
PICTURE = torch.zeros(2, IN, 5, 5)


def layers(
    forward: Any, shape: tuple[int, ...], x: torch.Tensor, bias: tuple[int, ...] = (OUT,)
) -> list[tuple[LinearLayer, dict[Node, str]]]:
    """The linear layers of a function of ``x``, ``w`` and ``b``, with all its parameters."""
    parts = {"w": nn.Parameter(torch.zeros(shape)), "b": nn.Parameter(torch.zeros(bias))}
    model = Computing(lambda m, x: forward(x, m.w, m.b), **parts)
    trace = Recorder(model).capture(Call("x", (((x,), {}),)))
    (named,), _ = parameter_nodes([trace], {name: name for name, _ in model.named_parameters()})
    found = (linear_layer(node, named) for node in trace.graph.nodes)
    return [(layer, named) for layer in found if layer]


@pytest.mark.parametrize(
    ("forward", "shape", "x", "kind", "input_dim", "bias", "direct"),
    [
        (lambda x, w, b: F.linear(x, w, b), (OUT, IN), X, "matrix", 1, True, True),
        (lambda x, w, b: F.linear(x, w), (OUT, IN), X, "matrix", 1, False, True),
        (lambda x, w, b: F.linear(x, w.t(), b), (IN, OUT), X, "matrix", 0, True, False),
        (lambda x, w, b: torch.addmm(b, x, w), (IN, OUT), X, "matrix", 0, True, True),
        (lambda x, w, b: torch.addmm(b, x, w.t()), (OUT, IN), X, "matrix", 1, True, False),
        (lambda x, w, b: x @ w, (IN, OUT), X, "product", 0, False, True),
        (lambda x, w, b: F.conv2d(x, w, b), (OUT, IN, 2, 2), PICTURE, "convolution", 1, True, True),
        (lambda x, w, b: F.embedding(x.long(), w), (IN, OUT), X, "embedding", 0, False, True),
    ],
)
def test_a_layer_says_how_its_weight_is_stored(
    forward: Any, shape: Any, x: Any, kind: str, input_dim: int, bias: bool, direct: bool
) -> None:
    ((layer, _),) = layers(forward, shape, x)
    assert (layer.kind, layer.input_dim) == (kind, input_dim)
    assert (layer.in_features, layer.out_features) == (IN, OUT)
    assert layer.weight.name == "w" and (layer.bias is not None) == bias
    assert layer.reads_directly == direct and not layer.scaled


@pytest.mark.parametrize(
    ("forward", "shape", "x"),
    [
        (lambda x, w, b: F.linear(x, 2 * w, b), (OUT, IN), X),  # computed weight
        (lambda x, w, b: F.linear(x, w, b + 1), (OUT, IN), X),  # computed bias
        (lambda x, w, b: F.linear(x, (v := w.t()), b) + v.sum(), (IN, OUT), X),  # a view read twice
        (lambda x, w, b: w @ x.t(), (OUT, IN), X),  # the weight is the left factor
        (lambda x, w, b: x @ w, (IN,), X),  # a vector
        (lambda x, w, b: x @ w, (5, IN, OUT), X),  # several matrices
        (lambda x, w, b: F.linear(w, w), (IN, IN), X),  # reads itself
        (lambda x, w, b: F.conv2d(x, w, groups=3), (OUT + 2, 1, 2, 2), PICTURE),
        (lambda x, w, b: F.conv_transpose2d(x, w), (IN, OUT, 2, 2), PICTURE),
    ],
)
def test_anything_else_is_no_layer(forward: Any, shape: Any, x: Any) -> None:
    assert not layers(forward, shape, x)


def test_factors_of_addmm_are_recognised() -> None:
    ((layer, _),) = layers(lambda x, w, b: torch.addmm(b, x, w, alpha=2), (IN, OUT), X)
    assert layer.scaled


@pytest.mark.parametrize(
    ("forward", "bias", "found"),
    [
        (lambda x, w, b: x @ w + b, (OUT,), True),
        (lambda x, w, b: b + x @ w, (OUT,), True),
        (lambda x, w, b: torch.add(x @ w, b, alpha=2), (OUT,), False),
        (lambda x, w, b: x @ w + b, (1, OUT), False),
        (lambda x, w, b: (y := x @ w) + b + y.sum(), (OUT,), False),
        (lambda x, w, b: x @ w + 2 * b, (OUT,), False),
    ],
)
def test_a_vector_that_is_added_next_is_a_bias(forward: Any, bias: Any, found: bool) -> None:
    ((layer, named),) = layers(forward, (IN, OUT), X, bias)
    added = with_added_bias(layer, set(layer.node.users), named)
    assert (added.bias is not None and added.bias.name == "b") == found
    assert added is layer or added.parameters == (layer.weight, added.bias)
