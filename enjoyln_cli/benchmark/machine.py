"""Whether a machine is free enough for its times to be believed.

Two signs say that it is not: the load average leaves fewer cores free than the run has threads, and
the same short call takes much longer at one time than at another.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

TAKEN = 0.5
"""Cores that may be missing: a load average never is quite zero."""
UNSTEADY = 1.5
"""Slowest over median of the same call, from which on the machine is not steady."""


def load_average() -> float | None:
    """Of the last minute; ``None`` where the system has none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy(load: float | None, own: float, threads: int, count: int) -> str:
    """A sentence where the work of others leaves too few of ``count`` cores; empty otherwise.

    ``load`` is a load average of which this run has caused ``own``; ``threads`` are what it needs.
    """
    others = 0.0 if load is None else max(0.0, load - own)
    if others <= TAKEN or count - others >= threads - TAKEN:
        return ""
    text = f"other programs use about {min(others, count):.1f} of {count} cores"
    return f"{text}; close them and measure again, as small differences are lost in the noise"


def unsteady(seconds: Sequence[float]) -> str:
    """A sentence where the same call took very different times; empty otherwise."""
    middle, slowest = statistics.median(seconds), max(seconds)
    if len(seconds) < 3 or slowest < UNSTEADY * middle:
        return ""
    at_one, at_another = (f"{1e3 * value:.3g} ms" for value in (middle, slowest))
    took = f"the same call took {at_one} at one time and {at_another} at another"
    return f"{took}, so other programs are running or the clock rate changes"
