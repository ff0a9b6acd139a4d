"""A GPU of this machine: what can compute a norm on it, and how long that takes.

``prepare`` chooses for the norms of a model (see ``tuning``). It is called when a model is loaded
or optimised, and never in a call of a norm. ``ENJOYLN_TUNE=0`` and ``ENJOYLN_KERNELS=0`` switch it
off: then a norm computes torch's ``rms_norm``, or its ``layer_norm`` if it has a bias.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from enjoyln_cli.kernels import build, choices, cuda, formula, native, tuning
from enjoyln_cli.kernels.choices import KERNEL, LAYER_NORM, LIGER, RMS_NORM, Choice, Norms
from enjoyln_cli.kernels.tuning import EPS, Compute

TURNS, CALLS, WARM_UP = 25, 20, 3
"""How often each graph is replayed, how many calls it has, and how many calls come before."""
NVIDIA = Path("/proc/driver/nvidia/version")
"""Where Linux tells the version of NVIDIA's driver."""


def layer_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return formula.layer_norm(x, weight, bias, EPS)


def rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return formula.torch_rms_norm(x, weight, bias, EPS)


def liger_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    return formula.liger_rms_norm(x, weight, bias, EPS)


def kernel(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _ran(native.entry.run("rms_norm", x, weight, bias, EPS))


def fused_kernel(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    return _ran(native.entry.run("add_rms_norm", x, residual, weight, bias, EPS))


def _ran(result: Any) -> Any:
    if result is NotImplemented:
        raise build.NoLibrary("the kernel does not run")
    return result


class Gpu:
    """A GPU that torch sees; see ``tuning.Device``."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.place = torch.device("cuda", index)
        self._missing: dict[tuple[str, str], str] = {}

    def key(self) -> choices.Key:
        major, minor = torch.cuda.get_device_capability(self.index)
        return {
            "gpu": torch.cuda.get_device_name(self.index),
            "capability": f"{major}.{minor}",
            "driver": _driver_version(),
            "torch": torch.__version__,
            "liger": _liger_version(),
            "sources": build.digest(),
        }

    def clock(self) -> float:
        return time.monotonic()

    def candidates(self, norms: Norms) -> dict[str, Compute | str]:
        return {
            LAYER_NORM: layer_norm,
            RMS_NORM: rms_norm,
            KERNEL: self._why_not(norms) or kernel,
            LIGER: _why_no_liger(norms) or liger_rms_norm,
        }

    def fused(self, norms: Norms) -> Compute | str:
        return self._why_not(norms) or fused_kernel

    def _why_not(self, norms: Norms) -> str:
        pair = norms.dtype, norms.parameters
        if pair not in self._missing:
            try:
                native.load_cuda(self.index, *pair)
                self._missing[pair] = ""
            except (build.NoLibrary, OSError) as error:
                self._missing[pair] = str(error)
        return self._missing[pair]

    def seconds(self, calls: Mapping[str, Callable[[], Any]]) -> Mapping[str, Sequence[float]]:
        try:
            with torch.cuda.device(self.place), torch.no_grad():
                return self._replayed(calls)
        except RuntimeError:  # a call cannot be recorded, or the memory is not enough
            torch.cuda.synchronize(self.place)
            return {}
        finally:
            torch.cuda.empty_cache()  # the memory of the graphs

    def _replayed(self, calls: Mapping[str, Callable[[], Any]]) -> dict[str, list[float]]:
        stream, graphs = torch.cuda.Stream(), {}
        for name, call in calls.items():
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    call()
            graphs[name] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(CALLS):
                    call()
        found: dict[str, list[float]] = {name: [] for name in calls}
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(TURNS):
            for name, graph in graphs.items():
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                found[name].append(start.elapsed_time(end) / 1e3 / CALLS)
        return found


def _driver_version() -> str:
    """The newest CUDA version that the driver supports, and its own version where Linux tells it.

    With ROCm, the version of torch's.
    """
    version = ctypes.c_int()
    try:
        cuda.driver().library.cuDriverGetVersion(ctypes.byref(version))
    except build.NoLibrary:
        return str(torch.version.hip)
    own = None
    with suppress(OSError):
        own = re.search(r"\d+\.\d+(\.\d+)?", NVIDIA.read_text())
    return f"{version.value}, {own[0]}" if own else str(version.value)


def _liger_version() -> str:
    """The version of Liger, or ``""`` if it is not installed."""
    try:
        return importlib.metadata.version("liger-kernel")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _why_no_liger(norms: Norms) -> str:
    if not norms.weight:
        return "it needs a weight"
    try:
        formula.liger()
    except Exception as error:  # another version, or a Triton that does not fit
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def why_not_tuned() -> str:
    """Why nothing is measured in this process, or ``""``."""
    for name in ("ENJOYLN_KERNELS", "ENJOYLN_TUNE"):
        if os.environ.get(name, "") == "0":
            return f"switched off by {name}=0"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return ""


def prepare(wanted: Iterable[tuple[torch.device, Norms]], again: bool = False) -> None:
    """Choose what computes these kinds of norm on each GPU, and use it from now on.

    Takes up to ``tuning.SECONDS`` for a GPU the first time; later calls and processes read the
    result. Does nothing on other devices, while a CUDA graph is captured, in a compiled function,
    and if it is switched off. ``again`` measures again what is known.
    """
    kinds: dict[int, dict[Norms, None]] = {}
    for device, norms in wanted:
        if device.type == "cuda":
            kinds.setdefault(device.index or 0, {})[norms] = None
    if not kinds or why_not_tuned() or torch.compiler.is_compiling():
        return
    if torch.cuda.is_current_stream_capturing():
        return
    for index, found in kinds.items():
        gpu = Gpu(index)
        known = tuning.choose(gpu, tuple(found), again)
        tuning.apply(gpu, (choice for choice in known if choice.norms in found))


def stored() -> dict[int, tuple[Choice, ...]]:
    """The choices in the cache for each GPU of this machine."""
    if not torch.cuda.is_available():
        return {}
    found = {}
    for index in range(torch.cuda.device_count()):
        key = Gpu(index).key()
        paths = (folder / choices.file_name(key) for folder in build.cache_folders())
        known = (choices.read(path, key) for path in paths if build.is_trusted(path.parent))
        found[index] = next(filter(None, known), ())
    return found
