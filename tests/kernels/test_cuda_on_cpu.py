"""All of ``cuda.cu``, executed on the CPU: values, and faults that are found.

A stand-in for CUDA (``tests/support/cuda_on_cpu``) runs the threads as fibers in an order that a
seed decides. Each buffer has its exact size, under AddressSanitizer. A program for one pair of
dtypes (``run.cpp``) runs a list of calls in a process of its own, with a time limit: a barrier that
is missing may show as a hang.
"""

from __future__ import annotations

import itertools
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from live_models import ROOT
from rounding import TIMES, lost_by_norms
from torch import Tensor

from enjoyln_cli.kernels import formula, gpu

HERE = ROOT / "tests" / "support" / "cuda_on_cpu"
FLAGS = ("-std=c++17", "-w", "-I", HERE)
CHECKED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""How the kernel is compiled: optimising it would take longer than it runs."""
SECONDS = 120

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
    pytest.mark.slow,
]


class Fault(Exception):
    """A program that ended with an error, and what it wrote."""


@dataclass(frozen=True)
class Case:
    """One call: ``x`` is ``(rows, d)``, ``weight`` and ``bias`` are ``(d,)``."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    over: bool = False
    """Whether the result overwrites ``x``."""
    offset: int = 0
    """Elements by which the rows are off the alignment for packs."""
    seed: int = 0
    """Decides which thread runs next."""

    def packed(self) -> bytes:
        """As ``run.cpp`` reads it, with the launch that ``gpu`` chooses."""
        rows, d = self.x.shape
        size = self.x.element_size()
        packs, threads = gpu.shape_of_launch(d, size, [256, self.offset * size])
        parts = gpu.WEIGHT * (self.weight is not None) + gpu.BIAS * (self.bias is not None)
        head = (parts, packs, threads, self.offset * size, self.over, self.seed)
        tensors = [t for t in (self.x, self.weight, self.bias) if t is not None]
        return struct.pack("qqd6i", rows, d, self.eps, *head) + b"".join(map(_bytes, tensors))

    def exact(self) -> Tensor:
        """The result in float64."""
        weight, bias = (None if t is None else t.double() for t in (self.weight, self.bias))
        return formula.rms_norm(self.x.double(), weight, bias, self.eps)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def program(folder: Path, dtype: str, parameters: str, source: Path = gpu.SOURCE) -> Path:
    """Compile the program for a pair of dtypes; ``source`` may be a copy with faults.

    What is in ``folder`` already is not compiled again.
    """
    made, threads = folder / f"{dtype}-{parameters}-{source.parent.name}", folder / "threads.o"
    if not threads.exists():
        _compile("-O2", "-c", HERE / "threads.cpp", "-o", threads)
    if not made.exists():
        types = f"-DROW={gpu.TYPES[dtype]}", f"-DPARAMETER={gpu.TYPES[parameters]}"
        _compile(*CHECKED, *types, "-I", source.parent, HERE / "run.cpp", threads, "-o", made)
    return made


def _compile(*arguments: str | Path) -> None:
    subprocess.run(["g++", *FLAGS, *arguments], check=True, timeout=SECONDS)


def run(made: Path, cases: Sequence[Case], fault: int = 0) -> list[Tensor]:
    """The result of each call, with a ``fault`` of the source switched on, or none.

    Raises ``Fault`` if the program ends with an error.
    """
    given, command = b"".join(case.packed() for case in cases), [made, f"{fault}"]
    try:
        found = subprocess.run(command, input=given, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Fault(f"it takes more than {SECONDS} s") from error
    if found.returncode:
        raise Fault(found.stderr.decode(errors="replace").strip())
    rest, results = bytearray(found.stdout), []
    for case in cases:
        size = case.x.numel() * case.x.element_size()
        some, rest = rest[:size], rest[size:]
        results.append(torch.frombuffer(some, dtype=case.x.dtype).reshape(case.x.shape))
    assert not rest
    return results


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


def is_right(one: Case, y: Tensor) -> bool:
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
    "the row after": (
        "(x + (int64_t)blockIdx.x * d)",
        "(x + ((int64_t)blockIdx.x + FAULT) * d)",
    ),
    "a pack after the last": ("i < d / N; i", "i < d / N + FAULT; i"),
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
