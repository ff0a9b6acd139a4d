"""Write a checkpoint's shards with some tensors edited, in bounded memory.

This module distributes the work. Each process writes whole files. The workers of a process are
threads with positioned reads and writes on shared files (torch and the system calls release the
interpreter lock). Which tensors change, and why, is decided elsewhere.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache, partial
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import TypeVar

import torch

from enjoyln_cli.archive.archive_file import Recorder, tensor_recorder
from enjoyln_cli.checkpoint.headers import FLOATS, StoredTensor, bytes_of
from enjoyln_cli.checkpoint.reader import Checkpoint, file_of, read_rows, read_tensor
from enjoyln_cli.checkpoint.source import require_unchanged
from enjoyln_cli.errors import BadCheckpoint, OutputError
from enjoyln_cli.models.memory import give_back
from enjoyln_cli.plan.edits import ROWS, Edit, EditInputs, read_edit_inputs
from enjoyln_cli.rewrite.blocks import Ends, Lane, Target, run
from enjoyln_cli.rewrite.journal import (
    Journal,
    assign_shards,
    digest_while_reading,
    note,
    note_read,
    reads_for,
    wait_for_all,
)
from enjoyln_cli.rewrite.shard_layout import Shard, index, layout
from enjoyln_cli.rewrite.steps import Slot, steps_of
from enjoyln_cli.text import size

T = TypeVar("T")
Task = Callable[[Lane, Ends], Iterator[None]]
"""Writes a part of a tensor; yields after each transfer."""

TICK = 0.1
"""Seconds between two progress reports."""
LANES = 2
"""Threads for each job: while one waits for the disk, the other computes. If corrections for an
archive are computed too, one is enough."""


def write_shards(
    checkpoint: Checkpoint,
    edits: Mapping[str, Edit],
    into: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | None = None,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
    recorder: Recorder | None = None,
    journal: Journal | None = None,
    allow_nonfinite: bool = False,
) -> tuple[str, ...]:
    """Write every tensor of ``checkpoint`` to safetensors files in the directory ``into``.

    ``edits`` maps names of written tensors to edits; a new tensor is stored in the file of the
    tensor that it is made from. ``dtype`` converts all floating-point tensors. ``max_shard_size``
    (bytes) distributes the tensors over new files; without it the layout stays, and without
    ``dtype`` so does every header. ``jobs`` is the number of cores to use, all by default.
    ``progress`` is called in the calling thread with the number of bytes written since the last
    call. ``recorder`` collects the data that restores the tensors. ``journal`` notes each finished
    file; a noted file that is still intact is not written again. Each of several processes writes
    its share, and all return when the last one is done.

    Returns the names of the files written, including the index, all synced to the disk. In other
    processes than the first, the result is empty.

    Raises ``BadCheckpoint`` for an edit of a tensor that is not stored, is not floating-point or
    does not contain the axis, for a vector of another length, for NaN or Inf in an edited tensor
    (unless ``allow_nonfinite``: they then spread over the group that is centred), for values out of
    the range of the dtype, and for a file that ends early. Raises ``OutputError`` if the disk has
    too little space.
    """
    _check_edits(checkpoint, edits)
    if checkpoint.source.remote and max_shard_size is not None:
        raise OutputError(
            "--stream keeps the layout of the files, so it cannot be combined with "
            "--max-shard-size; remove one of them"
        )
    shards = layout(checkpoint, edits, dtype, max_shard_size)
    mine = assign_shards(journal, into, shards) if journal else shards
    jobs = jobs or max(1, _cores() // (journal.team.local if journal else 1))
    if progress and len(mine) < len(shards):
        names = {shard.name for shard in mine}
        progress(sum(slot.nbytes for s in shards if s.name not in names for slot in s.slots))
    tasks = _tasks(checkpoint, edits, allow_nonfinite, journal)
    _check_space(mine, into)
    for some, at_hand in _batches(checkpoint, mine):
        with at_hand:
            write_tensors(
                checkpoint,
                tasks,
                some,
                into,
                jobs=jobs,
                progress=progress,
                recorder=recorder,
                journal=journal,
            )
    if journal:
        require_unchanged(checkpoint.source.path, checkpoint.states)
        wait_for_all(journal, into, shards)
        if journal.team.rank:
            return ()
    texts = index(checkpoint, shards)
    for name, text in texts.items():
        _write_file(into / name, text)
    return (*(shard.name for shard in shards), *texts)


def _batches(
    checkpoint: Checkpoint, shards: list[Shard]
) -> Iterator[tuple[list[Shard], AbstractContextManager[None]]]:
    """The shards to write together: all, or one at a time if the source is streamed."""
    remote = checkpoint.source.remote
    if remote is None:
        yield shards, nullcontext()
        return
    for shard in shards:
        file = next((slot.stored.file for slot in shard.slots), None)
        yield [shard], remote.at_hand(file) if file else nullcontext()


def write_tensors(
    checkpoint: Checkpoint,
    tasks_for: Callable[[Slot], Iterator[Task]],
    shards: Sequence[Shard],
    into: Path,
    *,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
    recorder: Recorder | None = None,
    journal: Journal | None = None,
) -> None:
    """Write the files of ``shards`` from the tensors of ``checkpoint``, and sync them to the disk.

    ``tasks_for`` gives the tasks that write a slot; workers may do them in any order. ``recorder``
    collects the data that restores the tensors, and ``journal`` notes each finished file. Raises
    what the tasks raise, and ``OutputError`` if the disk has too little space.
    """
    give_back()
    _check_space(shards, into)
    with ExitStack() as stack:
        jobs = jobs or _cores()
        _write_with_workers(
            checkpoint, tasks_for, shards, into, stack, jobs, progress, recorder, journal
        )


def _write_with_workers(
    checkpoint: Checkpoint,
    tasks_for: Callable[[Slot], Iterator[Task]],
    shards: Sequence[Shard],
    into: Path,
    stack: ExitStack,
    jobs: int,
    progress: Callable[[int], None] | None,
    recorder: Recorder | None,
    journal: Journal | None,
) -> None:
    positioned = checkpoint.format == "safetensors"
    needed = {slot.stored.file for shard in shards for slot in shard.slots if positioned}
    sources = {
        name: _open(file_of(checkpoint, name), os.O_RDONLY, stack) for name in sorted(needed)
    }
    targets = {shard.name: _create(shard, into, stack, journal is not None) for shard in shards}

    def finish(shard: Shard) -> None:
        target = targets[shard.name]
        os.fsync(target.cached)
        if journal:
            names = [slot.name for slot in shard.slots]
            note(journal, into / shard.name, target.pieces or (), names)

    lanes = LANES * jobs if positioned and recorder is None else jobs
    portions = [
        [
            (shard, slot, tasks)
            for slot in shard.slots
            for tasks in _portions(tuple(tasks_for(slot)), positioned)
        ]
        for shard in shards
    ]
    queue = deque(_interleaved(portions, lanes))
    del portions  # so that data that a task has read is freed with the task
    left = Counter(shard.name for shard, _, _ in queue)
    lock, stop = threading.Lock(), threading.Event()

    def drain(lane: Lane) -> None:
        torch.set_num_threads(1)
        while not stop.is_set():
            try:
                shard, slot, tasks = queue.popleft()
            except IndexError:
                return
            reads = reads_for(journal, slot.name)
            if positioned:
                source: int | memoryview = sources[slot.stored.file]
            else:
                source = bytes_of(read_tensor(checkpoint, slot.stored.name))
                note_read(reads, slot.stored.name, 0, source)
            kept = tensor_recorder(recorder, slot.name) if recorder else None
            ends = Ends(slot, source, targets[shard.name], kept, reads)
            for task in tasks:
                for _ in task(lane, ends):
                    if stop.is_set():
                        return
            with lock:
                left[shard.name] -= 1
                last = left[shard.name] == 0
            if last:
                finish(shard)

    for shard in shards:
        if not left[shard.name]:
            finish(shard)
    _with_workers(drain, lanes, stop, progress)


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


def _with_workers(
    drain: Callable[[Lane], None],
    threads: int,
    stop: threading.Event,
    progress: Callable[[int], None] | None,
) -> None:
    """Run ``drain`` in ``threads`` threads; any exception, here or in one of them, stops all."""
    lanes = [Lane() for _ in range(threads)]
    reported, before = 0, torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads) as pool:
            try:
                running = {pool.submit(drain, lane) for lane in lanes}
                while running:
                    done, running = wait(running, TICK, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    written = sum(lane.written for lane in lanes)
                    if progress and written > reported:
                        progress(written - reported)
                    reported = written
            except BaseException:
                stop.set()
                raise
    finally:
        torch.set_num_threads(before)


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
    for name, edit in edits.items():
        shape = _floating(checkpoint, edit.source or name, f"to become {name}").shape
        for axis in (*edit.axes, *(turn.axis for turn in edit.turns)):
            if not 0 <= axis.dim < len(shape) or axis.stop > shape[axis.dim]:
                raise BadCheckpoint(f"{name}: shape {shape} does not contain {axis}")
        lengths = {found: _floating(checkpoint, found, f"to change {name}") for found in edit.needs}
        for vector in (edit.times, edit.scale):
            length = prod(lengths[vector.tensor].shape) if vector else 0
            if vector and (vector.dim >= len(shape) or length != shape[vector.dim]):
                raise BadCheckpoint(
                    f"{vector.tensor}: has {length} elements, too few or too many for {name}"
                )
        if edit.plus:
            matrix, many = lengths[edit.plus.matrix].shape, prod(lengths[edit.plus.by].shape)
            if edit.plus.dim >= len(matrix) or matrix[edit.plus.dim] != many:
                raise BadCheckpoint(
                    f"{edit.plus.matrix}: shape {matrix} cannot be multiplied by {many} elements"
                )
            if prod(matrix) != prod(shape) * many:
                raise BadCheckpoint(
                    f"{name}: shape {shape} does not fit the product of {matrix} and {many}"
                )


def _floating(checkpoint: Checkpoint, name: str, what: str) -> StoredTensor:
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise BadCheckpoint(f"{name}: {what}, but {checkpoint.source.model} lacks it")
    if stored.dtype not in FLOATS:
        raise BadCheckpoint(
            f"{name}: {what}, but stored as {stored.dtype}, which is not floating-point"
        )
    return stored


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _tasks(
    checkpoint: Checkpoint, edits: Mapping[str, Edit], nonfinite: bool, journal: Journal | None
) -> Callable[[Slot], Iterator[Task]]:
    """A function that gives the tasks of each slot."""

    def inputs_of(slot: Slot, edit: Edit) -> EditInputs:
        reads = reads_for(journal, slot.name)

        def finite(name: str, value: torch.Tensor) -> torch.Tensor:
            """``value``; raises ``BadCheckpoint`` naming the tensor if it has NaN or Inf."""
            if not nonfinite and not value.isfinite().all():
                raise BadCheckpoint(
                    f"{name} in {checkpoint.tensors[name].file} holds NaN or Inf and cannot be "
                    "merged; repair it, or pass --allow-nonfinite"
                )
            return value

        def vector(name: str) -> torch.Tensor:
            found = read_tensor(checkpoint, name)
            note_read(reads, name, 0, bytes_of(found))
            return finite(name, found)

        def rows(name: str) -> Iterator[torch.Tensor]:
            return digest_while_reading(reads, name, read_rows(checkpoint, name, ROWS))

        values = read_edit_inputs(edit, vector, rows)
        if edit.plus and values.plus is not None:
            finite(edit.plus.matrix, values.plus)
        return values

    def tasks(slot: Slot) -> Iterator[Task]:
        edit = edits.get(slot.name, Edit())
        values = cache(partial(inputs_of, slot, edit))
        return (partial(run, step=s, nonfinite=nonfinite) for s in steps_of(slot, edit, values))

    return tasks


def _portions(tasks: tuple[Task, ...], positioned: bool) -> Iterator[tuple[Task, ...]]:
    """Tasks for one worker: single ones, or all of a tensor that has to be loaded whole."""
    return iter(zip(tasks, strict=True)) if positioned else iter((tasks,))


def _interleaved(queues: list[list[T]], many: int) -> Iterator[T]:
    """Items of ``many`` queues (files) in turns, since a file is locked during a write."""
    for first in range(0, len(queues), many):
        for row in zip_longest(*queues[first : first + many]):
            yield from (item for item in row if item is not None)


def _open(path: Path, flags: int, stack: ExitStack) -> int:
    file = os.open(path, flags, 0o666)
    stack.callback(os.close, file)
    return file


def _create(shard: Shard, into: Path, stack: ExitStack, noted: bool) -> Target:
    """Create a file of its final size, and write its header."""
    path = into / shard.name
    file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stack)
    os.truncate(file, shard.size)
    try:
        direct = _open(path, os.O_WRONLY | os.O_DIRECT, stack)
    except (AttributeError, OSError):  # not supported by the system or the file system
        direct = None
    target = Target(file, direct, [] if noted else None)
    target.write(memoryview(shard.header), 0)
    return target
