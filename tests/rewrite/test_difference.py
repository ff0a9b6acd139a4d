"""The difference restores the original from any written tensor, bit for bit."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import BinaryIO, cast

import pytest
import torch

from enjoyln_cli.plan.axis import Axis, centre
from enjoyln_cli.plan.edits import Edit, EditInputs, Vector
from enjoyln_cli.rewrite.difference import difference, restored

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPE = (30, 77)
AXES = (Axis(0, 2, 2, 7, 2), Axis(1, 0, 11, 7, 1))
MEANS = 2 * 2 * SHAPE[1] + SHAPE[0] * 11


def any_bits(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits: numbers, NaN with any payload, infinities, zeros of both signs."""
    made = torch.Generator().manual_seed(seed)
    shape = (*SHAPE[:-1], SHAPE[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, generator=made, dtype=torch.uint8).view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    integers = INTEGERS[a.dtype.itemsize]
    return a.dtype == b.dtype and torch.equal(a.view(integers), b.view(integers))


def unpacked(stored: bytes) -> BinaryIO:
    return cast(BinaryIO, gzip.open(io.BytesIO(stored)))


def edited(
    dtype: torch.dtype, axes: tuple[Axis, ...] = AXES
) -> tuple[Edit, EditInputs, torch.Tensor, torch.Tensor]:
    """An edit and its factors, an original, and the tensor that is written for it."""
    made = torch.Generator().manual_seed(4)
    x = (torch.randn(SHAPE, generator=made) * 0.02 + 0.3).to(dtype)
    factors = (torch.rand(SHAPE[1], generator=made) + 0.5).double()
    y = x.double() * factors
    for axis in axes:
        y = centre(y, axis)
    return Edit(times=(Vector("g", 1),), axes=axes), EditInputs((factors,)), x, y.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_edited_tensor_is_restored_from_few_bytes(dtype: torch.dtype) -> None:
    edit, values, x, y = edited(dtype)
    stored = difference(edit, values, x, y)
    assert not same_bits(x, y)
    assert same_bits(restored(edit, values, y, unpacked(stored)), x)
    means = MEANS * (4 if dtype.itemsize == 2 else 8)
    assert len(unpacked(stored).read()) == means + x.nbytes
    assert len(stored) < means + 0.5 * x.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axes", [(), AXES], ids=["copied", "centred"])
def test_any_bits_are_restored_from_any_others(dtype: torch.dtype, axes: tuple[Axis, ...]) -> None:
    edit, values = Edit(axes=axes), EditInputs()
    original, written = any_bits(dtype, 1), any_bits(dtype, 2)
    before = written.clone()
    stored = difference(edit, values, original, written)
    assert same_bits(restored(edit, values, written, unpacked(stored)), original)
    assert same_bits(written, before)


@pytest.mark.parametrize("factor", [0.0, float("nan"), float("inf")])
def test_factors_that_cannot_be_divided_by(factor: float) -> None:
    edit, values, x, y = edited(torch.float32, AXES[1:])
    values.times[0][7], y[:, 7] = factor, factor
    stored = difference(edit, values, x, y)
    assert same_bits(restored(edit, values, y, unpacked(stored)), x)


@pytest.mark.parametrize("damage", ["cut", "too short", "not compressed", "another bit"])
def test_what_does_not_fit_is_refused(damage: str) -> None:
    edit, values, x, y = edited(torch.bfloat16)
    stored = difference(edit, values, x, y)
    bad = {
        "cut": stored[:-9],
        "too short": gzip.compress(unpacked(stored).read()[:-1]),
        "not compressed": b"x" * 50,
        "another bit": bytes([*stored[:-40], stored[-40] ^ 4, *stored[-39:]]),
    }[damage]
    with pytest.raises((ValueError, EOFError, OSError, zlib.error)):
        data = unpacked(bad)
        restored(edit, values, y, data)
        data.read(1)
