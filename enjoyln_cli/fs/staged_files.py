"""Write a file, and files that belong to it, so that they appear complete or not at all.

They are written to a new directory beside the file, and renamed at the end. The files that belong
to it come first: at every moment the file is the complete old one, absent, or the complete new one.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import (
    OS_ERROR_ADVICE,
    absolute_path,
    check_file,
    sync,
    why_nothing_new,
)


def check_new_file(file: Path, beside: tuple[Path, ...] = (), *, force: bool = False) -> Path:
    """Return ``file`` as an absolute path if it, and the files ``beside`` it, can be written.

    Raises ``OutputError`` if one of them exists, unless ``force`` replaces it, or if the directory
    does not exist or allows no new files.
    """
    file = absolute_path(file)
    for path in (file, *(file.with_name(other.name) for other in beside)):
        if os.path.lexists(path) and not (force or path.is_dir()):
            raise OutputError(f"{path} exists; choose another name, or replace it with --force")
        check_file(path)
    if why := why_nothing_new(file.parent):
        raise OutputError(
            f"{file} cannot be written: {file.parent} does not allow new files ({why})"
        )
    return file


@contextmanager
def staged_file(
    file: Path, beside: tuple[Path, ...] = (), *, force: bool = False
) -> Iterator[Path]:
    """Yield a path in a new directory; what the block writes there becomes ``file`` at its end.

    The path has the name of ``file``. The block may also write files with the names of ``beside``
    to the same directory; they are put next to ``file``. With ``force`` existing files of all of
    these names are replaced; one that the block does not write again is removed. An exception in
    the block leaves them as they were.

    Raises ``OutputError`` as ``check_new_file`` does, and if the disk is full.
    """
    file = check_new_file(file, beside, force=force)
    others = [file.with_name(other.name) for other in beside]
    try:
        with tempfile.TemporaryDirectory(prefix=f".{file.name[:40]}.", dir=file.parent) as folder:
            yield Path(folder, file.name)
            written = [path for path in (*others, file) if Path(folder, path.name).exists()]
            for path in written:
                sync(Path(folder, path.name))
            check_new_file(file, beside, force=force)
            for old in (file, *others):
                old.unlink(missing_ok=True)
            for path in written:
                Path(folder, path.name).rename(path)
            sync(file.parent)
    except OSError as error:
        if error.errno not in OS_ERROR_ADVICE:
            raise
        raise OutputError(f"cannot write {file}: {OS_ERROR_ADVICE[error.errno]}") from error
