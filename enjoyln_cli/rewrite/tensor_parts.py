"""Write one tensor of a new weight file from a stored tensor, part by part.

Both tensors are memory maps of their files. Bytes that stay are copied by the system. Edited
elements go through float64 in pieces that fit into a cache (``edit_pieces.apply_in_pieces``), and
are rounded once. The parts are independent of each other, so threads may write them in any order.
Each maps the files anew, which fails if the stored file has been cut short meanwhile; only a file
that is cut while one of its parts is being edited ends the process (with SIGBUS).

torch rounds float64 to 16 bits by way of float32, so errors reach 0.5001 units in the last place
instead of 0.5.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from mmap import ACCESS_WRITE

import torch

from enjoyln_cli.checkpoint.headers import FLOATS, bytes_of, map_tensor, mapped, read_at
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.new_values import Append
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.rewrite.edit_pieces import apply_in_pieces, divide
from enjoyln_cli.rewrite.shard_layout import Slot

PART = 1 << 22
"""About how many elements a thread edits before it takes the next part."""
COPIED = 1 << 24
"""Most bytes to copy before the next part is taken."""
_WHOLE = threading.Lock()
"""Held while a tensor is edited that cannot be divided into parts, since that may need several
times its size in memory."""
_NO_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
"""Errors of a system that cannot copy between two files itself."""


@dataclass(frozen=True)
class TensorPart:
    """A part of a new tensor: how many bytes it has, and the function that writes them."""

    nbytes: int
    write: Callable[[], None]


@dataclass(frozen=True)
class TensorFiles:
    """Where one tensor is read from and written to."""

    slot: Slot
    source: int | Callable[[], torch.Tensor]
    """Descriptor of an open safetensors file, or the function that returns a pickled tensor."""
    target: int
    """Descriptor of the new file, which has its full size already."""

    def stored(self) -> torch.Tensor:
        """The stored tensor: a private map of its file, or in memory.

        Raises ``BadCheckpoint`` if the file has become shorter since its header was read.
        """
        if not isinstance(self.source, int):
            return self.source()
        return map_tensor(self.source, self.slot.stored)

    def new(self) -> torch.Tensor:
        """The new tensor: a map of its file, through which it is written."""
        slot = self.slot
        return mapped(self.target, slot.offset, slot.dtype, slot.shape, ACCESS_WRITE)


def parts_of(
    files: TensorFiles, edit: Edit, load: Callable[[Edit], Edit], allow_nonfinite: bool
) -> Iterator[TensorPart]:
    """The parts that write a tensor after ``edit``.

    ``load`` returns the edit with the values that it takes from other tensors. With
    ``allow_nonfinite``, NaN and Inf spread over their group, as the LayerNorm after it would spread
    them. Elements that the edit leaves alone are not checked.

    Writing a part raises ``BadCheckpoint`` if edited elements are NaN or Inf (without
    ``allow_nonfinite``), if values are out of the range of the new dtype, and if the file ends
    early.
    """
    slot = files.slot
    if edit.steps or slot.dtype != slot.stored.dtype:
        yield from _edited_parts(files, edit, load, allow_nonfinite)
        return
    for first in range(0, slot.nbytes, COPIED):
        count = min(COPIED, slot.nbytes - first)
        yield TensorPart(count, partial(_copy_bytes, files, first, count))


def _copy_bytes(files: TensorFiles, first: int, count: int) -> None:
    """Copy ``count`` bytes of the stored tensor from byte ``first`` on to the same place."""
    slot, target = files.slot, files.slot.offset + first
    if not isinstance(files.source, int):
        write_bytes(files.target, bytes_of(files.source())[first : first + count], target)
        return
    start, end = slot.stored.offset + first, slot.stored.offset + first + count
    try:
        while start < end:
            copied = os.copy_file_range(files.source, files.target, end - start, start, target)
            if copied == 0:
                raise BadCheckpoint(f"{slot.stored.file} ends inside {slot.name}; fetch it again")
            start, target = start + copied, target + copied
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _NO_COPY:
            raise
        data = memoryview(bytearray(end - start))
        read_at(files.source, data, slot.stored, start - slot.stored.offset)
        write_bytes(files.target, data, target)


def write_bytes(file: int, data: memoryview, at: int) -> None:
    """Write all of ``data`` to an open file from byte ``at`` on."""
    done = 0
    while done < len(data):
        done += os.pwrite(file, data[done:], at + done)


def _edited_parts(
    files: TensorFiles, edit: Edit, load: Callable[[Edit], Edit], allow_nonfinite: bool
) -> Iterator[TensorPart]:
    """The parts of a tensor whose elements go through float64; appended slices are one part."""
    slot = files.slot
    shape, itemsize = slot.stored.shape or (1,), FLOATS[slot.dtype].itemsize
    loaded = cache(load)
    if edit.append is not None:
        append, appended = edit.append, prod(slot.shape) - prod(shape)
        yield TensorPart(appended * itemsize, lambda: _append_slices(files.new(), shape, append))
    unappended = edit.without_append

    def write(dim: int, first: int, count: int) -> None:
        x = files.stored().view(shape).narrow(dim, first, count)
        y = without_appended(files.new(), shape).narrow(dim, first, count)
        part = loaded(unappended).part(dim, first, count)
        where = f"{slot.name} in {slot.stored.file}"
        try:
            with _WHOLE if x.numel() > 2 * PART else nullcontext():
                apply_in_pieces(x, part, y, allow_nonfinite=allow_nonfinite)
        except OverflowError:
            raise BadCheckpoint(
                f"{where} has values beyond {slot.dtype}; choose a wider dtype, such as --dtype "
                "float32"
            ) from None
        except FloatingPointError:
            raise BadCheckpoint(
                f"{where} holds NaN or Inf and cannot be centred; repair it, or pass "
                "--allow-nonfinite"
            ) from None

    for dim, first, count in divide(unappended, shape, PART) if prod(shape) else ():
        nbytes = prod(shape) // shape[dim] * count * itemsize
        yield TensorPart(nbytes, partial(write, dim, first, count))


def _append_slices(new: torch.Tensor, shape: tuple[int, ...], append: Append) -> None:
    """Fill the slices of a new tensor that a tensor of ``shape`` does not have."""
    added = new.narrow(append.dim, shape[append.dim], len(append.values))
    added.copy_(append.slices(shape))


def without_appended(new: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of the first slices of a tensor along each dimension, as many as ``shape`` has."""
    for dim, length in enumerate(shape if new.ndim else ()):
        new = new.narrow(dim, 0, length)
    return new.view(shape) if not new.ndim else new
