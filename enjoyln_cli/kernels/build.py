"""Find the shared library with the CPU kernels, or compile it from ``csrc``.

The name of a library contains a digest of its sources, flags and machine, so an outdated one is
never used. It is searched for in ``lib`` beside this file (a wheel may include it), then in the
user's cache. If it is in neither, it is compiled in a temporary directory and then moved into the
cache. A lock makes sure that processes which start together compile it only once. Compilation needs
a C++ compiler, but no headers of torch or Python, and the library works with every version of both.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
SOURCES, PREBUILT = HERE / "csrc", HERE / "lib"

X86 = {
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c",
    "avx2": "-mavx2 -mfma -mf16c",
    "plain": "",
}
"""Compiler flags for each instruction set of x86 processors."""

COMMON = ["-std=c++17", "-O2", "-fPIC", "-w", "-fvisibility=hidden"]
COMMON += ["-ffp-contract=fast", "-fno-math-errno"]
LINK = ["-shared", *(["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-s"])]

TIMEOUT = 300
"""Seconds that the compiler may take."""


class NoLibrary(Exception):
    """There is no library, and the reason; the caller continues without kernels."""


@dataclass(frozen=True)
class Target:
    """One library: the compiler and linker arguments to build it from ``csrc``."""

    objects: tuple[tuple[str, ...], ...]
    link: tuple[str, ...]

    @property
    def name(self) -> str:
        """The file name, e.g. ``cpu-0123456789abcdef.so``."""
        return f"cpu-{digest(self.objects, self.link, platform.machine())}.so"


def digest(*facts: object) -> str:
    """16 hexadecimal digits that change with these facts and with any file in ``csrc``."""
    sha = hashlib.sha256(repr(facts).encode())
    for path in sorted(SOURCES.iterdir()):
        if path.is_file():
            sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()[:16]


def cpu() -> Target:
    """The CPU library: the Python interface, and kernels for each instruction set of the family."""
    family = X86 if platform.machine().lower() in ("x86_64", "amd64") else {"plain": ""}
    known = [f"-DCPU_{name}" for name in family]
    of_sets = [
        (source, f"-DNAME={name}", *flags.split())
        for source in ("rows.cpp", "backward.cpp")
        for name, flags in family.items()
    ]
    return Target((*of_sets, ("entry.cpp", *known)), tuple(LINK))


def library(target: Target, retry: bool = False) -> Path:
    """The path of the library ``target``, which is compiled if it is not found.

    Raises as ``cached``.
    """
    if (PREBUILT / target.name).exists():
        return PREBUILT / target.name
    return cached(target.name, lambda path: compile_to(target, compiler(), path), retry)


def cached(name: str, make: Callable[[Path], None], retry: bool = False) -> Path:
    """The file ``name`` in the cache; if it is not there, ``make`` writes it at the path it gets.

    The ``NoLibrary`` that ``make`` raises is stored in the cache, so that later calls fail at once;
    ``retry`` calls ``make`` again. Raises ``NoLibrary`` with the reason.
    """
    folder = writable_folder(name)
    try:
        return _cached(folder, name, make, retry)
    except OSError as error:  # such as a full disk
        raise NoLibrary(f"cannot write to {folder}: {error.strerror or error}") from error


def _cached(folder: Path, name: str, make: Callable[[Path], None], retry: bool) -> Path:
    """As ``cached``. Raises ``OSError`` too."""
    path, failed = folder / name, (folder / name).with_suffix(".failed")
    if path.exists():
        return path
    with locked(path.with_suffix(".lock")):
        if path.exists():
            return path
        if failed.exists() and not retry:
            raise NoLibrary(failed.read_text())
        with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as temporary:
            made = Path(temporary) / name
            try:
                make(made)
            except NoLibrary as error:
                failed.write_text(str(error))
                raise
            os.replace(made, path)
        failed.unlink(missing_ok=True)
    return path


def writable_folder(name: str = "") -> Path:
    """The first cache folder that can be written to, or that has the file ``name``.

    Creates it. Raises ``NoLibrary`` with the reasons if there is none.
    """
    reasons = []
    for folder in cache_folders():
        try:
            if name and is_trusted(folder) and (folder / name).exists():
                return folder
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not is_trusted(folder):
                raise OSError(f"{folder} can be written by other users")
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            reasons.append(f"cannot write to {folder}: {error.strerror or error}")
    raise NoLibrary("; ".join(reasons))


def cache_folders() -> list[Path]:
    """Where compiled libraries are stored: the user's cache, or else a temporary directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return [Path(cache) / "enjoyln", Path(tempfile.gettempdir()) / f"enjoyln-{_user()}"]


def _user() -> int:
    return os.getuid() if hasattr(os, "getuid") else 0  # not on Windows, which has no kernels


def is_trusted(folder: Path) -> bool:
    """Whether no other user can write to ``folder``."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid in (_user(), 0) and not found.st_mode & 0o022


def compiler() -> str:
    """The path of the C++ compiler. Raises ``NoLibrary`` if there is none."""
    for name in filter(None, (os.environ.get("CXX", ""), "c++", "g++", "clang++")):
        if found := shutil.which(name):
            return found
    raise NoLibrary("a C++ compiler (g++ or clang++) is not on PATH")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock file ``path``, after waiting for other processes.

    If there can be no lock (some network drives, a folder that is read only), the rename alone
    keeps this safe.
    """
    with ExitStack() as stack:
        with suppress(ImportError, OSError):
            file = stack.enter_context(open(path, "w"))
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def compile_to(target: Target, tool: str, path: Path) -> None:
    """Compile ``target`` with the compiler ``tool``, and write the complete library to ``path``."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        objects = [os.path.join(folder, f"{i}.o") for i in range(len(target.objects))]
        _run(
            [tool, *COMMON, *flags, "-c", str(SOURCES / source), "-o", out]
            for (source, *flags), out in zip(target.objects, objects, strict=True)
        )
        made = os.path.join(folder, path.name)
        _run([[tool, *objects, *target.link, "-o", made]])
        os.replace(made, path)


def _run(commands: Iterable[list[str]]) -> None:
    """Run commands in parallel. Raises ``NoLibrary`` with the first error line if one fails."""
    try:
        running = [
            subprocess.Popen(c, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, errors="replace")
            for c in commands
        ]  # fmt: skip
    except OSError as error:
        raise NoLibrary(f"the compiler does not start: {error}") from error
    failure, deadline = "", time.monotonic() + TIMEOUT
    for process in running:
        try:
            output, _ = process.communicate(timeout=max(0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            failure = failure or f"the compiler took more than {TIMEOUT} s"
        if process.returncode and not failure:
            failure = f"{Path(str(process.args[0])).name} failed: {first_error(output)}"  # type: ignore
    if failure:
        raise NoLibrary(failure)


def first_error(output: str) -> str:
    """The first line of a compiler's ``output`` that reports an error, or all of it."""
    lines = (line.strip() for line in output.splitlines() if "error:" in line)
    return next(lines, output.strip())
