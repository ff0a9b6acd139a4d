"""The compiled kernels: loaded at first use, and what to say where there are none."""

from __future__ import annotations

from typing import Any


class Missing:
    """Stands where nothing was loaded: every kernel declines."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: NotImplemented


entry: Any = Missing()
"""The extension module: ``rms_norm`` and the others, which return NotImplemented to decline."""


def has(device: str) -> bool:
    """Whether there is a kernel for tensors on this type of device."""
    return False
