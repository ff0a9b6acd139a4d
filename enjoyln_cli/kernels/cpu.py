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


class Library:
    """The loaded library. If this machine has none, ``missing`` says why, and it takes no dtype."""

    missing = ""
    level = ""
    """Which of ``LEVELS`` computes."""
    dtypes: Collection[torch.dtype] = ()
    """What this level computes: ``plain`` has no instructions for float16."""
    run: Callable[[bytes], None]

    def __init__(self) -> None:
        if os.environ.get("ENJOYLN_KERNELS", "") == "0":
            self.missing = "switched off by ENJOYLN_KERNELS=0"
        elif not LIBRARY.exists():
            self.missing = "not compiled when enjoyln was installed, which needs g++ or clang++"
        else:
            try:
                functions = ctypes.CDLL(str(LIBRARY))
            except OSError as error:
                self.missing = f"it does not load: {error}"
                return
            self._use, self.run = functions.enjoyln_use, functions.enjoyln_rms_norm
            self._use.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
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


library = cache(Library)


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor | None:
    """``x / sqrt(mean(x^2) + eps) * weight + bias``, or ``None`` if the library does not take it.

    ``x`` is ``(..., d)``, ``weight`` and ``bias`` are ``(d,)``, all of one dtype. The result is
    contiguous.
    """
    loaded, dtype = library(), x.dtype
    if dtype not in loaded.dtypes or _is_watched():
        return None
    try:
        x, d = x.contiguous(), x.shape[-1]
        x_at = _address(x, dtype, x.numel())
        weight_at, bias_at = (0 if p is None else _address(p, dtype, d) for p in (weight, bias))
    except (RuntimeError, IndexError):  # sparse, nested, of a transform, or a single number
        return None
    if x_at is None or weight_at is None or bias_at is None:
        return None
    y = torch.empty_like(x)
    loaded.run(_pack(x_at, y.data_ptr(), weight_at, bias_at, x.numel() // d, d, eps, DTYPES[dtype]))
    return y


def _address(t: Tensor, dtype: torch.dtype, size: int) -> int | None:
    """The address of a tensor, or ``None`` if the library does not take it.

    It takes ordinary contiguous tensors of ``size`` elements of ``dtype`` in the memory of the CPU
    that need no gradient. A tensor without an address is empty, a wrapper of another tensor, or
    zeros that take no memory.
    """
    ordinary = (
        (type(t) is Parameter or type(t) is Tensor)
        and t.dtype is dtype
        and t.is_cpu
        and t.numel() == size
        and not (t.requires_grad and torch.is_grad_enabled())
        and not t.is_neg()
        and not t.is_nested
        and t.is_contiguous()
    )
    return t.data_ptr() or None if ordinary else None


def _is_watched() -> bool:
    """Whether torch may not compute the operations of this thread as they are written.

    So it is under autocast, a mode, a transform such as ``vmap``, forward-mode gradients, and while
    ``torch.jit`` traces.
    """
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch._C._is_any_autocast_enabled()
    )
