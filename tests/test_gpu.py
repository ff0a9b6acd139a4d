"""The CUDA kernels, run where there is a GPU: every form, dtype and way of reading a row."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from test_kernels import DTYPES, FORMS, NORMS, arguments, close, exact, op, results

from enjoyln_cli import kernels
from enjoyln_cli.kernels import native

WIDTHS = (1, 7, 32, 129, 768, 1000, 1024, 1025, 4096, 8192, 8200, 20001, 65536)
"""Short and long rows, with and without packs of 16 bytes, kept in registers and read twice."""

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")


@pytest.fixture(autouse=True, scope="module")
def active() -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENJOYLN_KERNELS", "unmeasured")
        status = native.status("cuda", retry=True)
        if not status.active:
            pytest.skip(status.what)
        yield


def on_gpu(args: tuple) -> tuple:
    return tuple(a.cuda() if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", NORMS)
def test_every_form_is_right(norm: str, form: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        args = on_gpu(arguments(form, dtype, 5, width))
        y, total = exact(norm, form, *args)
        again = tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
        found, kept = results(form, args, op(form.format(norm))(*args))
        assert close(found, y), width
        assert kept is None or torch.equal(kept, total), width
        repeated, _ = results(form, again, op(form.format(norm))(*again))
        assert torch.equal(found, repeated), width


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["add_{}", "sum_{}"])
@pytest.mark.parametrize("norm", NORMS)
def test_results_over_the_input(norm: str, form: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x, residual, *rest = on_gpu(arguments(form, dtype, 5, width))
        before = residual.clone()
        expected, total = exact(norm, form, x, residual, *rest)
        with torch.no_grad():
            y = getattr(kernels, f"{form.format(norm)}_over")(x, residual, *rest)
        assert y is x and close(y, expected), width
        assert torch.equal(residual, total if form == "add_{}" else before), width


def test_a_captured_graph_replays_on_new_values() -> None:
    x, weight, bias, eps = on_gpu(arguments("{}", torch.float16, 64, 768))
    x -= x.mean(-1, keepdim=True)
    kernels.rms_norm(x, weight, bias, eps)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = kernels.rms_norm(x, weight, bias, eps)
    x.mul_(-2)
    graph.replay()
    assert close(y, exact("rms_norm", "{}", x, weight, bias, eps)[0])


def test_the_current_stream_is_used() -> None:
    stream = torch.cuda.Stream()
    x, weight, bias, eps = on_gpu(arguments("{}", torch.float32, 4096, 1024))
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(20):  # each waits for the one before only on the same stream
            x = kernels.rms_norm(x - x.mean(-1, keepdim=True), weight, bias, eps)
    stream.synchronize()
    assert x.isfinite().all()
    centred = x - x.mean(-1, keepdim=True)
    y = kernels.rms_norm(centred, weight, bias, eps)
    assert close(y, exact("rms_norm", "{}", centred, weight, bias, eps)[0])
