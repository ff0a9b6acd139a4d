"""Set up the recording of a checkpoint for its archive, and estimate the archive's size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch

from enjoyln_cli.archive.archive_file import TRANSFER, Recorder
from enjoyln_cli.archive.prediction import Undo, compute_means, predict, undo_of
from enjoyln_cli.archive.residuals import corrections
from enjoyln_cli.checkpoint.headers import DTYPES, FLOATS
from enjoyln_cli.checkpoint.reader import Checkpoint, read_part, read_tensor
from enjoyln_cli.plan.edits import Edit, Vector, apply_edit, read_edit_inputs

SAMPLE = 1 << 16
"""How many elements of a tensor an estimate uses."""
ENTRY, PIECE = 340, 80
"""About how many bytes of an archive describe a tensor, and a piece of it."""


def start_recording(checkpoint: Checkpoint, edits: Mapping[str, Edit], spool: int) -> Recorder:
    """A recorder for every tensor of ``checkpoint``; ``spool`` is the descriptor of an open file.

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


def outputs_to_digest(recorder: Recorder, edits: Mapping[str, Edit]) -> list[str]:
    """Written tensors that restoring does not check: filled, extended, or untied copies."""
    return [
        name
        for name, edit in edits.items()
        if edit.fill is not None or edit.append or name not in recorder.originals
    ]


def bytes_to_keep(checkpoint: Checkpoint, edits: Mapping[str, Edit]) -> int:
    """Estimate the bytes of the archive, by editing and predicting a part of each edited tensor."""
    recorder = start_recording(checkpoint, edits, -1)
    total = 0.0
    for name, undo in recorder.undo.items():
        stored = checkpoint.tensors[name]
        total += ENTRY + PIECE * -(-stored.nbytes // TRANSFER)
        total += sum(tensor.nbytes for tensor in (*undo.means, *undo.factors))
        if name in edits and name not in recorder.written:
            total += prod(stored.shape) * _bytes_each(checkpoint, name, edits[name])
    return round(total)


def _bytes_each(checkpoint: Checkpoint, name: str, edit: Edit) -> float:
    """Bytes of corrections for each element, measured on a part of the tensor with whole groups."""
    shape = checkpoint.tensors[name].shape
    values = read_edit_inputs(edit, lambda other: read_tensor(checkpoint, other))
    free = [d for d in range(len(shape)) if d not in {axis.dim for axis in edit.axes}]
    if prod(shape) <= SAMPLE or not free or edit.plus:
        x = read_tensor(checkpoint, name)
    else:
        dim = max(free, key=lambda d: shape[d])
        count = max(1, SAMPLE * shape[dim] // prod(shape))
        span = (shape[dim] - count) // 2, count
        x = read_part(checkpoint, name, dim, *span)
        values = replace(
            values,
            times=_narrowed(values.times, edit.times, dim, span),
            scale=_narrowed(values.scale, edit.scale, dim, span),
        )
    edit = replace(edit, append=None)
    undo = undo_of(edit, values, x.dtype, tuple(x.shape))
    compute_means(undo, x.double())
    written = apply_edit(x.double(), edit, values).to(x.dtype).flatten()
    room = torch.empty(written.numel(), dtype=torch.float64)
    found = corrections(x.flatten(), predict(undo, written, 0, room))
    return found.nbytes / max(x.numel(), 1)


def _narrowed(
    values: torch.Tensor | None, at: Vector | None, dim: int, span: tuple[int, int]
) -> torch.Tensor | None:
    return values.narrow(0, *span) if values is not None and at and at.dim == dim else values
