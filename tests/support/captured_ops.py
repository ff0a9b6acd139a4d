"""Single operations as nodes of a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (registers its grouped product)
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.5


def captured(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Node, list[Node]]:
    """The node that computes the result, and the placeholders; composite ops stay whole."""
    graph = make_fx(function, pre_dispatch=True)(*inputs).graph
    result = next(node for node in graph.nodes if node.op == "output").args[0]
    return result, [node for node in graph.nodes if node.op == "placeholder"]
