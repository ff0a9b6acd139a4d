"""Which kernels this machine can use, and why others are not available: for ``enjoyln env``."""

from __future__ import annotations

from typing import Any

import torch

from enjoyln_cli.kernels import build, dispatch, native, ops


def environment() -> dict[str, Any]:
    """Describe everything that decides the speed of folded norms; compiles missing kernels.

    ``devices`` has one entry for ``cpu`` and one for ``cuda``. If kernels are active, it names
    them, their file and their measurements; otherwise the reason, and what is computed instead.
    """
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "compilers": {kind: _compiler(kind) for kind in ("cpu", "cuda")},
        "cache": str(build.cache_folders()[0]),
        "devices": [_device(name) for name in native.DEVICES],
    }


def _compiler(kind: str) -> str:
    try:
        return build.compiler(kind)
    except build.NoLibrary as error:
        return str(error)


def _instead(device: str) -> str:
    """What a folded norm runs on a device without kernels, as a sentence's end."""
    if ops.torch_fuses(device):
        return "torch's rms_norm, or its LayerNorm if they have a bias (see fold --merge bias)"
    return "torch's LayerNorm, which is no slower than before"


def _device(name: str) -> dict[str, Any]:
    status = native.status(name, retry=True)
    found: dict[str, Any] = {"device": name, "active": status.active}
    if not status.active:
        return found | {"why": status.what, "instead": _instead(name)}
    table = dispatch.table(native.table_name(status))
    return found | {
        "kernels": status.what,
        "library": str(status.path),
        "measured": table.measured or "not on a device like this one",
        "threads_from": table.serial_below if name == "cpu" else None,
        "other_ways": [
            f"{place.faster} for {place.dtype}, {place.rows[0]} to {place.rows[1]} rows of "
            f"{place.widths[0]} to {place.widths[1]}"
            for place in table.declined
        ],
    }
