"""A new directory appears whole or not at all.

It is made in a work directory beside its final place, so that a rename suffices:

    .OUT.partial/lock        locked while a run is at work there
    .OUT.partial/result/     what becomes OUT, synced file by file before it is renamed
    .OUT.partial/finished/   one file for each of the result's that a later run need not write again
    .OUT.partial/replaced    what stood at OUT, until the new one stands there

At every instant there is the old one at OUT, or nothing, or the new one as a whole. Whatever goes
wrong before, the work directory is removed and what stood at OUT still stands there; only where a
run was stopped from outside, and has finished something, it stays and a later one can go on with
it. A run that was killed leaves it as it is.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from enjoyln_cli.errors import EnjoyLNError, ModelNotFound, OutputError

RESULT = "result"
FINISHED = "finished"
_REPLACED = "replaced"
_GONE = "gone"
_LOCK = "lock"
_TRIES = 100
"""How often a work directory that vanishes is made again: other runs remove it when they end."""
_LONGEST = 200
"""Bytes of a name that still is a name with what is put around it."""

_FULL = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file system or a limit of this shell forbids files of this size; try "
    "--max-shard-size",
    errno.EROFS: "the file system is read-only; choose another place",
}
_STOPPED = (KeyboardInterrupt, OSError, OutputError, ModelNotFound)
"""What stops a run and says nothing against what it has written."""


def work_of(out: Path) -> Path:
    """The directory in which ``out`` is made: the same one for every run."""
    out = _absolute(out)
    name = out.name
    if len(os.fsencode(name)) > _LONGEST:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return out.parent / f".{name}.partial"


def _absolute(out: Path) -> Path:
    return Path(os.path.abspath(out.expanduser()))


@contextmanager
def staged_output(out: Path, *, source: Path, force: bool, resume: bool = False) -> Iterator[Path]:
    """A directory on the file system of ``out`` that becomes ``out`` when the block ends well.

    It is empty, except with ``resume``: then it holds whatever an earlier run has left, which the
    block has to judge. With ``force`` an existing ``out`` is replaced. Raises ``OutputError``,
    before the block where ``check_place`` does and while another run is at work; after it where the
    disk is full or the directory cannot be renamed. Any exception of the block leaves ``out`` as it
    was; one that comes from outside names the work directory if that is kept.
    """
    out = check_place(out, source=source, force=force, resume=resume)
    work = work_of(out)
    staged = work / RESULT
    made = [folder for folder in out.parents if not folder.exists()]
    lock = _locked(work, out)
    try:
        _recover(work, out, force)
        if not resume:
            clear(work)
        staged.mkdir(exist_ok=True)
        yield staged
        _publish(staged, out, work / _REPLACED, force)
    except BaseException as error:
        kept = isinstance(error, _STOPPED) and count_finished(work) > 0
        if not kept:
            shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):  # somebody else may have put something there
                for folder in made:
                    folder.rmdir()
        told = _told(error, out, work if kept else None)
        if told is error:
            raise
        raise told from error
    else:
        with suppress(OSError):
            _discard(work)
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)


def _told(error: BaseException, out: Path, kept: Path | None) -> BaseException:
    """What the user has to read of ``error``, and of what is ``kept``."""
    advice = "" if kept is None else f"{_left(kept)}; go on with --resume, or remove that directory"
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(advice) if kept else error
    if isinstance(error, OSError) and (kept or error.errno in _FULL):
        why = _FULL.get(error.errno or 0, f"{error.strerror or error}")
        return OutputError(f"cannot write {out}: {why}" + f"; {advice}" * bool(kept))
    if isinstance(error, EnjoyLNError) and kept and "--resume" not in str(error):
        return type(error)(f"{error}; {advice}")
    return error


def _left(work: Path) -> str:
    done = count_finished(work)
    return f"{done} finished file{'s' * (done != 1)} kept in {work}"


def count_finished(work: Path) -> int:
    """How many files of an unfinished result need not be written again."""
    try:
        return sum(entry.name.endswith(".json") for entry in os.scandir(work / FINISHED))
    except OSError:
        return 0


def check_place(out: Path, *, source: Path, force: bool, resume: bool = False) -> Path:
    """``out`` as an absolute path; ``OutputError`` where no directory can be made or replaced.

    What an unfinished run has left is a reason to refuse, unless ``resume`` goes on with it or
    ``force`` gives it up.
    """
    out = _absolute(out)
    real, origin, here = out.resolve(), source.resolve(), Path.cwd().resolve()
    if real == origin or out == origin:
        raise OutputError(f"{out} is the source itself; choose another directory")
    if origin in real.parents:
        raise OutputError(f"{out} lies inside the source {source}; choose another directory")
    if real in origin.parents:
        raise OutputError(f"{out} holds the source {source}; choose another directory")
    if os.path.lexists(out):
        _require_free(out, force, resume)
        if real == here or real in here.parents:
            raise OutputError(f"{out} holds the working directory; choose another directory")
    above = next(folder for folder in out.parents if os.path.lexists(folder))
    if not above.is_dir():
        raise OutputError(f"{above} is not a directory; choose another place")
    if not os.access(above, os.W_OK | os.X_OK):
        raise OutputError(f"{above} cannot be written to; choose another place")
    work = work_of(out)
    if count_finished(work) and not (force or resume):
        if _busy(work):
            raise _taken(out)
        raise OutputError(
            f"an earlier run to {out} was interrupted, {_left(work)}; go on with --resume, or "
            "start anew with --force"
        )
    return out


def check_file(file: Path) -> None:
    """Raises ``OutputError`` for a file that cannot be written, before there is anything to write.

    Nothing is made or changed to find that out.
    """
    folder, why = file.parent, ""
    if os.path.isdir(file):
        why = "it is a directory"
    elif not folder.is_dir():
        why = f"{folder} is not a directory"
    elif os.path.exists(file):
        why = "" if os.access(file, os.W_OK) else "it is read-only"
    elif not os.access(folder, os.W_OK | os.X_OK):
        why = f"{folder} does not allow new files"
    if why:
        raise OutputError(f"{file} cannot be written: {why}")


def write_file(file: Path, content: bytes) -> None:
    """Raises ``OutputError`` where it cannot be written; a new file is then not left in part."""
    is_new = not os.path.lexists(file)
    try:
        file.write_bytes(content)
    except OSError as error:
        if is_new:
            with suppress(OSError):
                file.unlink()
        raise OutputError(f"{file} cannot be written: {error.strerror or error}") from error


def _require_free(out: Path, force: bool, resume: bool = False) -> None:
    if resume and not force:
        raise OutputError(f"{out} is complete, so there is nothing to resume")
    if not force:
        raise OutputError(f"{out} exists; choose another directory, or replace it with --force")


def _locked(work: Path, out: Path) -> int:
    """Make ``work`` and lock it: an open file. A file system without locks lets every run pass."""
    for _ in range(_TRIES):
        try:
            work.mkdir(parents=True, exist_ok=True)
            if work.is_symlink():
                raise OutputError(f"{work} is a link to somewhere else; remove it")
            file = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # removed in between by the run that was at work
            continue
        except OSError as error:
            raise OutputError(f"{out.parent} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise _taken(out) from error
        except OSError:
            pass
        try:
            if os.path.samestat(os.fstat(file), os.stat(work / _LOCK)):
                return file
        except FileNotFoundError:
            pass
        os.close(file)
    raise OutputError(f"cannot create a directory in {out.parent}; choose another place")


def _busy(work: Path) -> bool:
    """Whether a run is at work there."""
    try:
        with (work / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _taken(out: Path) -> OutputError:
    return OutputError(f"another run is writing {out}; wait for it, or choose another directory")


def clear(folder: Path, keep: Collection[Path] = ()) -> None:
    """Remove everything below ``folder`` but the lock and the files to keep."""
    for path, folders, files in os.walk(folder, topdown=False):
        for found in (Path(path, name) for name in files):
            if found not in keep and found != folder / _LOCK:
                found.unlink()
        for found in (Path(path, name) for name in folders):
            if found.is_symlink():
                found.unlink()
            elif not any(os.scandir(found)):
                found.rmdir()


def _recover(work: Path, out: Path, force: bool) -> None:
    """Put back what a killed run had already moved aside."""
    replaced = work / _REPLACED
    if os.path.lexists(replaced):
        if os.path.lexists(out):
            _discard(work)
        else:
            replaced.rename(out)
            _require_free(out, force)


def _discard(work: Path) -> None:
    """Remove what was replaced, under a name from which nobody puts it back half removed."""
    replaced, gone = work / _REPLACED, work / _GONE
    if os.path.lexists(replaced):
        if os.path.lexists(gone):
            _remove(gone)
        replaced.rename(gone)
        _remove(gone)


def _publish(staged: Path, out: Path, aside: Path, force: bool) -> None:
    if not force and os.path.lexists(out):
        raise OutputError(f"{out} appeared in the meantime; choose another directory")
    try:
        _sync_tree(staged)
        try:
            if os.path.lexists(out):
                out.rename(aside)
            staged.rename(out)
            _sync(out.parent)
        finally:
            if os.path.lexists(aside) and not os.path.lexists(out):
                aside.rename(out)
    except OSError as error:
        why = _FULL.get(error.errno or 0, error.strerror)
        raise OutputError(f"cannot write {out}: {why}") from error


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
