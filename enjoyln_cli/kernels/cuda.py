"""The CUDA kernels: NVRTC compiles them for a GPU of this machine, CUDA's driver loads them.

torch's CUDA wheels bring NVRTC, so nothing has to be installed. It compiles ``csrc/cuda.cu`` for
one architecture, one dtype of rows and one of parameters, in one or two seconds. The result, a
cubin, is stored in the cache (see ``build.cached``). The driver loads it into the context that
torch uses on the GPU. ``entry.cpp`` then starts the kernels in that context, on torch's current
stream for the GPU of the tensor.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from enjoyln_cli.kernels import build
from enjoyln_cli.kernels.build import NoLibrary

KERNELS = (
    "short_packs",
    "short_single",
    "long_kept",
    "long_packs",
    "long_single",
    "back_short_packs",
    "back_short_single",
    "back_long_packs",
    "back_long_single",
    "back_chunks",
    "back_sums",
)
"""The functions of ``cuda.cu``, in the order of ``Kernel`` in ``launch.h``."""
TYPES = {"float32": "float", "float16": "Half", "bfloat16": "Bfloat", "float64": "double"}
"""The C++ type of each dtype, in the order of ``Dtype`` in ``call.h``."""
PAIRS = (
    *((dtype, dtype) for dtype in TYPES),
    ("float16", "float32"),
    ("bfloat16", "float32"),
)
"""The dtypes of rows and parameters that there are kernels for."""
HEADERS = ("backward.h", "call.h", "gradient.h", "launch.h", "team.h")
CALLED = ("cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuLaunchKernel")
"""The driver's functions that ``entry.cpp`` calls, in the order of its ``Driver``."""


@cache
def nvrtc() -> ctypes.CDLL:
    """NVRTC, as torch brings it or as the system has it. Raises ``NoLibrary`` if there is none."""
    if torch.version.cuda is None:
        raise NoLibrary("this torch was built without CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.partition('.')[0]}"
    for path in (*map(str, nvrtc_files(name)), name):
        try:
            return load_nvrtc(path)
        except OSError:
            continue
    raise NoLibrary(f"{name}, which compiles them, was not found; pip install nvidia-cuda-nvrtc")


def nvrtc_files(name: str = "libnvrtc.so.*") -> list[Path]:
    """Where NVIDIA's packages, or torch itself, have brought NVRTC."""
    folders = [Path(torch.__file__).parent / "lib"]
    folders += [Path(folder) / "nvidia" for folder in sys.path if folder]
    return [path for folder in folders for path in sorted(folder.glob(f"**/{name}"))]


def load_nvrtc(path: str) -> ctypes.CDLL:
    """The NVRTC library at ``path``. Raises ``OSError`` if it does not load."""
    if os.path.isabs(path):  # some versions look for this library by its name alone
        for builtins in sorted(Path(path).parent.glob("libnvrtc-builtins.so.*")):
            ctypes.CDLL(str(builtins))
    library = ctypes.CDLL(path)
    library.nvrtcCompileProgram.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return library


def nvrtc_version(library: ctypes.CDLL) -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def compiled_for(library: ctypes.CDLL, architecture: str) -> str:
    """``architecture`` if NVRTC knows it, otherwise the newest one that it runs the kernels of.

    A GPU runs kernels that were compiled for an earlier architecture of the same major version.
    """
    count, wanted = ctypes.c_int(), int(architecture.removeprefix("sm_"))
    library.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    known = (ctypes.c_int * count.value)()
    library.nvrtcGetSupportedArchs(known)
    fits = [number for number in known if number // 10 == wanted // 10 and number <= wanted]
    return f"sm_{max(fits, default=wanted)}"


def compile_kernels(
    library: ctypes.CDLL, architecture: str, dtype: str, parameters: str, *options: str
) -> tuple[bytes, str]:
    """Compile ``cuda.cu`` for an ``architecture`` such as ``sm_90``; returns the cubin and the log.

    Raises ``NoLibrary`` with the first error.
    """
    source = (build.SOURCES / "cuda.cu").read_bytes()
    headers = (ctypes.c_char_p * len(HEADERS))(
        *((build.SOURCES / name).read_bytes() for name in HEADERS)
    )
    names = (ctypes.c_char_p * len(HEADERS))(*(name.encode() for name in HEADERS))
    given = (
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        "--device-as-default-execution-space",  # for lambdas; NVRTC 13.2 and later need no option
        f"-DROW={TYPES[dtype]}",
        f"-DPARAMETER={TYPES[parameters]}",
        *options,
    )
    flags = (ctypes.c_char_p * len(given))(*(flag.encode() for flag in given))
    program = ctypes.c_void_p()
    if library.nvrtcCreateProgram(
        ctypes.byref(program), source, b"cuda.cu", len(HEADERS), headers, names
    ):
        raise NoLibrary("NVRTC cannot start")
    try:
        failed = library.nvrtcCompileProgram(program, len(given), flags)
        log = _text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog, program)
        log = log.rstrip(b"\0")
        if failed:
            raise NoLibrary(f"NVRTC failed: {build.first_error(log.decode(errors='replace'))}")
        cubin = _text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN, program)
        return cubin, log.decode(errors="replace")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size_of: Callable[..., int], read: Callable[..., int], program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    read(program, buffer)
    return buffer.raw


def cubin(architecture: str, dtype: str, parameters: str, retry: bool = False) -> Path:
    """The file with the compiled kernels, which is made if it is not in the cache.

    Raises ``NoLibrary``; see ``build.cached``.
    """
    library = nvrtc()
    architecture = compiled_for(library, architecture)
    facts = architecture, dtype, parameters, nvrtc_version(library)
    return build.cached(
        f"{architecture}-{build.digest(*facts)}.cubin",
        lambda path: _write(path, compile_kernels(library, architecture, dtype, parameters)[0]),
        retry,
    )


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


class Driver:
    """CUDA's driver, ``libcuda``, and what this process has loaded with it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.contexts: dict[int, ctypes.c_void_p] = {}

    @property
    def functions(self) -> list[int | None]:
        """The addresses of the functions in ``CALLED``."""
        return [ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value for name in CALLED]

    def context(self, index: int) -> ctypes.c_void_p:
        """The primary context of GPU ``index``, in which torch works. It is never released."""
        if index not in self.contexts:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(device), index)
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self.contexts[index] = context
        return self.contexts[index]

    def load(self, index: int, image: bytes) -> list[int | None]:
        """Load a cubin on GPU ``index``; the addresses of its functions, in the order ``KERNELS``.

        It stays loaded until the process ends.
        """
        module, functions = ctypes.c_void_p(), []
        with self._current(self.context(index)):
            self._call("cuModuleLoadData", ctypes.byref(module), image)
            for name in KERNELS:
                function = ctypes.c_void_p()
                self._call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
                functions.append(function.value)
        return functions

    @contextmanager
    def _current(self, context: ctypes.c_void_p) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: object) -> None:
        if number := getattr(self.library, name)(*arguments):
            text = ctypes.c_char_p()
            self.library.cuGetErrorName(number, ctypes.byref(text))
            reason = text.value.decode() if text.value else f"error {number}"
            raise NoLibrary(f"CUDA's driver: {name}: {reason}")


@cache
def driver() -> Driver:
    """CUDA's driver. Raises ``NoLibrary`` if this machine has none."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except OSError as error:
        raise NoLibrary(f"CUDA's driver does not load: {error}") from error
