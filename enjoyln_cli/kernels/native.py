"""The compiled kernels: loaded at first use, run once against the formula, and only then trusted.

Decides which devices have kernels here, and says why others have none. The library holds no code of
torch's and none of Python's: it sees tensors through DLPack's exchange functions, which torch hands
out, and threads through torch's own ``parallel_for``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch

from enjoyln_cli.kernels import build, dispatch, formula

DEVICES = {"cpu": 1, "cuda": 2}
"""DLPack's numbers of the devices that there are kernels for."""


@dataclass(frozen=True)
class Status:
    """What is known of one device's kernels."""

    device: str
    active: bool
    what: str
    """The instruction set or the architecture if active, otherwise the reason why not."""
    path: Path | None = None


class Missing:
    """Stands where nothing was loaded: every kernel declines."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return _declines


class Unloaded:
    """Stands before the first use, which loads the library or finds that there is none."""

    def __getattr__(self, name: str) -> Any:
        status("cpu")
        return getattr(entry, name)


def _declines(*args: Any) -> Any:
    return NotImplemented


entry: Any = Unloaded()
"""``rms_norm`` and the others with guards, and ``run(name, ...)`` without; see ``entry.cpp``."""

_known: dict[str, Status] = {}
_slower: dict[str, tuple[dispatch.Place, ...]] = {}
_lock = threading.RLock()


def has(device: str) -> bool:
    """Whether there is a kernel for tensors on this type of device; loads it at the first call."""
    known = _known.get(device)
    return (known or status(device)).active


def load(device: str) -> bool:
    """Loads the kernels for tensors on this type of device, if nobody did; whether it found any."""
    return device not in _known and status(device).active


def status(device: str, retry: bool = False) -> Status:
    """Loads what ``device`` needs, once; ``retry`` compiles again what failed to before."""
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
    _check(loaded, "cpu")
    _decline("cpu", table)
    entry = loaded
    return found


_loaded: list[ctypes.PyDLL] = []


def _library() -> ctypes.PyDLL:
    return _loaded[-1]


def _load_cpu(retry: bool) -> tuple[Path, str]:
    """Loads the library with the best instruction set that runs here."""
    if sys.platform not in ("linux", "darwin"):
        raise build.NoLibrary(f"the kernels are not made for {sys.platform}")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise build.NoLibrary("the kernels are not made for a Python without its global lock")
    exchange = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if exchange is None:
        raise build.NoLibrary(f"torch {torch.__version__} does not hand out DLPack's functions")
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
    library.enjoyln_cuda.argtypes = [ctypes.c_void_p]
    library.enjoyln_maker.argtypes = [ctypes.c_void_p]
    grad = _address("libtorch_cpu", "aoti_torch_grad_mode_is_enabled")
    if grad is None or not library.enjoyln_start((exchange, *_hooks()), grad):
        raise build.NoLibrary("torch hands out a DLPack or functions that are not known here")
    _loaded.append(library)
    if functions := _maker():
        library.enjoyln_maker((ctypes.c_void_p * len(functions))(*functions))
    isa = library.enjoyln_cpu(b"")
    return path, isa.decode()


def _hooks() -> tuple[Any, ...]:
    """What the guards of ``entry.cpp`` ask, in the order of its ``Torch``."""
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
    """The address of torch's own, so that the kernels use its threads; None: one thread."""
    return _address("libtorch_cpu", "torch_parallel_for")


MAKER = (
    ("libtorch_cpu", "aoti_torch_empty_strided"),
    ("libtorch_cpu", "aoti_torch_get_data_ptr"),
    ("libtorch_cpu", "aoti_torch_delete_tensor_object"),
    ("libtorch_python", "_Z16THPVariable_WrapRKN2at10TensorBaseE"),
    *(("libtorch_cpu", f"aoti_torch_dtype_{dtype}") for dtype in dispatch.DTYPES),
)
"""What ``entry.cpp`` makes tensors with; without one of them it asks ``torch.empty_like``."""


def _maker() -> list[int]:
    found = [_address(library, function) for library, function in MAKER]
    return [one for one in found if one is not None] if None not in found else []


def _address(library: str, function: str) -> int | None:
    """Where a function of torch's libraries is, if this torch has it."""
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
        raise build.NoLibrary(f"the way to it is missing: {status('cpu').what}")
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    here = tuple(f"{major}{minor}" for major, minor in sorted(found))
    unmeasured = [one for one in here if not dispatch.table(f"cuda-{one}").measured]
    if unmeasured and os.environ.get("ENJOYLN_KERNELS", "") != "unmeasured":
        raise build.NoLibrary(
            f"nobody has measured them on sm_{unmeasured[0]} yet; scripts/tune_kernels.py --device "
            "cuda does, and ENJOYLN_KERNELS=unmeasured takes them without"
        )
    whole = build.cuda()
    target = whole if (build.PREBUILT / whole.name).exists() else build.cuda(here)
    path = build.library(target, retry)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise build.NoLibrary(f"{path} does not load: {error}") from error
    launch = ctypes.cast(library.enjoyln_launch, ctypes.c_void_p)
    _library().enjoyln_cuda(launch)
    try:
        _check(entry, "cuda")
    except build.NoLibrary:
        _library().enjoyln_cuda(None)
        raise
    active = Status("cuda", True, "sm_" + ", sm_".join(here), path)
    _decline("cuda", dispatch.table(table_name(active)))
    return active


def table_name(status: Status) -> str:
    """The entry of ``dispatch.json`` for active kernels: ``cpu-avx512``, ``cuda-90``."""
    return f"{status.device}-{status.what.split(',')[0].removeprefix('sm_')}"


def _decline(device: str, table: dispatch.Table) -> None:
    _slower[device] = table.declined
    for place in table.declined:
        dtype = dispatch.DTYPES.index(place.dtype)
        _library().enjoyln_decline(
            DEVICES[device], dtype, *(ctypes.c_int64(n) for n in (*place.rows, *place.widths))
        )


def faster(x: Tensor) -> str | None:
    """What was measured to be faster than the kernel for a tensor like this one, if anything."""
    width = x.shape[-1]
    rows, dtype = x.numel() // max(width, 1), str(x.dtype).removeprefix("torch.")
    for place in _slower.get(x.device.type, ()):
        if place.covers(dtype, rows, width):
            return place.faster
    return None


def use(isa: str) -> bool:
    """Takes the CPU kernels of another instruction set, for tests and benchmarks."""
    return has("cpu") and _library().enjoyln_cpu(isa.encode()) is not None


@contextmanager
def _not_traced() -> Iterator[None]:
    """Within it, ``torch.jit.trace`` records nothing."""
    compiled: Any = torch._C
    state = compiled._get_tracing_state()
    compiled._set_tracing_state(None)
    try:
        yield
    finally:
        compiled._set_tracing_state(state)


@_not_traced()
@_python_dispatch._disable_current_modes()
def _check(loaded: Any, device: str) -> None:
    """A library made on somebody's machine is run against the formula before it is trusted.

    On real tensors, also where the first use is in a graph that is being captured or traced.
    """
    if loaded.run("rms_norm", torch.ones(1, 8, device=device), None, None, 1e-5) is NotImplemented:
        raise build.NoLibrary(f"the kernels for {device} do not run")
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for d in (1, 17, 200, 1500):
            i = torch.arange(2 * d, dtype=torch.float64, device=device).view(2, d)
            x, r = (torch.sin(i * k).to(dtype) for k in (0.7, 1.3))
            w, b = (torch.cos(i[0] * k).to(dtype) for k in (0.3, 0.9))
            for norm in ("rms_norm", "layer_norm"):
                pair = loaded.run(f"add_{norm}", x, r, w, b, 1e-5)
                if pair is NotImplemented:
                    continue
                total = x + r
                wide = [t.double() for t in (total, w, b)]
                expected = getattr(formula, norm)(*wide, 1e-5)
                bound = 4 * max(torch.finfo(dtype).eps, 1e-9) * (2 + expected.abs())
                close = (pair[0].double() - expected).abs() <= bound
                if not (close.all() and torch.equal(pair[1], total)):
                    raise build.NoLibrary(f"the kernel of {norm} is wrong for {dtype}, d = {d}")
