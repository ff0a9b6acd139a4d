"""The archive: one file from which a folded checkpoint's original is restored bit for bit.

The plan beside a result says how each tensor was edited. The archive has what the plan lacks. It is
a safetensors file with

    difference/NAME          U8, what restores an edited tensor (see ``difference``)
    header/FILE, file/FILE   U8, the header of a weight file, or all of a file that changes

The file's ``__metadata__`` has JSON under ``kept``: ``version``; the digest of the result's
``marker``; ``written``, from each tensor of the result to its digest; ``originals``, from each
tensor with a difference to ``[digest, dimension, slices]``, since it is restored in parts of so
many slices along that dimension; and ``files``, the digests of headers and files. A tensor without
a difference is the written one. The archive has a folder of its own, in which no loader looks for
weights.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from enjoyln_cli.checkpoint.headers import bytes_of
from enjoyln_cli.checkpoint.reader import Checkpoint, read_tensor
from enjoyln_cli.checkpoint.result_files import FILE, FOLDER
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.fs.digests import digest_of_data, fast_digest
from enjoyln_cli.plan.edits import Edit, read_edit_inputs
from enjoyln_cli.rewrite.difference import difference, restored, steps_to_undo
from enjoyln_cli.rewrite.edit_pieces import divide, edit_of_part
from enjoyln_cli.rewrite.shard_layout import Slot
from enjoyln_cli.rewrite.tensor_parts import TensorFiles, without_appended

VERSION = 1

PART = 1 << 20
"""About how many elements of a tensor are restored at once."""
WITHOUT = f"delete its folder {FOLDER} to get a copy that is not bit for bit the original"
"""Advice if the original cannot be restored."""
_ADVICE = "download the result again, or fold the source again"


def written_names(edits: Mapping[str, Edit]) -> dict[str, str]:
    """From original tensors to the unedited copies that they are restored from, if there are any.

    Every other original is restored from the tensor of its own name.
    """
    return {edit.source: name for name, edit in edits.items() if edit.source and not edit.changes}


# Writing.


@dataclass(frozen=True)
class Recorder:
    """Collects on the disk what restores the tensors of ``checkpoint``."""

    checkpoint: Checkpoint
    edits: Mapping[str, Edit]
    spool: BinaryIO
    """A temporary file for the differences, open for reading and writing."""
    sizes: dict[str, int] = field(default_factory=dict)
    """How many bytes of ``spool`` each difference takes, in their order."""
    written: dict[str, str] = field(default_factory=dict)
    originals: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """As in the archive."""


@dataclass(frozen=True)
class Record:
    """What restores one original tensor from a written one."""

    written: str
    digest: str
    """Of the written tensor."""
    name: str = ""
    """The original tensor, if a difference restores it."""
    original: tuple[str, int, int] = ("", 0, 0)
    """Its digest, and its parts as in the archive."""
    stored: bytes = b""


def record(recorder: Recorder, files: TensorFiles) -> Record:
    """The record of a tensor that is written and that ``files`` can read; changes nothing."""
    slot = files.slot
    name, digest = slot.stored.name, fast_digest(bytes_of(files.new()))
    edit = recorder.edits.get(name, Edit())
    is_restored = slot.name == name and edit.changes and name not in written_names(recorder.edits)
    if not is_restored or not prod(slot.stored.shape):
        return Record(slot.name, digest)
    shape = slot.stored.shape or (1,)
    steps = steps_to_undo(edit)
    values = read_edit_inputs(steps, lambda other: read_tensor(recorder.checkpoint, other))
    original, written = files.stored().view(shape), without_appended(files.new(), shape)
    parts = list(divide(steps, shape, PART))
    stored = b"".join(
        difference(
            edit_of_part(steps, *part),
            values.part(steps, *part),
            original.narrow(*part),
            written.narrow(*part),
        )
        for part in parts
    )
    dim, _, count = parts[0]
    in_parts = (fast_digest(bytes_of(original)), dim, count)
    return Record(slot.name, digest, name, in_parts, stored)


def keep(recorder: Recorder, entry: Record) -> None:
    """Add a record to those of the recorder."""
    recorder.written[entry.written] = entry.digest
    if entry.name:
        recorder.originals[entry.name] = entry.original
        recorder.sizes[entry.name] = recorder.spool.write(entry.stored)


def save_archive(
    recorder: Recorder,
    folder: Path,
    marker: Any,
    headers: Mapping[str, bytes],
    files: Mapping[str, bytes],
) -> None:
    """Write the archive to ``folder``.

    ``marker`` is the ``enjoyln`` entry of the result's config. ``headers`` and ``files`` map the
    original's file names to headers of weight files and to whole other files.
    """
    recorder.spool.flush()
    texts = {f"header/{name}": text for name, text in headers.items()}
    texts |= {f"file/{name}": text for name, text in files.items()}
    tensors = {name: np.frombuffer(text, np.uint8) for name, text in texts.items()}
    if recorder.sizes:
        stored, start = np.memmap(recorder.spool, np.uint8, "r"), 0
        for name, nbytes in recorder.sizes.items():
            tensors[f"difference/{name}"] = stored[start : start + nbytes]
            start += nbytes
    metadata = {
        "version": VERSION,
        "marker": digest_of_data(marker),
        "written": recorder.written,
        "originals": recorder.originals,
        "files": {name: fast_digest(text) for name, text in texts.items()},
    }
    save_file(tensors, folder / FILE, {"kept": json.dumps(metadata)})


# Reading.


@dataclass(frozen=True)
class Archive:
    """The archive of one original, without its differences, which are read one by one."""

    path: Path
    written: dict[str, str]
    originals: dict[str, tuple[str, int, int]]
    """As in the file."""
    headers: dict[str, bytes]
    files: dict[str, bytes]
    read: Callable[[str], bytes]
    """Reads a tensor of the file. Raises ``SafetensorError``."""


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError)


def open_archive(folder: Path, marker: Any) -> Archive:
    """Open the archive in ``folder`` of the result whose config has ``marker``.

    Raises ``BadCheckpoint`` if it is missing or damaged, or belongs to another result.
    """
    path = folder / FILE
    try:
        file = safe_open(path, "np")
        metadata = json.loads(file.metadata()["kept"])
        if metadata["version"] != VERSION:
            raise BadCheckpoint(
                f"{path} has version {metadata['version']!r:.40}, but this program reads "
                f"{VERSION}; upgrade enjoyln"
            )
        if metadata["marker"] != digest_of_data(marker):
            raise BadCheckpoint(f"{path} belongs to the result of another fold; {_ADVICE}")

        def read(name: str) -> bytes:
            return cast(bytes, file.get_tensor(name).tobytes())

        texts = {name: read(name) for name in metadata["files"]}
        if {name: fast_digest(text) for name, text in texts.items()} != metadata["files"]:
            raise ValueError("a digest does not match")
        kinds: dict[str, dict[str, bytes]] = {"header": {}, "file": {}}
        for name, text in texts.items():
            kind, _, file_name = name.partition("/")
            kinds[kind][file_name] = text
        originals = {
            str(name): (str(digest), int(dim), int(count))
            for name, (digest, dim, count) in metadata["originals"].items()
        }
        written = dict(metadata["written"])
        return Archive(path, written, originals, kinds["header"], kinds["file"], read)
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} is missing; {_ADVICE}") from error
    except _MALFORMED as error:
        raise BadCheckpoint(f"{path} is damaged: {type(error).__name__}; {_ADVICE}") from error


def restore(
    archive: Archive,
    edits: Mapping[str, Edit],
    slot: Slot,
    written: torch.Tensor,
    into: torch.Tensor,
    read: Callable[[str], torch.Tensor],
) -> None:
    """Restore the original tensor of ``slot`` from the ``written`` one, and check both by digest.

    ``edits`` are those of the fold, and ``read`` returns other tensors of the original. Raises
    ``BadCheckpoint`` if the written tensor has changed, or the archive cannot restore it.
    """
    stored, edit = slot.stored, edits.get(slot.name, Edit())
    if fast_digest(bytes_of(written)) != archive.written.get(stored.name):
        raise changed_since(f"{stored.name} in {stored.file}")
    is_edited = slot.name not in written_names(edits) and edit.changes and into.numel() > 0
    if is_edited != (slot.name in archive.originals):
        raise BadCheckpoint(
            f"{archive.path} and the plan of this result disagree about {slot.name}; {_ADVICE}"
        )
    if not is_edited:
        into.copy_(written)
        return
    try:
        shape, steps = tuple(into.shape) or (1,), steps_to_undo(edit)
        original, written = into.view(shape), without_appended(written, shape)
        values = read_edit_inputs(steps, read)
        digest, dim, count = archive.originals[slot.name]
        packed = io.BytesIO(archive.read(f"difference/{slot.name}"))
        with gzip.open(packed) as data:
            for first in range(0, shape[dim], count):
                part = dim, first, min(count, shape[dim] - first)
                undone, inputs = edit_of_part(steps, *part), values.part(steps, *part)
                values_of_part = restored(
                    undone, inputs, written.narrow(*part), cast(BinaryIO, data)
                )
                original.narrow(*part).copy_(values_of_part)
        if fast_digest(bytes_of(original)) != digest:
            raise ValueError("the digest does not match")
    except (*_MALFORMED, RuntimeError, EOFError, OSError, zlib.error) as error:
        raise BadCheckpoint(
            f"{archive.path} is damaged: it cannot restore {slot.name}; {_ADVICE}"
        ) from error


def changed_since(tensor: str) -> BadCheckpoint:
    """The refusal of a result in which a tensor has changed."""
    return BadCheckpoint(
        f"{tensor} is not what the fold wrote, so the original cannot be restored: the weights "
        f"were changed since; {WITHOUT}"
    )
