"""``enjoyln env``: which kernels are active, which are missing, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from enjoyln_cli.cli.main import main
from enjoyln_cli.kernels import build, dispatch, native, ops


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
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    text = env()
    assert "cpu: no kernels: a C++ compiler (g++ or clang++) is not on PATH" in text
    assert "CUDA compiler: nvcc (the CUDA toolkit) is not on PATH" in text
    assert "folded norms compute torch's LayerNorm, which is no slower than before" in text


@pytest.mark.slow
def test_a_failed_build_is_tried_again(fresh: None, tmp_path: Path) -> None:
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
    monkeypatch.setattr(native, "_slower", {"cpu": (place,)})
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


def test_cuda_kernels_that_were_not_measured_are_not_used(monkeypatch: Any) -> None:
    if not native.has("cpu"):
        pytest.skip(native.status("cpu").what)
    monkeypatch.setattr(native, "_known", {"cpu": native.status("cpu")})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (3, 7))
    status = native.status("cuda")
    assert not status.active and "speed on sm_37 has not been measured" in status.what


def test_a_device_where_torch_fuses_rms_norm_says_which_norms_use_it(
    fresh: None, monkeypatch: Any
) -> None:
    monkeypatch.setattr(ops, "torch_fuses", lambda device: device == "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "folded norms compute torch's rms_norm, or its LayerNorm if they have a bias" in env()
