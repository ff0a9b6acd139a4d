"""Where another way than the kernel was measured to be faster: the table that tuning writes.

``dispatch.json`` holds, for each device, what ``scripts/tune_kernels.py`` measured there: from how
many elements threads pay, and the ranges of rows and widths where ``F.layer_norm`` (or ``F.rms_norm``
and a bias) beat the kernel. A device that is not in the table has no such ranges.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "dispatch.json"
DTYPES = ("float32", "float16", "bfloat16", "float64")
"""In the order of ``call.h``."""


@dataclass(frozen=True)
class Place:
    """Rows and widths, both ends included, of one dtype, and what is faster there."""

    dtype: str
    rows: tuple[int, int]
    widths: tuple[int, int]
    faster: str
    """``layer_norm`` or ``rms_norm``, torch's own."""

    def covers(self, dtype: str, rows: int, width: int) -> bool:
        inside = self.rows[0] <= rows <= self.rows[1] and self.widths[0] <= width <= self.widths[1]
        return inside and dtype == self.dtype


@dataclass(frozen=True)
class Table:
    """What is known of one device."""

    serial_below: int = 1 << 16
    """Elements of one call below which a second thread costs more than it brings."""
    declined: tuple[Place, ...] = ()
    measured: str = ""
    """Where and with what it was measured; empty if it was not."""


@cache
def table(device: str) -> Table:
    """The entry of ``cpu-avx512``, ``cuda-90`` and so on; without ranges if there is none."""
    found: dict[str, Any] = json.loads(FILE.read_text()).get(device, {})
    if not found:
        return Table()
    places = tuple(
        Place(p["dtype"], tuple(p["rows"]), tuple(p["widths"]), p["faster"])
        for p in found["declined"]
    )
    return Table(found["serial_below"], places, found["measured"])
