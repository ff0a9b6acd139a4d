"""Whether other programs disturb a measurement on this machine.

There are two signs: the load average leaves fewer cores free than the run has threads, or the same
short call takes much longer at one time than at another.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

TAKEN = 0.5
"""Cores that other programs may use without a warning: a load average is never exactly zero."""
UNSTEADY = 1.5
"""Least ratio of the slowest to the median time of the same call that causes a warning."""


def load_average() -> float | None:
    """The load average of the last minute; ``None`` if the system has none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def cores() -> int:
    """The number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def busy(load: float | None, own: float, threads: int, count: int) -> str:
    """A warning if other programs leave too few of ``count`` cores free; otherwise empty.

    ``load`` is the load average, ``own`` the part of it that this run causes, and ``threads`` the
    number of threads that the run needs.
    """
    others = 0.0 if load is None else max(0.0, load - own)
    if others <= TAKEN or count - others >= threads - TAKEN:
        return ""
    text = f"other programs use about {min(others, count):.1f} of {count} cores"
    return f"{text}; close them and measure again, as small differences are lost in the noise"


def unsteady(seconds: Sequence[float]) -> str:
    """A warning if the same call took very different times; otherwise empty."""
    middle, slowest = statistics.median(seconds), max(seconds)
    if len(seconds) < 3 or slowest < UNSTEADY * middle:
        return ""
    at_one, at_another = (f"{1e3 * value:.3g} ms" for value in (middle, slowest))
    took = f"the same call took {at_one} at one time and {at_another} at another"
    return f"{took}, so other programs are running or the clock rate changes"
