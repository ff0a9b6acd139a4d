"""RMSNorm on a CPU by a compiled library (``rms_norm.cpp``), called through ctypes.

The library is compiled when the package is installed, and is loaded at the first call. It takes
ordinary tensors of float32, float16 or bfloat16 in plain eager calls that need no gradient. It
computes in float32 or wider, rounds once, and runs in torch's own threads.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

LIBRARY = Path(__file__).parent / "librms_norm.so"
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
"""The number of each dtype in ``rms_norm.cpp``."""

_pack = struct.Struct("6qdq").pack
LEVELS = ("avx512", "avx2", "plain")
"""What the library is compiled for, the fastest first."""
dispatch_modes = torch._C._len_torch_dispatch_stack
function_modes = torch._C._len_torch_function_stack
transform = torch._C._functorch.peek_interpreter_stack
tracing = torch._C._get_tracing_state
autocast = torch._C._is_any_autocast_enabled
empty_like = torch.empty_like


class Missing(Exception):
    """The library cannot be used, and the reason."""


class Library:
    """The loaded library. Raises ``Missing`` if there is none that this machine can use."""

    level = ""
    """Which of ``LEVELS`` computes."""
    dtypes: Collection[torch.dtype] = DTYPES
    """What this level computes: ``plain`` has no instructions for float16."""

    def __init__(self) -> None:
        if os.environ.get("ENJOYLN_KERNELS", "") == "0":
            raise Missing("switched off by ENJOYLN_KERNELS=0")
        if not LIBRARY.exists():
            raise Missing("not compiled when enjoyln was installed, which needs g++ or clang++")
        try:
            functions = ctypes.CDLL(str(LIBRARY))
        except OSError as error:
            raise Missing(f"it does not load: {error}") from error
        self._use = functions.enjoyln_use
        self._use.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        self.run: Callable[[bytes], None] = functions.enjoyln_rms_norm
        functions.enjoyln_rms_norm.argtypes = [ctypes.c_char_p]
        functions.enjoyln_rms_norm.restype = None
        next(level for level in LEVELS if self.use(level))

    def use(self, level: str) -> bool:
        """Compute with the instructions of ``level``; whether this processor has them."""
        if not self._use(level.encode(), _parallel_for()):
            return False
        self.level = level
        self.dtypes = set(DTYPES) - ({torch.float16} if level == "plain" else set())
        return True


@cache
def _parallel_for() -> int | None:
    """The address of torch's ``parallel_for``; without it, the library uses one thread."""
    for path in (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"):
        function = getattr(ctypes.CDLL(str(path)), "torch_parallel_for", None)
        if function is not None:
            return ctypes.cast(function, ctypes.c_void_p).value
    return None


@cache
def library() -> Library | Missing:
    """The library, or the reason why there is none."""
    try:
        return Library()
    except Missing as reason:
        return reason


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """``x / sqrt(mean(x^2) + eps) * weight + bias``, or ``None`` if the library does not take it.

    ``x`` is ``(..., d)``, ``weight`` and ``bias`` are ``(d,)``, all of one dtype. The result is
    contiguous.
    """
    loaded, dtype = library(), x.dtype
    if isinstance(loaded, Missing) or dtype not in loaded.dtypes or _is_watched():
        return None
    gradient = torch.is_grad_enabled()
    try:
        if (gradient and x.requires_grad) or not _is_rows(x):
            return None
        d = x.shape[-1]
        weight_at = _address(weight, dtype, d, gradient)
        bias_at = _address(bias, dtype, d, gradient)
        if weight_at is None or bias_at is None:
            return None
        x = x.contiguous()
        # No address: it is empty, a wrapper of another tensor, or zeros that take no memory.
        if not (x_at := x.data_ptr()):
            return None
    except RuntimeError:  # a tensor that has none either: sparse, or of a transform
        return None
    y = empty_like(x)
    loaded.run(_pack(x_at, y.data_ptr(), weight_at, bias_at, x.numel() // d, d, eps, DTYPES[dtype]))
    return y


def _is_rows(t: Tensor) -> bool:
    """Whether ``t`` is an ordinary tensor ``(..., d)`` in the memory of the CPU."""
    ordinary = type(t) is Tensor or type(t) is Parameter
    return ordinary and t.is_cpu and t.ndim > 0 and not t.is_neg() and not t.is_nested


def _address(t: Tensor | None, dtype: torch.dtype, width: int, gradient: bool) -> int | None:
    """The address of a parameter, 0 if there is none; ``None`` if the library does not take it.

    It takes an ordinary contiguous tensor of ``width`` elements of ``dtype`` without a gradient.
    """
    if t is None:
        return 0
    ordinary = (
        (type(t) is Parameter or type(t) is Tensor)
        and t.dtype is dtype
        and t.is_cpu
        and t.numel() == width
        and not (gradient and t.requires_grad)
        and not t.is_neg()
        and t.is_contiguous()
    )
    return t.data_ptr() or None if ordinary else None


def _is_watched() -> bool:
    """Whether torch may not compute the operations of this thread as they are written.

    So it is under autocast, a mode, a transform such as ``vmap``, forward-mode gradients, and while
    ``torch.jit`` traces.
    """
    return bool(
        dispatch_modes()
        or function_modes()
        or transform() is not None
        or tracing() is not None
        or forward_ad._current_level >= 0
        or autocast()
    )
