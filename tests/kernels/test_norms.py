"""The norm functions: their results, and how torch's own tools handle them."""

from __future__ import annotations

import pytest
import torch
from rounding import TIMES, lost_by_norms
from torch import Tensor, nn

from enjoyln_cli import kernels
from enjoyln_cli.kernels import formula

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
EPS = 1e-5


def zero_mean(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random rows with zero mean, up to rounding to ``dtype``."""
    x = torch.randn(*shape, dtype=torch.float64)
    return (x - x.mean(-1, keepdim=True)).to(dtype)


def affine(d: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return (torch.randn(d, dtype=torch.float64) + 1).to(dtype), torch.randn(d).to(dtype)


def exact(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    wide = [None if t is None else t.double() for t in (weight, bias)]
    return formula.rms_norm(x.double(), wide[0], wide[1], eps)


def close(y: Tensor, expected: Tensor) -> bool:
    """Whether ``y`` is near; a mean that rounding brought back adds to what is lost inside."""
    wide = lost_by_norms(formula.compute_dtype(y.dtype)) + torch.finfo(y.dtype).eps
    return bool(((y.double() - expected).abs() <= TIMES * wide * (1 + expected.abs())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 1), (7,), (2, 3, 33), (1, 768), (0, 16), (3, 1, 2, 257)])
def test_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, (weight, bias) = zero_mean(*shape, dtype=dtype), affine(shape[-1], dtype)
    for literal in (False, True):
        y = kernels.rms_norm(x, weight, bias, EPS, literal=literal)
        assert y.dtype == dtype and y.shape == torch.Size(shape) and y.is_contiguous()
        assert close(y, exact(x, weight, bias, EPS))


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_parameters_may_be_missing_or_of_another_dtype(weight: bool, bias: bool) -> None:
    for dtype in DTYPES:
        for other in DTYPES:
            w, b = affine(48, other)
            args = (zero_mean(3, 48, dtype=dtype), w if weight else None, b if bias else None, EPS)
            y = kernels.rms_norm(*args)
            assert y.dtype == dtype and close(y, exact(*args))


def test_inputs_need_not_be_contiguous() -> None:
    base = torch.randn(6, 5, 40)
    for x in (base.transpose(0, 1), base[:, ::2], base[..., ::2], base.movedim(-1, 0)):
        x = x - x.mean(-1, keepdim=True)
        x = x.transpose(0, 1).clone().transpose(0, 1)
        w, b = affine(2 * x.shape[-1], torch.float32)
        y = kernels.rms_norm(x, w[::2], b[::2], EPS)
        assert close(y, exact(x, w[::2], b[::2], EPS)) and y.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(4, 8), (4, 1), (1,), ()], ids=str)
def test_parameters_are_broadcast(
    dtype: torch.dtype, other: torch.dtype, shape: tuple[int, ...]
) -> None:
    """As in query and key norms: parameters ``(heads, d)`` for rows ``(..., heads, d)``."""
    x = zero_mean(2, 3, 4, 8, dtype=dtype)
    weight, bias = (torch.randn(shape).to(other) for _ in range(2))
    for w, b in ((weight, bias), (weight, None), (None, bias)):
        for literal in (False, True):
            y = kernels.rms_norm(x, w, b, EPS, literal=literal)
            assert y.dtype == dtype and close(y, exact(x, w, b, EPS))
        assert close(formula.torch_rms_norm(x, w, b, EPS), exact(x, w, b, EPS))


def test_the_result_is_an_ordinary_tensor() -> None:
    y = kernels.rms_norm(zero_mean(3, 16, dtype=torch.float32), None, None, EPS)
    assert type(y) is Tensor and not y.requires_grad and y.is_leaf and y._version == 0
    assert y.resize_(0).numel() == 0
    with torch.inference_mode():
        assert kernels.rms_norm(torch.randn(3, 16), None, None, EPS).is_inference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_on_a_cpu_it_is_torchs_layer_norm(dtype: torch.dtype) -> None:
    """To the last bit, for any number of rows, of zero mean or not; float64 shows the mean."""
    for rows in (1, 600):
        x, (weight, bias) = torch.randn(rows, 33).to(dtype) + 1, affine(33, dtype)
        expected = torch.nn.functional.layer_norm(x, (33,), weight, bias, EPS)
        assert torch.equal(kernels.rms_norm(x, weight, bias, EPS), expected)
        wide = [t.double() for t in (x, weight, bias)]
        assert torch.equal(kernels.rms_norm(*wide, EPS), formula.rms_norm(*wide, EPS))


def test_gradients_of_a_trained_norm() -> None:
    x, (weight, bias) = torch.randn(4, 7, dtype=torch.float64) + 1, affine(7)
    tensors = tuple(t.requires_grad_() for t in (x, weight, bias))
    assert torch.autograd.gradcheck(lambda *t: kernels.rms_norm(*t, EPS, literal=True), tensors)


@pytest.mark.parametrize("shape", [(16,), (3, 16)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_compile_and_export_see_plain_operations(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """With parameters of another dtype, which may be broadcast."""
    weight, bias = (torch.randn(shape) for _ in range(2))

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return kernels.rms_norm(x, weight, bias, EPS)

    x, block = zero_mean(3, 16, dtype=dtype), Block()
    expected = exact(x, weight, bias, EPS)
    assert close(torch.compile(block, backend="eager", fullgraph=True)(x), expected)
    assert close(torch.export.export(block, (x,)).module()(x), expected)


def test_transforms() -> None:
    x, (weight, bias) = zero_mean(4, 3, 16), affine(16)

    def norm(row: Tensor) -> Tensor:
        return kernels.rms_norm(row, weight.to(row.dtype), bias.to(row.dtype), EPS)

    with torch.no_grad():
        for dtype in (torch.float64, torch.float32):
            y = torch.vmap(norm)(x.to(dtype))
            assert close(y, exact(x.to(dtype), weight.to(dtype), bias.to(dtype), EPS))
    tangent = zero_mean(4, 3, 16)
    _, got = torch.func.jvp(norm, (x,), (tangent,))
    _, reference = torch.func.jvp(
        lambda r: formula.rms_norm(r, weight, bias, EPS), (x,), (tangent,)
    )
    assert torch.allclose(got, reference, rtol=1e-10, atol=1e-12)
    traced = torch.fx.experimental.proxy_tensor.make_fx(norm)(x)
    assert torch.allclose(traced(2 * x), formula.rms_norm(2 * x, weight, bias, EPS), rtol=1e-12)


def test_torch_jit_records_the_norm() -> None:
    weight, bias = affine(16, torch.float32)
    x, other = zero_mean(3, 16, dtype=torch.float32), zero_mean(5, 16, dtype=torch.float32)
    with torch.no_grad():
        traced = torch.jit.trace(
            lambda x: kernels.rms_norm(x, weight, bias, EPS), x, check_trace=False
        )
    assert close(traced(other), exact(other, weight, bias, EPS))


def test_autocast_on_the_cpu_is_as_for_layer_norm() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = zero_mean(3, 16, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            like = torch.nn.functional.layer_norm(x, (16,))
            assert kernels.rms_norm(x, None, None, EPS).dtype == like.dtype


def test_a_mean_shows_where_rms_norm_is_to_be_taken_literally() -> None:
    x, weight = torch.randn(3, 16) + 2, torch.randn(16)
    literal = formula.rms_norm(x, weight, None, EPS)

    for is_literal in (False, True):
        y = kernels.rms_norm(x, weight, None, EPS, literal=is_literal)
        assert torch.allclose(y, literal, rtol=1e-3) == is_literal
