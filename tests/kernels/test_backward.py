"""The gradients of the norms: of the kernels and of the formula, in every dtype."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kernel_cases import DTYPES, EPS, NORMS, op
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F

from enjoyln_cli.kernels import formula, native, ops

WIDTHS = (1, 7, 16, 33, 768, 1001)


@pytest.fixture(params=["avx512", "avx2", "plain"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    if not native.has("cpu") or not native.use(request.param):
        pytest.skip(f"{request.param} does not run here")
    yield request.param
    native.use("")


def given(rows: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``dy``, ``x``, ``weight`` and another gradient of ``x``."""
    dy, x, added = (torch.randn(rows, d).to(dtype) for _ in range(3))
    return dy, x, (torch.randn(d) + 1).to(dtype), added


def exact(norm: str, dy: Tensor, x: Tensor, weight: Tensor | None, added: Tensor | None) -> Any:
    """What autograd gives for the formula in float64."""
    wide = [None if t is None else t.double() for t in (x, weight)]
    x, bias = wide[0].requires_grad_(), torch.zeros(dy.shape[-1], dtype=torch.float64)  # type: ignore
    scale = torch.ones_like(bias) if weight is None else wide[1]
    wanted = (x, scale.requires_grad_(), bias.requires_grad_())  # type: ignore[union-attr]
    y = getattr(formula, norm)(x, scale, bias, EPS)
    dx, dw, db = torch.autograd.grad(y, wanted, dy.double())
    return (dx if added is None else dx + added.double()), dw, db


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_the_kernel_is_right(isa: str, norm: str, dtype: torch.dtype) -> None:
    if isa == "plain" and dtype == torch.float16:
        pytest.skip("there is no kernel for it")
    step, wide = torch.finfo(dtype).eps, torch.finfo(formula.compute_dtype(dtype)).eps
    for d in WIDTHS:
        for rows in (1, 3, 70):
            dy, x, weight, added = given(rows, d, dtype)
            for w, a in ((weight, added), (None, None), (weight.to(torch.float32), None)):
                if dtype == torch.float64 and w is not None and w.dtype != dtype:
                    continue
                found = ops._native_backward(norm, dy, x, w, a, EPS)
                assert found is not None
                expected = exact(norm, dy, x, w, a)
                scale = (x.double().var(-1, correction=0) + EPS).rsqrt().max().item()
                size = 2 + scale + expected[0].abs().max().item()
                error = (found[0].double() - expected[0]).abs()
                assert (error <= 0.51 * step * expected[0].abs() + 40 * wide * size).all()
                for one, sums in zip(found[1:], expected[1:], strict=True):
                    assert one.dtype == formula.compute_dtype(dtype)
                    assert ((one.double() - sums).abs() <= 40 * wide * rows * (1 + size)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_the_error_is_no_larger_than_torchs_own(norm: str, dtype: torch.dtype) -> None:
    """Errors are root mean squares over many elements, from the gradients in float64."""
    dy, x, weight, _ = given(64, 768, dtype)
    wanted = [t.requires_grad_() for t in (x, weight, torch.zeros_like(weight))]

    def torchs() -> Tensor:
        if norm == "layer_norm":
            return F.layer_norm(x, (768,), weight, wanted[2], EPS)
        return F.rms_norm(x, (768,), weight, EPS) + wanted[2]

    expected = exact(norm, dy, x.detach(), weight.detach(), None)
    results = []
    for y in (op(norm)(*wanted, EPS), torchs()):
        gradients = torch.autograd.grad(y, wanted, dy)
        results.append([(a.double() - b).square().mean().sqrt().item()
                        for a, b in zip(gradients, expected, strict=True)])  # fmt: skip
    for own, other in zip(*results, strict=True):
        assert own <= 1.25 * other + 1e-12


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("form", ["{}", "add_{}", "sum_{}"])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_in_float64(norm: str, form: str, weighted: bool) -> None:
    shape = (2, 2, 5)
    rows = 1 if form == "{}" else 2
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(rows)]
    parameters = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    affine = parameters if weighted else [None, parameters[1]]
    arguments = (*tensors, *affine, EPS)
    assert gradcheck(op(form.format(norm)), arguments)
    assert gradgradcheck(op(form.format(norm)), arguments)


def test_the_kernel_is_what_the_operator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native.has("cpu"):
        pytest.skip(native.status("cpu").what)
    dy, x, weight, added = given(5, 33, torch.float32)
    found = op("rms_norm_backward")(dy, x, weight, added, EPS)
    monkeypatch.setitem(vars(formula), "_over_rows", None)  # what the formula needs
    again = op("rms_norm_backward")(dy, x, weight, added, EPS)
    assert all(map(torch.equal, found, again))
    with pytest.raises(TypeError):
        op("rms_norm_backward")(dy.double(), x, weight, added, EPS)  # is left to the formula


def test_threads_do_not_change_the_gradients() -> None:
    dy, x, weight, added = given(700, 301, torch.float32)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(op("rms_norm_backward")(dy, x, weight, added, EPS))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, *results))


def test_what_the_kernel_cannot_take_is_left_to_the_formula() -> None:
    dy, x, weight, added = given(6, 33, torch.float32)
    strided = x.t().contiguous().t()
    expected = op("rms_norm_backward")(dy, x, weight, added, EPS)
    found = op("rms_norm_backward")(dy, strided, weight, added, EPS)
    assert all(map(torch.equal, found, expected))
    shapes = [t.shape for t in op("rms_norm_backward")(dy[:0], x[:0], weight, None, EPS)]
    assert shapes == [(0, 33), (33,), (33,)]
    wrong = torch.empty(1, 2, 32), torch.empty(1, 2, 33, dtype=torch.float64)
    for partial in wrong:
        given_too = (dy, x, weight, added, torch.empty_like(x), torch.empty(2, 33), partial, None)
        assert native.entry.run("rms_norm_backward", *given_too, EPS) is NotImplemented
