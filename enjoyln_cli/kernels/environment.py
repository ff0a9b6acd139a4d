"""Which kernels this machine can use, and why others are not available: for ``enjoyln env``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from enjoyln_cli.kernels import cpu, gpu, norms

SAME_RESULTS = "torch's LayerNorm, with the same results; nothing is lost but speed"


def environment() -> dict[str, Any]:
    """Describe everything that decides the speed of folded norms.

    ``devices`` has one entry for ``cpu``, one for ``cuda``, and one for an accelerator of another
    type, such as ``mps``. If kernels are active, it names them; otherwise the reason, and what is
    computed instead.
    """
    others = torch.accelerator.current_accelerator(check_available=True)
    devices = [_cpu(), _cuda()]
    if others is not None and others.type != "cuda":
        devices.append(_without(others.type, f"there are none for {others.type}"))
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "devices": devices}


def kernels_on(device: str) -> str:
    """The name of the kernels on a type of device, such as ``avx512``, or why there are none."""
    if device == "cpu":
        library = cpu.library()
        return library.level if isinstance(library, cpu.Library) else str(library)
    if device == "cuda" and not gpu.why_not_measured():
        return "the fastest at load"
    return f"there are none for {device}"


def lost_without_kernels() -> str:
    """One sentence about a CPU without kernels; empty if there are kernels."""
    library = cpu.library()
    if isinstance(library, cpu.Library):
        return ""
    return f"no kernels for this CPU ({library}): a folded norm computes {SAME_RESULTS}"


def _cpu() -> dict[str, Any]:
    library = cpu.library()
    if isinstance(library, cpu.Missing):
        return _without("cpu", str(library))
    return {"device": "cpu", "active": True, "kernels": library.level, "library": str(cpu.LIBRARY)}


def _cuda() -> dict[str, Any]:
    if reason := gpu.why_not_measured():
        return _without("cuda", reason)
    measured = [
        {"device": str(device)} | asdict(choice)
        for (device, _), choices in gpu.measured.items()
        for choice in choices
    ]
    return {"device": "cuda", "active": True, "kernels": kernels_on("cuda"), "choices": measured}


def _without(device: str, reason: str) -> dict[str, Any]:
    instead = SAME_RESULTS
    if norms.torch_fuses(device):
        instead = "torch's rms_norm, or its LayerNorm if they have a bias (see fold --merge bias)"
    return {"device": device, "active": False, "why": reason, "instead": instead}
