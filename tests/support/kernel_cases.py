"""The norm operators with their arguments, and what they have to compute."""

from __future__ import annotations

from typing import Any

import torch
from rounding import TIMES, lost_by_norms
from torch import Tensor

from enjoyln_cli.kernels import formula

NORMS = ("rms_norm", "layer_norm")


FORMS = ("{}", "add_{}", "add_{}_", "sum_{}")


DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


EPS = 1e-5


def affine(d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return (torch.randn(d, dtype=torch.float64) + 1).to(dtype), torch.randn(d).to(dtype)


def op(name: str) -> Any:
    return getattr(torch.ops.enjoyln, name).default


def arguments(form: str, dtype: torch.dtype, *shape: int, grad: bool = False) -> tuple[Any, ...]:
    weight, bias = affine(shape[-1], dtype)
    x, residual = (torch.randn(*shape).to(dtype) for _ in range(2))
    given = (x, weight, bias) if form == "{}" else (x, residual, weight, bias)
    return (*(t.requires_grad_(grad) for t in given), EPS)


def exact(norm: str, form: str, *args: Any) -> tuple[Tensor, Tensor]:
    """``(y, sum)`` in float64, the sum rounded as the operator rounds it."""
    *tensors, weight, bias, eps = args
    total = tensors[0] if form == "{}" else tensors[0] + tensors[1]
    wide = [None if t is None else t.double() for t in (weight, bias)]
    y = getattr(formula, norm)(total.double(), *wide, eps)
    return y, total


def results(form: str, args: tuple[Any, ...], output: Any) -> tuple[Tensor, Tensor | None]:
    """What an operator or a function gave as ``(y, sum)``."""
    if form == "add_{}":
        return output
    return output, args[1] if form == "add_{}_" else None


def close(y: Tensor, expected: Tensor) -> bool:
    """Whether ``y`` is within a rounding to its dtype and what is lost in the dtype inside."""
    step = torch.finfo(y.dtype).eps
    wide = TIMES * lost_by_norms(formula.compute_dtype(y.dtype))
    bound = 0.51 * step * expected.abs() + wide * (1 + expected.abs())
    return bool(((y.double() - expected).abs() <= bound).all())
