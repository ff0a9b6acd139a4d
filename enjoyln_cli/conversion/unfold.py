"""Restores the original from a converted directory, bit for bit.

If the fold saved the data for it (``archive``), every tensor is restored to its file and position,
and checked by digest. Config, index and model card are restored as they were. Otherwise the result
already is a LayerNorm checkpoint that computes the original's function, and only the marker is
removed. In both cases the recipe, the verification, the card of the fold and the folder with the
saved data are not copied; all other files are. The directory appears whole or not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from enjoyln_cli.archive.archive_file import Archive, Piece, open_archive, read_corrections
from enjoyln_cli.archive.prediction import Undo, predict
from enjoyln_cli.archive.residuals import correct
from enjoyln_cli.checkpoint.config import MARKER, raw_config, require_folded
from enjoyln_cli.checkpoint.file_roles import CONFIG, is_file_name
from enjoyln_cli.checkpoint.headers import DTYPES, StoredTensor, tensors_of_header
from enjoyln_cli.checkpoint.reader import (
    Checkpoint,
    blocks_of,
    open_checkpoint,
    other_files,
    pipeline_files,
)
from enjoyln_cli.checkpoint.result_files import CARD_FILE, FOLDER, is_own
from enjoyln_cli.checkpoint.source import open_source, require_unchanged, states_of
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.fs.digests import digest_of_piece, digest_of_tensor
from enjoyln_cli.fs.staging import staged_output
from enjoyln_cli.publish.card import is_card
from enjoyln_cli.rewrite.blocks import Ends, Lane, output_buffer, read, room, write
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.rewrite.shard_layout import Shard
from enjoyln_cli.rewrite.steps import Slot
from enjoyln_cli.rewrite.writer import Task, total_progress, write_tensors

WITHOUT = f"delete its folder {FOLDER} to get a copy that is not bit for bit the original"


@dataclass(frozen=True)
class UnfoldResult:
    """The result of an unfold."""

    back: Path
    restored: bool
    """Whether ``back`` is the original; otherwise it is the folded result without its marker."""
    tensors: int
    bytes_written: int
    seconds: float


def unfold(
    out: str | Path,
    back: str | Path,
    *,
    jobs: int | None = None,
    force: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> UnfoldResult:
    """Restore the original of the converted directory ``out`` into the new directory ``back``.

    If ``out`` was folded with ``keep_means``, ``back`` is the original bit for bit, with the same
    files and layout. Otherwise it is ``out`` without its marker. ``jobs`` is the number of parallel
    workers, ``on_progress`` receives the bytes done and the bytes in all, and ``force`` replaces
    ``back``.

    Raises ``OutputError``, and ``BadCheckpoint`` in these cases: ``out`` is not the result of a
    fold, the saved data is damaged or belongs to another result, or a tensor is not what the fold
    wrote.
    """
    begin = perf_counter()
    source = open_source(str(out), weights=True)
    config = raw_config(source)
    require_folded(config, str(out))
    folded = open_checkpoint(source)
    kept = None
    if (source.path / FOLDER).exists():
        kept = open_archive(source.path / FOLDER, config[MARKER])
    with staged_output(Path(back), source=source.root, force=force) as staged:
        inner = staged / source.folder
        inner.mkdir(parents=True, exist_ok=True)
        names = [name for name in other_files(folded) if not is_own(name)]
        around = pipeline_files(folded)
        others = states_of(source.path, names), states_of(source.root, around)
        copy_files(names, source.path, inner)
        copy_files(around, source.root, staged)
        if is_card(staged / CARD_FILE):
            (staged / CARD_FILE).unlink()
        if kept:
            for name, content in kept.files.items():
                if name == CARD_FILE:
                    (staged / name).write_bytes(content)
                else:
                    (inner / _plain_name(name, CONFIG, ".index.json")).write_bytes(content)
            restore(folded, kept, inner, jobs, on_progress)
        else:
            index = () if folded.index is None else (folded.index,)
            copy_files((*folded.shards, *index), source.path, inner)
            text = json.dumps({k: v for k, v in config.items() if k != MARKER}, indent=2) + "\n"
            (inner / CONFIG).write_text(text, encoding="utf-8")
        require_unchanged(source.path, {**folded.states, **others[0]})
        require_unchanged(source.root, others[1])
        size = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
    tensors = kept.undo if kept else folded.tensors
    return UnfoldResult(Path(back), kept is not None, len(tensors), size, perf_counter() - begin)


def restore(
    folded: Checkpoint,
    kept: Archive,
    into: Path,
    jobs: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the weight files of the original into ``into``."""
    shards = _shards(folded, kept)
    total = sum(slot.nbytes for shard in shards for slot in shard.slots)
    with ExitStack() as stack:
        file = os.open(kept.path, os.O_RDONLY)
        stack.callback(os.close, file)

        def tasks(slot: Slot) -> Iterator[Task]:
            undo = kept.undo[slot.name]
            return (partial(_restore, file, undo, piece) for piece in kept.pieces[slot.name])

        progress = total_progress(total, on_progress)
        write_tensors(folded, tasks, shards, into, jobs=jobs, progress=progress)


def _shards(folded: Checkpoint, kept: Archive) -> list[Shard]:
    """The original's files; each tensor with the stored tensor that it is restored from.

    Raises ``BadCheckpoint`` if a stored tensor is not what the fold wrote.
    """
    for name, digest in kept.unchecked.items():
        if name not in folded.tensors or digest_of_tensor(blocks_of(folded, name)) != digest:
            raise BadCheckpoint(
                f"{name} is not what the fold wrote, so it cannot be restored: the weights were "
                f"changed since; {WITHOUT}"
            )
    shards = []
    for file, header in kept.headers.items():
        slots = [_slot(folded, kept, one) for one in tensors_of_header(file, header)]
        shards.append(Shard(_plain_name(file, ".safetensors"), header, tuple(slots)))
    found = [slot.name for shard in shards for slot in shard.slots]
    if sorted(found) != sorted(kept.undo):
        raise BadCheckpoint(f"{kept.path} contradicts itself: it does not hold what its files list")
    return shards


def _slot(folded: Checkpoint, kept: Archive, one: StoredTensor) -> Slot:
    undo = kept.undo.get(one.name)
    if undo is None or (undo.dtype, undo.shape) != (DTYPES[one.dtype], one.shape):
        raise BadCheckpoint(f"{kept.path} contradicts itself about {one.name}")
    written = folded.tensors.get(kept.written[one.name])
    if written is None:
        raise BadCheckpoint(
            f"{one.name} has to be restored from {kept.written[one.name]}, which is not stored: "
            f"the weights were changed since the fold; {WITHOUT}"
        )
    if written.dtype != one.dtype or not _is_extended(written.shape, one.shape):
        raise BadCheckpoint(
            f"{written.name} is stored as {written.dtype} of shape {list(written.shape)}, not as "
            f"the fold wrote it: the weights were changed since; {WITHOUT}"
        )
    return Slot(one.name, written, one.dtype, one.shape, one.offset)


def _is_extended(written: tuple[int, ...], original: tuple[int, ...]) -> bool:
    """Whether the shapes are equal, except that one dimension of ``written`` may be longer."""
    if len(written) != len(original):
        return False
    pairs = [(a, b) for a, b in zip(written, original, strict=True) if a != b]
    return len(pairs) <= 1 and all(a > b for a, b in pairs)


def _plain_name(name: str, *ends: str) -> str:
    if not is_file_name(name, *ends):
        raise BadCheckpoint(f"{name!r:.99} is not a plain file name; do not use this result")
    return name


def _restore(file: int, undo: Undo, piece: Piece, lane: Lane, ends: Ends) -> Iterator[None]:
    """Predict a piece of the original from the stored tensor, correct it, check it, write it."""
    data = output_buffer(lane, ends, piece.start, piece.nbytes)
    _read_cut(ends, piece.start, data)
    if piece.predicted:
        try:
            x, at = torch.frombuffer(data, dtype=undo.dtype), 0
            for block in predict(undo, x, piece.start // undo.dtype.itemsize, room(lane)):
                x[at : at + block.numel()].copy_(block)
                at += block.numel()
            correct(x, read_corrections(file, piece, undo.dtype))
        except (RuntimeError, ValueError, KeyError) as error:
            raise BadCheckpoint(
                f"the data saved for {ends.slot.name} contradicts itself; {WITHOUT}"
            ) from error
    if digest_of_piece(data) != piece.digest:
        stored = ends.slot.stored
        raise BadCheckpoint(
            f"{stored.name} in {stored.file} is not what the fold wrote, so that {ends.slot.name} "
            f"cannot be restored: the weights were changed since; {WITHOUT}"
        )
    write(lane, ends, piece.start, data)
    yield


def _read_cut(ends: Ends, start: int, data: memoryview) -> None:
    """Read the stored bytes from ``start``, without the elements that the fold appended."""
    shape, wider = ends.slot.shape, ends.slot.stored.shape
    dim = next((d for d, (a, b) in enumerate(zip(shape, wider, strict=True)) if a != b), 0)
    if not shape or prod(shape[:dim]) == 1:
        read(ends, start, data)
        return
    size = DTYPES[ends.slot.dtype].itemsize * prod(shape[dim + 1 :])
    row, stored = shape[dim] * size, wider[dim] * size
    first, last = start // row, -(-(start + len(data)) // row)
    rows = np.empty((last - first, stored), dtype=np.uint8)
    read(ends, first * stored, rows.reshape(-1).data)
    kept = rows[:, :row].reshape(-1)
    data[:] = kept[start - first * row :][: len(data)].data
