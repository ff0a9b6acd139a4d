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

    The result is always contiguous, as with torch's LayerNorm: models take views of it.
    """
    wide = x.to(compute_dtype(x.dtype)).contiguous()
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return _scaled(y, weight, bias).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``F.layer_norm`` of ``x`` ``(..., d)``; ``weight`` and ``bias`` as for ``rms_norm``.

    torch itself takes a weight and a bias of one dimension and of the dtype of ``x``.
    """
    shape, dtype = x.shape[-1:], x.dtype
    if (weight is None or (weight.dtype is dtype and weight.shape == shape)) and (
        bias is None or (bias.dtype is dtype and bias.shape == shape)
    ):
        return torch.layer_norm(x, shape, weight, bias, eps)
    return _scaled(F.layer_norm(x.to(compute_dtype(dtype)), shape, eps=eps), weight, bias).to(dtype)


def torch_rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``rms_norm`` by ``F.rms_norm``, which stays one node in an exported graph.

    The formula would be several nodes there, from which the ONNX optimiser drops an ``eps`` below
    1e-8. ONNX's operator needs a weight. If none is passed, torch's exporter creates a weight as
    large as ``x``, so a weight of ones is passed.
    """
    shape, fits = x.shape[-1:], weight is not None and weight.shape == x.shape[-1:]
    rounds_once = bias is None and (weight is None or (fits and weight.dtype == x.dtype))
    dtype = x.dtype if rounds_once else compute_dtype(x.dtype)
    inside = weight.to(dtype) if weight is not None and fits else None
    if inside is None and torch.onnx.is_in_onnx_export():
        inside = x.new_ones(shape, dtype=dtype)
    y = F.rms_norm(x.to(dtype).contiguous(), shape, inside, eps)
    return _scaled(y, None if fits else weight, bias).to(x.dtype)


def _scaled(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def is_close(y: Tensor, exact: Tensor) -> bool:
    """Whether the result ``y`` of a kernel is a few roundings from ``exact``, in float64."""
    bound = 4 * max(torch.finfo(y.dtype).eps, 1e-9) * (2 + exact.abs())
    return bool(((y.double() - exact).abs() <= bound).all())
