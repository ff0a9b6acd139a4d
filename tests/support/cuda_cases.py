"""Calls of the CUDA kernels that run on the CPU: compiled with a stand-in for CUDA.

A program for one pair of dtypes (``cuda_on_cpu/run.cpp``) runs a list of calls in a process of its
own, with a time limit: a barrier that is missing may show as a hang. The threads
(``cuda_on_cpu/threads.cpp``) are the same in each program.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kernel_cases import close
from torch import Tensor

from enjoyln_cli.kernels import build, cuda, formula

HERE = Path(__file__).parent / "cuda_on_cpu"
FLAGS = ("-std=c++17", "-w", "-I", HERE)
CHECKED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""How the kernels are compiled: optimising them would take longer than they run."""
SECONDS = 120
NOT_KEPT, KEPT, IN_PLACE = range(3)
"""What becomes of the sum: it is not kept, it is kept, or it replaces the residual."""

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


class Fault(Exception):
    """A program that ended with an error, and what it wrote."""


@dataclass(frozen=True)
class Case:
    """One call: ``x`` and ``residual`` are ``(rows, d)``, ``weight`` and ``bias`` ``(d,)``."""

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    layer: bool = False
    sum: int = NOT_KEPT
    over: bool = False
    """Whether the result overwrites ``x``."""
    offset: int = 0
    """Elements by which the rows are off the alignment for packs."""
    seed: int = 0
    """Decides which thread runs next."""

    def packed(self) -> bytes:
        """As ``run.cpp`` reads it."""
        return _packed(self, self.residual, self.weight, self.bias)

    @property
    def outputs(self) -> list[Tensor]:
        """Tensors like the result and the sum, if that is kept."""
        return [self.x] * (1 + (self.sum != NOT_KEPT))

    def exact(self) -> tuple[Tensor, Tensor]:
        """The result in float64, and the sum rounded to the dtype of ``x``."""
        total = self.x if self.residual is None else self.x + self.residual
        weight, bias = (None if t is None else t.double() for t in (self.weight, self.bias))
        norm = formula.layer_norm if self.layer else formula.rms_norm
        return norm(total.double(), weight, bias, self.eps), total


@dataclass(frozen=True)
class Gradients:
    """The gradients of a norm: ``dy`` and ``added`` are as ``x``, ``(rows, d)``."""

    x: Tensor
    dy: Tensor
    weight: Tensor | None = None
    added: Tensor | None = None
    eps: float = 1e-5
    layer: bool = False
    offset: int = 0
    seed: int = 0
    chunks: int = 3

    sum, over = NOT_KEPT, False

    def packed(self) -> bytes:
        return _packed(self, self.dy, self.weight, self.added, self.chunks)

    @property
    def outputs(self) -> list[Tensor]:
        """Tensors like ``dx`` and like the gradients of weight and bias, ``(2, d)``."""
        wide = formula.compute_dtype(self.x.dtype)
        return [self.x, self.x.new_empty(2, self.x.shape[1], dtype=wide)]


def _packed(
    case: Case | Gradients,
    second: Tensor | None,
    weight: Tensor | None,
    last: Tensor | None,
    chunks: int = 0,
) -> bytes:
    optional = (second, weight, last)
    flags = (case.layer, *(t is not None for t in optional), case.sum, case.over)
    offset = case.offset * case.x.element_size()
    head = struct.pack("qqd9i4x", *case.x.shape, case.eps, *flags, offset, case.seed, chunks)
    return head + b"".join(_bytes(t) for t in (case.x, *optional) if t is not None)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def program(folder: Path, dtype: str, parameters: str, sources: Path = build.SOURCES) -> Path:
    """Compile the program for a pair of dtypes; ``sources`` may be a copy with faults.

    What is in ``folder`` already is not compiled again.
    """
    made, threads = folder / f"{dtype}-{parameters}-{sources.name}", folder / "threads.o"
    if not threads.exists():
        _compile("-O2", "-c", HERE / "threads.cpp", "-o", threads)
    if not made.exists():
        types = f"-DROW={cuda.TYPES[dtype]}", f"-DPARAMETER={cuda.TYPES[parameters]}"
        _compile(*CHECKED, *types, "-I", sources, HERE / "run.cpp", threads, "-o", made)
    return made


def _compile(*arguments: str | Path) -> None:
    subprocess.run(["g++", *FLAGS, *arguments], check=True, timeout=SECONDS)


def run(made: Path, cases: Sequence[Case | Gradients], fault: int = 0) -> list[list[Tensor]]:
    """The outputs of each call, with a ``fault`` of the sources switched on, or none.

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
        results.append([])
        for like in case.outputs:
            size = like.numel() * like.element_size()
            some, rest = rest[:size], rest[size:]
            results[-1].append(torch.frombuffer(some, dtype=like.dtype).reshape(like.shape))
    assert not rest
    return results


def is_right(case: Case, found: list[Tensor]) -> bool:
    """Whether a result is close to the float64 formula, and the sum is exact."""
    exact, total = case.exact()
    return close(found[0], exact) and all(torch.equal(one, total) for one in found[1:])
