"""``enjoyln env``: which kernels are active, which are missing, and why."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from enjoyln_cli.cli.main import main
from enjoyln_cli.kernels import norms


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_cpu_has_no_kernels() -> None:
    text = run("env")
    instead = "torch's LayerNorm, with the same results"
    assert f"cpu: no kernels: there are none for cpu\n  folded norms compute {instead}\n" in text
    device = json.loads(run("env", "--json"))["devices"][0]
    assert device == {
        "device": "cpu", "active": False, "why": "there are none for cpu", "instead": instead,
    }  # fmt: skip


@pytest.mark.parametrize("off", [True, False])
def test_a_gpu_has_kernels_unless_they_are_off(off: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: None)
    if off:
        monkeypatch.setenv("ENJOYLN_KERNELS", "0")
    missing = "cuda: no kernels: switched off by ENJOYLN_KERNELS=0\n"
    assert (missing if off else "cuda: kernels: the fastest at load\n") in run("env")


@pytest.mark.parametrize(("device", "fuses"), [("mps", True), ("xpu", False), ("cuda", True)])
def test_an_accelerator_without_kernels_says_what_it_computes(
    device: str, fuses: bool, monkeypatch: Any
) -> None:
    def current(check_available: bool = False) -> torch.device:
        return torch.device(device)

    monkeypatch.setattr(norms, "torch_fuses", lambda found: fuses and found == device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    instead = "torch's rms_norm, or its LayerNorm if they have a bias" if fuses else "LayerNorm"
    lines = run("env").splitlines()
    if device == "cuda":  # as with ROCm: it has an entry in any case
        assert sum(line.startswith("cuda: ") for line in lines) == 1
    else:
        assert f"{device}: no kernels: there are none for {device}" in lines
    assert instead in lines[-1]
