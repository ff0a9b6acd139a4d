"""Which kernels this machine can use, and why others are not available: for ``enjoyln env``."""

from __future__ import annotations

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
    other = torch.accelerator.current_accelerator(check_available=True)
    devices = dict.fromkeys(("cpu", "cuda", *([other.type] if other is not None else [])))
    described = [_describe(device) for device in devices]
    return {"torch": torch.__version__, "threads": torch.get_num_threads(), "devices": described}


def why_no_kernels(device: str) -> str:
    """Why there are no kernels on a type of device; empty if there are."""
    if device == "cpu":
        return cpu.library().missing
    return gpu.why_not_measured() if device == "cuda" else f"there are none for {device}"


def kernels_on(device: str) -> str:
    """The name of the kernels on a type of device, such as ``avx512``, or why there are none."""
    active = cpu.library().level if device == "cpu" else "the fastest at load"
    return why_no_kernels(device) or active


def lost_without_kernels() -> str:
    """One sentence about a CPU without kernels; empty if there are kernels."""
    why = why_no_kernels("cpu")
    return why and f"no kernels for this CPU ({why}): a folded norm computes {SAME_RESULTS}"


def _describe(device: str) -> dict[str, Any]:
    if why := why_no_kernels(device):
        fused = "torch's rms_norm, or its LayerNorm if they have a bias (see fold --merge bias)"
        instead = fused if norms.torch_fuses(device) else SAME_RESULTS
        return {"device": device, "active": False, "why": why, "instead": instead}
    entry = {"device": device, "active": True, "kernels": kernels_on(device)}
    return entry | {"library": str(cpu.LIBRARY)} if device == "cpu" else entry
