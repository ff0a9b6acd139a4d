"""Accuracy of the CPU's kernels: on zero-mean rows no further from float64 than torch's LayerNorm.

Every level of instructions that this processor has is tested.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from rounding import TIMES, lost_by_norms
from torch import Tensor
from torch.nn import functional as F

from enjoyln_cli.kernels import cpu, formula

EPS = 1e-5
DTYPES = tuple(cpu.DTYPES)
WIDTHS = (1, 2, 3, 15, 16, 17, 31, 33, 64, 100, 255, 384, 768, 1000, 1025, 4097, 65536)
LIBRARY = cpu.library()

pytestmark = pytest.mark.skipif(bool(LIBRARY.missing), reason=LIBRARY.missing)


@pytest.fixture(params=cpu.LEVELS, autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = LIBRARY.level
    if not LIBRARY.use(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    LIBRARY.use(before)


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    with torch.no_grad():
        y = cpu.rms_norm(x, weight, bias, eps)
    if y is None:
        assert (LIBRARY.level, x.dtype) == ("plain", torch.half)
        pytest.skip("without instructions for float16 this is left to torch")
    return y


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
    dtype: torch.dtype, kind: str, eps: float
) -> None:
    x = rows(kind, dtype)
    weight, bias = (torch.randn(768).to(dtype) for _ in range(2))
    if eps == 0:
        x = x[1:]  # torch and the kernels give NaN for a row of zeros
    exact = formula.rms_norm(x.double(), weight.double(), bias.double(), eps)
    mean, most = error(rms_norm(x, weight, bias, eps), exact)
    torch_mean, torch_most = error(F.layer_norm(x, (768,), weight, bias, eps), exact)
    # In rows of one number torch's sums may be exact by luck; a rounding of the result is allowed.
    rounding = 0.5 * torch.finfo(dtype).eps * float(exact.square().mean().sqrt())
    assert mean <= max(torch_mean * 1.02, rounding if kind == "constant" else 0)
    assert most <= torch_most * 2  # a maximum over few values varies more


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_width(dtype: torch.dtype) -> None:
    inside = 2 * TIMES * lost_by_norms(formula.compute_dtype(dtype))  # rows of up to 65536
    for d in WIDTHS:
        x, weight, bias = (torch.randn(*shape, d).to(dtype) for shape in ((5,), (), ()))
        for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
            wide = [None if t is None else t.double() for t in (w, b)]
            exact = formula.rms_norm(x.double(), wide[0], wide[1], EPS)
            bound = 0.51 * torch.finfo(dtype).eps * exact.abs() + inside * (1 + exact.abs())
            y = rms_norm(x, w, b, EPS)
            assert y.dtype == dtype and ((y.double() - exact).abs() <= bound).all(), d


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_off_the_alignment(dtype: torch.dtype) -> None:
    base = torch.randn(3 * 100 + 1).to(dtype)
    for x in (base[1:].view(3, 100), base[1:].view(3, 100).T, base[::2][:150].view(3, 50)):
        assert torch.equal(rms_norm(x, None, None, EPS), rms_norm(x.clone(), None, None, EPS))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_inf_and_nan_pass_through_as_in_layer_norm(dtype: torch.dtype, bad: float) -> None:
    x = rows("random", dtype, n=6)
    x[2, 100] = x[4, 767] = bad
    y = rms_norm(x, None, None, EPS)
    assert torch.equal(y.isnan(), F.layer_norm(x, (768,)).isnan())
    assert y[2].isnan().all() and not y[3].isnan().any()
    weight = torch.ones(768, dtype=dtype)
    weight[5] = torch.nan
    weight[6] = torch.inf
    y = rms_norm(x, weight, None, EPS)
    assert y[0, 5].isnan() and y[0, 6].isinf() and y[0, 7].isfinite()


def test_every_16_bit_number_is_read_and_rounded_as_torch_does() -> None:
    """A row of one number and an eps of zero: the result is its sign, times the weight."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        numbers = bits.view(dtype)
        fits = numbers.isfinite() & (numbers != 0)
        x = torch.ones(2, len(bits), dtype=dtype)
        y = rms_norm(x, numbers, None, 0.0)
        assert torch.equal(y[0][fits], numbers[fits])
        assert torch.equal(y[0].isnan(), numbers.isnan())
        y = rms_norm(numbers[fits][:, None], None, None, 0.0)
        assert torch.equal(y, numbers[fits].sign()[:, None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_those_beside_it(dtype: torch.dtype) -> None:
    for d in (40, 768, 1001, 9000):
        x = torch.randn(11, d).to(dtype)
        x[6] *= 1e-30 if dtype != torch.float16 else 1e-6  # summed with care
        weight, bias = (torch.randn(d).to(dtype) for _ in range(2))
        y = rms_norm(x, weight, bias, 1e-24)
        for i in range(11):
            assert torch.equal(y[i], rms_norm(x[i], weight, bias, 1e-24))


def test_threads_do_not_change_the_result() -> None:
    x = rows("random", torch.float32, n=301)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = rms_norm(x, None, None, EPS)
        torch.set_num_threads(2)
        assert torch.equal(rms_norm(x, None, None, EPS), one)
    finally:
        torch.set_num_threads(before)
