"""All of ``cuda.cu``, executed on the CPU: values, extreme values, and faults that are found.

A stand-in for CUDA (``tests/support/cuda_on_cpu``) runs the threads as fibers in an order that a
seed decides. Each buffer has its exact size, under AddressSanitizer.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
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
def programs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The program for a pair of dtypes, compiled once."""
    folder = tmp_path_factory.mktemp("cuda_on_cpu")

    def made(dtype: str, parameters: str) -> Path:
        path = folder / f"{dtype}-{parameters}"
        return path if path.exists() else program(folder, dtype, parameters)

    return made


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
def test_every_kernel_is_right(programs: Callable[[str, str], Path], pair: tuple[str, str]) -> None:
    affines = itertools.cycle(("weight and bias", "weight", "bias", ""))
    cases = []
    for d, offset in (*((d, 0) for d in PACKS + TAILS), (768, 1), (1536, 3)):
        for form in FORMS:
            rows = 2 if d > 1024 else 5  # a block takes several short rows
            cases.append(case(rows, d, pair, next(affines), offset=offset, **form))
    for one, found in zip(cases, run(programs(*pair), cases), strict=True):
        assert is_right(one, found), (one.x.shape, one.offset)


def test_the_order_of_threads_does_not_matter(programs: Callable[[str, str], Path]) -> None:
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
    programs: Callable[[str, str], Path], pair: tuple[str, str], kind: Callable[[Tensor], Tensor]
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
    programs: Callable[[str, str], Path],
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
def test_the_gradients_are_right(
    programs: Callable[[str, str], Path], pair: tuple[str, str]
) -> None:
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


FAULTS = (
    ("cuda.cu", "    __syncthreads();  // other threads may", "    // other threads may"),
    ("cuda.cu", "int step = 16;", "int step = 8;"),
    ("cuda.cu", "0xffffffffu, v", "0x0000ffffu, v"),
    ("cuda.cu", "i < THREADS / 32", "i < THREADS / 32 - 1"),
    ("cuda.cu", "int64_t at = row * c.d", "int64_t at = (row + 1) * c.d"),
    ("cuda.cu", "if (row < c.rows)", "if (true)"),
    ("launch.h", "c.d % pack == 0 && rows % 16 == 0", "c.d % pack == 0"),
    ("launch.h", "c.d % pack == 0 && ", ""),
    ("launch.h", "(c.rows + WARPS - 1) / WARPS", "c.rows / WARPS"),
    ("launch.h", "c.d <= THREADS * EACH", "true"),
    ("team.h", "if (i < packs) {\n          fetch", "if (i <= packs) {\n          fetch"),
    ("cuda.cu", "  __syncthreads();\n  if (share < 2", "  if (share < 2"),
    ("cuda.cu", "i >= 2 * c.d", "i > 2 * c.d"),
    ("gradient.h", "h[j] * dot - total", "h[j] * dot"),
    ("backward.h", "rows * chunk / chunks", "rows / chunks * chunk"),
)  # fmt: skip
"""A file, a text in it, and what replaces it: of each kind of fault one (a barrier that is missing,
a mask or a reduction that is too small, an index past the end, a wrong tail, an alignment, a grid
that is too small)."""


def cases_for_faults() -> list[Case]:
    pair = ("float32", "float32")
    cases = [case(5, d, pair, sum=KEPT, layer=True, seed=d) for d in (7, 48, 1032, 1536, 8200)]
    cases += [case(5, d, pair, offset=1, seed=d) for d in (48, 1032)]
    for seed in range(6):  # a fault in the order of threads does not show each time
        cases.append(case(2, 1536, pair, layer=True, seed=seed))
        extreme = case(2, 1030, pair, sum=KEPT, seed=seed)
        cases.append(Case(**{**vars(extreme), "x": extreme.x * 1e25}))
    return cases


def is_found(made: Path) -> bool:
    """Whether a program gives a wrong result, or ends with an error."""
    cases, pair = cases_for_faults(), ("float32", "float32")
    sizes = ((40, 7), (40, 48), (8, 1032))
    backward = [gradients(rows, d, pair, True, layer=1, seed=d) for rows, d in sizes]
    try:
        norms_are_right = all(map(is_right, cases, run(made, cases)))
        return not (
            norms_are_right and all(map(gradients_are_right, backward, run(made, backward)))
        )
    except Fault:
        return True


def test_sources_without_a_fault_pass(programs: Callable[[str, str], Path]) -> None:
    assert not is_found(programs("float32", "float32"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: " ".join(fault[2].split())[:30])
def test_a_fault_is_found(fault: tuple[str, str, str], tmp_path: Path) -> None:
    name, before, after = fault
    sources = shutil.copytree(build.SOURCES, tmp_path / "csrc")
    text = (sources / name).read_text()
    assert before in text
    (sources / name).write_text(text.replace(before, after, 1))
    assert is_found(program(tmp_path, "float32", "float32", sources))
