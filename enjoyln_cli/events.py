"""Events that a long job reports while it runs: its stages, warnings and failures."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

from enjoyln_cli.fs.whole_file import write_whole

Event = Callable[[str, str], None]
"""A listener, called with a level and a text. The levels are:

* ``"stage"``: a new stage begins;
* ``"download"``: a stage begins in which ``huggingface_hub`` shows its own progress bars;
* ``"warning"``: the user should know this about the result;
* ``"failure"``: a side file could not be written; the job's result is complete without it."""


def default_listener(level: str, text: str) -> None:
    """Issue warnings and failures with ``warnings.warn``; ignore stages."""
    if level in ("warning", "failure"):
        warnings.warn(text, stacklevel=3)


def write_or_warn(path: Path, text: str, event: Event) -> None:
    """Write a report file. If that fails, report a ``"failure"``: the caller still prints it."""
    try:
        write_whole(path, text)
    except OSError as error:
        event("failure", f"{path} is not written: {error.strerror or error}")
