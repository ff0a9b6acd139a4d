"""All of ``cuda.cu``, executed on the CPU: values, extreme values, and faults that are found.

A stand-in for CUDA (``tests/support/cuda_on_cpu``) runs the threads as fibers in an order that a
seed decides. Each buffer has its exact size, under AddressSanitizer.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from cuda_cases import (
    IN_PLACE,
    KEPT,
    NOT_KEPT,
    Case,
    Fault,
    Gradients,
    is_right,
    needs_compiler,
    program,
    run,
)
from kernel_cases import close
from torch import Tensor

from enjoyln_cli.kernels import build, cuda, formula

pytestmark = [needs_compiler, pytest.mark.slow]

PACKS = (8, 768, 1024, 1032, 8192, 8200)
"""Row lengths of whole packs: short rows, rows that are kept in registers, and longer ones."""
TAILS = (1, 33, 1001, 1025)
FORMS = (
    {"layer": True},
    {"sum": KEPT},
    {"sum": IN_PLACE, "over": True},
    {"sum": NOT_KEPT, "layer": True, "over": True},
)
"""How a norm is called. Those with ``sum`` add a residual."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The program for a pair of dtypes, compiled once."""
    return partial(program, tmp_path_factory.mktemp("cuda_on_cpu"))


def case(
    rows: int, d: int, dtypes: tuple[str, str], affine: str = "weight and bias", **options: int
) -> Case:
    dtype, parameters = (getattr(torch, name) for name in dtypes)
    x, residual = (torch.randn(rows, d).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(d).to(parameters) for _ in range(2))
    return Case(
        x,
        residual if "sum" in options else None,
        weight if "weight" in affine else None,
        bias if "bias" in affine else None,
        **options,  # type: ignore[arg-type]
    )


PAIRS = [pair for pair in reversed(cuda.PAIRS) if pair not in cuda.PAIRS[1:3]]
"""Each dtype of rows once; those of 16 bits with parameters in float32."""


@pytest.mark.parametrize("pair", reversed(cuda.PAIRS), ids=" with ".join)
def test_every_kernel_is_right(programs: Callable[..., Path], pair: tuple[str, str]) -> None:
    affines = itertools.cycle(("weight and bias", "weight", "bias", ""))
    cases = []
    for d, offset in (*((d, 0) for d in PACKS + TAILS), (768, 1), (1536, 3)):
        for form in FORMS:
            rows = 2 if d > 1024 else 5  # a block takes several short rows
            cases.append(case(rows, d, pair, next(affines), offset=offset, **form))
    for one, found in zip(cases, run(programs(*pair), cases), strict=True):
        assert is_right(one, found), (one.x.shape, one.offset)


def test_the_order_of_threads_does_not_matter(programs: Callable[..., Path]) -> None:
    pair = ("bfloat16", "float32")
    for d in (33, 768, 1536, 8200):
        torch.manual_seed(d)
        one = case(3, d, pair, sum=KEPT, layer=True)
        cases = [Case(**{**vars(one), "seed": seed}) for seed in range(6)]
        first, *others = run(programs(*pair), cases)
        assert all(torch.equal(*two) for again in others for two in zip(again, first, strict=True))


def huge(x: Tensor) -> Tensor:
    return x * (torch.finfo(x.dtype).max / 8) ** 0.75


def tiny(x: Tensor) -> Tensor:
    """Values whose squares are zero in float32; in float64 they have to be numbers."""
    return x * max(torch.finfo(x.dtype).tiny, 1e-140)


def largest(x: Tensor) -> Tensor:
    return x.sign() * torch.finfo(x.dtype).max / 2


@pytest.mark.parametrize("kind", [huge, tiny, largest])
@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_extreme_values(
    programs: Callable[..., Path], pair: tuple[str, str], kind: Callable[[Tensor], Tensor]
) -> None:
    cases = []
    for d, layer, added in itertools.product((33, 1536, 8200), (False, True), (False, True)):
        one = case(3, d, pair)
        residual = kind(torch.randn_like(one.x)) / 4 if added else None
        fields = {"x": kind(one.x), "residual": residual, "layer": layer, "eps": 0.0}
        cases.append(Case(**{**vars(one), **fields, "sum": KEPT if added else NOT_KEPT}))
    for one, (y, *total) in zip(cases, run(programs(*pair), cases), strict=True):
        kept = one.x if one.residual is None else one.x + one.residual
        assert all(torch.equal(found, kept) for found in total)
        shrink = 1e-200 if pair[0] == "float64" and kind is not tiny else 1.0  # within float64
        wide = Case(kept.double() * shrink, None, one.weight, one.bias, 0.0, one.layer)
        exact, _ = wide.exact()
        assert close(y, exact)


def test_rows_without_a_result_are_nan_and_others_are_not_touched(
    programs: Callable[..., Path],
) -> None:
    pair = ("bfloat16", "float32")
    for d, layer in itertools.product((33, 768, 8200), (False, True)):
        one = case(6, d, pair, layer=layer)
        one.x[1, 5], one.x[2, d - 1] = torch.inf, torch.nan
        one.x[3] = 0
        ((y,),) = run(programs(*pair), [one])
        assert y[1:3].isnan().all() and y[[0, 3, 4, 5]].isfinite().all()
        assert one.bias is not None and torch.equal(y[3], one.bias.to(y.dtype))


def gradients(
    rows: int, d: int, dtypes: tuple[str, str], affine: bool, **options: int
) -> Gradients:
    dtype, parameters = (getattr(torch, name) for name in dtypes)
    x, dy, added = (torch.randn(rows, d).to(dtype) for _ in range(3))
    weight = torch.randn(d).to(parameters) if affine else None
    return Gradients(x, dy, weight, added if affine else None, **options)  # type: ignore[arg-type]


def gradients_are_right(one: Gradients, found: list[Tensor]) -> bool:
    """Whether they are within the rounding of the dtype that they are computed in."""
    backward = formula.layer_norm_backward if one.layer else formula.rms_norm_backward
    wide = [None if t is None else t.double() for t in (one.dy, one.x, one.weight, one.added)]
    dx, dw, db = backward(*wide, one.eps)  # type: ignore[arg-type]
    step = torch.finfo(found[1].dtype).eps * 100
    rounding = 0.51 * torch.finfo(found[0].dtype).eps * dx.abs() + step * (1 + dx.abs())
    sums = torch.stack((dw, db))
    near = (found[1].double() - sums).abs() <= step * one.x.shape[0] * (1 + sums.abs())
    return bool(((found[0].double() - dx).abs() <= rounding).all() and near.all())


@pytest.mark.parametrize("pair", PAIRS, ids=" with ".join)
def test_the_gradients_are_right(programs: Callable[..., Path], pair: tuple[str, str]) -> None:
    sizes = ((8, 0), (7, 0), (33, 0), (768, 0), (768, 1), (1032, 0), (1025, 0), (1536, 3))
    switches = itertools.cycle(itertools.product((0, 1), (True, False), (1, 3, 29)))
    cases = []
    for d, offset in sizes + sizes[::2]:
        layer, affine, rows = next(switches)
        rows = min(rows, 4) if d > 1024 else rows  # long rows take one at a time
        chunks = min(rows, 3)
        cases.append(gradients(rows, d, pair, affine, layer=layer, offset=offset, chunks=chunks))
    for one, found in zip(cases, run(programs(*pair), cases), strict=True):
        assert gradients_are_right(one, found), (one.x.shape, one.layer, one.offset)


FAULTS = {
    "a barrier before the sum of a block": (
        "cuda.cu",
        "    __syncthreads();  // other threads may",
        "    if (!FAULT) __syncthreads();  // other threads may",
    ),
    "a barrier after the sums of the warps": (
        "cuda.cu",
        "    __syncthreads();\n    v = 0;",
        "    if (!FAULT) __syncthreads();\n    v = 0;",
    ),
    "a barrier before the sum of a chunk": (
        "cuda.cu",
        "  __syncthreads();\n  if (share < 2",
        "  if (!FAULT) __syncthreads();\n  if (share < 2",
    ),
    "a reduction over half a warp": ("cuda.cu", "int step = 16;", "int step = FAULT ? 8 : 16;"),
    "a mask of half a warp": ("cuda.cu", "0xffffffffu, v", "FAULT ? 0xffffu : 0xffffffffu, v"),
    "a warp left out": ("cuda.cu", "i < THREADS / 32", "i < THREADS / 32 - FAULT"),
    "the row after": ("cuda.cu", "int64_t at = row * c.d", "int64_t at = (row + FAULT) * c.d"),
    "a row after the last": ("cuda.cu", "if (row < c.rows)", "if (FAULT || row < c.rows)"),
    "packs off the alignment": (
        "launch.h",
        "c.d % pack == 0 && rows % 16 == 0",
        "c.d % pack == 0 && (FAULT || rows % 16 == 0)",
    ),
    "packs that leave a tail": (
        "launch.h",
        "c.d % pack == 0 && ",
        "(FAULT || c.d % pack == 0) && ",
    ),
    "a block too few": (
        "launch.h",
        "(c.rows + WARPS - 1) / WARPS",
        "(c.rows + (FAULT ? 0 : WARPS - 1)) / WARPS",
    ),
    "a row too long to be kept": (
        "launch.h",
        "c.d <= THREADS * EACH",
        "(FAULT || c.d <= THREADS * EACH)",
    ),
    "a pack after the last": (
        "team.h",
        "if (i < packs) {\n          fetch",
        "if (i < packs + FAULT) {\n          fetch",
    ),
    "elements of a thread twice": (
        "cuda.cu",
        "threadIdx.x % 32, 32}",
        "threadIdx.x % 32, 32 - FAULT}",
    ),
    "packs that are not written": (
        "team.h",
        "    Packed y;\n",
        "    if (FAULT && i > 99) return;\n    Packed y;\n",
    ),
    "rows left out of a sum": ("cuda.cu", "row += SHARE", "row += SHARE + FAULT"),
    "a share left out of a sum": ("cuda.cu", "i < SHARE;", "i < SHARE - FAULT;"),
    "columns without a block": (
        "launch.h",
        "(c.d + COLUMNS - 1) / COLUMNS * c.chunks",
        "(c.d + (FAULT ? 0 : COLUMNS - 1)) / COLUMNS * c.chunks",
    ),
    "a column after the last": ("cuda.cu", "i >= 2 * c.d", "i >= 2 * c.d + FAULT"),
    "a gradient that is not centred": (
        "gradient.h",
        "h[j] * dot - total",
        "h[j] * dot - (FAULT ? 0 : total)",
    ),
    "chunks without the last rows": (
        "backward.h",
        "rows * chunk / chunks",
        "(FAULT ? rows / chunks * chunk : rows * chunk / chunks)",
    ),
}
"""Of each kind one or more: a file, a text in it, and what replaces it. ``FAULT`` is true if the
fault is switched on, so that one program has them all."""


@pytest.fixture(scope="module")
def faulty(programs: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that has all faults, none of which is switched on by itself."""
    sources = tmp_path_factory.mktemp("sources") / "faulty"
    shutil.copytree(build.SOURCES, sources)
    for number, (name, before, after) in enumerate(FAULTS.values(), start=1):
        text = (sources / name).read_text()
        assert before in text
        after = after.replace("FAULT", f"(fault == {number})")
        (sources / name).write_text(text.replace(before, after, 1))
    return programs("float32", "float32", sources)


def cases_for_faults() -> list[Case]:
    pair = ("float32", "float32")
    cases = [case(5, d, pair, sum=KEPT, layer=True, seed=d) for d in (7, 48, 1032, 1536, 8200)]
    cases += [case(5, d, pair, offset=1, seed=d) for d in (48, 1032)]
    for seed in range(6):  # a fault in the order of threads does not show each time
        cases.append(case(2, 1536, pair, layer=True, seed=seed))
        extreme = case(2, 1030, pair, sum=KEPT, seed=seed)
        cases.append(Case(**{**vars(extreme), "x": extreme.x * 1e25}))
    return cases


def is_found(made: Path, fault: int) -> bool:
    """Whether a program gives a wrong result, or ends with an error."""
    cases, pair = cases_for_faults(), ("float32", "float32")
    sizes = ((40, 7), (40, 48), (8, 1032))
    backward = [gradients(rows, d, pair, True, layer=1, seed=d) for rows, d in sizes]
    try:
        norms_are_right = all(map(is_right, cases, run(made, cases, fault)))
        return not (
            norms_are_right and all(map(gradients_are_right, backward, run(made, backward, fault)))
        )
    except Fault:
        return True


def test_sources_without_a_fault_pass(programs: Callable[..., Path], faulty: Path) -> None:
    for made in (programs("float32", "float32"), faulty):
        assert not is_found(made, 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, faulty: Path) -> None:
    assert is_found(faulty, 1 + list(FAULTS).index(fault))
