"""``enjoyln env``: which kernels are active, which are missing, and why; and what ``fold`` says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from live_models import CHECKPOINTS, ROOT

from enjoyln_cli.cli.main import main
from enjoyln_cli.kernels import cpu, norms


def run(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is looked for again."""
    monkeypatch.setattr(cpu, "library", cpu.Library)


def test_active_kernels_are_named() -> None:
    library = cpu.library()
    if library.missing:
        pytest.skip(library.missing)
    text = run("env")
    assert f"cpu: kernels: {library.level}\n  library: {cpu.LIBRARY}\n" in text
    device = json.loads(run("env", "--json"))["devices"][0]
    assert device == {
        "device": "cpu", "active": True, "kernels": library.level, "library": str(cpu.LIBRARY),
    }  # fmt: skip


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("how", ["switched off", "not compiled", "of another system"])
def test_missing_kernels_are_explained(how: str, monkeypatch: Any, tmp_path: Path) -> None:
    if how == "switched off":
        monkeypatch.setenv("ENJOYLN_KERNELS", "0")
    else:
        monkeypatch.setattr(cpu, "LIBRARY", tmp_path / "librms_norm.so")
    if how == "of another system":
        cpu.LIBRARY.write_bytes(b"MZ")
    text = run("env")
    reason = {"of another system": "it does not load: "}.get(how, how)
    assert f"cpu: no kernels: {reason}" in text
    assert (
        "  folded norms compute torch's LayerNorm, with the same results; nothing is lost but speed"
        in text
    )
    with torch.no_grad():
        x = torch.randn(64, 768)
        x -= x.mean(-1, keepdim=True)
        y = norms.rms_norm(x, None, None, 1e-5)
        assert torch.equal(y, torch.nn.functional.layer_norm(x, (768,)))


@pytest.mark.usefixtures("fresh")
def test_a_fold_says_why_kernels_are_missing(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("ENJOYLN_KERNELS", "0")
    out = str(tmp_path / "out")
    folded = run("fold", str(CHECKPOINTS / "gpt2"), "-o", out, "--no-verify")
    (line,) = (line for line in folded.splitlines() if line.startswith("no kernels"))
    assert line.startswith("no kernels for this CPU (switched off")
    assert line.endswith("with the same results; nothing is lost but speed")


def test_a_fold_says_nothing_about_kernels_that_there_are(tmp_path: Path) -> None:
    if (library := cpu.library()).missing:
        pytest.skip(library.missing)
    arguments = ("fold", str(CHECKPOINTS / "gpt2"), "-o", str(tmp_path / "out"), "--no-verify")
    assert "no kernels" not in run(*arguments)


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


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_a_wheel_is_built_with_and_without_a_compiler(compiler: bool, tmp_path: Path) -> None:
    """Without torch, and for every version of Python."""
    for folder in ("enjoyln_cli", "recipes"):
        built = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / folder, tmp_path / "source" / folder, ignore=built)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    environment = dict(os.environ)
    if not compiler:
        nothing = str(tmp_path / "nothing")
        environment |= {"PATH": nothing, "CC": f"{nothing}/cc", "CXX": f"{nothing}/c++"}
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from setuptools.build_meta import build_wheel; print(build_wheel(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=tmp_path / "source", env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    name = done.stdout.splitlines()[-1]
    assert name.startswith("enjoyln-") and "-py3-none-" in name
    files = zipfile.ZipFile(tmp_path / name).namelist()
    assert ("enjoyln_cli/kernels/librms_norm.so" in files) == compiler
