"""The GPU's kernel without a GPU: its values in Triton's interpreter, and that it compiles.

``test_gpu`` tests its values on a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

TARGETS = {"Turing": ("cuda", 75, 32), "Hopper": ("cuda", 90, 32), "MI300": ("hip", "gfx942", 64)}


@pytest.mark.slow
def test_it_is_right_in_the_interpreter() -> None:
    file = Path(__file__).with_name("in_tritons_interpreter.py")
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", str(file)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_it_compiles(dtype: str, target: str) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from enjoyln_cli.kernels.triton_norm import rms_norm_of_row

    types = dict.fromkeys(("x", "y"), f"*{dtype}") | {"weight": "*fp32", "bias": "*fp32"}
    constants = {"has_weight": True, "has_bias": True, "block": 1024}
    signature = types | {"width": "i32", "eps": "fp32"} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(rms_norm_of_row, signature, constants)
    binary = triton.compile(source, target=GPUTarget(*TARGETS[target]), options={"num_warps": 4})
    assert any(binary.asm.get(kind) for kind in ("cubin", "hsaco"))
