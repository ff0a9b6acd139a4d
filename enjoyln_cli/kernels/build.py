"""From ``csrc`` to a shared library: where it lies, and compiling it where it does not.

A library's name carries the digest of its sources, flags and machine, so a stale one is never
taken. It is looked for beside this file (a wheel may bring it), then in the user's cache, and is
compiled into the cache otherwise: into a temporary directory, and renamed when it is complete,
under a lock so that processes which start together compile once. Neither torch's headers nor
Python's are needed, only a C++ compiler (for ``cuda`` nvcc), and the result serves every version of
both.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCES, PREBUILT = HERE / "csrc", HERE / "lib"

X86 = {
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c",
    "avx2": "-mavx2 -mfma -mf16c",
    "plain": "",
}
"""Instruction sets of a processor and the compiler's flags for each."""

COMMON = ["-std=c++17", "-O2", "-fPIC", "-w", "-fvisibility=hidden"]
COMMON += ["-ffp-contract=fast", "-fno-math-errno"]
LINK = ["-shared", *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else [])]

ARCHITECTURES = ("80", "86", "89", "90", "100", "120")
"""CUDA compute capabilities that a wheel is built for; the last comes as PTX too."""

TIMEOUT = 300


class NoLibrary(Exception):
    """There is no library, and why; the caller goes on without."""


@dataclass(frozen=True)
class Target:
    """One library: its name, the commands that make it from ``csrc``, and what it depends on."""

    kind: str
    objects: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]

    @property
    def name(self) -> str:
        """``cpu-0123456789abcdef.so``"""
        sha = hashlib.sha256(repr((self.objects, self.link, platform.machine())).encode())
        for path in sorted(SOURCES.iterdir()):
            if path.is_file():
                sha.update(path.name.encode() + path.read_bytes())
        return f"{self.kind}-{sha.hexdigest()[:16]}.so"


def cpu() -> Target:
    """The entry from Python and the kernels for every instruction set of this machine's family."""
    family = X86 if platform.machine().lower() in ("x86_64", "amd64") else {"plain": ""}
    known = [f"-DCPU_{name}" for name in family]
    rows = [("rows.cpp", f"-DNAME={name}", *flags.split()) for name, flags in family.items()]
    return Target("cpu", (*rows, ("entry.cpp", *known)), tuple(LINK))


def cuda(architectures: tuple[str, ...] = ARCHITECTURES) -> Target:
    """The CUDA kernels; on first use for the architectures of the devices at hand."""
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    ptx = f"-gencode=arch=compute_{architectures[-1]},code=compute_{architectures[-1]}"
    flags = (
        "-std=c++17",
        "-O3",
        "-w",
        "--threads=0",
        "-Xcompiler=-fPIC,-fvisibility=hidden",
        *codes,
        ptx,
    )
    return Target("cuda", (("cuda.cu", *flags),), ("-shared", "-cudart=static"))


def library(target: Target, retry: bool = False) -> Path:
    """The path of the compiled ``target``. Raises ``NoLibrary`` with the reason.

    A failure to compile is remembered beside where the library would be; ``retry`` tries again.
    """
    name = target.name
    if (PREBUILT / name).exists():
        return PREBUILT / name
    reasons = []
    for folder in cache_folders():
        try:
            if is_trusted(folder) and (folder / name).exists():
                return folder / name
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not is_trusted(folder):
                raise OSError(f"{folder} can be written by other users")
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reasons.append(f"cannot write to {folder}: {error.strerror or error}")
            continue
        return _compiled(target, folder / name, retry)
    raise NoLibrary("; ".join(reasons))


def cache_folders() -> list[Path]:
    """Where compiled libraries are kept: the user's cache, or a temporary directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [Path(cache) / "enjoyln", Path(tempfile.gettempdir()) / f"enjoyln-{_user()}"]


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0  # not on Windows, which has no kernels


def is_trusted(folder: Path) -> bool:
    """Whether nobody else can have put a library there."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid in (_user(), 0) and not found.st_mode & 0o022


def compiler(kind: str) -> str:
    """The compiler for a kind of target. Raises ``NoLibrary`` where there is none."""
    if kind == "cuda":
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        names = ["nvcc", os.path.join(home, "bin", "nvcc")]
    else:
        names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    for name in filter(None, names):
        if found := shutil.which(name):
            return found
    wanted = "nvcc (the CUDA toolkit)" if kind == "cuda" else "a C++ compiler (g++ or clang++)"
    raise NoLibrary(f"{wanted} is not on PATH")


def _compiled(target: Target, path: Path, retry: bool) -> Path:
    tool = compiler(target.kind)
    failed = path.with_suffix(".failed")
    with _locked(path.with_suffix(".lock")):
        if path.exists():
            return path
        if failed.exists() and not retry:
            raise NoLibrary(failed.read_text())
        try:
            compile_to(target, tool, path)
        except NoLibrary as error:
            failed.write_text(str(error))
            raise
        failed.unlink(missing_ok=True)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Waits for other processes; without locks (some network drives) the rename alone is safe."""
    with open(path, "w") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            pass
        yield


def compile_to(target: Target, tool: str, path: Path) -> None:
    """Compiles ``target`` with ``tool`` into ``path``, which appears whole or not at all."""
    common = COMMON if target.kind == "cpu" else []
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        objects = [os.path.join(folder, f"{i}.o") for i in range(len(target.objects))]
        _run(
            [tool, *common, *flags, "-c", str(SOURCES / source), "-o", out]
            for (source, *flags), out in zip(target.objects, objects, strict=True)
        )
        made = os.path.join(folder, path.name)
        _run([[tool, *objects, *target.link, "-o", made]])
        os.replace(made, path)


def _run(commands: Iterator[list[str]] | list[list[str]]) -> None:
    """Runs them side by side. Raises ``NoLibrary`` with the first line of what one complained."""
    try:
        running = [
            subprocess.Popen(c, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, errors="replace")
            for c in commands
        ]  # fmt: skip
    except OSError as error:
        raise NoLibrary(f"the compiler does not start: {error}") from error
    complaint, deadline = "", time.monotonic() + TIMEOUT
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            complaint = complaint or f"the compiler took more than {TIMEOUT} s"
        if process.returncode and not complaint:
            lines = [line for line in output.splitlines() if "error" in line] or [output.strip()]
            complaint = f"{Path(str(process.args[0])).name} failed: {lines[0]}"  # type: ignore
    if complaint:
        raise NoLibrary(complaint)
