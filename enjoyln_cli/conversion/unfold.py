"""Restores the original from a converted directory, bit for bit.

If the fold saved the data for it (``archive``), every tensor is restored to its file and position,
and checked by digest. Config, index and model card are restored as they were. Otherwise the result
already is a LayerNorm checkpoint that computes the original's function, and only the marker is
removed. In both cases the recipe, the verification, the card of the fold and the folder with the
saved data are not copied; all other files are. The directory appears whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from enjoyln_cli.checkpoint.config import MARKER, raw_config, require_folded
from enjoyln_cli.checkpoint.file_roles import CONFIG, is_file_name
from enjoyln_cli.checkpoint.headers import DTYPES, StoredTensor, bytes_of, tensors_of_header
from enjoyln_cli.checkpoint.reader import (
    Checkpoint,
    open_checkpoint,
    other_files,
    pipeline_files,
    read_tensor,
)
from enjoyln_cli.checkpoint.result_files import CARD_FILE, FOLDER
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.fs.digests import fast_digest
from enjoyln_cli.fs.staging import staged_output
from enjoyln_cli.plan.edits import Edit, edits_of
from enjoyln_cli.publish.card import is_card
from enjoyln_cli.recipe.stored_plan import read_plan
from enjoyln_cli.rewrite.archive import WITHOUT, Archive, changed_since, open_archive, written_names
from enjoyln_cli.rewrite.archive import restore as restore_tensor
from enjoyln_cli.rewrite.difference import steps_to_undo
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.rewrite.shard_layout import Shard, Slot
from enjoyln_cli.rewrite.tensor_parts import TensorFiles, TensorPart
from enjoyln_cli.rewrite.writer import total_progress, write_tensors


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
    require_folded(raw_config(source), str(out))
    folded = open_checkpoint(source)
    config = folded.raw_config
    archive = None
    if (source.path / FOLDER).exists():
        archive = open_archive(source.path / FOLDER, config[MARKER])
        edits = edits_of(read_plan(folded, None))
    with staged_output(Path(back), source=source.root, force=force) as staged:
        inner = staged / source.folder
        inner.mkdir(parents=True, exist_ok=True)
        copy_files(other_files(folded), source.path, inner)
        copy_files(pipeline_files(folded), source.root, staged)
        if is_card(staged / CARD_FILE):
            (staged / CARD_FILE).unlink()
        if archive:
            for name, content in archive.files.items():
                if name == CARD_FILE:
                    (staged / name).write_bytes(content)
                else:
                    (inner / _plain_name(name, CONFIG, ".index.json")).write_bytes(content)
            tensors = restore(folded, archive, edits, inner, jobs, on_progress)
        else:
            index = () if folded.index is None else (folded.index,)
            copy_files((*folded.shards, *index), source.path, inner)
            text = json.dumps({k: v for k, v in config.items() if k != MARKER}, indent=2) + "\n"
            (inner / CONFIG).write_text(text, encoding="utf-8")
            tensors = len(folded.tensors)
        size = sum(path.stat().st_size for path in staged.rglob("*") if path.is_file())
    return UnfoldResult(Path(back), archive is not None, tensors, size, perf_counter() - begin)


def restore(
    folded: Checkpoint,
    archive: Archive,
    edits: Mapping[str, Edit],
    into: Path,
    jobs: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> int:
    """Write the weight files of the original into ``into``; ``edits`` are those of the fold.

    Returns the number of tensors.
    """
    shards = _shards(folded, archive, written_names(edits))
    slots = {slot.name: slot for shard in shards for slot in shard.slots}
    for name in archive.written.keys() - {slot.stored.name for slot in slots.values()}:
        if name not in folded.tensors:
            raise changed_since(name)
        if fast_digest(bytes_of(read_tensor(folded, name))) != archive.written[name]:
            raise changed_since(name)

    def vector(name: str) -> torch.Tensor:
        """A tensor of the original that others were multiplied by, and that needs no other."""
        if name not in slots or steps_to_undo(edits.get(name, Edit())).needs:
            raise BadCheckpoint(f"{archive.path} does not restore {name}; {WITHOUT}")
        slot = slots[name]
        original = torch.empty(slot.shape, dtype=DTYPES[slot.dtype])
        written = read_tensor(folded, slot.stored.name)
        restore_tensor(archive, edits, slot, written, original, vector)
        return original

    def parts(files: TensorFiles) -> Iterator[TensorPart]:
        def write() -> None:
            restore_tensor(archive, edits, files.slot, files.stored(), files.new(), vector)

        yield TensorPart(files.slot.nbytes, write)

    total = sum(slot.nbytes for slot in slots.values())
    progress = total_progress(total, on_progress)
    write_tensors(folded, parts, shards, into, jobs=jobs, progress=progress)
    return len(slots)


def _shards(folded: Checkpoint, archive: Archive, copies: Mapping[str, str]) -> list[Shard]:
    """The original's files; each tensor with the stored tensor that it is restored from."""
    return [
        Shard(
            _plain_name(file, ".safetensors"),
            header,
            tuple(_slot(folded, copies, stored) for stored in tensors_of_header(file, header)),
        )
        for file, header in archive.headers.items()
    ]


def _slot(folded: Checkpoint, copies: Mapping[str, str], original: StoredTensor) -> Slot:
    name = copies.get(original.name, original.name)
    written = folded.tensors.get(name)
    if written is None:
        raise BadCheckpoint(
            f"{original.name} has to be restored from {name}, which is not stored: the weights "
            f"were changed since the fold; {WITHOUT}"
        )
    if written.dtype != original.dtype or not _is_extended(written.shape, original.shape):
        raise BadCheckpoint(
            f"{written.name} is stored as {written.dtype} of shape {list(written.shape)}, not as "
            f"the fold wrote it: the weights were changed since; {WITHOUT}"
        )
    return Slot(original.name, written, original.dtype, original.shape, original.offset)


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
