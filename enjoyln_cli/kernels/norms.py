"""What computes a folded norm: the project's kernels, torch's norms, or the formula.

* On a CPU, in plain eager calls, the library of ``cpu``.
* On a GPU, if no gradient is wanted, what was the fastest when the model was loaded (see ``gpu``);
  without a measurement ``F.rms_norm``, for norms without a bias on devices where torch computes it
  in one kernel (see ``torch_fuses``).
* In compiled graphs, where Inductor fuses it, in float64, and for tensor subclasses, the formula.
* In exports, torch's own operator for RMSNorm, so that the graph has one node for it.
* In all other cases ``F.layer_norm``. It gives the same result, since a folded norm only sees rows
  with zero mean. These cases are: there is no kernel for the device or the dtype; autocast, for
  which torch has a rule; and gradients, which torch computes in one step for LayerNorm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from enjoyln_cli.kernels import cpu, formula, gpu

Norm = Callable[[Tensor, Tensor | None, Tensor | None, float], Tensor]

FEWEST = 8192
"""Elements of a tensor from which on the CPU's kernel takes less time than torch's LayerNorm."""
ORDINARY = (Tensor, torch.nn.Parameter)

_literal = False


@contextmanager
def literally() -> Iterator[None]:
    """Inside the block, RMSNorm is never replaced by LayerNorm, even if there is no kernel.

    Verification uses this to detect rows whose mean is not zero.
    """
    global _literal
    before, _literal = _literal, True
    try:
        yield
    finally:
        _literal = before


@cache
def torch_fuses(device: str) -> bool:
    """Whether torch computes RMSNorm in one kernel on a type of device.

    So it does on CUDA (and ROCm) since torch 2.9, and on MPS; on a CPU it takes several steps.
    """
    key = torch._C._dispatch_key_for_device(device)
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_rms_norm", key)


def _is_autocast(device: str) -> bool:
    """Whether autocast is enabled on a type of device; there is none on ``meta``, for example."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


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
    of ``x``, computed in float32 or wider and rounded once. The rows must have zero mean, since
    LayerNorm is computed if there is no kernel. With ``literal`` it never is, and the gradient is
    that of RMSNorm. In float64, used for checks, this is the formula on every machine.
    """
    if dims > 1:
        weight, bias = (None if p is None else p.flatten() for p in (weight, bias))
        return rms_norm(x.flatten(-dims), weight, bias, eps, literal=literal).reshape(x.shape)
    if is_exporting():
        return formula.exported_rms_norm(x, weight, bias, eps)
    if is_dynamo_compiling() or x.dtype is torch.float64:
        return formula.rms_norm(x, weight, bias, eps)
    if not (literal or _literal) and x.is_cpu and x.numel() < FEWEST:
        return formula.layer_norm(x, weight, bias, eps)
    y = cpu.rms_norm(x, weight, bias, eps)
    if y is not None:
        return y
    if is_compiling() or not _is_plain(x, weight, bias):
        return formula.rms_norm(x, weight, bias, eps)
    return _instead(x, weight, bias, literal or _literal)(x, weight, bias, eps)


def _instead(x: Tensor, weight: Tensor | None, bias: Tensor | None, literal: bool) -> Norm:
    """What computes a folded RMSNorm where the library of ``cpu`` does not.

    ``F.rms_norm`` is one kernel without a bias, and with a weight of the dtype of ``x``.
    """
    device = x.device.type
    if literal:
        fused = torch_fuses(device) and not _is_autocast(device)
        return formula.torch_rms_norm if fused else formula.rms_norm
    if not gpu.measured and (bias is not None or not torch_fuses(device)):
        return formula.layer_norm
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, bias) if t is not None):
        return formula.layer_norm
    if _is_autocast(device):
        return formula.layer_norm
    fastest = gpu.fastest_for(x, weight, bias)
    if fastest is not None:
        return fastest
    fits = bias is None and (weight is None or weight.dtype == x.dtype)
    return formula.torch_rms_norm if fits and torch_fuses(device) else formula.layer_norm


def _is_plain(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether these are ordinary tensors, with shapes that ``F.layer_norm`` accepts."""
    if type(x) not in ORDINARY or torch.jit.is_tracing() or forward_ad._current_level >= 0:
        return False
    tensors = [parameter for parameter in (weight, bias) if parameter is not None]
    return all(type(t) in ORDINARY and t.shape == (x.size(-1),) for t in tensors)
