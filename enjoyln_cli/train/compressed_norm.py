"""CRMSNorm: RMSNorm of a zero-mean vector of ``d`` features that is held as ``d - 1`` numbers.

Pre-RMSNorm and Pre-CRMSNorm Transformers, section 3.2 and equation 5. The last feature is left out,
since it is minus the sum ``s`` of the others:

    r = 1 / sqrt((sum(x^2) + s^2) / d + eps)
    y = weight * x * r + bias

With ``h = x * r`` and ``g = weight * dy``, the gradients are

    dx = r * (g - (h + sum(h)) * sum(g * h) / d)        dweight = sum(dy * h)        dbias = sum(dy)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def crms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """CRMSNorm of ``x``, which is ``(..., d - 1)`` of any floating dtype.

    ``weight`` and ``bias`` are ``(d - 1,)`` or ``None``. The result has the shape and dtype of
    ``x``; it is computed in float32 or wider and rounded once. For the backward pass, ``x`` is
    kept, and nothing else of its size.
    """
    return _CrmsNorm.apply(x, weight, bias, eps)  # type: ignore[no-any-return, no-untyped-call]


def crms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``x`` (its shape and dtype), weight and bias (``(d - 1,)``, float32 or
    wider), from the gradient ``grad`` of the result."""
    wide = x.to(_wide(x))
    dy = grad.to(wide.dtype)
    h, r = _normalised(wide, eps)
    g = dy if weight is None else dy * weight
    shared = (g * h).sum(-1, keepdim=True) / (x.shape[-1] + 1)
    dx = r * (g - (h + h.sum(-1, keepdim=True)) * shared)
    return dx.to(x.dtype), _over_rows(dy * h), _over_rows(dy)


class CRMSNorm(nn.Module):
    """CRMSNorm without weight and bias, for a stream of ``features`` = ``d - 1`` numbers."""

    def __init__(self, features: int, eps: float) -> None:
        super().__init__()
        self.features, self.eps = features, eps

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is ``(..., features)``."""
        return crms_norm(x, eps=self.eps)

    def extra_repr(self) -> str:
        """The arguments, for ``repr``."""
        return f"{self.features}, eps={self.eps}"


def orthonormal_norm(features: int, eps: float, like: Tensor) -> nn.RMSNorm:
    """The norm of a stream of ``features`` = ``d - 1`` coordinates in an orthonormal basis.

    With ``x = E z``, the columns of ``E`` orthonormal and orthogonal to the vector of ones, the sum
    of squares is that of ``z``. So the norm is torch's RMSNorm of ``d - 1`` features with the
    weight ``sqrt(d / (d - 1))`` and ``eps * d / (d - 1)``. The weight is a constant that is not
    trained; it has the dtype and device of ``like``.
    """
    ratio = (features + 1) / features
    norm = nn.RMSNorm(features, eps=eps * ratio, dtype=like.dtype, device=like.device)
    nn.init.constant_(norm.weight, ratio**0.5)
    return norm.requires_grad_(False)


class _CrmsNorm(torch.autograd.Function):
    """``crms_norm`` with ``crms_norm_backward`` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.dtypes = eps, [None if p is None else p.dtype for p in (weight, bias)]
        y, _ = _normalised(x.to(_wide(x)), eps)
        if weight is not None:
            y = y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dx, *parts = crms_norm_backward(grad, x, weight, ctx.eps)
        pairs = zip(parts, ctx.dtypes, strict=True)
        return dx, *(None if dtype is None else part.to(dtype) for part, dtype in pairs), None


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``h = x * r`` and ``r``."""
    squares = x.square().sum(-1, keepdim=True) + x.sum(-1, keepdim=True).square()
    r = torch.rsqrt(squares / (x.shape[-1] + 1) + eps)
    return x * r, r


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _over_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)
