"""What computes a folded norm: torch's norms, the project's kernel for GPUs, or the formula.

* On a CPU ``F.layer_norm``. It gives the same result, since a folded norm only sees rows with zero
  mean, and torch has no RMSNorm there that takes less time.
* On a GPU, if no gradient is wanted, what was the fastest when the model was loaded (see ``gpu``);
  without a measurement ``F.rms_norm``, for norms without a bias on devices where torch computes it
  in one kernel (see ``torch_fuses``).
* In compiled graphs, where Inductor fuses it, and in float64, the formula.
* In exports, torch's own operator for RMSNorm, so that the graph has one node for it.
* In all other cases ``F.layer_norm``, as on a CPU: for other devices and dtypes; under autocast,
  for which torch has a rule; and with gradients, which torch computes in one step for LayerNorm.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_exporting

from enjoyln_cli.kernels import formula, gpu


@cache
def torch_fuses(device: str) -> bool:
    """Whether torch computes RMSNorm in one kernel on a type of device.

    So it does on CUDA (and ROCm) since torch 2.9, and on MPS; on a CPU it takes several steps.
    """
    key = torch._C._dispatch_key_for_device(device)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", key)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dims: int = 1,
    literal: bool = False,
) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps) + bias`` over the last ``dims`` dimensions.

    ``x`` has shape ``(..., *shape)``, and any floating dtype and layout; ``weight`` and ``bias``
    have that ``shape`` and any floating dtype. Returns a contiguous tensor of the shape and dtype
    of ``x``, computed in float32 or wider and rounded once; in float64 by the formula on every
    machine. The rows must have zero mean, since in most cases LayerNorm is computed. With
    ``literal`` it never is: a mean shows in the result, and the gradient is RMSNorm's.
    """
    if dims > 1:
        weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
        return rms_norm(x.flatten(-dims), weight, bias, eps, literal=literal).reshape(x.shape)
    if is_exporting():
        return formula.torch_rms_norm(x, weight, bias, eps)
    if is_compiling() or x.dtype is torch.float64:
        return formula.rms_norm(x, weight, bias, eps)
    if not literal and ((x.is_cpu and not torch_fuses("cpu")) or x.numel() < gpu.fewest):
        return formula.layer_norm(x, weight, bias, eps)
    return _chosen(x, weight, bias, literal)(x, weight, bias, eps)


def _chosen(x: Tensor, weight: Tensor | None, bias: Tensor | None, literal: bool) -> gpu.Norm:
    """What computes an RMSNorm in an eager call on a GPU, or with ``literal`` on any device.

    ``F.rms_norm`` is one kernel without a bias, and with a weight of the dtype of ``x``.
    """
    device, shape = x.device.type, x.shape[-1:]
    is_autocast = _has_autocast(device) and torch.is_autocast_enabled(device)
    if literal:
        fuses = torch_fuses(device) and not is_autocast
        return formula.torch_rms_norm if fuses else formula.rms_norm
    if is_autocast or (torch.is_grad_enabled() and _requires_grad(x, weight, bias)):
        return formula.layer_norm
    for parameter in (weight, bias):
        if parameter is not None and parameter.shape != shape:
            return formula.layer_norm
    fits = bias is None and (weight is None or weight.dtype == x.dtype) and torch_fuses(device)
    alike = formula.torch_rms_norm if fits else formula.layer_norm
    return gpu.fastest_for(x, weight, bias) or alike


_has_autocast = cache(torch.amp.is_autocast_available)


def _requires_grad(*tensors: Tensor | None) -> bool:
    return any(tensor is not None and tensor.requires_grad for tensor in tensors)
