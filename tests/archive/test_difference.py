"""The difference restores the original from any written tensor, bit for bit."""

from __future__ import annotations

import zlib
from dataclasses import replace

import pytest
import torch

from enjoyln_cli.archive.difference import Undo, difference, restored
from enjoyln_cli.plan.axis import Axis, centre

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


def edited(dtype: torch.dtype) -> tuple[Undo, torch.Tensor, torch.Tensor]:
    """How an edit is undone, an original, and the tensor that is written for it."""
    made = torch.Generator().manual_seed(4)
    x = (torch.randn(SHAPE, generator=made) * 0.02 + 0.3).to(dtype)
    factor = (torch.rand(SHAPE[1], generator=made) + 0.5).double()
    y = x.double() * factor
    for axis in AXES:
        y = centre(y, axis)
    undo = Undo(dtype, SHAPE, AXES)
    return replace(undo, dims=(1,), factors=(factor.to(undo.wide),)), x, y.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_edited_tensor_is_restored_from_few_bytes(dtype: torch.dtype) -> None:
    undo, x, y = edited(dtype)
    stored = difference(undo, x, y)
    assert not same_bits(x, y)
    assert same_bits(restored(undo, y, stored), x)
    means = MEANS * undo.wide.itemsize
    assert means <= len(stored) < means + 0.5 * x.nbytes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axes", [(), AXES], ids=["copied", "centred"])
def test_any_bits_are_restored_from_any_others(dtype: torch.dtype, axes: tuple[Axis, ...]) -> None:
    undo = Undo(dtype, SHAPE, axes)
    original, written = any_bits(dtype, 1), any_bits(dtype, 2)
    before = written.clone()
    assert same_bits(restored(undo, written, difference(undo, original, written)), original)
    assert same_bits(written, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bits_need_nothing(dtype: torch.dtype) -> None:
    original = any_bits(dtype, 1)
    undo = Undo(dtype, SHAPE)
    assert difference(undo, original, original.clone()) == b""
    assert same_bits(restored(undo, original, b""), original)


@pytest.mark.parametrize("span", [(0, 3, 20), (1, 14, 21)])
def test_a_part_is_undone_like_the_whole(span: tuple[int, int, int]) -> None:
    undo, x, _ = edited(torch.float32)
    undo = replace(undo, axes=AXES[1:])
    y = centre(x.double() * undo.factors[0], AXES[1]).float()
    some_x, some_y, part = x.narrow(*span).contiguous(), y.narrow(*span), undo.part(*span)
    assert same_bits(restored(part, some_y, difference(part, some_x, some_y)), some_x)


@pytest.mark.parametrize("damage", ["cut means", "cut", "too short", "not compressed"])
def test_what_does_not_fit_is_refused(damage: str) -> None:
    undo, x, y = edited(torch.bfloat16)
    stored = difference(undo, x, y)
    means = MEANS * 4
    bad = {
        "cut means": stored[: means - 5],
        "cut": stored[:-9],
        "too short": stored[:means] + zlib.compress(bytes(x.nbytes - 2)),
        "not compressed": stored[:means] + b"x" * 50,
    }[damage]
    with pytest.raises((ValueError, RuntimeError, zlib.error)):
        restored(undo, y, bad)
