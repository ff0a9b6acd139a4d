"""The output directory: whole, or not there.

Everything is written into a sibling directory, flushed to the disk, and renamed into place.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enjoyln_cli.errors import OutputError
from enjoyln_cli.source import Source


@contextmanager
def staged_output(out: Path, *, source: Source, force: bool) -> Iterator[Path]:
    """A temporary sibling of ``out`` that becomes ``out`` if the block ends without an exception.

    With ``force`` an existing ``out`` is replaced in one step. Raises ``OutputError`` before
    anything is written if ``out`` exists, lies in the source or around it, or cannot be made.
    """
    out = Path(out).absolute()
    _require_apart(out, source.path)
    if out.exists() and not force:
        raise OutputError(f"{out} exists; name another directory, or pass --force to replace it")
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; name a directory")
    staged = out.parent / f".{out.name}.{secrets.token_hex(4)}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staged.mkdir()
    except OSError as error:
        raise OutputError(f"{out} cannot be created: {error.strerror}") from error
    try:
        yield staged
        _flush(staged)
        _publish(staged, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise OutputError(
                f"{out.parent} has no space left; nothing was kept. Free some or go elsewhere"
            ) from error
        raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _require_apart(out: Path, source: Path) -> None:
    out, source = out.resolve(), source.resolve()
    if out == source or out.is_relative_to(source):
        raise OutputError(f"{out} lies in the source {source}; name a directory outside of it")
    if source.is_relative_to(out):
        raise OutputError(f"{out} holds the source {source}; name a directory of its own")


def _flush(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in (*files, "."):
            descriptor = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _publish(staged: Path, out: Path) -> None:
    old = staged.with_name(f"{staged.name}.old")
    if out.exists():
        out.rename(old)
    try:
        staged.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
