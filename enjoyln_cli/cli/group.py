"""The group of commands: how an error is printed, and the exit status.

Every refusal is one line on standard error and exit status 1. The exit status is 2 for a usage
error, 130 after Ctrl-C, and 143 after SIGTERM.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import click

from enjoyln_cli.cli import help
from enjoyln_cli.errors import EnjoyLNError

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Settings that silence the libraries, unless the user set them or ``ENJOYLN_DEBUG=1``.

Warnings of Python and of ``logging`` are silenced, too. What a library logs as an error is shown.
"""
BARS = "HF_HUB_DISABLE_PROGRESS_BARS"


def debugging() -> bool:
    """Whether the user asked for tracebacks and the libraries' own messages."""
    return os.environ.get("ENJOYLN_DEBUG", "") not in ("", "0")


def complain(message: str) -> None:
    """Print one line on standard error, red if colours are allowed."""
    colour = False if os.environ.get("NO_COLOR") else None
    click.secho(f"error: {' '.join(message.split())}", fg="red", err=True, color=colour)


def open_streams() -> None:
    """Open ``os.devnull`` for each closed standard stream, so no other file gets its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def drop_unread() -> None:
    """Drop what nobody reads any more; when Python ends, it would try to write it, and complain."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


received: list[int] = []
"""The signals of ``end_on_signals`` that have come."""


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, unless they are ignored (``nohup``)."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    received.append(number)
    raise KeyboardInterrupt


class Commands(click.Group):
    """A group that turns every refusal into one line and an exit status."""

    command_class = help.Command

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which they are used."""
        return list(self.commands)

    def main(self, *args: Any, **options: Any) -> Any:
        """Run Click's ``main`` with standard streams that are open, and stay quiet at the end."""
        open_streams()
        try:
            return super().main(*args, **options)
        finally:
            drop_unread()

    def invoke(self, ctx: click.Context) -> Any:
        if debugging():
            return self._run(ctx)
        ctx.obj = {name for name in QUIET if name not in os.environ}
        os.environ.update({name: QUIET[name] for name in ctx.obj})
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            return self._run(ctx)
        except KeyboardInterrupt as error:
            number = received[0] if received else signal.SIGINT
            how = f"ended by {signal.Signals(number).name}" if received else "interrupted"
            complain(f"{how}; {str(error) or 'nothing half-written was left behind'}")
            ctx.exit(128 + number)
        except (click.exceptions.Exit, click.Abort, click.ClickException):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise
            complain(explain(error))
            ctx.exit(1)
        finally:
            logging.disable(logging.NOTSET)

    def _run(self, ctx: click.Context) -> Any:
        """Run the command and write all that it printed.

        Click ends with status 1 if the reader of the output has gone away.
        """
        result = super().invoke(ctx)
        sys.stdout.flush()
        return result


def explain(error: Exception) -> str:
    """The line that the user reads for an exception."""
    if isinstance(error, EnjoyLNError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}"
    kind = type(error).__name__
    return f"unexpected {kind}: {error} (ENJOYLN_DEBUG=1 shows where; please report it)"


def show_transfers() -> None:
    """Let ``huggingface_hub`` draw its bars on a terminal. Call this before it is imported."""
    if sys.stderr.isatty() and BARS in (click.get_current_context().obj or ()):
        os.environ.pop(BARS, None)
