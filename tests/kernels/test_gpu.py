"""Tests that need a GPU: all forms of the kernels, all dtypes, all row lengths, and timing."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from kernel_cases import DTYPES, EPS, FORMS, NORMS, arguments, close, exact, op, results
from live_models import CHECKPOINTS
from rounding import as_exact
from transformers import AutoModelForCausalLM

from enjoyln_cli import fold, from_pretrained, kernels
from enjoyln_cli.benchmark.baselines import MODES, record_graphs
from enjoyln_cli.benchmark.bench import bench
from enjoyln_cli.benchmark.cases import BenchOptions
from enjoyln_cli.benchmark.timing import WARM_UP, Task
from enjoyln_cli.benchmark.workload import PHASES
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.kernels import build, choices, cuda, formula, gpu, native, tuning

WIDTHS = (1, 7, 32, 129, 768, 1000, 1024, 1025, 4096, 8192, 8200, 20001, 65536)
"""Row lengths for each code path: vector loads of 16 bytes or not, one pass over a row or two."""

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU is here")


@pytest.fixture(autouse=True, scope="module")
def loaded() -> None:
    """The kernels of all dtypes, on each GPU."""
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            for pair in cuda.PAIRS:
                native.load_cuda(index, *pair)


@pytest.fixture
def chosen() -> Iterator[None]:
    """The kernels are used for every norm of ``WIDTHS`` with weight and bias of its dtype."""
    for width, added, dtype in product(WIDTHS, (False, True), DTYPES):
        name = str(dtype).removeprefix("torch.")
        native.choose(0, added, (name, name), (True, True), width, (1, 2**31 - 1))
    yield
    native.forget_choices()


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
@pytest.mark.parametrize("norm", NORMS)
def test_the_gradients_are_right(norm: str, dtype: torch.dtype) -> None:
    step, wide = torch.finfo(dtype).eps, torch.finfo(formula.compute_dtype(dtype)).eps
    for rows, width in ((1, 768), (70, 7), (70, 33), (70, 768), (600, 1025), (70, 8200)):
        dy, x, added = on_gpu(tuple(torch.randn(rows, width).to(dtype) for _ in range(3)))
        (weight,) = on_gpu(((torch.randn(width) + 1).to(dtype),))
        found = op(f"{norm}_backward")(dy, x, weight, added, EPS)
        doubles = (t.double() for t in (dy, x, weight, added))
        exact = getattr(formula, f"{norm}_backward")(*doubles, EPS)
        size = 2 + exact[0].abs().max()
        error = (found[0].double() - exact[0]).abs()
        assert (error <= 0.51 * step * exact[0].abs() + 40 * wide * size).all(), width
        for one, sums in zip(found[1:], exact[1:], strict=True):
            assert ((one.double() - sums).abs() <= 40 * wide * rows * (1 + size)).all(), width
        again = op(f"{norm}_backward")(dy, x, weight, added, EPS)
        assert all(map(torch.equal, found, again)), "the same in every run"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["add_{}", "sum_{}"])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.usefixtures("chosen")
def test_results_over_the_input(norm: str, form: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x, residual, *rest = on_gpu(arguments(form, dtype, 5, width))
        before = residual.clone()
        expected, total = exact(norm, form, x, residual, *rest)
        with torch.no_grad():
            y = getattr(kernels, f"{form.format(norm)}_over")(x, residual, *rest)
        assert y is x and close(y, expected), width
        assert torch.equal(residual, total if form == "add_{}" else before), width


@pytest.mark.usefixtures("chosen")
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


@pytest.mark.usefixtures("chosen")
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


@pytest.mark.usefixtures("chosen")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_kernel_runs_on_the_gpu_of_its_tensor() -> None:
    args = arguments("{}", torch.float32, 64, 1024)
    for index in range(2):
        native.choose(index, False, ("float32", "float32"), (True, True), 1024, (1, 100))
        given = [a.to(f"cuda:{index}") if isinstance(a, torch.Tensor) else a for a in args]
        for current in range(2):
            with torch.cuda.device(current), torch.no_grad():
                found = native.entry.rms_norm(*given)
                assert found.device.index == index and torch.cuda.current_device() == current
            assert close(found, exact("rms_norm", "{}", *given)[0])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_is_measured_is_right_and_is_stored(
    dtype: str, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path / "cache"])
    norms = choices.Norms(dtype, dtype, True, bias, 768)
    device = gpu.Gpu(0)
    found = tuning.choose(device, (norms,))
    assert {(one.rows, one.added) for one in found} == set(product(tuning.ROWS, (False, True)))
    for one in found:
        assert set(one.left_out) <= {"liger"}, one
        assert one.taken in one.microseconds
    assert tuning.choose(device, (norms,)) == found == gpu.stored()[0]


def test_a_model_that_is_loaded_on_a_gpu_uses_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path / "cache"])
    out = fold(CHECKPOINTS / "gpt2", tmp_path / "out", model_class="GPT2LMHeadModel").out
    model = from_pretrained(out, device_map="cuda")
    width = model.config.hidden_size
    assert {one.norms.width for one in gpu.stored()[0]} == {width}
    ids = torch.arange(3, 35, device="cuda").reshape(4, 8)
    stock = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / "gpt2").to("cuda")
    with torch.no_grad():
        found, expected = model(ids).logits, stock(ids).logits
        assert as_exact(found, expected, stock.double()(ids).logits)
    choices.forget()
    native.forget_choices()


def test_what_is_recorded_begins_again_each_time() -> None:
    """A replay of a CUDA graph restores the same values, reads new inputs, and runs no Python."""
    source, factor = torch.randn(3, 5, device="cuda"), torch.ones((), device="cuda")
    results: list[torch.Tensor] = []

    def run(held: list[torch.Tensor]) -> None:
        for _ in range(2):
            held[0] = torch.cat([held[0], held[0] * factor])
        results.append(held[0].mul_(2))

    with torch.no_grad():
        task = record_graphs(Task(run, lambda: [source.clone()], 2), torch.device("cuda"))
    assert task.steps == 2
    before = len(results)
    for _ in range(2):
        factor.add_(1)
        task.run(task.prepare())
    expected = torch.cat([source, source * 3])
    assert torch.equal(results[-1], 2 * torch.cat([expected, expected * 3]))
    assert len(results) == before


def test_every_mode_measures_both_phases(tmp_path: Path) -> None:
    fold(CHECKPOINTS / "gpt2", tmp_path / "out", model_class="GPT2LMHeadModel")
    asked = BenchOptions(((2, 12),), modes=MODES, repeats=3)
    found = bench(tmp_path / "out", asked=asked, device="cuda")
    assert {(row.mode, row.phase) for row in found.rows} == set(product(MODES, PHASES))
    assert all(size > 0 for row in found.rows for size in (row.peak_bytes or {}).values())
    assert found.left_out == ()


def test_what_cannot_be_recorded_is_refused_and_others_still_can() -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(UnsupportedModel, match="cannot be recorded: "):
        record_graphs(Task(lambda _: x.sum().item()), torch.device("cuda"))
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    record_graphs(Task(lambda _: x.add_(1)), torch.device("cuda")).run(None)
    assert x.tolist() == [1 + WARM_UP + 1] * 4, "warmed up, recorded and replayed"
