"""Restore a tensor from the one that was written for it, bit for bit.

An edit computes ``written = round(append(P diag(f) W))``: multiply, centre, append, and round once.
From the means that centring removed and the factors, ``W`` is approximated, and what the rounding
lost is stored as a difference of bits:

    approximation = round((cut(written) + means) / f)
    difference    = bits(W) - bits(approximation)      as integers of the elements' width

Most differences are 0, and most others are 1 or -1. They are stored as 0, 1, 2, ... for 0, -1, 1,
..., all lowest bytes first, then all second bytes, and so on, compressed by zlib. They restore
``W`` whatever the approximation is, NaN and signed zeros included. The approximation is computed in
float64 (in float32 for 16-bit dtypes), one operation at a time, so that every machine gets the same
bits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from enjoyln_cli.checkpoint.headers import bytes_of
from enjoyln_cli.plan.axis import Axis, centre, group_means, scale_along
from enjoyln_cli.plan.edits import Edit, EditInputs, edit_of_part

Integers = NDArray[np.signedinteger]

_INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


@dataclass(frozen=True)
class Undo:
    """How a tensor of the original, or a part of it, is approximated from the written one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    axes: tuple[Axis, ...] = ()
    """The axes that the edit centred over, in this order."""
    dims: tuple[int, ...] = ()
    """The dimensions that the edit multiplied along before centring, in this order."""
    factors: tuple[torch.Tensor, ...] = ()
    """For each of ``dims``, a vector of one factor for each slice, finite and not 0."""

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the approximation, the means and the factors."""
        return torch.float32 if self.dtype.itemsize == 2 else torch.float64

    def part(self, dim: int, first: int, count: int) -> Undo:
        """How ``count`` slices along ``dim`` are approximated, from slice ``first`` on."""
        axes = edit_of_part(Edit(axes=self.axes), dim, first, count).axes
        shape = (*self.shape[:dim], count, *self.shape[dim + 1 :])
        pairs = zip(self.dims, self.factors, strict=True)
        factors = tuple(f.narrow(0, first, count) if d == dim else f for d, f in pairs)
        return replace(self, shape=shape, axes=axes, factors=factors)


def undo_of(edit: Edit, values: EditInputs, dtype: torch.dtype, shape: tuple[int, ...]) -> Undo:
    """How to approximate a tensor of ``dtype`` and ``shape`` before ``edit``.

    What an edit adds to a tensor, or fills it with, is not undone, and no norm that is baked into a
    table; the difference then holds all of the tensor.
    """
    if edit.bake or edit.level:
        return Undo(dtype, shape)
    undo = Undo(dtype, shape, edit.axes)
    known = ((edit.times, values.times), (edit.scale, values.scale))
    pairs = [(at.dim, value) for at, value in known if at is not None and value is not None]
    factors = tuple(_divisor(value.to(undo.wide)) for _, value in pairs)
    return replace(undo, dims=tuple(dim for dim, _ in pairs), factors=factors)


def _divisor(values: torch.Tensor) -> torch.Tensor:
    """``values`` with 1 in place of zeros, NaN and Inf."""
    return torch.where((values == 0) | ~values.isfinite(), torch.ones_like(values), values)


def fits(undo: Undo) -> bool:
    """Whether axes and factors fit the shape: a check for data read from a file."""
    shape = undo.shape
    if len(undo.dims) != len(undo.factors) or min(shape, default=0) < 0:
        return False
    return all(
        0 <= axis.dim < len(shape)
        and min(axis.start, axis.outer - 1, axis.size - 1, axis.inner - 1) >= 0
        and axis.step == 0
        and axis.stop <= shape[axis.dim]
        for axis in undo.axes
    ) and all(
        0 <= dim < len(shape) and (factor.shape, factor.dtype) == ((shape[dim],), undo.wide)
        for dim, factor in zip(undo.dims, undo.factors, strict=True)
    )


def difference(undo: Undo, original: torch.Tensor, written: torch.Tensor) -> bytes:
    """What ``restored`` needs besides ``written``: the means, then the compressed difference.

    Both tensors have the shape and dtype of ``undo``. Empty if the written tensor is the original.
    """
    means = _means_of(undo, original) if undo.axes else []
    bits = _bits(original) - _bits(_approximation(undo, written, means))
    stored = b"".join(bytes_of(mean) for mean in means)
    return stored + _compressed(bits) if bits.any() else stored


def restored(undo: Undo, written: torch.Tensor, stored: bytes) -> torch.Tensor:
    """The original, from ``written`` and what ``difference`` returned.

    Raises ``ValueError``, ``RuntimeError`` or ``zlib.error`` if ``stored`` does not fit.
    """
    means, start = [], 0
    for axis in undo.axes:
        shape = _shape_of_means(undo.shape, axis)
        nbytes = prod(shape) * undo.wide.itemsize
        data = bytearray(stored[start : start + nbytes])
        means.append(torch.frombuffer(data, dtype=undo.wide).view(shape))
        start += nbytes
    approximation = _approximation(undo, written, means)
    if start < len(stored):
        bits = _bits(approximation)
        bits += _decompressed(stored[start:], bits)
    return approximation


def _means_of(undo: Undo, x: torch.Tensor) -> list[torch.Tensor]:
    """The means that each axis loses when it is centred, after the multiplications."""
    x, means = x.double(), []
    for dim, factor in zip(undo.dims, undo.factors, strict=True):
        x = scale_along(x, factor.double(), dim)
    for number, axis in enumerate(undo.axes):
        if number:
            x = centre(x, undo.axes[number - 1])
        means.append(group_means(x, axis).to(undo.wide))
    return means


def _shape_of_means(shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    return (*shape[: axis.dim], axis.outer, 1, axis.inner, *shape[axis.dim + 1 :])


def _approximation(
    undo: Undo, written: torch.Tensor, means: Sequence[torch.Tensor]
) -> torch.Tensor:
    """A new tensor: the written one with the edit undone, as far as rounding allows."""
    if not undo.axes and not undo.dims:
        return written.clone(memory_format=torch.contiguous_format)
    x = written.to(undo.wide, memory_format=torch.contiguous_format, copy=True)
    for axis, mean in zip(reversed(undo.axes), reversed(means), strict=True):
        centred = x.narrow(axis.dim, axis.start, axis.length)
        centred.unflatten(axis.dim, (axis.outer, axis.size, axis.inner)).add_(mean)
    for dim, factor in zip(reversed(undo.dims), reversed(undo.factors), strict=True):
        x.div_(factor.reshape(-1, *(1,) * (x.ndim - 1 - dim)))
    # The bits of a NaN depend on the machine.
    return x.nan_to_num_(0.0, torch.inf, -torch.inf).to(undo.dtype)


def _bits(x: torch.Tensor) -> Integers:
    """The elements of ``x`` as integers; they share its memory if it is contiguous."""
    return np.frombuffer(bytes_of(x), dtype=_INTEGERS[x.dtype.itemsize])


def _compressed(bits: Integers) -> bytes:
    folded = (bits << 1) ^ (bits >> (8 * bits.itemsize - 1))
    planes = np.ascontiguousarray(folded.view(np.uint8).reshape(-1, bits.itemsize).T)
    packer = zlib.compressobj(strategy=zlib.Z_RLE)  # what repeats here are runs of zeros
    return packer.compress(planes.data) + packer.flush()


def _decompressed(data: bytes, like: Integers) -> Integers:
    """The integers that ``_compressed`` was called with, as many and as wide as ``like`` has."""
    unpacker = zlib.decompressobj()
    planes = np.frombuffer(unpacker.decompress(data, like.nbytes), dtype=np.uint8)
    if planes.size != like.nbytes:
        raise ValueError("a difference of another length")
    columns = np.ascontiguousarray(planes.reshape(like.itemsize, -1).T)
    folded = columns.reshape(-1).view(f"u{like.itemsize}")
    bits: Integers = (folded >> 1).view(like.dtype) ^ -(folded & 1).view(like.dtype)
    return bits
