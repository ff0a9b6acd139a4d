"""Where a model is while it runs: in memory, or on the disk as far as it does not fit.

Decides by the bytes of its parameters. With ``largest`` the bytes of the largest of them, a model
runs in memory where ``HEADROOM * all <= room``; otherwise its weights are read when they are
needed, ``COPIES * largest`` of the room is for the one that is, and what is left keeps others. A
user may also ask for a model cut to its first blocks: a config with fewer layers loads the weights
of those layers alone.
"""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.text import size

HEADROOM = 1.3
"""Memory of a model that runs over that of its parameters: the loader's copies and activations."""
COPIES = 2
"""Of a tensor while it is read: converted, and edited. What is stored is mapped from its file."""
M_MMAP_THRESHOLD, LARGE = -3, 1 << 20
"""The name of a setting in ``malloc.h``: from how many bytes on a block is a mapping of its own."""
DEVICE_MAPS = ("auto", "cpu", "disk")
"""Where weights are: in memory as far as they fit, all in memory, all on the disk."""

DEPTHS = (
    "num_hidden_layers",
    "num_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
"""What configs call the number of blocks."""


def available_memory() -> int | None:
    """Bytes that can be used without swapping, the control group's limit counted, if known."""
    found = []
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        if "MemAvailable" in fields:
            found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        found.append(limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass  # no control group, or one without a limit
    return min(found) if found else None


def give_back() -> None:
    """Have the C library return what is freed: now, and from now on at once where it is large.

    Left to itself, glibc keeps blocks of up to 32 MB for later, which is most weights, and holes
    between those that stay.
    """
    with suppress(AttributeError, OSError, TypeError):  # another library, or another system
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGE)
        libc.malloc_trim(0)


def used_memory() -> int:
    """Bytes of this process that no file backs; 0 where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon")]
    return found[0] if found else 0


def room_for_weights(
    sizes: Mapping[str, int], dtype: torch.dtype, device_map: str, max_memory: int | None
) -> int | None:
    """Bytes of weights that may stay in memory, the rest on the disk; ``None`` for all of them.

    ``sizes`` are elements by parameter. ``max_memory`` (bytes) is for the whole process; without it
    the room is what the machine has left. Raises ``UnsupportedModel`` where it is too little for
    the largest parameter.
    """
    if device_map not in DEVICE_MAPS:
        raise UnsupportedModel(f"device_map is {device_map!r}, not one of {', '.join(DEVICE_MAPS)}")
    if max_memory is not None:
        give_back()
    room = available_memory() if max_memory is None else max_memory - used_memory()
    need = sum(sizes.values()) * dtype.itemsize * HEADROOM
    if device_map == "cpu" or (device_map == "auto" and (room is None or need <= room)):
        return None
    give_back()
    name = max(sizes, key=lambda found: sizes[found])
    one = COPIES * sizes[name] * dtype.itemsize
    if room is not None and room < one:
        least = (one + used_memory()) / 1e9
        raise UnsupportedModel(
            f"{name} alone takes {size(sizes[name] * dtype.itemsize)} in {dtype}, and only "
            f"{size(max(room, 0))} may be used; pass --max-memory {least + 0.1:.1f}GB"
        )
    return 0 if device_map == "disk" or room is None else int((room - one) / HEADROOM)


def first_blocks(config: Any, blocks: int) -> Any:
    """A copy of ``config`` with at most ``blocks`` layers in every part of the model.

    Lists with an entry for each layer are cut too. Raises ``UnsupportedModel`` where no part has
    more layers than that.
    """
    cut = copy.deepcopy(config)
    fewer = False
    for part in _parts(cut):
        names = [name for name in DEPTHS if type(getattr(part, name, None)) is int]
        depths = {name: getattr(part, name) for name in names}
        for name, depth in depths.items():
            if depth > blocks:
                setattr(part, name, blocks)
                fewer = True
        for name, value in list(vars(part).items()):
            if isinstance(value, list) and len(value) in depths.values() and len(value) > blocks:
                setattr(part, name, value[:blocks])
    if not fewer:
        raise UnsupportedModel(
            f"this {config.model_type} has no more than {blocks} blocks, so --layers would leave "
            "nothing out; drop it"
        )
    return cut


def _parts(config: Any) -> Iterator[Any]:
    """A config and all configs inside of it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "model_type") and value is not config:
            yield from _parts(value)
