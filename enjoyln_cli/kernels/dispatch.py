"""The tuning table: for which sizes torch's own norm is faster than the kernel.

``scripts/tune_kernels.py`` measures a device and writes the result to ``dispatch.json``: from how
many elements on several threads are faster than one, and for which ranges of rows and widths
``F.layer_norm`` (or ``F.rms_norm`` and adding the bias) is faster than the kernel. For a device
that is not in the table, the kernel is always used.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "dispatch.json"
DTYPES = ("float32", "float16", "bfloat16", "float64")
"""In the same order as in ``csrc/call.h``."""


@dataclass(frozen=True)
class Place:
    """A range of rows and widths (both ends included) of one dtype, and what is faster there."""

    dtype: str
    rows: tuple[int, int]
    widths: tuple[int, int]
    faster: str
    """Torch's own ``layer_norm`` or ``rms_norm``."""

    def covers(self, dtype: str, rows: int, width: int) -> bool:
        inside = self.rows[0] <= rows <= self.rows[1] and self.widths[0] <= width <= self.widths[1]
        return inside and dtype == self.dtype


@dataclass(frozen=True)
class Table:
    """The measurements of one device."""

    serial_below: int = 1 << 16
    """A call with fewer elements runs on one thread, since starting more would take longer."""
    declined: tuple[Place, ...] = ()
    """Sizes for which the kernel is not used."""
    measured: str = ""
    """The hardware and versions of the measurement; empty if there was none."""


@cache
def table(device: str) -> Table:
    """The entry for a device name such as ``cpu-avx512`` or ``cuda-90``; defaults if missing."""
    found: dict[str, Any] = json.loads(FILE.read_text()).get(device, {})
    if not found:
        return Table()
    places = tuple(
        Place(p["dtype"], tuple(p["rows"]), tuple(p["widths"]), p["faster"])
        for p in found["declined"]
    )
    return Table(found["serial_below"], places, found["measured"])
