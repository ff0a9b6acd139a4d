"""Writes lines to standard output or standard error, on a terminal or into a file.

Imports nothing slow, so that a command can print its first line at once.
"""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

PIPED_WIDTH = 200
"""Width of tables that are not printed on a terminal, so that a file has them in full."""


def console(stderr: bool = False) -> Console:
    """A console that prints names literally. It replaces characters that the encoding lacks."""
    stream = sys.stderr if stderr else sys.stdout
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() else PIPED_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def say(text: str, style: str = "", stderr: bool = False) -> None:
    """Print one line without wrapping it."""
    console(stderr).print(Text(text, style=style), soft_wrap=True)
