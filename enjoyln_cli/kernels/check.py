"""Compare kernels with the formula: what is wrong on this machine is not used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from enjoyln_cli.kernels import dispatch, formula
from enjoyln_cli.kernels.build import NoLibrary

CHUNKS, CHUNK_ROWS = 32, 16
"""The most chunks of rows for the gradients of weight and bias, and the fewest rows of one."""


@contextmanager
def _outside_of_modes() -> Iterator[None]:
    """Inside the block, ``torch.jit.trace`` records nothing, and no mode changes an operation."""
    compiled: Any = torch._C
    state = compiled._get_tracing_state()
    compiled._set_tracing_state(None)
    try:
        with compiled.DisableTorchFunction(), _python_dispatch._disable_current_modes():
            yield
    finally:
        compiled._set_tracing_state(state)


DTYPES = tuple((dtype, dtype) for dtype in dispatch.DTYPES)


@_outside_of_modes()
def compare_with_formula(
    loaded: Any, device: str, dtypes: tuple[tuple[str, str], ...] = DTYPES
) -> None:
    """Compare the kernels with the formula on real tensors; raise ``NoLibrary`` if one is wrong.

    ``dtypes`` are pairs of the dtypes of rows and parameters. Tracing and modes are switched off,
    since the first use may be inside a traced call, or in one that runs in float64.
    """
    one = torch.ones(1, 8, device=device, dtype=getattr(torch, dtypes[0][0]))
    if loaded.run("rms_norm", one, None, None, 1e-5) is NotImplemented:
        raise NoLibrary(f"the kernels for {device} do not run")
    for row, parameter in dtypes:
        for d in (1, 17, 200, 1500, 1536, 9000) if device != "cpu" else (1, 17, 200, 1500):
            i = torch.arange(2 * d, dtype=torch.float64, device=device).view(2, d)
            x, r = (torch.sin(i * k).to(getattr(torch, row)) for k in (0.7, 1.3))
            w, b = (torch.cos(i[0] * k).to(getattr(torch, parameter)) for k in (0.3, 0.9))
            for norm in ("rms_norm", "layer_norm"):
                pair = loaded.run(f"add_{norm}", x, r, w, b, 1e-5)
                if pair is NotImplemented:
                    continue
                total = x + r
                y = getattr(formula, norm)(*(t.double() for t in (total, w, b)), 1e-5)
                if not (formula.is_close(pair[0], y) and torch.equal(pair[1], total)):
                    raise NoLibrary(f"the kernel of {norm} is wrong for {x.dtype}, d = {d}")
                wide = (t.double() for t in (r, x, w, total))
                exact = getattr(formula, f"{norm}_backward")(*wide, 1e-5)
                found = gradients(loaded.run, norm, r, x, w, total, 1e-5)
                if found is None or not all(map(formula.is_close, found, exact)):
                    raise NoLibrary(f"the gradient of {norm} is wrong for {x.dtype}, d = {d}")


def gradients(
    run: Callable[..., Any],
    norm: str,
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    added: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The gradients of ``formula.rms_norm_backward`` by a kernel, or ``None`` if it declines.

    ``run`` is that of ``entry``. ``x`` is not empty.
    """
    wide, d = formula.compute_dtype(x.dtype), x.shape[-1]
    x, rows = x.contiguous(), x.numel() // d
    dx, sums = torch.empty_like(x), x.new_empty(2, d, dtype=wide)
    chunks = max(1, min(rows // CHUNK_ROWS, CHUNKS))
    partial = x.new_empty(chunks, 2, d, dtype=wide)
    scales = x.new_empty(2, rows, dtype=wide) if x.is_cuda else None
    given = (grad, x, weight, added)
    dense = [None if t is None else t.contiguous() for t in given]
    if run(f"{norm}_backward", *dense, dx, sums, partial, scales, eps) is NotImplemented:
        return None
    return dx, sums[0].clone(), sums[1].clone()
