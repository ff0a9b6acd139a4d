"""The operators: their results, their gradients, and how torch's own tools handle them."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from kernel_cases import DTYPES, EPS, FORMS, NORMS, affine, arguments, close, exact, op, results
from rounding import TIMES, lost_by_norms, relative
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from enjoyln_cli import kernels
from enjoyln_cli.kernels import formula


def zero_mean(*shape: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Tensor:
    """Random rows with zero mean, up to rounding to ``dtype``."""
    x = torch.randn(*shape, dtype=torch.float64) * scale
    return (x - x.mean(-1, keepdim=True)).to(dtype)


# Results.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(5, 1), (7,), (2, 3, 33), (1, 768), (0, 16), (3, 1, 2, 257)])
def test_operators(norm: str, form: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    args = arguments(form, dtype, *shape)
    expected, total = exact(norm, form, *args)
    y, got = results(form, args, op(form.format(norm))(*args))
    assert y.dtype == dtype and y.shape == torch.Size(shape) and y.is_contiguous()
    assert close(y, expected)
    assert got is None or torch.equal(got, total)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", NORMS)
def test_functions_agree_with_the_operators(norm: str, form: str) -> None:
    x, residual = zero_mean(4, 65), zero_mean(4, 65)
    given = (x,) if form == "{}" else (x, residual)
    args = (*given, *affine(65), EPS)
    expected, total = exact(norm, form, *copy.deepcopy(args))
    y, got = results(form, args, getattr(kernels, form.format(norm))(*args))
    assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12)
    assert got is None or torch.equal(got, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", ["add_{}", "sum_{}"])
@pytest.mark.parametrize("norm", NORMS)
def test_results_over_the_input(norm: str, form: str, transposed: bool, dtype: torch.dtype) -> None:
    args = arguments(form, dtype, 6, 65)
    expected, total = exact(norm, form, *args)
    x, residual, *rest = args
    if transposed:  # which no kernel writes to
        x = x.t().contiguous().t()
    before = residual.clone()
    with torch.no_grad():
        y = getattr(kernels, f"{form.format(norm)}_over")(x, residual, *rest)
    assert (y is x) != transposed
    assert close(y, expected)
    assert torch.equal(residual, total if form == "add_{}" else before)


@pytest.mark.parametrize("weight", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("norm", NORMS)
def test_parameters_may_be_missing_or_of_another_dtype(norm: str, weight: bool, bias: bool) -> None:
    for dtype in DTYPES:
        for other in DTYPES:
            w, b = affine(48, other)
            args = (zero_mean(3, 48, dtype=dtype), w if weight else None, b if bias else None, EPS)
            expected, _ = exact(norm, "{}", *args)
            y, z = op(norm)(*args), getattr(kernels, norm)(*args)
            assert y.dtype == z.dtype == dtype
            assert close(y, expected)
            # a mean that rounding brought back adds to what is lost inside
            wide = lost_by_norms(formula.compute_dtype(dtype)) + torch.finfo(dtype).eps
            assert ((z.double() - expected).abs() <= TIMES * wide * (1 + expected.abs())).all()


def test_the_sum_has_the_promoted_dtype() -> None:
    x, residual = zero_mean(3, 40, dtype=torch.bfloat16), zero_mean(3, 40, dtype=torch.float32)
    for function in (op("add_rms_norm"), kernels.add_rms_norm):
        y, total = function(x, residual, None, None, EPS)
        assert y.dtype == total.dtype == torch.float32
        assert torch.equal(total, x + residual)
        other, _ = function(residual, x, None, None, EPS)
        assert torch.equal(other, y)
    with pytest.raises(RuntimeError, match="can't be cast"):
        kernels.add_rms_norm_(residual, x.half().to(torch.int32), None, None, EPS)


@pytest.mark.parametrize("norm", NORMS)
def test_inputs_need_not_be_contiguous(norm: str) -> None:
    base = torch.randn(6, 5, 40, dtype=torch.float64)
    for x in (base.transpose(0, 1), base[:, ::2], base[..., ::2], base.movedim(-1, 0)):
        x = x - x.mean(-1, keepdim=True)
        x = x.transpose(0, 1).clone().transpose(0, 1)
        w, b = affine(2 * x.shape[-1])
        args = (x, w[::2], b[::2], EPS)
        expected, _ = exact(norm, "{}", *args)
        for function in (op(norm), getattr(kernels, norm)):
            y = function(*args)
            assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12) and y.is_contiguous()
        residual = torch.zeros_like(x)
        y = getattr(kernels, f"add_{norm}_")(x, residual, *args[1:])
        assert torch.allclose(y, expected, rtol=1e-12, atol=1e-12) and torch.equal(residual, x)


def test_a_weight_for_every_head_is_the_formula() -> None:
    x, weight = zero_mean(2, 3, 4, 8), torch.randn(4, 8, dtype=torch.float64)
    y = kernels.rms_norm(x, weight, None, EPS)
    assert torch.allclose(y, formula.rms_norm(x, weight, None, EPS), rtol=1e-13)


@pytest.mark.parametrize("form", FORMS)
def test_operators_refuse_what_does_not_fit(form: str) -> None:
    good = arguments(form, torch.float32, 3, 8)
    meta = [t.to("meta") if isinstance(t, Tensor) else t for t in good]
    op(form.format("rms_norm"))(*meta)
    wrong = list(meta)
    wrong[-3] = torch.ones(7, device="meta")
    with pytest.raises(RuntimeError, match=r"must be \(d,\)"):
        op(form.format("rms_norm"))(*wrong)


PARAMETERS = (None, torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_parameters_of_any_dtype_or_none(norm: str, dtype: torch.dtype) -> None:
    for d in (33, 8, 200):  # what is kept for one width serves the next
        x = torch.randn(3, d).to(dtype)
        for weight_dtype in PARAMETERS:
            for bias_dtype in PARAMETERS:
                weight = None if weight_dtype is None else torch.randn(d).to(weight_dtype)
                bias = None if bias_dtype is None else torch.randn(d).to(bias_dtype)
                with torch.no_grad():
                    y = op(norm)(x, weight, bias, EPS)
                assert close(y, exact(norm, "{}", x, weight, bias, EPS)[0])


@pytest.mark.parametrize("shape", [(3, 33), (0, 33), (1,) * 20 + (33,)])
def test_results_are_ordinary_tensors(shape: tuple[int, ...]) -> None:
    x, residual = zero_mean(*shape, dtype=torch.float32), zero_mean(*shape, dtype=torch.float32)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            results = (kernels.rms_norm(x, None, None, EPS),
                       *kernels.add_rms_norm(x, residual, None, None, EPS))  # fmt: skip
        for y in results:
            assert type(y) is Tensor and y.shape == x.shape and y.stride() == x.stride()
            assert y.is_inference() == (context.__class__ is torch.inference_mode)
            assert y.untyped_storage().resizable()
            assert y.untyped_storage().nbytes() == 4 * y.numel() and not y._is_view()
    forgotten = weakref.ref(results[0])
    del y, results
    assert forgotten() is None


# Gradients.


@pytest.mark.parametrize("form", ["{}", "add_{}", "sum_{}"])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients(norm: str, form: str) -> None:
    args = arguments(form, torch.float64, 3, 7, grad=True)
    for function in (op(form.format(norm)), getattr(kernels, form.format(norm))):
        assert gradcheck(function, args)
        assert gradgradcheck(function, args)
    without = (*args[:-3], None, None, EPS)
    assert gradcheck(op(form.format(norm)), without)


@pytest.mark.parametrize("norm", NORMS)
def test_gradients_in_place(norm: str) -> None:
    args = arguments("add_{}_", torch.float64, 3, 7, grad=True)
    for function in (op(f"add_{norm}_"), getattr(kernels, f"add_{norm}_")):

        def whole(x: Tensor, residual: Tensor, *rest: Any, function: Any = function) -> Any:
            residual = residual.clone()
            return function(x, residual, *rest), residual

        assert gradcheck(whole, args)


def test_gradients_have_the_dtypes_of_their_tensors() -> None:
    x = zero_mean(3, 16, dtype=torch.bfloat16).requires_grad_()
    weight, bias = (p.requires_grad_() for p in affine(16, torch.float32))
    kernels.rms_norm(x, weight, bias, EPS).sum().backward()
    assert (x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)  # type: ignore
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    formula.rms_norm(*wide, EPS).sum().backward()
    for one, right in zip((weight, bias), wide[1:], strict=True):
        # three rows in bfloat16, summed in float32
        assert relative(one.grad, right.grad) <= torch.finfo(x.dtype).eps  # type: ignore


def test_only_a_wanted_gradient_is_recorded() -> None:
    x, (weight, bias) = zero_mean(3, 16), affine(16)
    weight.requires_grad_()
    assert kernels.rms_norm(x, weight, bias, EPS).requires_grad
    assert not kernels.rms_norm(x, weight.detach(), bias, EPS).requires_grad
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            y = kernels.rms_norm(x, weight, bias, EPS)
            assert not y.requires_grad and y.grad_fn is None


def test_an_in_place_sum_is_noticed_by_autograd() -> None:
    x, residual = zero_mean(3, 16), zero_mean(3, 16)
    weight = torch.ones(16, dtype=torch.float64, requires_grad=True)
    y = (residual * weight).sum()
    with torch.no_grad():
        kernels.add_rms_norm_(x, residual, None, None, EPS)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# torch's own tools.


@pytest.mark.one_case
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", NORMS)
def test_opcheck(norm: str, form: str, grad: bool) -> None:
    args = arguments(form, torch.float32, 3, 17, grad=grad)
    if form == "add_{}_" and grad:
        args = (args[0], args[1].detach(), *args[2:])
    torch.library.opcheck(op(form.format(norm)), args)
    torch.library.opcheck(op(form.format(norm)), (*args[:-3], None, None, EPS))


@pytest.mark.parametrize("norm", NORMS)
def test_opcheck_of_the_backward(norm: str) -> None:
    x, grad = torch.randn(3, 17), torch.randn(3, 17)
    for added in (None, torch.randn(3, 17)):
        torch.library.opcheck(op(f"{norm}_backward"), (grad, x, torch.randn(17), added, EPS))


class Block(torch.nn.Module):
    """A pre-LN step and a post-LN step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(32, dtype=torch.float64))
        self.bias = torch.nn.Parameter(torch.randn(32, dtype=torch.float64))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        y, total = kernels.add_rms_norm(x, residual, self.weight, self.bias, EPS)
        z = kernels.sum_layer_norm(y, total, self.weight, None, EPS)
        return kernels.rms_norm(z - z.mean(-1, keepdim=True), self.weight, self.bias, EPS)


def test_compile_and_export_see_plain_operations() -> None:
    block, x, residual = Block().eval(), zero_mean(2, 5, 32), zero_mean(2, 5, 32)
    with torch.no_grad():
        expected = block(x, residual)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x, residual), expected, rtol=1e-12, atol=1e-12)
    for strict in (True, False):
        program = torch.export.export(block, (x, residual), strict=strict)
        assert "enjoyln" not in str(program.graph)
        assert torch.allclose(program.module()(x, residual), expected, rtol=1e-12, atol=1e-12)


def test_transforms() -> None:
    x, (weight, bias) = zero_mean(4, 3, 16), affine(16)
    expected = formula.rms_norm(x, weight, bias, EPS)

    def one(row: Tensor) -> Tensor:
        return kernels.rms_norm(row, weight, bias, EPS)

    with torch.no_grad():
        assert torch.allclose(torch.vmap(one)(x), expected, rtol=1e-12, atol=1e-12)
    tangent = zero_mean(4, 3, 16)
    _, got = torch.func.jvp(one, (x,), (tangent,))
    _, reference = torch.func.jvp(
        lambda r: formula.rms_norm(r, weight, bias, EPS), (x,), (tangent,)
    )
    assert torch.allclose(got, reference, rtol=1e-10, atol=1e-12)
    traced = torch.fx.experimental.proxy_tensor.make_fx(one)(x)
    assert torch.allclose(traced(2 * x), formula.rms_norm(2 * x, weight, bias, EPS), rtol=1e-12)


def test_results_can_be_copied_and_resized() -> None:
    y = kernels.rms_norm(zero_mean(3, 16), None, None, EPS)
    assert torch.equal(copy.deepcopy(y), y)
    assert y.resize_(0).numel() == 0


def test_autocast_on_the_cpu_is_as_for_layer_norm() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = zero_mean(3, 16, dtype=dtype)
        with torch.autocast("cpu", torch.bfloat16):
            like = torch.nn.functional.layer_norm(x, (16,))
            assert kernels.rms_norm(x, None, None, EPS).dtype == like.dtype
            assert op("rms_norm")(x, None, None, EPS).dtype == like.dtype


@pytest.mark.parametrize("norm", ["rms_norm", "add_rms_norm"])
def test_a_mean_shows_where_rms_norm_is_to_be_taken_literally(norm: str) -> None:
    x, weight = torch.randn(3, 16, dtype=torch.float64) + 2, torch.randn(16, dtype=torch.float64)
    given = (x,) if norm == "rms_norm" else (x - 1, torch.ones_like(x))
    literal = formula.rms_norm(x, weight, None, EPS)

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            return func(*args, **(kwargs or {}))

    def computed() -> Tensor:
        y = getattr(kernels, norm)(*given, weight, None, EPS)
        return y if norm == "rms_norm" else y[0]

    with torch.no_grad(), Watching():  # nothing may pass a mode by, so no kernel runs
        assert not torch.allclose(computed(), literal, rtol=1e-3)
        with kernels.literally():
            assert torch.allclose(computed(), literal, rtol=1e-12)
        assert not torch.allclose(computed(), literal, rtol=1e-3)
