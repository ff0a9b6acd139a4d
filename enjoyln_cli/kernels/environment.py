"""Which kernels this machine can use, and why others are not available: for ``enjoyln env``."""

from __future__ import annotations

from typing import Any

import torch

from enjoyln_cli.kernels import gpu, norms

SAME_RESULTS = "torch's LayerNorm, with the same results"


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


def _describe(device: str) -> dict[str, Any]:
    why = gpu.why_not_measured() if device == "cuda" else f"there are none for {device}"
    if why:
        fused = "torch's rms_norm, or its LayerNorm if they have a bias (see fold --merge bias)"
        instead = fused if norms.torch_fuses(device) else SAME_RESULTS
        return {"device": device, "active": False, "why": why, "instead": instead}
    return {"device": device, "active": True, "kernels": "the fastest at load"}
