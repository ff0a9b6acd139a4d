"""How much of a model can be run in float64 in the memory there is.

Decides between the whole model and its first blocks: a config with fewer layers loads the weights
of those layers alone.
"""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint import Checkpoint

HEADROOM = 1.3
"""Memory of a float64 model over that of its parameters: the loader's copies and activations."""

_LAYER = re.compile(r"\.(\d+)\.")


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


def blocks_that_fit(checkpoint: Checkpoint, config: Any, budget: int | None) -> int | None:
    """How many first blocks fit in ``budget`` bytes in float64; ``None`` for all of them.

    From the headers alone. 0 where not even one does, or the config does not say how many there
    are.
    """
    sizes = {name: math.prod(stored.shape) for name, stored in checkpoint.tensors.items()}
    room = math.inf if budget is None else budget / (8 * HEADROOM)
    if sum(sizes.values()) <= room:
        return None
    layers = getattr(config, "num_hidden_layers", None)
    if not layers:
        return 0
    blocks = sum(size for name, size in sizes.items() if _LAYER.search(f".{name}"))
    rest = sum(sizes.values()) - blocks
    return max(0, min(int((room - rest) // max(blocks / layers, 1)), layers - 1))


def first_blocks(config: Any, blocks: int) -> Any:
    """A copy of ``config`` with ``blocks`` layers, lists of one entry per layer cut too."""
    cut = copy.deepcopy(config)
    layers = cut.num_hidden_layers
    for name, value in list(vars(cut).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(cut, name, value[:blocks])
    cut.num_hidden_layers = blocks
    return cut
