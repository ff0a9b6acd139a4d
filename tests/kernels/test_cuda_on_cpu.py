"""All of ``cuda.cu``, executed on the CPU: values, and faults that are found.

A stand-in for CUDA (``tests/support/cuda_on_cpu``) runs the threads as fibers in an order that a
seed decides. Each buffer has its exact size, under AddressSanitizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_cases import Case, Fault, needs_compiler, program, run
from rounding import TIMES, lost_by_norms

from enjoyln_cli.kernels import gpu

pytestmark = [needs_compiler, pytest.mark.slow]

PAIRS = [
    ("float32", "float32"),
    *((dtype, other) for dtype in ("float16", "bfloat16") for other in (dtype, "float32")),
]
"""The dtypes of rows and parameters that there are kernels for."""
PACKS, TAILS = (8, 768, 1032, 4096), (1, 33, 1001)
"""Row lengths of whole packs, and others."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The program for a pair of dtypes, compiled once."""
    return partial(program, tmp_path_factory.mktemp("cuda_on_cpu"))


def case(rows: int, d: int, dtypes: tuple[str, str], parts: str = "wb", **options: int) -> Case:
    dtype, parameters = (getattr(torch, name) for name in dtypes)
    x = torch.randn(rows, d).to(dtype)
    weight, bias = (torch.randn(d).to(parameters) for _ in range(2))
    given = weight if "w" in parts else None, bias if "b" in parts else None
    return Case(x, *given, **options)  # type: ignore[arg-type]


def is_right(one: Case, y: torch.Tensor) -> bool:
    """Whether ``y`` is a rounding to its dtype, and what float32 loses inside, from the formula."""
    exact = one.exact()
    bound = 0.51 * torch.finfo(y.dtype).eps * exact.abs()
    bound += TIMES * lost_by_norms(torch.float32) * (1 + exact.abs())
    return bool(((y.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_every_row_length_is_right(programs: Callable[..., Path], pair: tuple[str, str]) -> None:
    parts = itertools.cycle(("wb", "w", "b", ""))
    cases = [
        case(3, d, pair, next(parts), offset=offset, over=over)
        for d, offset in (*((d, 0) for d in PACKS + TAILS), (768, 1), (1032, 3))
        for over in (0, 1)
    ]
    for one, y in zip(cases, run(programs(*pair), cases), strict=True):
        assert is_right(one, y), (one.x.shape, one.offset)


def test_the_order_of_threads_does_not_matter(programs: Callable[..., Path]) -> None:
    pair = ("bfloat16", "float32")
    for d in (33, 768, 4096):
        one = case(3, d, pair)
        first, *others = run(programs(*pair), [replace(one, seed=seed) for seed in range(6)])
        assert all(torch.equal(y, first) for y in others)


def test_rows_without_a_result_are_nan_and_others_are_not_touched(
    programs: Callable[..., Path],
) -> None:
    for pair in (("bfloat16", "float32"), ("float32", "float32")):
        one = case(6, 768, pair)
        one.x[1, 5], one.x[2, 767], one.x[3] = torch.inf, torch.nan, 0
        one.x[4] *= 1e25  # its squares do not fit into a float
        (y,) = run(programs(*pair), [one])
        assert y[[1, 2, 4]].isnan().all() and y[[0, 3, 5]].isfinite().all()
        assert one.bias is not None and torch.equal(y[3], one.bias.to(y.dtype))


FAULTS = {
    "a barrier after the sums of the warps": (
        "  __syncthreads();\n  v = 0;",
        "  if (!FAULT) __syncthreads();\n  v = 0;",
    ),
    "a reduction over half a warp": ("int step = LANES / 2;", "int step = FAULT ? 8 : 16;"),
    "a mask of half a warp": ("0xffffffffu, v", "FAULT ? 0xffffu : 0xffffffffu, v"),
    "a warp left out": ("i < blockDim.x / LANES;", "i < blockDim.x / LANES - FAULT;"),
    "the row after": (
        "(x + (int64_t)blockIdx.x * d)",
        "(x + ((int64_t)blockIdx.x + FAULT) * d)",
    ),
    "a pack after the last": ("i < d / N; i", "i < d / N + FAULT; i"),
    "elements of a thread twice": ("i = threadIdx.x; i", "i = threadIdx.x - FAULT; i"),
}
"""A text in ``cuda.cu``, and what replaces it. ``FAULT`` is 1 if the fault is switched on, so that
one program has them all."""


@pytest.fixture(scope="module")
def faulty(programs: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that has all faults, none of which is switched on by itself."""
    source = tmp_path_factory.mktemp("sources") / "faulty" / gpu.SOURCE.name
    source.parent.mkdir()
    text = gpu.SOURCE.read_text()
    for number, (before, after) in enumerate(FAULTS.values(), start=1):
        assert before in text
        text = text.replace(before, after.replace("FAULT", f"(fault == {number})"), 1)
    source.write_text(text)
    return programs("float32", "float32", source)


def is_found(made: Path, fault: int) -> bool:
    """Whether a program gives a wrong result, or ends with an error."""
    pair = ("float32", "float32")
    cases = [case(3, d, pair, seed=d) for d in (7, 48, 1032, 4096)]
    cases += [case(2, 1536, pair, seed=seed) for seed in range(6)]
    try:
        return not all(map(is_right, cases, run(made, cases, fault)))
    except Fault:
        return True


def test_a_source_without_a_fault_passes(programs: Callable[..., Path], faulty: Path) -> None:
    for made in (programs("float32", "float32"), faulty):
        assert not is_found(made, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, faulty: Path) -> None:
    assert is_found(faulty, 1 + list(FAULTS).index(fault))
