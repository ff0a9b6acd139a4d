"""Restore a tensor from the one that was written for it, bit for bit.

An edit computes ``written = round(append(P diag(f) W))``: multiply, centre, append, and round once.
From the means that centring removed and the factors, ``W`` is approximated, and what the rounding
lost is stored as a difference of bits:

    approximation = round((cut(written) + means) / f)
    difference    = bits(W) - bits(approximation)      as integers of the elements' width

Most differences are 0, and most others are 1 or -1. They are stored after the means, as 0, 1, 2,
... for 0, -1, 1, ..., all lowest bytes first, then all second bytes, and so on, all compressed by
gzip. They restore ``W`` whatever the approximation is, NaN and signed zeros included. What an edit
adds to a tensor, or fills it with, is not undone, and no norm that is baked into a table; the
difference then holds all of the tensor. The approximation is computed in float64 (in float32 for
16-bit dtypes), one operation at a time, so that every machine gets the same bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from math import prod
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray

from enjoyln_cli.checkpoint.headers import bytes_of
from enjoyln_cli.plan.axis import Axis, centre, group_means, scale_along
from enjoyln_cli.plan.edits import Edit, EditInputs, Vector

Integers = NDArray[np.signedinteger]

_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
_GZIP = 31
"""zlib's number for the format of gzip."""


def steps_to_undo(edit: Edit) -> Edit:
    """The steps of ``edit`` that an approximation undoes."""
    if edit.fill is not None or edit.bake or edit.level:
        return Edit()
    return Edit(times=edit.times, scale=edit.scale, axes=edit.axes)


def difference(
    edit: Edit, values: EditInputs, original: torch.Tensor, written: torch.Tensor
) -> bytes:
    """What ``restored`` needs besides ``written``: the means and the difference, compressed.

    ``edit`` is one from ``steps_to_undo``. Both tensors have the same shape and dtype.
    """
    means = _means_of(edit, values, original)
    bits = _bits(original) - _bits(_approximation(edit, values, written, means))
    folded = (bits << 1) ^ (bits >> (8 * bits.itemsize - 1))
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, bits.itemsize).T)
    packer = zlib.compressobj(wbits=_GZIP, strategy=zlib.Z_RLE)  # what repeats are runs of zeros
    packed = [packer.compress(data) for data in (*map(bytes_of, means), planes.data)]
    return b"".join([*packed, packer.flush()])


def restored(
    edit: Edit, values: EditInputs, written: torch.Tensor, stored: BinaryIO
) -> torch.Tensor:
    """The original, from ``written`` and what ``difference`` returned, which ``stored`` unpacks.

    Raises ``ValueError`` if ``stored`` ends early.
    """
    wide, means = _wide(written.dtype), []
    for axis in edit.axes:
        shape = _shape_of_means(tuple(written.shape), axis)
        data = _read(stored, prod(shape) * wide.itemsize)
        means.append(torch.frombuffer(data, dtype=wide).view(shape))
    approximation = _approximation(edit, values, written, means)
    bits = _bits(approximation)
    planes = np.frombuffer(_read(stored, bits.nbytes), dtype=np.uint8)
    columns = np.ascontiguousarray(planes.reshape(bits.itemsize, -1).T)
    folded = columns.reshape(-1).view(f"u{bits.itemsize}")
    bits += (folded >> 1).view(bits.dtype) ^ -(folded & 1).view(bits.dtype)
    return approximation


def _read(stored: BinaryIO, nbytes: int) -> bytearray:
    data = bytearray(stored.read(nbytes))
    if len(data) != nbytes:
        raise ValueError(f"{len(data)} bytes are left instead of {nbytes}")
    return data


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the approximation, the means and the factors."""
    return torch.float32 if dtype.itemsize == 2 else torch.float64


def _factors(
    edit: Edit, values: EditInputs, dtype: torch.dtype
) -> Iterator[tuple[Vector, torch.Tensor]]:
    """Each vector that the edit multiplies by, with its factors.

    Factors that cannot be divided by (zeros, NaN and Inf) are 1.
    """
    pairs = [*zip(edit.times, values.times, strict=True), (edit.scale, values.scale)]
    for vector, factors in pairs:
        if vector is not None and factors is not None:
            factors = factors.to(dtype)
            usable = (factors != 0) & factors.isfinite()
            yield vector, torch.where(usable, factors, torch.ones_like(factors))


def _means_of(edit: Edit, values: EditInputs, x: torch.Tensor) -> list[torch.Tensor]:
    """The means that each axis loses when it is centred, after the multiplications."""
    wide, means = _wide(x.dtype), []
    x = x.to(torch.float64, copy=True)
    for vector, factors in _factors(edit, values, wide):
        scaled = scale_along(vector.part(x), factors.double(), vector.dim)
        vector.part(x).copy_(scaled)
    for number, axis in enumerate(edit.axes):
        if number:
            x = centre(x, edit.axes[number - 1])
        means.append(group_means(x, axis).to(wide))
    return means


def _shape_of_means(shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    return (*shape[: axis.dim], axis.outer, 1, axis.inner, *shape[axis.dim + 1 :])


def _approximation(
    edit: Edit, values: EditInputs, written: torch.Tensor, means: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A new tensor: the written one with the edit undone, as far as rounding allows."""
    if edit == Edit():
        return written.clone(memory_format=torch.contiguous_format)
    x = written.to(_wide(written.dtype), memory_format=torch.contiguous_format, copy=True)
    for axis, mean in zip(reversed(edit.axes), reversed(means), strict=True):
        centred = x.narrow(axis.dim, axis.start, axis.length)
        centred.unflatten(axis.dim, (axis.outer, axis.size, axis.inner)).add_(mean)
    for vector, factors in reversed(list(_factors(edit, values, x.dtype))):
        vector.part(x).div_(factors.reshape(-1, *(1,) * (x.ndim - 1 - vector.dim)))
    # The bits of a NaN depend on the machine.
    return x.nan_to_num_(0.0, torch.inf, -torch.inf).to(written.dtype)


def _bits(x: torch.Tensor) -> Integers:
    """The elements of ``x`` as integers; they share its memory if it is contiguous."""
    return np.frombuffer(bytes_of(x), dtype=_INTEGERS[x.dtype.itemsize])
