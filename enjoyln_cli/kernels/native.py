"""Load the compiled kernels, and compare them with the formula before using them.

``status`` tells which devices have kernels on this machine, and why others have none. The library
is not linked with torch or Python: it accesses tensors by DLPack's exchange functions, which torch
provides, and runs threads by torch's ``parallel_for``.

The CPU's kernels are loaded at first use. Those of a GPU are loaded by ``load_cuda`` for a pair of
dtypes, and used for the sizes that ``choose`` was told (see ``tuning``).
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from enjoyln_cli.kernels import build, cuda, dispatch
from enjoyln_cli.kernels.check import compare_with_formula

DEVICES = {"cpu": 1, "cuda": 2}
"""Devices that have kernels, with DLPack's numbers for them."""


@dataclass(frozen=True)
class Status:
    """Whether the kernels of one device are active."""

    device: str
    active: bool
    what: str
    """If active, the instruction set or the GPUs' architectures, otherwise the reason why not."""
    path: Path | None = None
    """The library with the kernels, or with NVRTC, which compiles those for CUDA."""


class Missing:
    """Placeholder for ``entry`` if no library could be loaded: every kernel declines."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _declines


class Unloaded:
    """Placeholder for ``entry`` until the first use, which tries to load the library."""

    def __getattr__(self, name: str) -> Any:
        status("cpu")
        return getattr(entry, name)


def _declines(*args: Any) -> Any:
    return NotImplemented


entry: Any = Unloaded()
"""The kernels: ``rms_norm`` and the others check their arguments, ``run(name, ...)`` does not.

Each returns ``NotImplemented`` if the kernel cannot be used; see ``csrc/entry.cpp``."""

_known: dict[str, Status] = {}
_slower: tuple[dispatch.Place, ...] = ()
_lock = threading.RLock()


def has(device: str) -> bool:
    """Whether there are kernels for this type of device; loads the CPU's at the first call."""
    if device == "cuda":
        return bool(_on_gpu)
    known = _known.get(device)
    return (known or status(device)).active


def load(device: str) -> bool:
    """Load the kernels of the CPU in a call of a norm; whether this call has activated them."""
    return device == "cpu" and device not in _known and status(device).active


def status(device: str, retry: bool = False) -> Status:
    """Load the kernels for ``device`` once; ``retry`` compiles again if that failed before."""
    with _lock:
        if device not in _known or (retry and not _known[device].active):
            try:
                _known[device] = _load(device, retry)
            except build.NoLibrary as error:
                _known[device] = Status(device, False, str(error))
        return _known[device]


def _load(device: str, retry: bool) -> Status:
    global entry
    if device not in DEVICES:
        raise build.NoLibrary(f"there are no kernels for {device}")
    if os.environ.get("ENJOYLN_KERNELS", "") == "0":
        entry = Missing()
        raise build.NoLibrary("switched off by ENJOYLN_KERNELS=0")
    if device == "cuda":
        return _load_cuda(retry)
    entry = Missing()
    path, isa = _load_cpu(retry)
    found = Status("cpu", True, isa, path)
    table = dispatch.table(table_name(found))
    _library().enjoyln_parallel(_parallel_for(), ctypes.c_int64(table.serial_below))
    functions = _functions()
    loaded = SimpleNamespace(**{name: f for name, f in functions.items() if name.isidentifier()})
    bare = {name[:-1]: f for name, f in functions.items() if name.endswith("!")}
    loaded.run = lambda name, *args: bare[name](*args)
    compare_with_formula(loaded, "cpu")
    _decline(table)
    entry = loaded
    return found


_loaded: list[ctypes.PyDLL] = []


def _library() -> ctypes.PyDLL:
    return _loaded[-1]


def _load_cpu(retry: bool) -> tuple[Path, str]:
    """Load the CPU library; returns its path and the best instruction set of this processor."""
    if sys.platform not in ("linux", "darwin"):
        raise build.NoLibrary(f"the kernels do not support {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise build.NoLibrary("the kernels do not support free-threaded Python")
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        raise build.NoLibrary(f"torch {torch.__version__} does not provide DLPack's functions")
    path = build.library(build.cpu(), retry)
    try:
        library = ctypes.PyDLL(str(path))
    except OSError as error:
        raise build.NoLibrary(f"{path} does not load: {error}") from error
    library.enjoyln_function.restype = ctypes.c_void_p
    library.enjoyln_name.restype = ctypes.c_char_p
    library.enjoyln_cpu.restype = ctypes.c_char_p
    library.enjoyln_start.argtypes = [ctypes.py_object, ctypes.c_void_p]
    library.enjoyln_parallel.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.enjoyln_driver.argtypes = [ctypes.c_void_p]
    library.enjoyln_cuda.argtypes = [*[ctypes.c_int32] * 3, ctypes.c_void_p, ctypes.c_void_p]
    library.enjoyln_choose.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    library.enjoyln_maker.argtypes = [ctypes.c_void_p]
    grad = _address("libtorch_cpu", "aoti_torch_grad_mode_is_enabled")
    if grad is None or not library.enjoyln_start((exchange, *_hooks()), grad):
        raise build.NoLibrary(
            f"the interface of torch {torch.__version__} differs from the one that the kernels use"
        )
    _loaded.append(library)
    if functions := _maker():
        library.enjoyln_maker((ctypes.c_void_p * len(functions))(*functions))
    isa = library.enjoyln_cpu(b"")
    return path, isa.decode()


def _hooks() -> tuple[Any, ...]:
    """The torch objects that the checks in ``entry.cpp`` use, in the order of its ``Torch``."""
    from torch.autograd import forward_ad

    def no_modes() -> int:
        return len(_python_dispatch._get_current_dispatch_mode_stack())

    return (
        Tensor,
        torch.nn.Parameter,
        getattr(torch._C, "_len_torch_dispatch_stack", no_modes),
        getattr(torch._C, "_is_tracing", torch.jit.is_tracing),
        vars(forward_ad),
        "_current_level",
        torch.empty_like,
        Tensor.contiguous,
        getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version),
        torch.is_autocast_enabled,
        Tensor.is_neg,
    )


def _functions() -> dict[str, Any]:
    library, found = _library(), {}
    prototype = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_int)
    make = prototype(("enjoyln_function", library))
    index = 0
    while name := library.enjoyln_name(index):
        found[name.decode()] = make(index)
        index += 1
    return found


def _parallel_for() -> int | None:
    """The address of torch's ``parallel_for``; without it, the kernels run on one thread."""
    return _address("libtorch_cpu", "torch_parallel_for")


MAKER = (
    ("libtorch_cpu", "aoti_torch_empty_strided"),
    ("libtorch_cpu", "aoti_torch_get_data_ptr"),
    ("libtorch_cpu", "aoti_torch_delete_tensor_object"),
    ("libtorch_python", "_Z16THPVariable_WrapRKN2at10TensorBaseE"),
    *(("libtorch_cpu", f"aoti_torch_dtype_{dtype}") for dtype in dispatch.DTYPES),
)
"""Functions with which ``entry.cpp`` creates tensors. It calls ``torch.empty_like`` unless this
torch has all of them."""


def _maker() -> list[int]:
    found = [_address(library, function) for library, function in MAKER]
    return [one for one in found if one is not None] if None not in found else []


def _address(library: str, function: str) -> int | None:
    """The address of a function in one of torch's libraries, or ``None``."""
    for path in (Path(torch.__file__).parent / "lib").glob(f"{library}.*"):
        if path.suffix in (".so", ".dylib"):
            found = getattr(ctypes.CDLL(str(path)), function, None)
            if found is not None:
                return ctypes.cast(found, ctypes.c_void_p).value
    return None


def _load_cuda(retry: bool) -> Status:
    if not torch.cuda.is_available():
        raise build.NoLibrary("torch sees no CUDA device")
    if not has("cpu"):
        raise build.NoLibrary(f"they are called through the CPU library: {status('cpu').what}")
    compiler = cuda.nvrtc()
    functions = cuda.driver().functions
    _library().enjoyln_driver((ctypes.c_void_p * len(functions))(*functions))
    found = sorted({architecture(i) for i in range(torch.cuda.device_count())})
    return Status("cuda", True, ", ".join(found), Path(compiler._name))


def architecture(index: int) -> str:
    """The architecture of GPU ``index``, such as ``sm_90``."""
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


_on_gpu: set[tuple[int, str, str]] = set()


def load_cuda(index: int, dtype: str, parameters: str, retry: bool = False) -> None:
    """Compile and load the kernels for rows of ``dtype`` and ``parameters`` on GPU ``index``.

    They are compared with the formula. Raises ``NoLibrary`` if they cannot be used.
    """
    with _lock:
        if (index, dtype, parameters) in _on_gpu:
            return
        if not (active := status("cuda")).active:
            raise build.NoLibrary(active.what)
        if (dtype, parameters) not in cuda.PAIRS:
            raise build.NoLibrary(f"there are none for {dtype} with parameters of {parameters}")
        path = cuda.cubin(architecture(index), dtype, parameters, retry)
        try:
            kernels = cuda.driver().load(index, path.read_bytes())
        except build.NoLibrary:
            path.unlink(missing_ok=True)  # a damaged file: the next process compiles it again
            raise
        place = index, dispatch.DTYPES.index(dtype), dispatch.DTYPES.index(parameters)
        context = cuda.driver().context(index)
        if not _library().enjoyln_cuda(*place, context, (ctypes.c_void_p * len(kernels))(*kernels)):
            raise build.NoLibrary(f"GPU {index} is beyond the GPUs that the kernels support")
        try:
            compare_with_formula(entry, f"cuda:{index}", ((dtype, parameters),))
        except build.NoLibrary:
            _library().enjoyln_cuda(*place, None, None)
            raise
        _on_gpu.add((index, dtype, parameters))


Kind = tuple[int, bool, tuple[str, str], tuple[bool, bool], int]
"""A GPU, whether the norm is that of a sum, the dtypes of rows and parameters, whether there are
weight and bias, and the width."""
_chosen: dict[Kind, tuple[tuple[int, int], ...]] = {}


def choose(
    index: int,
    added: bool,
    dtypes: tuple[str, str],
    affine: tuple[bool, bool],
    width: int,
    *rows: tuple[int, int],
) -> None:
    """Use the kernels for a ``Kind`` of norm where it has one of these numbers of ``rows``.

    Each is the fewest and the most rows, both included. Replaces an earlier choice for the same
    kind; without ``rows``, the kernels decline it.
    """
    _chosen[index, added, dtypes, affine, width] = rows
    _set_choices()


def forget_choices() -> None:
    """Use the kernels of GPUs for no norm."""
    _chosen.clear()
    _set_choices()


def _set_choices() -> None:
    if not _loaded:
        return
    numbers: list[int] = []
    for (index, added, dtypes, affine, width), ranges in _chosen.items():
        codes = [dispatch.DTYPES.index(dtype) for dtype in dtypes]
        for few, most in ranges:
            numbers += [index, added, *codes, affine[0] + 2 * affine[1], width, few, most]
    _library().enjoyln_choose((ctypes.c_int64 * len(numbers))(*numbers), len(numbers) // 8)


def table_name(status: Status) -> str:
    """The name of active kernels in ``dispatch.json``, such as ``cpu-avx512``."""
    return f"{status.device}-{status.what}"


def _decline(table: dispatch.Table) -> None:
    """Tell the library for which sizes the CPU's kernels must decline."""
    global _slower
    _slower = table.declined
    for place in table.declined:
        dtype = dispatch.DTYPES.index(place.dtype)
        sizes = (ctypes.c_int64(n) for n in (*place.rows, *place.widths))
        _library().enjoyln_decline(dtype, *sizes)


def faster(x: Tensor) -> str | None:
    """The function of torch that is faster than the CPU's kernel for this size, if there is one."""
    if x.device.type != "cpu":
        return None
    width = x.shape[-1]
    rows, dtype = x.numel() // max(width, 1), str(x.dtype).removeprefix("torch.")
    return next((place.faster for place in _slower if place.covers(dtype, rows, width)), None)


def use(isa: str) -> bool:
    """Switch to the CPU kernels of another instruction set, for tests and benchmarks.

    Returns whether this processor has it.
    """
    return has("cpu") and _library().enjoyln_cpu(isa.encode()) is not None
