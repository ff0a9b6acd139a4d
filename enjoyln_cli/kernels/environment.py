"""Which kernels this machine can use, and why others are not available: for ``enjoyln env``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from enjoyln_cli.kernels import build, cuda, dispatch, gpu, native, ops


def environment() -> dict[str, Any]:
    """Describe everything that decides the speed of folded norms; compiles missing CPU kernels.

    ``devices`` has one entry for ``cpu``, one for ``cuda``, and one for an accelerator of another
    type, such as ``mps``. If kernels are active, it names them, their file and their measurements;
    otherwise the reason, and what is computed instead.
    """
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "compilers": {"cpu": _or_reason(build.compiler), "cuda": _or_reason(_nvrtc)},
        "cache": str(build.cache_folders()[0]),
        "devices": [_cpu(), _cuda(), *_others()],
    }


def _or_reason(find: Callable[[], str]) -> str:
    try:
        return find()
    except build.NoLibrary as error:
        return str(error)


def _nvrtc() -> str:
    library = cuda.nvrtc()
    return f"NVRTC {cuda.nvrtc_version(library)}, {library._name}"


def _instead(device: str) -> str:
    """What a folded norm runs on a device without kernels, as a sentence's end."""
    if ops.torch_fuses(device):
        return "torch's rms_norm, or its LayerNorm if they have a bias (see fold --merge bias)"
    return "torch's LayerNorm, which is no slower than before"


def _status(device: str) -> tuple[native.Status, dict[str, Any]]:
    """The status of a device, and its entry as far as it is the same for each."""
    status = native.status(device, retry=True)
    found: dict[str, Any] = {"device": device, "active": status.active}
    if not status.active:
        return status, found | {"why": status.what, "instead": _instead(device)}
    return status, found | {"kernels": status.what, "library": str(status.path)}


def _cpu() -> dict[str, Any]:
    status, found = _status("cpu")
    if not status.active:
        return found
    table = dispatch.table(native.table_name(status))
    return found | {
        "measured": table.measured or "not on a device like this one",
        "threads_from": table.serial_below,
        "other_ways": [
            f"{place.faster} for {place.dtype}, {place.rows[0]} to {place.rows[1]} rows of "
            f"{place.widths[0]} to {place.widths[1]}"
            for place in table.declined
        ],
    }


def _others() -> list[dict[str, Any]]:
    found = torch.accelerator.current_accelerator(check_available=True)
    return [] if found is None or found.type == "cuda" else [_status(found.type)[1]]


def _cuda() -> dict[str, Any]:
    _, found = _status("cuda")
    stored = {index: [asdict(one) for one in some] for index, some in gpu.stored().items()}
    return found | {"choices": stored, "not_measured": gpu.why_not_tuned()}
