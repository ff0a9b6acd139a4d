"""Write a checkpoint's shards with some tensors edited, in bounded memory.

Threads take parts of tensors from one queue (torch and the system calls release the interpreter
lock). Which tensors change, and why, is decided elsewhere.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from enjoyln_cli.checkpoint.headers import FLOATS, StoredTensor, load_bin
from enjoyln_cli.checkpoint.reader import Checkpoint, read_tensor
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.finite import unusable_input
from enjoyln_cli.errors import BadCheckpoint, OutputError
from enjoyln_cli.models.memory import give_back
from enjoyln_cli.plan.fold_options import WRITE_DEFAULTS, WriteOptions
from enjoyln_cli.rewrite.edit_pieces import in_threads
from enjoyln_cli.rewrite.journal import Journal, note, resume_shards
from enjoyln_cli.rewrite.shard_layout import Shard, index, layout
from enjoyln_cli.rewrite.tensor_parts import (
    TensorFiles,
    TensorPart,
    parts_of,
    write_bytes,
)
from enjoyln_cli.text import size

THREADS = 2
"""Threads for each job: while one waits for the disk, the other computes."""


def write_shards(
    checkpoint: Checkpoint,
    edits: Mapping[str, Edit],
    into: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    *,
    progress: Callable[[int], None] | None = None,
    journal: Journal | None = None,
) -> tuple[str, ...]:
    """Write every tensor of ``checkpoint`` to safetensors files in the directory ``into``.

    ``edits`` maps names of written tensors to edits; a new tensor is stored in the file of the
    tensor that it is made from. Without a new ``max_shard_size`` the layout stays, and without a
    new ``dtype`` so does every header. ``progress`` is called in the calling thread with the number
    of bytes written since the last call. ``journal`` notes each finished file; a noted file that is
    still intact is not written again.

    Returns the names of the files written, including the index, all synced to the disk.

    Raises ``BadCheckpoint`` for an edit of a tensor that is not stored, is not floating-point or
    does not contain the axis, for a vector of another length, for NaN or Inf in an edited tensor
    (unless ``allow_nonfinite``: they then spread over the group that is centred), for values out of
    the range of the dtype, and for a file that ends early. Raises ``OutputError`` if the disk has
    too little space.
    """
    _check_edits(checkpoint, edits)
    shards = layout(checkpoint, edits, options.stored_dtype, options.max_shard_size)
    finished = resume_shards(journal, into, shards) if journal else []
    left = [shard for shard in shards if shard.name not in finished]
    if progress and finished:
        progress(sum(slot.nbytes for s in shards if s.name in finished for slot in s.slots))

    def edited(files: TensorFiles) -> Iterator[TensorPart]:
        edit = edits.get(files.slot.name, Edit())
        load = partial(_loaded_edit, checkpoint, options.allow_nonfinite)
        return parts_of(files, edit, load, options.allow_nonfinite)

    def finish(path: Path) -> None:
        if journal:
            note(journal, path)

    _write_tensors(
        checkpoint, edited, left, into, jobs=options.jobs, progress=progress, finish=finish
    )
    texts = index(checkpoint, shards)
    for name, text in texts.items():
        _write_file(into / name, text)
    return (*(shard.name for shard in shards), *texts)


def _write_tensors(
    checkpoint: Checkpoint,
    parts_for: Callable[[TensorFiles], Iterable[TensorPart]],
    shards: Sequence[Shard],
    into: Path,
    *,
    jobs: int | None,
    progress: Callable[[int], None] | None,
    finish: Callable[[Path], None],
) -> None:
    """Write the files of ``shards`` from the tensors of ``checkpoint``, and sync them to the disk.

    ``parts_for`` gives the parts of a tensor, which threads may write in any order. ``finish`` is
    called with each file when it is on the disk. Raises the errors of the parts, and
    ``OutputError`` if the disk has too little space.
    """
    give_back()
    _check_space(shards, into)
    threads = THREADS * (jobs or _cores())
    with ExitStack() as stack:
        sources = _sources(checkpoint, shards, stack)
        targets = {shard.name: _create(shard, into, stack) for shard in shards}
        parts = [
            (shard.name, part)
            for shard in shards
            for slot in shard.slots
            for part in parts_for(TensorFiles(slot, sources(slot.stored), targets[shard.name]))
        ]
        left = Counter(name for name, _ in parts)

        def complete(name: str) -> None:
            os.fsync(targets[name])
            finish(into / name)

        for name in targets.keys() - left.keys():
            complete(name)
        for name, nbytes in in_threads([partial(_write, *pair) for pair in parts], threads):
            left[name] -= 1
            if left[name] == 0:
                complete(name)
            if progress:
                progress(nbytes)


def _write(name: str, part: TensorPart) -> tuple[str, int]:
    """Write a part of the file ``name``. Returns the name, and how many bytes were written."""
    part.write()
    return name, part.nbytes


def _sources(
    checkpoint: Checkpoint, shards: Sequence[Shard], stack: ExitStack
) -> Callable[[StoredTensor], int | Callable[[], torch.Tensor]]:
    """A function that returns where a stored tensor is read from (see ``TensorFiles``)."""
    folder = checkpoint.source.path
    if checkpoint.format == "bin":
        return lambda stored: partial(_loaded, folder / stored.file, stored.name)
    names = sorted({slot.stored.file for shard in shards for slot in shard.slots})
    files = {name: _open(folder / name, os.O_RDONLY, stack) for name in names}
    return lambda stored: files[stored.file]


def _loaded(path: Path, name: str) -> torch.Tensor:
    return load_bin(path)[name].detach().contiguous()


def total_progress(
    total: int, listener: Callable[[int, int], None] | None
) -> Callable[[int], None] | None:
    """A ``progress`` callback for a listener that takes bytes done and total bytes."""
    if listener is None:
        return None
    done = 0
    listener(done, total)

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        listener(done, total)

    return add


def _check_space(shards: Sequence[Shard], into: Path) -> None:
    need, free = sum(shard.size for shard in shards), shutil.disk_usage(into).free
    if need > free:
        raise OutputError(
            f"the weights need {size(need)}, but only {size(free)} are free at {into.parent}; "
            "free some space, or choose another place"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_edits(checkpoint: Checkpoint, edits: Mapping[str, Edit]) -> None:
    shapes = {name: stored.shape for name, stored in checkpoint.tensors.items()}
    try:
        for name, edit in edits.items():
            edit.require_fit(name, shapes)
    except ValueError as error:
        raise BadCheckpoint(str(error)) from None
    for name, edit in edits.items():
        for needed in (edit.source or name, *edit.needs):
            dtype = checkpoint.tensors[needed].dtype
            if dtype not in FLOATS:
                raise BadCheckpoint(
                    f"{needed}: is stored as {dtype}, but the edit of {name} needs a "
                    "floating-point tensor"
                )


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _loaded_edit(checkpoint: Checkpoint, allow_nonfinite: bool, edit: Edit) -> Edit:
    """``edit`` with the values that it takes from other tensors.

    Raises ``BadCheckpoint`` that names the tensor if that is NaN or Inf, unless they are allowed.
    """
    read = partial(read_tensor, checkpoint)
    loaded = edit.loaded(read)
    if not allow_nonfinite and (unusable := unusable_input(loaded, read)):
        raise BadCheckpoint(f"{unusable} and cannot be fused; repair it, or pass --allow-nonfinite")
    return loaded


def _open(path: Path, flags: int, stack: ExitStack) -> int:
    file = os.open(path, flags, 0o666)
    stack.callback(os.close, file)
    return file


def _create(shard: Shard, into: Path, stack: ExitStack) -> int:
    """Create a file of its final size, and write its header.

    The space is reserved, since a map cannot report that the disk is full.
    """
    file = _open(into / shard.name, os.O_RDWR | os.O_CREAT | os.O_EXCL, stack)
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, shard.size)
    else:
        os.truncate(file, shard.size)
    write_bytes(file, memoryview(shard.header), 0)
    return file
