"""Compiling the kernels on first use: once, in parallel, and with a reason if it fails."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from live_models import ROOT
from torch._subclasses import FakeTensorMode

from enjoyln_cli.comparison.run import Float64
from enjoyln_cli.kernels import build, native
from enjoyln_cli.kernels.build import NoLibrary
from enjoyln_cli.kernels.check import compare_with_formula

USE = """
import json, torch
from enjoyln_cli import kernels
x = torch.randn(3, 32)
x = x - x.mean(-1, keepdim=True)
y = kernels.rms_norm(x, None, None, 1e-5)
exact = torch.nn.functional.layer_norm(x.double(), (32,))
lost = (torch.nn.functional.layer_norm(x, (32,)) - exact).norm()
assert (y - exact).norm() <= 8 * max(lost, torch.finfo(y.dtype).eps * exact.norm())
status = kernels.native.status("cpu")
line = json.dumps([status.active, status.what, str(status.path)])
print(line + "\\n", end="", flush=True)
"""
"""Computes a norm, and prints in one piece which kernels did it: others may print, too."""

TOGETHER = """
import os, sys
from enjoyln_cli import kernels
for _ in range(2):
    if os.fork() == 0:
        exec(sys.argv[1])
        os._exit(0)
assert os.wait()[1] == 0 == os.wait()[1]
"""
"""Runs the program that is its argument in two processes, which have imported the package."""

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")


@pytest.mark.slow
@needs_compiler
def test_processes_that_start_together_compile_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", quick_compiler)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-c", TOGETHER, USE]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=240)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == 2
    path = tmp_path / "enjoyln" / build.cpu().name
    assert all(active and got == str(path) for active, _, got in found)
    assert sorted(p.suffix for p in path.parent.iterdir()) == [".lock", ".so"]
    monkeypatch.setattr(build, "compiler", None)
    assert build.library(build.cpu()) == path, "which is not compiled again"


@needs_compiler
def test_the_library_is_small() -> None:
    assert build.library(build.cpu()).stat().st_size <= 400_000


@needs_compiler
def test_the_name_changes_with_sources_and_flags(tmp_path: Path, monkeypatch: Any) -> None:
    before = build.cpu().name
    assert build.cpu().name == before
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    assert build.cpu().name == before
    with open(tmp_path / "csrc" / "call.h", "a") as file:
        file.write("\n")
    assert build.cpu().name != before
    assert replace(build.cpu(), link=("-shared", "-g")).name != build.cpu().name


@needs_compiler
@pytest.mark.parametrize("mode", [FakeTensorMode, Float64])
def test_a_loaded_library_is_checked_even_inside_of_a_mode(mode: Any) -> None:
    wrong = SimpleNamespace(run=lambda name, x, *_: (x, x) if "add" in name else x)
    assert native.has("cpu")
    with mode():
        compare_with_formula(native.entry, "cpu")
        with pytest.raises(NoLibrary, match="kernel of rms_norm is wrong for torch.float32, d = 1"):
            compare_with_formula(wrong, "cpu")
    for refused in (native.Missing(), SimpleNamespace(run=lambda *_: NotImplemented)):
        with pytest.raises(NoLibrary, match="the kernels for cpu do not run"):
            compare_with_formula(refused, "cpu")


@needs_compiler
@pytest.mark.parametrize("gradient", [3, 4, None], ids=["of x", "of the weight", "missing"])
def test_gradients_are_checked_as_well(gradient: int | None) -> None:
    def run(name: str, *args: Any) -> Any:
        if not name.endswith("_backward"):
            return native.entry.run(name, *args)
        if gradient is None or native.entry.run(name, *args) is NotImplemented:
            return NotImplemented
        args[1 + gradient][0].mul_(1.01)
        return None

    assert native.has("cpu")
    with pytest.raises(NoLibrary, match="gradient of rms_norm is wrong for torch.float32, d = "):
        compare_with_formula(SimpleNamespace(run=run), "cpu")


def test_a_full_disk_is_a_reason_not_to_have_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build, "cache_folders", lambda: [tmp_path / "cache"])
    with pytest.raises(NoLibrary, match="cannot write to .*cache: No space left on device"):
        build.cached("a.cubin", full)
    assert build.cached("a.cubin", lambda path: path.write_bytes(b"1") and None).exists()


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a new process with an empty cache."""
    monkeypatch.setattr(native, "_known", {})
    monkeypatch.setattr(native, "entry", native.Unloaded())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"PATH": "/nowhere", "CXX": ""}, "C++ compiler (g++ or clang++) is not on PATH"),
        ({"ENJOYLN_KERNELS": "0"}, "switched off by ENJOYLN_KERNELS=0"),
    ],
    ids=["no compiler", "switched off"],
)
def test_without_kernels_it_computes_and_says_why(
    setting: dict[str, str],
    reason: str,
    fresh: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in setting.items():
        monkeypatch.setenv(name, value)
    exec(USE, {})
    active, what, _ = json.loads(capsys.readouterr().out)
    assert not active and reason in what


@pytest.mark.slow
@needs_compiler
def test_a_cache_that_cannot_be_written_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_compiler: str
) -> None:
    (tmp_path / "cache").write_text("not a directory")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", quick_compiler)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    path = build.library(build.cpu())
    assert path.parent == temporary / f"enjoyln-{os.getuid()}" and ctypes.CDLL(str(path))
    (tmp_path / "file").write_text("")
    # no temporary directory either: TMPDIR is ignored by Python where it is not writable
    folders = [tmp_path / "file" / "a", tmp_path / "file" / "b"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NoLibrary, match="cannot"):
        patch.setattr(build, "cache_folders", lambda: folders)
        build.library(build.cpu())


def test_a_directory_that_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    assert build.is_trusted(tmp_path)
    tmp_path.chmod(0o777)
    assert not build.is_trusted(tmp_path)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(NoLibrary, match="other users"):
        patch.setattr(build, "cache_folders", lambda: [tmp_path])
        build.library(build.cpu())


@pytest.mark.slow
@needs_compiler
def test_a_failed_compilation_is_reported_and_stored(
    tmp_path: Path, monkeypatch: Any, quick_compiler: str
) -> None:
    monkeypatch.setenv("CXX", quick_compiler)
    shutil.copytree(build.SOURCES, tmp_path / "csrc")
    (tmp_path / "csrc" / "call.h").write_text("#error this is broken\n")
    monkeypatch.setattr(build, "SOURCES", tmp_path / "csrc")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for _ in range(2):
        with pytest.raises(NoLibrary, match="this is broken"):
            build.library(build.cpu())
    for path in (tmp_path / "csrc").iterdir():
        path.write_text("")  # which compiles in no time
    broken = tmp_path / "enjoyln" / build.cpu().name
    broken.with_suffix(".failed").write_text("an earlier reason")
    with pytest.raises(NoLibrary, match="an earlier reason"):
        build.library(build.cpu())
    assert build.library(build.cpu(), retry=True) == broken
    assert not broken.with_suffix(".failed").exists()


def test_a_library_that_a_wheel_brought_is_taken(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build, "cache_folders", list)
    with pytest.raises(NoLibrary):
        build.library(build.cpu())
    (tmp_path / build.cpu().name).write_bytes(b"")
    assert build.library(build.cpu()) == tmp_path / build.cpu().name


def wheel(tmp_path: Path, **environment: str) -> Path:
    """Build a wheel from a copy of the sources, without network access and without torch."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("enjoyln_cli", "recipes"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    given = {**os.environ, "PATH": "/usr/bin:/bin", **environment}
    subprocess.run(
        [sys.executable, "-c", command], cwd=copy, env=given, check=True, capture_output=True
    )
    return next(copy.glob("*.whl"))


def test_a_wheel_is_pure_and_brings_every_module_and_the_sources(tmp_path: Path) -> None:
    made = wheel(tmp_path)
    assert made.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(made).namelist()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "enjoyln_cli").rglob("*.py")}
    assert modules <= set(names)
    sources = {f"enjoyln_cli/kernels/csrc/{path.name}" for path in build.SOURCES.iterdir()}
    assert sources <= set(names) and "enjoyln_cli/kernels/dispatch.json" in names
    assert not any(name.endswith(".so") for name in names)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/usr/bin/g++").exists(), reason="needs g++")
def test_a_wheel_can_bring_the_library(tmp_path: Path, quick_compiler: str) -> None:
    made = wheel(tmp_path, ENJOYLN_PREBUILT="1", CXX=quick_compiler)
    assert "-py3-none-linux" in made.name or "-py3-none-macos" in made.name
    libraries = [n for n in zipfile.ZipFile(made).namelist() if n.endswith(".so")]
    assert libraries == [f"enjoyln_cli/kernels/lib/{build.cpu().name}"]


def test_a_wheel_is_made_without_a_compiler(tmp_path: Path) -> None:
    made = wheel(tmp_path, ENJOYLN_PREBUILT="1", PATH="/nowhere", CXX="")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(made).namelist())
