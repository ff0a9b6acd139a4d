"""RMSNorm of rows on a GPU, in Triton, forward only.

Triton comes with torch for GPUs. It compiles the kernel for the GPU at hand when a model is loaded,
and keeps the result on the disk. A test runs this file on the CPU, in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_WARPS = 8
ELEMENTS_OF_A_WARP = 256


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_of_row(  # type: ignore[no-untyped-def]
    x, y, weight, bias, width, eps, has_weight: tl.constexpr, has_bias: tl.constexpr,
    block: tl.constexpr,
):  # fmt: skip
    """One program computes one row of ``width`` elements, in float32, and rounds it once."""
    start = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, block)
    inside = at < width
    row = tl.load(x + start + at, mask=inside, other=0).to(tl.float32)
    squares = tl.sum(row * row)
    # NaN if a square does not fit into a float, as for a row with an Inf or a NaN.
    row *= tl.rsqrt(squares / width + eps) + (squares - squares)
    if has_weight:
        row *= tl.load(weight + at, mask=inside, other=0).to(tl.float32)
    if has_bias:
        row += tl.load(bias + at, mask=inside, other=0).to(tl.float32)
    tl.store(y + start + at, row.to(y.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps) + bias`` over the last dimension, on the GPU of ``x``.

    ``x`` has shape ``(..., d)`` and dtype float32, float16 or bfloat16; ``weight`` and ``bias``
    have shape ``(d,)`` and any of these dtypes. Returns a contiguous tensor like ``x``.
    """
    x, width = x.contiguous(), x.shape[-1]
    y, block = torch.empty_like(x), triton.next_power_of_2(width)
    warps = min(MOST_WARPS, max(1, block // ELEMENTS_OF_A_WARP))
    parts = (x if weight is None else weight, x if bias is None else bias)
    given = {"has_weight": weight is not None, "has_bias": bias is not None, "block": block}
    with torch.cuda.device_of(x):
        rms_norm_of_row[(x.numel() // width,)](x, y, *parts, width, eps, **given, num_warps=warps)
    return y
