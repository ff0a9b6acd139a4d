"""Accuracy of the kernels: on zero-mean rows no further from float64 than torch's LayerNorm.

Every instruction set of this processor is tested, and the row function of the CUDA kernels,
compiled for the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rounding import TIMES, lost_by_norms
from torch import Tensor
from torch.nn import functional as F

from enjoyln_cli import kernels
from enjoyln_cli.kernels import formula, native

EPS = 1e-5
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
WIDTHS = (1, 2, 3, 15, 16, 17, 31, 33, 64, 100, 255, 384, 768, 1000, 1025, 4097, 65536)

pytestmark = pytest.mark.skipif(not native.has("cpu"), reason=native.status("cpu").what)


@pytest.fixture(params=["avx512", "avx2", "plain"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if not native.use(request.param):
        pytest.skip(f"{request.param} does not run here")
    yield request.param
    native.use("")


@pytest.fixture(autouse=True)
def the_same_rows_every_time() -> None:
    torch.manual_seed(0)


def rows(kind: str, dtype: torch.dtype, n: int = 100, d: int = 768) -> Tensor:
    """Rows whose mean is exactly zero in ``dtype``: they hold the negative of every value."""
    x = torch.randn(n, d // 2, dtype=torch.float64)
    largest = torch.finfo(dtype).max
    if kind == "outlier":
        x[:, 3] = 1e4
    elif kind == "huge":
        x *= 1e20 if largest > 1e30 else largest / 8
    elif kind == "largest":
        x = x.sign() * largest
    elif kind == "tiny":
        x *= 1e-20 if largest > 1e30 else 1e-6
    elif kind == "constant":
        x = x * 0 + torch.rand(n, 1, dtype=torch.float64) + 0.1
        x[0] = 0
    x = x.to(dtype)
    return torch.cat([x, -x], -1)[:, torch.randperm(2 * (d // 2))].contiguous()


def error(y: Tensor, exact: Tensor) -> tuple[float, float]:
    """Root mean square and maximum of the error; infinite if a value is not finite."""
    off = (y.double() - exact).abs().nan_to_num(torch.inf)
    return float(off.square().mean().sqrt()), float(off.max())


@pytest.mark.parametrize("eps", [1e-5, 1e-12, 0.0])
@pytest.mark.parametrize("kind", ["random", "outlier", "huge", "largest", "tiny", "constant"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_further_from_the_truth_than_layer_norm(
    isa: str, dtype: torch.dtype, kind: str, eps: float
) -> None:
    x = rows(kind, dtype)
    weight, bias = (torch.randn(768).to(dtype) for _ in range(2))
    if eps == 0:
        x = x[1:]  # torch and the kernels give NaN for a row of zeros
    wide = x.double()
    shrink = 1e-200 if kind == "largest" and dtype == torch.float64 else 1.0
    exact = formula.rms_norm(wide * shrink, weight.double(), bias.double(), eps * shrink**2)
    with torch.no_grad():
        mean, most = error(kernels.rms_norm(x, weight, bias, eps), exact)
        torch_mean, torch_most = error(F.layer_norm(x, (768,), weight, bias, eps), exact)
    # Sums of float64 are computed in float64 by both, so the last bit is luck. Narrower dtypes are
    # summed in a wider one.
    double = dtype == torch.float64
    luck = 2 * torch.finfo(dtype).eps * float(exact.abs().max()) if double else 0.0
    assert mean <= max(torch_mean * 1.02, luck)
    assert most <= max(torch_most * 2, luck)  # a maximum over few values varies more


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(isa: str, dtype: torch.dtype, norm: str) -> None:
    if isa == "plain" and dtype == torch.float16:
        pytest.skip("without instructions for float16 this is left to torch")
    inside = 2 * TIMES * lost_by_norms(formula.compute_dtype(dtype))  # rows of up to 65536
    for d in WIDTHS:
        x, residual = (torch.randn(5, d).to(dtype) for _ in range(2))
        weight, bias = (torch.randn(d).to(dtype) for _ in range(2))
        with torch.no_grad():
            y, total = getattr(kernels, f"add_{norm}")(x, residual, weight, bias, EPS)
            z = getattr(kernels, norm)(total, weight, bias, EPS)
        assert torch.equal(total, x + residual), d
        wide = (total.double(), weight.double(), bias.double())
        exact = getattr(formula, norm)(*wide, EPS)
        bound = 0.51 * torch.finfo(dtype).eps * exact.abs()
        bound = bound + inside * (1 + exact.abs())
        assert ((y.double() - exact).abs() <= bound).all(), d
        assert torch.equal(y, z), d


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inf_and_nan_pass_through_as_in_layer_norm(
    isa: str, dtype: torch.dtype, bad: float
) -> None:
    if isa == "plain" and dtype == torch.float16:
        pytest.skip("without instructions for float16 this is left to torch")
    x = rows("random", dtype, n=6)
    x[2, 100] = x[4, 767] = bad
    with torch.no_grad():
        for norm in (kernels.rms_norm, kernels.layer_norm):
            y = norm(x, None, None, EPS)
            expected = F.layer_norm(x, (768,))
            assert torch.equal(y.isnan(), expected.isnan())
            assert y[2].isnan().all() and not y[3].isnan().any()
    weight = torch.ones(768, dtype=dtype)
    weight[5] = torch.nan
    weight[6] = torch.inf
    with torch.no_grad():
        y = kernels.rms_norm(x, weight, None, EPS)
    assert y[0, 5].isnan() and y[0, 6].isinf() and y[0, 7].isfinite()


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000])
def test_a_nan_of_any_bits_in_a_float32_weight_is_seen_in_bfloat16(isa: str, bits: int) -> None:
    x = rows("random", torch.bfloat16, n=5)
    weight, bias = torch.ones(768), torch.zeros(768)
    weight.view(torch.int32)[[4, 767]] = bias.view(torch.int32)[[7, 8]] = bits
    with torch.no_grad():
        y = kernels.rms_norm(x, weight, bias, EPS)
    assert y.isnan().any(0).nonzero().flatten().tolist() == [4, 7, 8, 767]
    assert y[:, [4, 7, 8, 767]].isnan().all()


@pytest.mark.parametrize("norm", ["rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_those_beside_it(isa: str, dtype: torch.dtype, norm: str) -> None:
    for d in (40, 768, 1001, 9000):
        x, residual = (torch.randn(11, d).to(dtype) for _ in range(2))
        x[6] *= 1e-30 if dtype == torch.float32 else 0  # summed with care
        residual[6] = 0
        weight, bias = (torch.randn(d).to(dtype) for _ in range(2))
        add = getattr(kernels, f"add_{norm}")
        with torch.no_grad():
            y, total = add(x, residual, weight, bias, 1e-24)
            for i in range(11):
                alone = add(x[i], residual[i], weight, bias, 1e-24)
                assert torch.equal(y[i], alone[0]) and torch.equal(total[i], alone[1])


def test_threads_do_not_change_the_result(isa: str) -> None:
    x = rows("random", torch.float32, n=301)
    before = torch.get_num_threads()
    with torch.no_grad():
        try:
            torch.set_num_threads(1)
            one = kernels.rms_norm(x, None, None, EPS)
            torch.set_num_threads(2)
            assert torch.equal(kernels.rms_norm(x, None, None, EPS), one)
        finally:
            torch.set_num_threads(before)
