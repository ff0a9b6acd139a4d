"""What the kernels compute, in plain PyTorch: for ``torch.compile``, export, subclasses and tests.

    rms_norm      y = weight * x / sqrt(mean(x^2) + eps) + bias
    layer_norm    y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias

over the last dimension, in float32 or wider, rounded once to the dtype of ``x``. The backward
formulas follow from ``h = x * r``, ``r = 1 / sqrt(mean(x^2) + eps)`` and ``g = weight * dy``:

    dx = r * (g - h * mean(g * h))        dweight = sum(dy * h)        dbias = sum(dy)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that is computed in: float32, or ``dtype`` where that is wider."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``x`` is ``(..., d)``, ``weight`` and ``bias`` broadcast against it, of any float dtype.

    The result is contiguous, whatever ``x`` is, as that of a LayerNorm: models make views of it.
    """
    wide = x.to(compute_dtype(x.dtype)).contiguous()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def exported_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``rms_norm`` by torch's operator, which an exported graph keeps as one, with any ``eps``.

    Written out it would be several, in which the optimiser of ONNX drops an ``eps`` below 1e-8.
    The operator of ONNX wants a weight; where torch's exporter has none, it makes one as large as
    ``x``.
    """
    dtype = x.dtype if bias is None else compute_dtype(x.dtype)
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    if weight is None and torch.onnx.is_in_onnx_export():
        weight = x.new_ones(x.shape[-1:], dtype=dtype)
    y = F.rms_norm(x.to(dtype).contiguous(), x.shape[-1:], weight, eps)
    return (y if bias is None else y + bias).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``F.layer_norm`` over the last dimension, with ``weight`` and ``bias`` of any float dtype.

    torch takes parameters of the dtype of ``x`` and, on CPU, float32 ones beside a half ``x``;
    any others are computed in float32 and rounded once.
    """
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = compute_dtype(x.dtype)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x`` (its shape and dtype), ``weight`` and ``bias`` (both ``(d,)``, wide)."""
    dtype = compute_dtype(x.dtype)
    wide, dy = x.to(dtype), grad.to(dtype)
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    h = wide * r
    g = dy if weight is None else dy * weight
    dx = r * (g - h * (g * h).mean(-1, keepdim=True))
    return dx.to(x.dtype), _over_rows(dy * h), _over_rows(dy)


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``rms_norm_backward``: LayerNorm is RMSNorm after a centring, which is its own adjoint."""
    wide = x.to(compute_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    dx, dweight, dbias = rms_norm_backward(grad, centred, weight, eps)
    return (dx - dx.mean(-1, keepdim=True)).to(x.dtype), dweight, dbias


def _over_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)
