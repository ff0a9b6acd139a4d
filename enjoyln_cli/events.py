"""What a long job tells of itself: stages, and warnings that go with its result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from enjoyln_cli.fs.whole_file import write_whole

Event = Callable[[str, str], None]
"""Receives ``("stage", text)``, or ``("download", text)`` for a stage in which the Hub's library
draws its own bars; ``("warning", text)``; and ``("failure", text)`` for a file that could not be
written and is not the job's result."""


def default_listener(level: str, text: str) -> None:
    """Issue warnings and failures with ``warnings.warn``; ignore stages."""
    if level in ("warning", "failure"):
        warnings.warn(text, stacklevel=3)


def write_or_warn(path: Path, text: str, event: Event) -> None:
    """Write what was measured; where that fails, say so, since it can still be printed."""
    try:
        write_whole(path, text)
    except OSError as error:
        event("failure", f"{path} is not written: {error.strerror or error}")
