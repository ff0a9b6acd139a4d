"""Calls of the CUDA kernels that run on the CPU: compiled with a stand-in for CUDA.

A program for one pair of dtypes (``cuda_on_cpu/run.cpp``) runs a list of calls in a process of its
own, with a time limit: a barrier that is missing may show as a hang.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from kernel_cases import close
from torch import Tensor

from enjoyln_cli.kernels import build, cuda, formula

HERE = Path(__file__).parent / "cuda_on_cpu"
FLAGS = ("-std=c++17", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-w")
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
        optional = (self.residual, self.weight, self.bias)
        given = [t for t in (self.x, *optional) if t is not None]
        flags = (self.layer, *(t is not None for t in optional), self.sum, self.over)
        offset = self.offset * self.x.element_size()
        head = struct.pack("qqd8i", *self.x.shape, self.eps, *flags, offset, self.seed)
        return head + b"".join(_bytes(t) for t in given)

    def exact(self) -> tuple[Tensor, Tensor]:
        """The result in float64, and the sum rounded to the dtype of ``x``."""
        total = self.x if self.residual is None else self.x + self.residual
        weight, bias = (None if t is None else t.double() for t in (self.weight, self.bias))
        norm = formula.layer_norm if self.layer else formula.rms_norm
        return norm(total.double(), weight, bias, self.eps), total


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def program(folder: Path, dtype: str, parameters: str, sources: Path = build.SOURCES) -> Path:
    """Compile the program for a pair of dtypes; ``sources`` may be a copy with a fault."""
    made = folder / f"{dtype}-{parameters}"
    types = f"-DROW={cuda.TYPES[dtype]}", f"-DPARAMETER={cuda.TYPES[parameters]}"
    command = ["g++", *FLAGS, "-I", HERE, "-I", sources, *types, HERE / "run.cpp", "-o", made]
    subprocess.run(command, check=True, timeout=SECONDS)
    return made


def run(made: Path, cases: list[Case]) -> list[tuple[Tensor, Tensor | None]]:
    """The result and the sum of each call. Raises ``Fault`` if the program ends with an error."""
    given = b"".join(case.packed() for case in cases)
    try:
        found = subprocess.run([made], input=given, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Fault(f"it takes more than {SECONDS} s") from error
    if found.returncode:
        raise Fault(found.stderr.decode(errors="replace").strip())
    rest, results = bytearray(found.stdout), []
    for case in cases:
        size = case.x.numel() * case.x.element_size()
        parts = []
        for _ in range(1 + (case.sum != NOT_KEPT)):
            some, rest = rest[:size], rest[size:]
            parts.append(torch.frombuffer(some, dtype=case.x.dtype).reshape(case.x.shape))
        results.append((parts[0], parts[1] if case.sum != NOT_KEPT else None))
    assert not rest
    return results


def is_right(case: Case, found: tuple[Tensor, Tensor | None]) -> bool:
    """Whether a result is close to the float64 formula, and the sum is exact."""
    (y, total), (exact, expected) = found, case.exact()
    return close(y, exact) and (total is None or torch.equal(total, expected))
