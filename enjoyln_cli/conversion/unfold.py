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
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import torch

from enjoyln_cli.archive.archive_file import Archive, RecordedPart, open_archive
from enjoyln_cli.archive.difference import Undo, restored
from enjoyln_cli.checkpoint.config import MARKER, raw_config, require_folded
from enjoyln_cli.checkpoint.file_roles import CONFIG, is_file_name
from enjoyln_cli.checkpoint.headers import DTYPES, StoredTensor, bytes_of, tensors_of_header
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
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.rewrite.shard_layout import Shard, Slot
from enjoyln_cli.rewrite.tensor_parts import TensorFiles, TensorPart, without_appended
from enjoyln_cli.rewrite.writer import total_progress, write_tensors

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

        def parts(files: TensorFiles) -> Iterator[TensorPart]:
            undo = kept.undo[files.slot.name]
            undo = replace(undo, shape=undo.shape or (1,))
            written, original = cache(files.stored), cache(files.new)
            for part in kept.parts[files.slot.name]:
                nbytes = files.slot.nbytes // undo.shape[part.dim] * part.count
                write = partial(_restore, file, files.slot, undo, part, written, original)
                yield TensorPart(nbytes, write)

        progress = total_progress(total, on_progress)
        write_tensors(folded, parts, shards, into, jobs=jobs, progress=progress)


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


def _restore(
    archive: int,
    slot: Slot,
    undo: Undo,
    part: RecordedPart,
    written: Callable[[], torch.Tensor],
    original: Callable[[], torch.Tensor],
) -> None:
    """Restore a part of an original tensor from the written one, check it, write it."""
    span = part.dim, part.first, part.count
    folded = without_appended(written(), undo.shape).narrow(*span)
    try:
        stored = os.pread(archive, part.nbytes, part.offset)
        values = restored(undo.part(*span), folded, stored)
    except (RuntimeError, ValueError, zlib.error) as error:
        raise BadCheckpoint(
            f"the data saved for {slot.name} contradicts itself; {WITHOUT}"
        ) from error
    if digest_of_piece(bytes_of(values)) != part.digest:
        raise BadCheckpoint(
            f"{slot.stored.name} in {slot.stored.file} is not what the fold wrote, so that "
            f"{slot.name} cannot be restored: the weights were changed since; {WITHOUT}"
        )
    original().view(undo.shape).narrow(*span).copy_(values)
