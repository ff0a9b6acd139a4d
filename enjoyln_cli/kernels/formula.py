"""The norms in plain PyTorch, over the last dimension: for ``torch.compile``, export and tests.

    rms_norm      y = weight * x / sqrt(mean(x^2) + eps) + bias
    layer_norm    y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias

They are computed in float32 or wider, and rounded once to the dtype of ``x``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: float32, or ``dtype`` if that is wider."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of ``x`` ``(..., d)``; ``weight`` and ``bias`` broadcast to it, of any float dtype.

    The result is always contiguous, like that of torch's LayerNorm: models take views of it.
    """
    wide = x.to(compute_dtype(x.dtype)).contiguous()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def exported_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``rms_norm`` by torch's operator, which stays one node in an exported graph.

    The formula would become several nodes, from which the ONNX optimiser drops an ``eps`` below
    1e-8. ONNX's operator needs a weight. Without one, torch's exporter would create a weight as
    large as ``x``, so a weight of ones is passed here.
    """
    dtype = x.dtype if bias is None else compute_dtype(x.dtype)
    weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
    if weight is None and torch.onnx.is_in_onnx_export():
        weight = x.new_ones(x.shape[-1:], dtype=dtype)
    y = F.rms_norm(x.to(dtype).contiguous(), x.shape[-1:], weight, eps)
    return (y if bias is None else y + bias).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``F.layer_norm`` over the last dimension, with ``weight`` and ``bias`` of any float dtype.

    If their dtype differs from that of ``x``, the norm is computed in float32 or wider and rounded
    once: torch itself accepts few such combinations.
    """
    dtype = x.dtype
    if (weight is None or weight.dtype is dtype) and (bias is None or bias.dtype is dtype):
        return torch.layer_norm(x, [x.size(-1)], weight, bias, eps)
    wide = compute_dtype(dtype)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(dtype)


def torch_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``F.rms_norm``, then the bias. Where dtypes differ, computes as ``layer_norm`` does."""
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        y = F.rms_norm(x, x.shape[-1:], weight, eps)
        return y if bias is None else y + bias
    wide = compute_dtype(x.dtype)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return torch_rms_norm(x.to(wide), weight, bias, eps).to(x.dtype)


def liger_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm by Liger's Triton kernel, computed in float32; it needs a ``weight``.

    Raises ``ImportError`` if Liger is not installed.
    """
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    y: Tensor = LigerRMSNormFunction.apply(x.contiguous(), weight, eps, 0.0, "gemma")
    return y if bias is None else y + bias


def is_close(y: Tensor, exact: Tensor) -> bool:
    """Whether the result ``y`` of a kernel is a few roundings from ``exact``, in float64."""
    bound = 4 * max(torch.finfo(y.dtype).eps, 1e-9) * (2 + exact.abs())
    return bool(((y.double() - exact).abs() <= bound).all())
