"""Decide how much of a model is in memory while it runs, and how much stays on disk.

The decision depends on the bytes of the parameters: of ``all``, and of the ``largest``. If
``HEADROOM * all`` bytes are free, the whole model is in memory. Otherwise weights are read from
disk when they are needed: ``COPIES * largest`` bytes are reserved for the weight that is being
read, and the rest of the memory keeps other weights.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.text import size

HEADROOM = 1.3
"""Memory of a running model relative to its parameters: copies by the loader, and activations."""
COPIES = 2
"""Copies of a tensor in memory while it is read: the converted and the edited copy. The stored
tensor is mapped from its file."""
M_MMAP_THRESHOLD, LARGE = -3, 1 << 20
"""The option of ``mallopt`` for the smallest block with its own mapping, and its new value."""
DEVICE_MAPS = ("auto", "cpu", "disk")
"""``auto``: in memory as far as weights fit; ``cpu``: all in memory; ``disk``: all on disk."""


def available_memory() -> int | None:
    """Bytes that can be used without swapping, within the limit of the control group.

    ``None`` if the system does not tell.
    """
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        if "MemAvailable" in fields:
            limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        limits.append(limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group, or no limit
    return min(limits) if limits else None


def give_back() -> None:
    """Make the C library return freed memory to the system: now, and later for large blocks.

    By default glibc keeps freed blocks of up to 32 MB, the size of most weights, for later use.
    """
    with suppress(AttributeError, OSError, TypeError):  # not glibc, or another system
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        libc.malloc_trim(0)


def used_memory() -> int:
    """Resident bytes of this process that no file backs; 0 if the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    resident = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")]
    return resident[0] if resident else 0


def fits(elements: int, dtype: torch.dtype, device_map: str, max_memory: int | None) -> bool:
    """Whether a model with that many ``elements`` in ``dtype`` may be in memory as a whole.

    Raises ``UnsupportedModel`` for a ``device_map`` that is none of ``DEVICE_MAPS``.
    """
    if device_map not in DEVICE_MAPS:
        raise UnsupportedModel(f"device_map is {device_map!r}, not one of {', '.join(DEVICE_MAPS)}")
    if max_memory is not None:
        give_back()
    free_bytes, need = _free_bytes(max_memory), elements * dtype.itemsize * HEADROOM
    return device_map == "cpu" or (
        device_map == "auto" and (free_bytes is None or need <= free_bytes)
    )


def _free_bytes(max_memory: int | None) -> int | None:
    """Bytes that this process may still use; ``None`` if the system does not tell."""
    return available_memory() if max_memory is None else max_memory - used_memory()


def bytes_for_weights(
    sizes: Mapping[str, int], dtype: torch.dtype, device_map: str, max_memory: int | None
) -> int | None:
    """How many bytes of weights may stay in memory; ``None`` if all of them may.

    ``sizes`` gives the number of elements of each parameter. ``max_memory`` is a limit in bytes for
    the whole process; without it, the free memory of the machine is the limit. Raises
    ``UnsupportedModel`` if that is too little for the largest parameter.
    """
    if fits(sum(sizes.values()), dtype, device_map, max_memory):
        return None
    give_back()
    free_bytes = _free_bytes(max_memory)
    name = max(sizes, key=lambda name: sizes[name])
    largest = COPIES * sizes[name] * dtype.itemsize
    if free_bytes is not None and free_bytes < largest:
        least = (largest + used_memory()) / 1e9
        raise UnsupportedModel(
            f"{name} alone takes {size(sizes[name] * dtype.itemsize)} in {dtype}, and only "
            f"{size(max(free_bytes, 0))} may be used; pass --max-memory {least + 0.1:.1f}GB"
        )
    return (
        0 if device_map == "disk" or free_bytes is None else int((free_bytes - largest) / HEADROOM)
    )
