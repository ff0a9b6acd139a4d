"""Where lines go: to a terminal or a file, as standard output or standard error.

Imports nothing that takes time, so that a command can say that it has begun.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

PIPED_WIDTH = 200
"""Columns for tables that do not go to a terminal, so that nothing is cut off in a file."""


def console(stderr: bool = False) -> Console:
    """A console that prints names literally and never fails for want of a character."""
    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def say(text: str, style: str = "", stderr: bool = False) -> None:
    """One line, never hard-wrapped."""
    console(stderr).print(Text(text, style=style), soft_wrap=True)
