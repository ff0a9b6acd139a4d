"""Record what restores a checkpoint while it is written, and estimate the archive's size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from io import BytesIO
from math import prod
from typing import BinaryIO

import torch

from enjoyln_cli.archive.archive_file import Record, Recorder
from enjoyln_cli.archive.difference import Undo, difference, undo_of
from enjoyln_cli.checkpoint.headers import DTYPES, FLOATS, bytes_of
from enjoyln_cli.checkpoint.reader import Checkpoint, read_part, read_tensor
from enjoyln_cli.fs.digests import digest_of_piece
from enjoyln_cli.plan.edits import Edit, apply_in_pieces, divide, edit_of_part, read_edit_inputs

RECORDED = 1 << 20
"""About how many elements of a tensor are recorded at once."""
SAMPLE = 1 << 16
"""How many elements of a tensor an estimate uses."""
ENTRY, PART = 340, 60
"""About how many bytes of an archive describe a tensor, and a part of it."""


def start_recording(checkpoint: Checkpoint, edits: Mapping[str, Edit], spool: BinaryIO) -> Recorder:
    """A recorder for every tensor of ``checkpoint``; ``spool`` is an open temporary file.

    A tensor that is copied unchanged to another name is restored from that copy.
    """
    copies = {e.source: name for name, e in edits.items() if e.source and not e.changes}
    undo = {}
    for name, stored in checkpoint.tensors.items():
        edit = edits.get(name)
        if edit is None or name in copies or stored.dtype not in FLOATS:
            undo[name] = Undo(DTYPES[stored.dtype], stored.shape)
        else:
            values = read_edit_inputs(
                replace(edit, plus=None), lambda other: read_tensor(checkpoint, other)
            )
            undo[name] = undo_of(edit, values, FLOATS[stored.dtype], stored.shape)
    return Recorder(undo, copies, spool)


def parts_to_record(
    recorder: Recorder,
    written: str,
    original: Callable[[], torch.Tensor],
    new: Callable[[], torch.Tensor],
) -> Iterator[Callable[[], Record]]:
    """What makes the records of the tensor that ``written`` restores, if any, once it is written.

    ``original`` returns the stored tensor, and ``new`` the written one without appended slices.
    """
    name = recorder.originals.get(written)
    if name is None or not prod(recorder.undo[name].shape):
        return
    undo, original, new = recorder.undo[name], cache(original), cache(new)
    undo = replace(undo, shape=undo.shape or (1,))

    def record(dim: int, first: int, count: int) -> Record:
        x = original().view(undo.shape).narrow(dim, first, count).contiguous()
        y = new().view(undo.shape).narrow(dim, first, count)
        stored = difference(undo.part(dim, first, count), x, y)
        return Record(name, (dim, first, count), digest_of_piece(bytes_of(x)), stored)

    for part in divide(Edit(axes=undo.axes), undo.shape, RECORDED):
        yield partial(record, *part)


def outputs_to_digest(recorder: Recorder, edits: Mapping[str, Edit]) -> list[str]:
    """Written tensors that restoring does not check: filled, extended, or untied copies."""
    return [
        name
        for name, edit in edits.items()
        if edit.fill is not None or edit.append or name not in recorder.originals
    ]


def bytes_to_keep(checkpoint: Checkpoint, edits: Mapping[str, Edit]) -> int:
    """Estimate the bytes of the archive, by editing and recording a part of each edited tensor."""
    recorder = start_recording(checkpoint, edits, BytesIO())
    total = 0.0
    for name, undo in recorder.undo.items():
        count = prod(undo.shape)
        total += ENTRY + PART * -(-count // RECORDED)
        total += sum(factor.nbytes for factor in undo.factors)
        if count and name in edits and name not in recorder.written:
            total += count * _bytes_each(checkpoint, name, edits[name], undo)
    return round(total)


def _bytes_each(checkpoint: Checkpoint, name: str, edit: Edit, undo: Undo) -> float:
    """Bytes that are stored for each element, measured on a part in the middle of the tensor."""
    values = read_edit_inputs(edit, lambda other: read_tensor(checkpoint, other))
    edit = replace(edit, append=None)
    parts = list(divide(edit, undo.shape, SAMPLE))
    part = parts[len(parts) // 2]
    x = read_part(checkpoint, name, *part)
    written = torch.empty_like(x)
    with suppress(OverflowError):  # the fold itself will refuse it
        inputs = values.part(edit, *part)
        apply_in_pieces(x, edit_of_part(edit, *part), inputs, written, allow_nonfinite=True)
    return len(difference(undo.part(*part), x, written)) / x.numel()
