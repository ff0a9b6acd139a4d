"""Write a checkpoint's shards anew, with some tensors edited, in memory that does not grow.

Decides the files of the result, the place of every tensor in them, and who writes what: workers are
threads, with positioned reads and writes on shared files (torch and the system calls let go of the
interpreter lock). It knows neither which tensors have to change nor why.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise, zip_longest
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch

from enjoyln_cli.blocks import Ends, Lane, Target, run
from enjoyln_cli.checkpoint import Checkpoint, file_of, header_of, read_rows, read_tensor
from enjoyln_cli.edit import ROWS, Edit, Given, given
from enjoyln_cli.errors import BadCheckpoint, OutputError
from enjoyln_cli.kept import Keeper, keeping
from enjoyln_cli.shards import Stored
from enjoyln_cli.steps import FLOATS, Slot, steps_of

T = TypeVar("T")
Task = Callable[[Lane, Ends], Iterator[None]]
"""Writes a part of a tensor, pausing after each transfer."""

TICK = 0.1
"""Seconds between two reports of progress."""
LANES = 2
"""Threads for each job: while one waits for the disk, the other computes."""


@dataclass(frozen=True)
class Shard:
    """One file of the result: its header, then the tensors."""

    name: str
    header: bytes
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return max((s.offset + s.nbytes for s in self.slots), default=len(self.header))


def write_shards(
    checkpoint: Checkpoint,
    edits: Mapping[str, Edit],
    into: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int | None = None,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
    keeper: Keeper | None = None,
) -> tuple[str, ...]:
    """Write every tensor of ``checkpoint`` to safetensors files in the directory ``into``.

    ``edits`` says what becomes of some of them, by the name that each gets: one that is not stored
    appears in the file of the tensor that it is made from. ``dtype`` converts all floating tensors.
    ``max_shard_size`` (bytes) cuts the shards anew; otherwise the layout stays, and without
    ``dtype`` so does every header. ``jobs`` is the number of cores to keep busy, all by default.
    ``progress`` is called in the calling thread with the number of bytes written since the last
    call; ``keeper`` receives what it takes to restore the tensors.

    Returns the names of the files written, the index among them, all of them synced to the disk.
    Raises ``BadCheckpoint`` for an edit of a tensor that is not stored, is not floating or does not
    hold the axis, for a vector of another length, for NaN or Inf in an edited tensor, for values
    out of the range of the dtype, and for a file that ends early; ``OutputError`` where the disk
    has too little space.
    """
    _check_edits(checkpoint, edits)
    if checkpoint.source.remote and max_shard_size is not None:
        raise OutputError(
            "files that are fetched one by one keep their layout: leave --max-shard-size or "
            "--stream out"
        )
    shards = _layout(checkpoint, edits, dtype, max_shard_size)
    tasks = _tasks(checkpoint, edits, jobs or _cores())
    _check_space(shards, into)
    for some, at_hand in _turns(checkpoint, shards):
        with at_hand:
            write_tensors(
                checkpoint, tasks, some, into, jobs=jobs, progress=progress, keeper=keeper
            )
    index = _index(checkpoint, shards)
    for name, text in index.items():
        _write_file(into / name, text)
    return (*(shard.name for shard in shards), *index)


def _turns(
    checkpoint: Checkpoint, shards: list[Shard]
) -> Iterator[tuple[list[Shard], AbstractContextManager[None]]]:
    """What is written together: all, or where files are fetched, what is made from one of them."""
    remote = checkpoint.source.remote
    if remote is None:
        yield shards, nullcontext()
        return
    for shard in shards:
        file = next((slot.stored.file for slot in shard.slots), None)
        yield [shard], remote.at_hand(file) if file else nullcontext()


def plain_layout(checkpoint: Checkpoint) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What a copy of ``checkpoint`` consists of besides tensors: headers by file, and the index."""
    shards = _layout(checkpoint, {}, None, None)
    return {shard.name: shard.header for shard in shards}, _index(checkpoint, shards)


def write_tensors(
    checkpoint: Checkpoint,
    tasks_for: Callable[[Slot], Iterator[Task]],
    shards: Sequence[Shard],
    into: Path,
    *,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
    keeper: Keeper | None = None,
) -> None:
    """Write the files of ``shards`` from the tensors of ``checkpoint``, and sync them to the disk.

    ``tasks_for`` gives what writes a slot, in any order and by any worker; ``keeper`` receives what
    it takes to restore the tensors. Raises what the tasks do, and ``OutputError`` where the disk
    has too little space.
    """
    _check_space(shards, into)
    with ExitStack() as stack:
        _work(checkpoint, tasks_for, shards, into, stack, jobs or _cores(), progress, keeper)


def _work(
    checkpoint: Checkpoint,
    tasks_for: Callable[[Slot], Iterator[Task]],
    shards: Sequence[Shard],
    into: Path,
    stack: ExitStack,
    jobs: int,
    progress: Callable[[int], None] | None,
    keeper: Keeper | None,
) -> None:
    positioned = checkpoint.format == "safetensors"
    needed = {slot.stored.file for shard in shards for slot in shard.slots if positioned}
    sources = {
        name: _open(file_of(checkpoint, name), os.O_RDONLY, stack) for name in sorted(needed)
    }
    targets = {shard.name: _create(shard, into, stack) for shard in shards}
    portions = [
        [
            (shard.name, slot, tasks)
            for slot in shard.slots
            for tasks in _portions(tuple(tasks_for(slot)), positioned)
        ]
        for shard in shards
    ]
    lanes = LANES * jobs if positioned else jobs
    queue = deque(_alternating(portions, lanes))
    left = Counter(name for name, _, _ in queue)
    lock, stop = threading.Lock(), threading.Event()

    def drain(lane: Lane) -> None:
        torch.set_num_threads(1)
        while not stop.is_set():
            try:
                name, slot, tasks = queue.popleft()
            except IndexError:
                return
            source = sources[slot.stored.file] if positioned else _loaded(checkpoint, slot)
            kept = keeping(keeper, slot.name) if keeper else None
            for task in tasks:
                for _ in task(lane, Ends(slot, source, targets[name], kept)):
                    if stop.is_set():
                        return
            with lock:
                left[name] -= 1
                last = left[name] == 0
            if last:
                os.fsync(targets[name].cached)

    _with_workers(drain, lanes, stop, progress)


def summed(total: int, listener: Callable[[int, int], None] | None) -> Callable[[int], None] | None:
    """For a listener that wants bytes done and bytes in all, what ``progress`` is called with."""
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
    """Run ``drain`` in so many threads; any exception, here or there, stops them all."""
    lanes = [Lane() for _ in range(threads)]
    told, before = 0, torch.get_num_threads()
    try:
        with ThreadPoolExecutor(threads) as pool:
            try:
                running = {pool.submit(drain, lane) for lane in lanes}
                while running:
                    done, running = wait(running, TICK, FIRST_EXCEPTION)
                    for future in done:
                        future.result()
                    written = sum(lane.written for lane in lanes)
                    if progress and written > told:
                        progress(written - told)
                    told = written
            except BaseException:
                stop.set()
                raise
    finally:
        torch.set_num_threads(before)


def _check_space(shards: Sequence[Shard], into: Path) -> None:
    need, free = sum(shard.size for shard in shards), shutil.disk_usage(into).free
    if need > free:
        raise OutputError(
            f"the weights take {need / 1e9:.1f} GB, {into.parent} has {free / 1e9:.1f} GB left; "
            "free some space, or choose another place"
        )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_edits(checkpoint: Checkpoint, edits: Mapping[str, Edit]) -> None:
    for name, edit in edits.items():
        shape = _floating(checkpoint, edit.source or name, f"to become {name}").shape
        for axis in edit.axes:
            if not 0 <= axis.dim < len(shape) or axis.stop > shape[axis.dim]:
                raise BadCheckpoint(f"{name}: shape {shape} does not hold {axis}")
        lengths = {found: _floating(checkpoint, found, f"to change {name}") for found in edit.needs}
        for vector in (edit.times, edit.scale):
            length = prod(lengths[vector.tensor].shape) if vector else 0
            if vector and (vector.dim >= len(shape) or length != shape[vector.dim]):
                raise BadCheckpoint(
                    f"{vector.tensor}: has {length} elements, too few or many for {name}"
                )
        if edit.plus:
            matrix, many = lengths[edit.plus.matrix].shape, prod(lengths[edit.plus.by].shape)
            if edit.plus.dim >= len(matrix) or matrix[edit.plus.dim] != many:
                raise BadCheckpoint(f"{edit.plus.matrix}: shape {matrix} times {many} elements")
            if prod(matrix) != prod(shape) * many:
                raise BadCheckpoint(f"{name}: shape {shape} does not hold what {matrix} gives")


def _floating(checkpoint: Checkpoint, name: str, what: str) -> Stored:
    stored = checkpoint.tensors.get(name)
    if stored is None:
        raise BadCheckpoint(f"{name}: {what}, but {checkpoint.source.model} lacks it")
    if stored.dtype not in FLOATS:
        raise BadCheckpoint(f"{name}: {what}, but stored as {stored.dtype}, not floating")
    return stored


def bytes_to_write(
    checkpoint: Checkpoint, edits: Mapping[str, Edit], dtype: torch.dtype | None = None
) -> int:
    """Bytes of all tensors that ``write_shards`` would write."""
    return sum(slot.nbytes for slot in _slots(checkpoint, edits, _code(dtype)))


def _code(dtype: torch.dtype | None) -> str | None:
    code = next((c for c, d in FLOATS.items() if d == dtype), None)
    if dtype is not None and code is None:
        raise OutputError(f"cannot store weights as {dtype}; choose one of {sorted(FLOATS)}")
    return code


def _slots(checkpoint: Checkpoint, edits: Mapping[str, Edit], code: str | None) -> list[Slot]:
    """Every tensor to write, those that are new after all others."""
    made = {name: Edit() for name in checkpoint.tensors} | dict(edits)
    slots = []
    for name, edit in made.items():
        stored = checkpoint.tensors[edit.source or name]
        dtype = code if code and stored.dtype in FLOATS else stored.dtype
        slots.append(Slot(name, stored, dtype, edit.shape(stored.shape), stored.offset))
    return slots


def _layout(
    checkpoint: Checkpoint,
    edits: Mapping[str, Edit],
    dtype: torch.dtype | None,
    max_shard_size: int | None,
) -> list[Shard]:
    """The files of the result and the place of every tensor in them."""
    slots = _slots(checkpoint, edits, _code(dtype))
    if max_shard_size is not None:
        ordered = [s for f in checkpoint.shards for s in slots if s.stored.file == f]
        return _cut(ordered, _common_metadata(checkpoint), max_shard_size)
    shards = []
    for file in checkpoint.shards:
        here = [slot for slot in slots if slot.stored.file == file]
        same = all(slot.stays for slot in here)
        if checkpoint.format == "safetensors" and same:
            header = header_of(checkpoint, file)
            shards.append(Shard(file, header, tuple(sorted(here, key=lambda s: s.offset))))
        else:
            metadata = checkpoint.metadata.get(file) or {"format": "pt"}
            shards.append(_packed(_safetensors_name(file), here, metadata))
    return shards


def _cut(slots: list[Slot], metadata: dict[str, str], limit: int) -> list[Shard]:
    """Consecutive tensors in files of at most ``limit`` bytes of tensors (one at the least)."""
    groups: list[list[Slot]] = [[]]
    size = 0
    for slot in slots:
        if groups[-1] and size + slot.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(slot)
        size += slot.nbytes
    if len(groups) == 1:
        return [_packed("model.safetensors", groups[0], metadata)]
    return [
        _packed(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group, metadata)
        for i, group in enumerate(groups, 1)
    ]


def _packed(name: str, slots: list[Slot], metadata: dict[str, str]) -> Shard:
    """A shard with a new header; wide dtypes first, so that every tensor is aligned."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    ordered = sorted(slots, key=lambda s: -(s.nbytes // max(prod(s.shape), 1)))
    ends = [0, *accumulate(slot.nbytes for slot in ordered)]
    for slot, (begin, end) in zip(ordered, pairwise(ends), strict=True):
        entries[slot.name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    moved = [
        replace(slot, offset=len(header) + begin)
        for slot, begin in zip(ordered, ends, strict=False)
    ]
    return Shard(name, header, tuple(moved))


def _safetensors_name(file: str) -> str:
    if not file.endswith(".bin"):
        return file
    return file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


def _common_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    merged = {k: v for d in checkpoint.metadata.values() for k, v in (d or {}).items()}
    return merged or {"format": "pt"}


def _index(checkpoint: Checkpoint, shards: list[Shard]) -> dict[str, bytes]:
    """The shard index: the source's own where nothing in it changes; none for a single file."""
    slots = {slot.name: slot for shard in shards for slot in shard.slots}
    files = {slot.name: shard.name for shard in shards for slot in shard.slots}
    content: dict[str, Any] = {"metadata": {}, "weight_map": files}
    stays = all(files[slot.name] == slot.stored.file for slot in slots.values())
    if checkpoint.index and stays:
        text = (checkpoint.source.path / checkpoint.index).read_bytes()
        new = any(slot.nbytes != slot.stored.nbytes for slot in slots.values())
        if not new and slots.keys() == checkpoint.tensors.keys():
            return {checkpoint.index: text}
        content = {"metadata": {}, **json.loads(text)}
        content["weight_map"] = {**content["weight_map"], **files}
    elif [shard.name for shard in shards] == ["model.safetensors"]:
        return {}
    metadata = dict(content["metadata"] or {})
    if type(known := metadata.get("total_parameters")) is int:
        more = sum(prod(slot.shape) for slot in slots.values())
        more -= sum(prod(stored.shape) for stored in checkpoint.tensors.values())
        metadata["total_parameters"] = known + more
    metadata["total_size"] = sum(slot.nbytes for slot in slots.values())
    text = json.dumps({**content, "metadata": metadata}, indent=2).encode() + b"\n"
    return {"model.safetensors.index.json": text}


def _write_file(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _tasks(
    checkpoint: Checkpoint, edits: Mapping[str, Edit], jobs: int
) -> Callable[[Slot], Iterator[Task]]:
    """Tells what becomes of each tensor. The vectors that are multiplied in are in memory."""

    def read(name: str) -> torch.Tensor:
        return read_tensor(checkpoint, name)

    def rows(name: str) -> Iterator[torch.Tensor]:
        return read_rows(checkpoint, name, ROWS)

    none = Given()
    needing = {name: edit for name, edit in edits.items() if edit.needs}
    with ThreadPoolExecutor(jobs) as pool:
        found = pool.map(lambda edit: given(edit, read, rows), needing.values())
        values = dict(zip(needing, found, strict=True))

    def tasks(slot: Slot) -> Iterator[Task]:
        steps = steps_of(slot, edits.get(slot.name, Edit()), values.get(slot.name, none))
        return (partial(run, step=step) for step in steps)

    return tasks


def _portions(tasks: tuple[Task, ...], positioned: bool) -> Iterator[tuple[Task, ...]]:
    """Tasks that one worker takes together: one, or all of a tensor that has to be loaded whole."""
    return iter(zip(tasks, strict=True)) if positioned else iter((tasks,))


def _alternating(queues: list[list[T]], many: int) -> Iterator[T]:
    """``many`` queues at a time, in turns: a file is locked while somebody writes to it."""
    for first in range(0, len(queues), many):
        for row in zip_longest(*queues[first : first + many]):
            yield from (item for item in row if item is not None)


def _open(path: Path, flags: int, stack: ExitStack) -> int:
    file = os.open(path, flags, 0o666)
    stack.callback(os.close, file)
    return file


def _create(shard: Shard, into: Path, stack: ExitStack) -> Target:
    """A new file of its final size that holds the header, on the disk if there is nothing else."""
    path = into / shard.name
    file = _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, stack)
    os.truncate(file, shard.size)
    try:
        direct = _open(path, os.O_WRONLY | os.O_DIRECT, stack)
    except (AttributeError, OSError):  # a system or a file system that knows no such thing
        direct = None
    target = Target(file, direct)
    target.write(memoryview(shard.header), 0)
    if not shard.slots:
        os.fsync(file)
    return target


def _loaded(checkpoint: Checkpoint, slot: Slot) -> memoryview:
    """The bytes of a tensor that lies in no one piece of its file."""
    tensor = read_tensor(checkpoint, slot.stored.name).contiguous().reshape(-1)
    return tensor.view(torch.uint8).numpy().data
