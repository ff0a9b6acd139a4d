"""A terminal that tests read, and where they answer a question."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import struct
import termios
from collections.abc import Mapping

from commands import python


def on_a_terminal(*words: object, **environment: str) -> str:
    """What a terminal receives from a Python program that succeeds (see ``commands.python``)."""
    status, text = asked_on_a_terminal(b"", *words, environment=environment)
    assert status == 0, text
    return text


def asked_on_a_terminal(
    reply: bytes, *words: object, environment: Mapping[str, str]
) -> tuple[int, str]:
    """The exit status of a Python program and what its terminal receives.

    The terminal is all three streams, and controls the program: Ctrl-C is a signal. The user
    answers ``reply`` to a question that ends in ``[y/N]``.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = python(
        *words,
        environment={"TERM": "xterm-256color", **environment},
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    received, quiet, patience = b"", 0, 1
    with contextlib.suppress(OSError):  # raised when the program has closed its end
        while True:
            heard = bool(select.select([ours], [], [], 1.0)[0])
            if heard and not (block := os.read(ours, 65536)):
                break
            received += block if heard else b""
            quiet = 0 if heard else quiet + 1
            # Python misses a signal right before it waits; a second signal while it ends kills it
            if b"[y/N]" in received and quiet >= patience:
                os.write(ours, reply)
                quiet, patience = 0, 20
    os.close(ours)
    return process.wait(), received.decode()
