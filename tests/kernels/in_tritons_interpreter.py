"""What the GPU's kernel computes, on the CPU: ``test_triton_norm`` runs these tests.

They need a process of their own with ``TRITON_INTERPRET=1``, which Triton reads at its import.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from rounding import TIMES, lost_by_norms
from torch import Tensor

from enjoyln_cli.kernels import formula, gpu

SOURCE = Path(gpu.__file__).with_name("triton_norm.py")
DTYPES = ("float32", "float16", "bfloat16")
WIDTHS = (1, 7, 33, 768, 1025)
FAULTS = {
    "always the first row": ("tl.load(x + start + at", "tl.load(x + at"),
    "not the last element": ("inside = at < width", "inside = at < width - 1"),
    "a mean over the block": ("squares / width", "squares / block"),
    "no bias": ("row += tl.load(bias", "row += 0 * tl.load(bias"),
}
"""A text of the kernel, and what replaces it."""


def kernel(folder: Path, fault: str = "") -> Any:
    """The module, with the named ``fault`` of ``FAULTS``, if any."""
    text = SOURCE.read_text()
    if fault:
        assert text.count(FAULTS[fault][0]) == 1
        text = text.replace(*FAULTS[fault])
    file = folder / "triton_norm.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location("triton_norm", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tensors(width: int, dtype: str, parameters: str, parts: str) -> list[Tensor | None]:
    """Two rows inside a larger tensor that has NaN elsewhere, a weight and a bias."""
    whole = torch.full((3, width + 3), torch.nan)
    whole[:2, :width] = torch.randn(2, width)
    x = whole.to(getattr(torch, dtype))[:2, :width]
    weight, bias = (torch.randn(width).to(getattr(torch, parameters)) for _ in range(2))
    return [x, weight if "w" in parts else None, bias if "b" in parts else None]


def is_right(module: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the result is a rounding to its dtype, and what float32 loses inside, from exact.

    The interpreter cuts bfloat16 off instead of rounding it.
    """
    y = module.rms_norm(x, weight, bias, gpu.EPS)
    wide = [None if t is None else t.double() for t in (weight, bias)]
    exact = formula.rms_norm(x.double(), *wide, gpu.EPS)
    roundings = 1.01 if y.dtype is torch.bfloat16 else 0.51
    bound = roundings * torch.finfo(y.dtype).eps * exact.abs()
    bound += TIMES * lost_by_norms(torch.float32) * (1 + exact.abs())
    return y.is_contiguous() and bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("parameters", ["float32", "the same"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width_is_right(dtype: str, parameters: str, tmp_path: Path) -> None:
    module, parts = kernel(tmp_path), itertools.cycle(("wb", "w", "b", ""))
    for width in WIDTHS:
        given = tensors(
            width, dtype, dtype if parameters == "the same" else parameters, next(parts)
        )
        assert is_right(module, *given), width


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, tmp_path: Path) -> None:
    given = tensors(33, "float32", "float32", "wb")
    assert is_right(kernel(tmp_path), *given)
    assert not is_right(kernel(tmp_path, fault), *given)


def test_rows_without_a_result_are_nan(tmp_path: Path) -> None:
    x, weight, bias = torch.randn(6, 33), torch.randn(33), torch.randn(33)
    x[1, 5], x[2, 32], x[3] = torch.inf, torch.nan, 0
    x[4] *= 1e25  # its squares do not fit into a float
    y = kernel(tmp_path).rms_norm(x, weight, bias, gpu.EPS)
    assert y[[1, 2, 4]].isnan().all() and y[[0, 3, 5]].isfinite().all()
    assert torch.equal(y[3], bias)
