"""What a long job tells of itself: stages, and warnings that go with its result."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from enjoyln_cli.files import write_whole

Event = Callable[[str, str], None]
"""Receives ``("stage", text)`` or ``("warning", text)``."""


def by_python(level: str, text: str) -> None:
    """For callers that did not say whom to tell: warnings are Python's, stages are not told."""
    if level == "warning":
        warnings.warn(text, stacklevel=3)


def keep(path: Path, text: str, event: Event) -> None:
    """Write what was measured; where nobody may, a warning: it is still there to be printed."""
    try:
        write_whole(path, text)
    except OSError as error:
        event("warning", f"{path} is not written: {error.strerror or error}")
