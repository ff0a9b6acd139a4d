"""Calls of the CUDA kernel that run on the CPU: compiled with a stand-in for CUDA.

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
from torch import Tensor

from enjoyln_cli.kernels import formula, gpu

HERE = Path(__file__).parent / "cuda_on_cpu"
FLAGS = ("-std=c++17", "-w", "-I", HERE)
CHECKED = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""How the kernel is compiled: optimising it would take longer than it runs."""
SECONDS = 120

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


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
