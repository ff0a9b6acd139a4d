"""What computes a folded norm: the project's kernels, torch's norms, or the formula.

* On a CPU, in plain eager calls, the library of ``cpu``.
* On a GPU, if no gradient is wanted, what was the fastest when the model was loaded (see ``gpu``);
  without a measurement ``F.rms_norm``, for norms without a bias on devices where torch computes it
  in one kernel (see ``torch_fuses``).
* In compiled graphs, where Inductor fuses it, and in float64, the formula.
* In exports, torch's own operator for RMSNorm, so that the graph has one node for it.
* In all other cases ``F.layer_norm``. It gives the same result, since a folded norm only sees rows
  with zero mean. These cases are: there is no kernel for the device or the dtype; autocast, for
  which torch has a rule; and gradients, which torch computes in one step for LayerNorm.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_exporting

from enjoyln_cli.kernels import cpu, formula, gpu

FEWEST = 8192
"""Elements of a tensor from which on the CPU's kernel takes less time than torch's LayerNorm."""


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
    machine. The rows must have zero mean, since LayerNorm is computed if there is no kernel. With
    ``literal`` it never is: a mean shows in the result, and the gradient is that of RMSNorm.
    """
    if dims > 1:
        weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
        return rms_norm(x.flatten(-dims), weight, bias, eps, literal=literal).reshape(x.shape)
    if is_exporting():
        return formula.torch_rms_norm(x, weight, bias, eps)
    if is_compiling() or x.dtype is torch.float64:
        return formula.rms_norm(x, weight, bias, eps)
    if not literal and x.numel() < (FEWEST if x.is_cpu else gpu.fewest):
        return formula.layer_norm(x, weight, bias, eps)
    if x.is_cpu:
        y = cpu.rms_norm(x, weight, bias, eps)
        if y is not None:
            return y
    return _instead(x, weight, bias, literal)(x, weight, bias, eps)


def _instead(x: Tensor, weight: Tensor | None, bias: Tensor | None, literal: bool) -> gpu.Norm:
    """What computes a folded RMSNorm where the library of ``cpu`` does not.

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
