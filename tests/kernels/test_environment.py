"""``enjoyln env``: which kernels are active, which are missing, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from enjoyln_cli.cli.main import main
from enjoyln_cli.kernels import build, choices, dispatch, gpu, native, ops


def env(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["env", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def fresh(monkeypatch: Any, tmp_path: Path) -> None:
    """The state of a new process with an empty cache."""
    monkeypatch.setattr(native, "_known", {})
    monkeypatch.setattr(native, "entry", native.Unloaded())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_active_kernels_are_named() -> None:
    if not native.has("cpu"):
        pytest.skip(native.status("cpu").what)
    text = env()
    status = native.status("cpu")
    assert f"cpu: {status.what} kernels" in text and str(status.path) in text
    found = json.loads(env("--json"))
    cpu = found["devices"][0]
    assert cpu["active"] and cpu["kernels"] == status.what
    assert cpu["threads_from"] == dispatch.table(native.table_name(status)).serial_below


def test_missing_kernels_are_explained(fresh: None, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    text = env()
    assert "cpu: no kernels: a C++ compiler (g++ or clang++) is not on PATH" in text
    if torch.version.cuda is None:
        assert "CUDA compiler: this torch was built without CUDA" in text
    assert "folded norms compute torch's LayerNorm, which is no slower than before" in text


@pytest.mark.slow
def test_a_failed_build_is_tried_again(
    fresh: None, tmp_path: Path, monkeypatch: Any, quick_compiler: str
) -> None:
    monkeypatch.setenv("CXX", quick_compiler)
    folder = tmp_path / "enjoyln"
    folder.mkdir(mode=0o700)
    (folder / build.cpu().name).with_suffix(".failed").write_text("an earlier reason")
    assert native.status("cpu").what == "an earlier reason"
    if json.loads(env("--json"))["compilers"]["cpu"].startswith("/"):
        assert native.status("cpu").active


def test_what_was_measured_to_be_faster_is_found(monkeypatch: Any) -> None:
    place = dispatch.Place("float32", (1, 8), (16, 32), "layer_norm")
    assert place.covers("float32", 8, 16) and not place.covers("float32", 9, 16)
    assert not place.covers("float16", 8, 16) and not place.covers("float32", 8, 33)
    monkeypatch.setattr(native, "_slower", (place,))
    assert native.faster(torch.ones(2, 4, 32)) == "layer_norm"
    assert native.faster(torch.ones(9, 32)) is None


def test_the_committed_table_is_readable() -> None:
    for device in json.loads(dispatch.FILE.read_text()):
        table = dispatch.table(device)
        assert table.measured and table.serial_below > 0
        assert len(table.declined) <= 64
        assert {place.dtype for place in table.declined} <= set(dispatch.DTYPES)
        assert {place.faster for place in table.declined} <= {"layer_norm", "rms_norm"}
    assert dispatch.table("cpu-of-tomorrow") == dispatch.Table()


def test_what_was_measured_on_a_gpu_is_shown(monkeypatch: Any) -> None:
    norms = choices.Norms("bfloat16", "float32", True, True, 768)
    times = {"layer_norm": 4.25, "kernel": 3.0}
    left_out = {"liger": "ImportError: No module named 'liger_kernel'"}
    measured = choices.Choice(norms, 32, True, "kernel", times, left_out)
    bare = choices.Norms("float16", "float16", False, False, 64)
    default = choices.Choice(bare, 1, False, "rms_norm", {}, {})
    monkeypatch.setattr(gpu, "stored", lambda: {0: (measured, default), 1: ()})
    lines = env().splitlines()
    assert lines[-3:] == [
        "  GPU 0: 32 rows of 768 in bfloat16, weight and bias in float32, after an addition: "
        "kernel (layer_norm 4.2 \u00b5s, kernel 3.0 \u00b5s; liger: ImportError: No module named "
        "'liger_kernel')",
        "  GPU 0: 1 row of 64 in float16: rms_norm (not timed)",
        "  GPU 1: no measurements yet (torch sees no GPU)",
    ]
    cuda = json.loads(env("--json"))["devices"][1]
    assert cuda["choices"]["0"][0]["microseconds"] == times and cuda["choices"]["1"] == []


def test_without_a_gpu_nothing_can_be_measured(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    result = CliRunner().invoke(main, ["env", "--tune", str(tmp_path)])
    assert result.exit_code == 1
    assert result.stderr == "error: nothing can be measured: torch sees no GPU\n"


@pytest.mark.parametrize(("device", "fuses"), [("mps", True), ("xpu", False), ("cuda", True)])
def test_an_accelerator_without_kernels_says_what_it_computes(
    device: str, fuses: bool, monkeypatch: Any
) -> None:
    def current(check_available: bool = False) -> torch.device:
        return torch.device(device)

    monkeypatch.setattr(ops, "torch_fuses", lambda found: fuses and found == device)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    instead = "torch's rms_norm, or its LayerNorm if they have a bias" if fuses else "LayerNorm"
    lines = env().splitlines()
    if device == "cuda":  # as with ROCm: it has an entry in any case
        assert sum(line.startswith("cuda: ") for line in lines) == 1
    else:
        assert f"{device}: no kernels: there are no kernels for {device}" in lines
    assert instead in lines[-1]


def test_a_device_where_torch_fuses_rms_norm_says_which_norms_use_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(ops, "torch_fuses", lambda device: device == "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "folded norms compute torch's rms_norm, or its LayerNorm if they have a bias" in env()
