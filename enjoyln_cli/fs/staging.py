"""Write an output directory OUT so that it appears complete or not at all.

The files are written to a work directory beside OUT, which is renamed at the end:

    .OUT.partial/lock        locked while a run uses the work directory
    .OUT.partial/result/     becomes OUT; every file is synced before the rename
    .OUT.partial/finished/   one record for each finished file, which --resume need not rewrite
    .OUT.partial/replaced    the previous OUT, until the new one is in place

At every moment OUT is the complete old directory, absent, or the complete new directory. If a run
fails, OUT stays as it was and the work directory is removed. If a run is interrupted from outside
(Ctrl-C, a full disk, a lost connection) and has finished at least one file, the work directory is
kept, so that a later run can resume. A killed run also leaves its work directory behind.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from enjoyln_cli.errors import EnjoyLNError, ModelNotFound, OutputError
from enjoyln_cli.text import why_no_text

RESULT = "result"
FINISHED = "finished"
_REPLACED = "replaced"
_REMOVING = "gone"
"""The new name of the previous OUT while it is being removed."""
_LOCK = "lock"
_MAX_LOCK_ATTEMPTS = 100
"""Another run that ends removes the work directory; this often it is created again."""
_MAX_NAME_BYTES = 200
"""The work directory of an output with a longer name is named after the name's digest."""

OS_ERROR_ADVICE = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file system or a limit of this shell forbids files of this size; "
    "fold and rotate write smaller files with --max-shard-size",
    errno.EROFS: "the file system is read-only; choose another place",
}
_RESUMABLE = (KeyboardInterrupt, OSError, OutputError, ModelNotFound)
"""Exceptions that interrupt a run without casting doubt on the files that it has finished."""


def work_of(out: Path) -> Path:
    """The work directory for ``out``, which is the same for every run."""
    out = absolute_path(out)
    name = out.name
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = hashlib.sha256(os.fsencode(name)).hexdigest()
    return out.parent / f".{name}.partial"


def learning_state(out: Path) -> Path:
    """The file beside ``out`` that an interrupted run of ``rotate --learn`` leaves behind."""
    work = work_of(out)
    return work.with_name(f"{work.stem}.learning")


def absolute_path(out: Path) -> Path:
    """``out`` as an absolute path. Raises ``OutputError`` for a name that no file can have."""
    if "\0" in str(out):
        raise OutputError(f"{str(out)!r} contains a NUL character; choose another name")
    absolute = os.path.abspath(out.expanduser())
    if why := why_no_text(absolute):
        raise OutputError(f"{absolute} {why}")
    return Path(absolute)


@contextmanager
def staged_output(out: Path, *, source: Path, force: bool, resume: bool = False) -> Iterator[Path]:
    """Yield a directory that becomes ``out`` when the block ends without an exception.

    The directory is empty. Only with ``resume`` it holds the files of an interrupted run, and the
    block has to decide which of them to use. With ``force`` an existing ``out`` is replaced. An
    exception in the block leaves ``out`` as it was; if the work directory is kept for ``--resume``,
    the message names it.

    Raises ``OutputError``: before the block as ``check_place`` does, and if another run writes to
    ``out``; after it if the disk is full or the directory cannot be renamed.
    """
    out = check_place(out, source=source, force=force, resume=resume)
    work = work_of(out)
    staged = work / RESULT
    new_parents = [folder for folder in out.parents if not folder.exists()]
    lock = _locked(work, out)
    try:
        _recover(work, out, force)
        if not resume:
            clear(work)
        staged.mkdir(exist_ok=True)
        yield staged
        _publish(staged, out, work / _REPLACED, force)
    except BaseException as error:
        resumable = isinstance(error, _RESUMABLE) and count_finished(work) > 0
        if not resumable:
            shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):  # another program may have put a file there
                for folder in new_parents:
                    folder.rmdir()
        explained = _explain(error, out, work if resumable else None)
        if explained is error:
            raise
        raise explained from error
    else:
        with suppress(OSError):
            _discard(work)
        shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(lock)


def _explain(error: BaseException, out: Path, work: Path | None) -> BaseException:
    """``error`` with advice for the user; ``work`` is the work directory if it was kept."""
    advice = ""
    if work is not None:
        advice = f"{_kept_files(work)}; continue with --resume, or remove that directory"
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(advice) if work else error
    number = _os_error_number(error)
    is_told = work or (number is None and str(error))
    if number in OS_ERROR_ADVICE or (isinstance(error, OSError) and is_told):
        named = error.strerror if isinstance(error, OSError) else None
        why = OS_ERROR_ADVICE.get(number or 0, f"{named or error}")
        return OutputError(f"cannot write {out}: {why}{f'; {advice}' if work else ''}")
    if isinstance(error, EnjoyLNError) and work and "--resume" not in str(error):
        return type(error)(f"{error}; {advice}")
    return error


def _os_error_number(error: BaseException) -> int | None:
    """The ``errno`` of an error; libraries in Rust write it into their messages.

    NumPy raises an ``OSError`` without a number where a file cannot take all bytes.
    """
    if isinstance(error, OSError):
        return error.errno
    written = re.search(r"\(os error (\d+)\)", str(error))
    return int(written[1]) if written else None


def _kept_files(work: Path) -> str:
    done = count_finished(work)
    return f"{done} finished file{'s' * (done != 1)} kept in {work}"


def count_finished(work: Path) -> int:
    """How many files of an interrupted run are finished and need not be written again."""
    try:
        return sum(entry.name.endswith(".json") for entry in os.scandir(work / FINISHED))
    except OSError:
        return 0


def check_place(out: Path, *, source: Path | None, force: bool, resume: bool = False) -> Path:
    """Return ``out`` as an absolute path if it can be written.

    ``source`` is ``None`` if it is not known yet where the model lies. Raises ``OutputError`` if
    the directory cannot be created or replaced, and if an interrupted run has left finished files,
    unless ``resume`` uses them or ``force`` discards them.
    """
    out = absolute_path(out)
    real, here = out.resolve(), Path.cwd().resolve()
    if source is not None:
        _require_apart(out, source)
    if os.path.lexists(out):
        _require_free(out, force, resume)
        if real == here or real in here.parents:
            raise OutputError(f"{out} contains the working directory; choose another directory")
    above = next(folder for folder in out.parents if os.path.lexists(folder))
    if not above.is_dir():
        raise OutputError(f"{above} is not a directory; choose another place")
    longest = max((len(os.fsencode(part)) for part in out.relative_to(above).parts), default=0)
    if longest > os.pathconf(above, "PC_NAME_MAX"):
        raise OutputError(f"{out} has a name that is too long for its file system; shorten it")
    if why := why_nothing_new(above):
        raise OutputError(f"cannot create a directory in {above}: {why}; choose another place")
    work = work_of(out)
    if count_finished(work) and not (force or resume):
        if _is_locked(work):
            raise _in_use_error(out)
        raise OutputError(
            f"an earlier run to {out} was interrupted, {_kept_files(work)}; continue with "
            "--resume, or start anew with --force"
        )
    return out


def _require_apart(out: Path, source: Path) -> None:
    """Raise ``OutputError`` if one of the two directories is the other or lies inside it."""
    real, origin = out.resolve(), source.resolve()
    if real == origin or out == origin:
        raise OutputError(f"{out} is the source itself; choose another directory")
    if origin in real.parents:
        raise OutputError(f"{out} lies inside the source {source}; choose another directory")
    if real in origin.parents:
        raise OutputError(f"{out} contains the source {source}; choose another directory")


def why_nothing_new(folder: Path) -> str:
    """Why nothing can be created in a directory, found by trying it; empty if it can.

    If the process is killed meanwhile, the next process removes what is left of the trial.
    """
    trial = folder / ".enjoyln.trial"
    try:
        with suppress(FileExistsError):
            trial.mkdir()
        with suppress(FileNotFoundError):  # another process has removed it
            trial.rmdir()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_file(file: Path) -> None:
    """Raise ``OutputError`` if ``file`` cannot be written; ``file`` itself is not touched."""
    folder, why = file.parent, ""
    if os.path.isdir(file):
        why = "it is a directory"
    elif not folder.is_dir():
        why = f"{folder} is not a directory"
    elif os.path.exists(file):
        why = "" if os.access(file, os.W_OK) else "it is read-only"
    elif reason := why_nothing_new(folder):
        why = f"{folder} does not allow new files ({reason})"
    if why:
        raise OutputError(f"{file} cannot be written: {why}")


def write_file(file: Path, content: bytes) -> None:
    """Write ``content`` to ``file``; if that fails, a partly written new file is removed.

    Raises ``OutputError`` if it cannot be written.
    """
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
    """Create ``work`` and lock it; returns the open lock file.

    On a file system without locks, the lock is skipped.
    """
    for _ in range(_MAX_LOCK_ATTEMPTS):
        try:
            work.mkdir(parents=True, exist_ok=True)
            if work.is_symlink():
                raise OutputError(f"{work} is a symbolic link; remove it")
            file = os.open(work / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:  # another run ended and removed the directory
            continue
        except OSError as error:
            raise OutputError(f"{out.parent} cannot be written to: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(file)
            raise _in_use_error(out) from error
        except OSError:
            pass
        try:
            if os.path.samestat(os.fstat(file), os.stat(work / _LOCK)):
                return file
        except FileNotFoundError:
            pass
        os.close(file)
    raise OutputError(f"cannot create a directory in {out.parent}; choose another place")


def _is_locked(work: Path) -> bool:
    """Whether another run holds the lock of ``work``."""
    try:
        with (work / _LOCK).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _in_use_error(out: Path) -> OutputError:
    return OutputError(f"another run is writing {out}; wait for it, or choose another directory")


def clear(folder: Path, keep: Collection[Path] = ()) -> None:
    """Remove everything below ``folder`` except the lock and the files in ``keep``."""
    for parent, folders, files in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in files):
            if path not in keep and path != folder / _LOCK:
                path.unlink()
        for path in (Path(parent, name) for name in folders):
            if path.is_symlink():
                path.unlink()
            elif not any(os.scandir(path)):
                path.rmdir()


def _recover(work: Path, out: Path, force: bool) -> None:
    """Move the previous OUT back if a killed run had moved it aside."""
    replaced = work / _REPLACED
    if os.path.lexists(replaced):
        if os.path.lexists(out):
            _discard(work)
        else:
            replaced.rename(out)
            _require_free(out, force)


def _discard(work: Path) -> None:
    """Remove the previous OUT.

    It is renamed first, so that ``_recover`` cannot restore a directory that is half removed.
    """
    replaced, removing = work / _REPLACED, work / _REMOVING
    if os.path.lexists(replaced):
        if os.path.lexists(removing):
            _remove(removing)
        replaced.rename(removing)
        _remove(removing)


def _publish(staged: Path, out: Path, aside: Path, force: bool) -> None:
    if not force and os.path.lexists(out):
        raise OutputError(f"{out} appeared in the meantime; choose another directory")
    try:
        _sync_tree(staged)
        try:
            if os.path.lexists(out):
                out.rename(aside)
            staged.rename(out)
            sync(out.parent)
        finally:
            if os.path.lexists(aside) and not os.path.lexists(out):
                aside.rename(out)
    except OSError as error:
        why = OS_ERROR_ADVICE.get(error.errno or 0, error.strerror)
        raise OutputError(f"cannot write {out}: {why}") from error


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _sync_tree(root: Path) -> None:
    """Sync every file to disk, and every directory after its contents."""
    for folder, _, files in os.walk(root, topdown=False):
        for name in files:
            sync(Path(folder, name))
        sync(Path(folder))


def sync(path: Path) -> None:
    """Wait until the file or directory ``path`` is on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that does not sync directories
            raise
    finally:
        os.close(file)
