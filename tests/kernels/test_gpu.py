"""Tests that need a GPU: the kernel for all dtypes and row lengths, and what is chosen at load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from live_models import CHECKPOINTS
from rounding import TIMES, as_exact, lost_by_norms
from torch import Tensor
from transformers import AutoModelForCausalLM

from enjoyln_cli import fold, from_pretrained
from enjoyln_cli.kernels import formula, gpu

WIDTHS = (1, 7, 32, 129, 768, 1000, 1024, 1025, 4096, 8200, 65536)
DTYPES = ("float32", "float16", "bfloat16")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")


@pytest.fixture(autouse=True)
def nothing_measured() -> Iterator[None]:
    gpu.measured.clear()
    yield
    gpu.measured.clear()


def tensors(dtype: str, parameters: str, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(*shape, device="cuda").to(getattr(torch, dtype))
    weight, bias = (torch.randn(shape[-1], device="cuda") for _ in range(2))
    return x, weight.to(getattr(torch, parameters)), bias.to(getattr(torch, parameters))


def is_right(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    exact = formula.rms_norm(x.double(), weight.double(), bias.double(), gpu.EPS)
    bound = 0.51 * torch.finfo(y.dtype).eps * exact.abs()
    bound += 2 * TIMES * lost_by_norms(torch.float32) * (1 + exact.abs())
    return bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("parameters", ["float32", "the same"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_right(dtype: str, parameters: str) -> None:
    for width in WIDTHS:
        args = tensors(dtype, dtype if parameters == "the same" else parameters, 5, width)
        y = gpu.kernel_norm(*args, gpu.EPS)
        assert is_right(y, *args), width
        assert torch.equal(gpu.kernel_norm(*args, gpu.EPS), y), "the same in every run"


def test_a_captured_graph_replays_on_new_values() -> None:
    x, weight, bias = tensors("float16", "float16", 64, 768)
    gpu.kernel_norm(x, weight, bias, gpu.EPS)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = gpu.kernel_norm(x, weight, bias, gpu.EPS)
    x.mul_(-2)
    graph.replay()
    assert is_right(y, x, weight, bias)


def test_the_current_stream_is_used() -> None:
    stream = torch.cuda.Stream()
    x, weight, bias = tensors("float32", "float32", 4096, 1024)
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(20):  # each waits for the one before only on the same stream
            before = x - x.mean(-1, keepdim=True)
            x = gpu.kernel_norm(before, weight, bias, gpu.EPS)
    stream.synchronize()
    assert is_right(x, before, weight, bias)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_kernel_runs_on_the_gpu_of_its_tensor() -> None:
    for index in range(2):
        args = [t.to(f"cuda:{index}") for t in tensors("float32", "float32", 64, 1024)]
        for current in range(2):
            with torch.cuda.device(current):
                y = gpu.kernel_norm(*args, gpu.EPS)
                assert y.device.index == index and torch.cuda.current_device() == current
            assert is_right(y, *args)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_candidate_is_right_and_is_timed(dtype: str, bias: bool) -> None:
    kind = gpu.Norms(getattr(torch, dtype), getattr(torch, dtype), True, bias, 768)
    gpu.prepare([(torch.device("cuda", 0), kind)])
    choices = gpu.measured[torch.device("cuda", 0), kind]
    assert [choice.rows for choice in choices] == list(gpu.ROWS)
    for choice in choices:
        assert not choice.left_out, choice
        assert choice.candidate in choice.times


def test_a_model_that_is_loaded_on_a_gpu_uses_what_was_measured(tmp_path: Path) -> None:
    out = fold(CHECKPOINTS / "gpt2", tmp_path / "out", model_class="GPT2LMHeadModel").out
    model = from_pretrained(out, device_map="cuda")
    assert {norms.width for _, norms in gpu.measured} == {model.config.hidden_size}
    ids = torch.arange(3, 35, device="cuda").reshape(4, 8)
    stock = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").to("cuda")
    with torch.no_grad():
        found, expected = model(ids).logits, stock(ids).logits
        assert as_exact(found, expected, stock.double()(ids).logits)
