"""CRMSNorm: RMSNorm of a zero-mean vector of ``d`` features that is held as ``d - 1`` numbers.

Pre-RMSNorm and Pre-CRMSNorm Transformers, section 3.2 and equation 5. The last feature is left out,
since it is minus the sum ``s`` of the others:

    r = 1 / sqrt((sum(x^2) + s^2) / d + eps)
    y = weight * x * r + bias
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def crms_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """CRMSNorm of ``x``, which is ``(..., d - 1)`` of any floating dtype.

    ``weight`` and ``bias`` are ``(d - 1,)`` or ``None``. The result has the shape and dtype of
    ``x``; it is computed in float32 or wider and rounded once.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    squares = wide.square().sum(-1, keepdim=True) + wide.sum(-1, keepdim=True).square()
    y = wide * torch.rsqrt(squares / (x.shape[-1] + 1) + eps)
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias).to(x.dtype)


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
