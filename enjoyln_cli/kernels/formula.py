"""The norms in plain PyTorch: for ``torch.compile``, export, tensor subclasses and tests.

    rms_norm      y = weight * x / sqrt(mean(x^2) + eps) + bias
    layer_norm    y = weight * (x - mean(x)) / sqrt(var(x) + eps) + bias

They are computed over the last dimension, in float32 or wider, and rounded once to the dtype of
``x``. The gradients of RMSNorm, with ``r = 1 / sqrt(mean(x^2) + eps)``, ``h = x * r`` and
``g = weight * dy``, are

    dx = r * (g - h * mean(g * h))        dweight = sum(dy * h)        dbias = sum(dy)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

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
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = compute_dtype(x.dtype)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def torch_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``F.rms_norm``, then the bias. Where dtypes differ, computes as ``layer_norm`` does.

    Under autocast, torch casts the arguments, and the result has the dtype that it gives it.
    """
    alike = all(p is None or p.dtype == x.dtype for p in (weight, bias))
    if alike or torch.is_autocast_enabled(x.device.type):
        y = F.rms_norm(x, x.shape[-1:], weight, eps)
        return y if bias is None else y + bias
    wide = compute_dtype(x.dtype)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return torch_rms_norm(x.to(wide), weight, bias, eps).to(x.dtype)


@cache
def liger() -> Callable[..., Tensor]:
    """Liger's RMSNorm with its gradient. Raises ``ImportError`` if it is not installed."""
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    return LigerRMSNormFunction.apply  # type: ignore[no-any-return]


def liger_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm by Liger's Triton kernel, computed in float32; ``weight`` must not be ``None``."""
    y = liger()(x.contiguous(), weight, eps, 0.0, "gemma")
    return y if bias is None else y + bias


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, added: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``x`` (with its dtype), ``weight`` and ``bias`` (``(d,)``, compute dtype).

    ``added`` is another gradient of ``x``, of its shape: it is added before rounding.
    """
    dtype = compute_dtype(x.dtype)
    wide, dy = x.to(dtype), grad.to(dtype)
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    h = wide * r
    g = dy if weight is None else dy * weight
    dx = r * (g - h * (g * h).mean(-1, keepdim=True))
    if added is not None:
        dx = dx + added
    return dx.to(x.dtype), _over_rows(dy * h), _over_rows(dy)


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, added: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """As ``rms_norm_backward``: LayerNorm is RMSNorm after centring, which is self-adjoint."""
    wide = x.to(compute_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    dx, dweight, dbias = rms_norm_backward(grad, centred, weight, None, eps)
    dx = dx - dx.mean(-1, keepdim=True)
    return (dx if added is None else dx + added).to(x.dtype), dweight, dbias


def is_close(found: Tensor, exact: Tensor) -> bool:
    """Whether a kernel's result is right: it is a few roundings from the float64 formula."""
    bound = 4 * max(torch.finfo(found.dtype).eps, 1e-9) * (2 + exact.abs())
    return bool(((found.double() - exact).abs() <= bound).all())


def _over_rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).sum(0)
