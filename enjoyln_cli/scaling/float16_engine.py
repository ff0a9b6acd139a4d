"""Run a model as an engine does that computes all in float16 and takes norms apart.

The result of every op is rounded to float16, so what is above 65504 becomes infinite. A LayerNorm
is computed from the sum of a row, the differences, and the sum of their squares, each in float16.
Products of matrices are summed in float32, as engines do. The model itself stays in float32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from enjoyln_cli.graph.nodes import aten

MASKED = 1e30
"""Larger numbers belong to attention masks, which are as large as a dtype allows."""


@contextmanager
def engine_in_float16(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute in float16 inside the block, op by op, with rounded weights."""
    stored = {name: value.data for name, value in model.named_parameters()}
    try:
        for parameter in model.parameters():
            parameter.data = _half(parameter.data)
        with torch.no_grad(), _RoundedOps():
            yield
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = stored[name]


class _RoundedOps(TorchDispatchMode):
    """Rounds the floating-point results of each op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is aten.native_layer_norm:
            return _layer_norm(*args)
        result = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if _is_float(x)}

        def rounded(x: Any) -> Any:
            if not _is_float(x) or x.is_meta:
                return x
            if x.untyped_storage().data_ptr() in given:  # a view, or written in place
                return x.copy_(_half(x)) if func._schema.is_mutable else x
            return _half(x)

        return tree_map(rounded, result)


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = tuple(range(-len(shape), 0))
    count = float(torch.Size(shape).numel())
    mean = _half(_half(x.sum(dims, keepdim=True)) / count)
    centred = _half(x - mean)
    variance = _half(_half(_half(centred * centred).sum(dims, keepdim=True)) / count)
    root = _half(torch.sqrt(_half(variance + float(_half(torch.tensor(eps))))))
    y = _half(centred / root)
    y = y if weight is None else _half(y * weight)
    return (y if bias is None else _half(y + bias)), mean, 1 / root


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.float32


def _half(x: Tensor) -> Tensor:
    """The nearest numbers of float16, in float32; numbers of masks become its largest number."""
    largest = torch.finfo(torch.float16).max
    x = torch.where(x.isfinite() & (x.abs() > MASKED), x.sign() * largest, x)
    return x.half().float()
