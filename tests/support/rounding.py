"""How far a result may be from another: as far as rounding takes the original on this machine.

A machine rounds in its own order, so no bound for float32 or a narrower dtype is a fixed number.
The exact result is computed in float64; the original's own distance from it is the measure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

TIMES = 8
"""Two results that are rounded in another order differ by a few times what either loses."""
IDENTITY = 1e-12
"""Two results in float64 that are the same up to rounding."""


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The distance from the exact result, relative to its norm."""
    exact = exact.double()
    return float((found.double() - exact).norm() / exact.norm().clamp_min(1e-300))


def as_exact(
    found: torch.Tensor, original: torch.Tensor, exact: torch.Tensor, stored: Any = None
) -> bool:
    """Whether ``found`` is as close to the exact result as the original is, up to a few times.

    The original loses at least a rounding of its dtype, or of ``stored`` if the weights of
    ``found`` were rounded to that. In float64 both are the exact result.
    """
    if original.dtype == (stored or original.dtype) == torch.float64:
        return relative(found, exact) <= IDENTITY
    steps = [torch.finfo(dtype).eps for dtype in (original.dtype, stored or original.dtype)]
    return relative(found, exact) <= TIMES * max(relative(original, exact), *steps)


def in_float64(value: Any) -> Any:
    """A copy of a model, a tensor, or a container of them; integers stay."""
    if isinstance(value, nn.Module):
        return copy.deepcopy(value).double()
    if isinstance(value, torch.Tensor):
        return value.detach().double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: in_float64(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(in_float64, value))
    return value


class InFloat64(TorchFunctionMode):
    """Every function of torch is called with float64 tensors, whatever it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_double(args), **_double(kwargs or {}))


def _double(value: Any) -> Any:
    """With gradients, unlike ``in_float64``."""
    if isinstance(value, torch.Tensor):
        narrow = value.is_floating_point() and value.dtype != torch.float64
        return torch.Tensor.double(value) if narrow else value
    if isinstance(value, dict):
        return {key: _double(one) for key, one in value.items()}
    return tuple(map(_double, value)) if type(value) is tuple else value


def exactly(function: Callable[..., Any], *given: Any) -> Any:
    """What ``function`` returns if everything is computed in float64."""
    with torch.no_grad(), InFloat64():
        return function(*in_float64(given))


IDS = torch.arange(3, 21).reshape(2, 9)


def logits(model: Any) -> torch.Tensor:
    """What a causal language model returns for ``IDS``."""
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


@cache
def lost_by(folder: Path) -> float:
    """What float32 costs the causal language model of a checkpoint, relative to its logits."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return relative(logits(model), logits(in_float64(model)))


@cache
def lost_by_norms(dtype: torch.dtype) -> float:
    """The largest error of torch's LayerNorm in any element, relative to one plus its size.

    In float64 nothing is more exact, so that two results are the same up to rounding.
    """
    if dtype == torch.float64:
        return IDENTITY / TIMES
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)
        for shape in ((64, 8192), (8192,), (8192,))
    )
    exact = nn.functional.layer_norm(x.double(), (8192,), weight.double(), bias.double())
    found = nn.functional.layer_norm(x, (8192,), weight, bias)
    return float(((found.double() - exact).abs() / (1 + exact.abs())).max())
