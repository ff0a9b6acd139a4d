"""A new directory appears whole or not at all.

It is written under a temporary name beside its final one (so that a rename suffices), synced file
by file, and renamed. Whatever goes wrong before, the temporary directory is removed and what stood
in the place of the new one still stands there.
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

_FULL = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file system or a limit of this shell forbids files of this size; try "
    "--max-shard-size",
    errno.EROFS: "the file system is read-only; choose another place",
}


@contextmanager
def staged_output(out: Path, *, source: Path, force: bool) -> Iterator[Path]:
    """A temporary directory beside ``out`` that becomes ``out`` when the block ends well.

    With ``force`` an existing ``out`` is replaced. Raises ``OutputError``, before the block where
    ``out`` exists (without ``force``), holds ``source`` or the working directory, lies in
    ``source``, or has no parent that can be written to; after it where the disk is full or the
    directory cannot be renamed. Any exception of the block leaves ``out`` as it was.
    """
    out = check_place(out, source=source, force=force)
    tag = secrets.token_hex(4)
    staged = out.parent / f".{out.name[:200]}.{tag}.partial"
    try:
        try:
            staged.mkdir()
        except OSError as error:
            raise OutputError(f"{out.parent} cannot be written to: {error.strerror}") from error
        try:
            yield staged
        except OSError as error:
            if error.errno in _FULL:
                raise OutputError(f"cannot write {out}: {_FULL[error.errno]}") from error
            raise
        try:
            _sync_tree(staged)
            _rename(staged, out, staged.with_suffix(".old"), force)
        except OSError as error:
            why = _FULL.get(error.errno or 0, error.strerror)
            raise OutputError(f"cannot write {out}: {why}") from error
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def check_place(out: Path, *, source: Path, force: bool) -> Path:
    """``out`` as an absolute path; ``OutputError`` where no directory can be made or replaced."""
    out = Path(os.path.abspath(out.expanduser()))
    real, origin, here = out.resolve(), source.resolve(), Path.cwd().resolve()
    if real == origin or out == origin:
        raise OutputError(f"{out} is the source itself; choose another directory")
    if origin in real.parents:
        raise OutputError(f"{out} lies inside the source {source}; choose another directory")
    if real in origin.parents:
        raise OutputError(f"{out} holds the source {source}; choose another directory")
    if os.path.lexists(out):
        if not force:
            raise OutputError(f"{out} exists; choose another directory, or replace it with --force")
        if real == here or real in here.parents:
            raise OutputError(f"{out} holds the working directory; choose another directory")
    if not out.parent.is_dir():
        missing = "is not a directory" if out.parent.exists() else "does not exist"
        raise OutputError(f"{out.parent} {missing}; create it first")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise OutputError(f"{out.parent} cannot be written to; choose another place")
    return out


def _rename(staged: Path, out: Path, aside: Path, force: bool) -> None:
    if not force and os.path.lexists(out):
        raise OutputError(f"{out} appeared in the meantime; choose another directory")
    try:
        if os.path.lexists(out):
            out.rename(aside)
        staged.rename(out)
        _sync(out.parent)
    finally:
        if os.path.lexists(aside) and not os.path.lexists(out):
            aside.rename(out)
        elif os.path.lexists(aside):
            _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync_tree(root: Path) -> None:
    """Every file, then every directory from the innermost outwards."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            _sync(Path(folder, name))
        _sync(Path(folder))


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync directories
            raise
    finally:
        os.close(file)
