"""Corrections turn any prediction into the original, bit for bit; damaged ones are refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from enjoyln_cli.archive.residuals import correct, corrections
from enjoyln_cli.errors import BadCheckpoint

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def any_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """Random bits: numbers, NaN with any payload, infinities, zeros of both signs."""
    made = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 256, (count * dtype.itemsize,), generator=made, dtype=torch.uint8)
    return raw.view(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = INTS[a.dtype.itemsize]
    return torch.equal(a.view(kind), b.view(kind))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 1.0])
def test_near_and_far_misses(dtype: torch.dtype, share: float) -> None:
    original = any_bits(dtype, 70_001)
    predicted = original.clone()
    made = torch.Generator().manual_seed(3)
    missed = torch.rand(original.numel(), generator=made) < share
    off = torch.randint(-300, 301, (int(missed.sum()),), generator=made)
    bits = predicted.view(INTS[dtype.itemsize])
    bits[missed] += off.to(bits.dtype)
    found = corrections(original, [predicted])
    different = original.view(bits.dtype) != bits
    assert (found.gaps != 255).sum() == found.steps.size == different.sum()
    assert same_bits(predicted, original) == (not different.any())
    correct(predicted, found)
    assert same_bits(predicted, original)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_prediction_that_is_wrong_everywhere(dtype: torch.dtype) -> None:
    original, predicted = any_bits(dtype, 5_000), any_bits(dtype, 5_001)[:5_000].clone()
    correct(predicted, corrections(original, [predicted]))
    assert same_bits(predicted, original)


def test_one_step_takes_two_bytes_and_crosses_zero() -> None:
    tiny = torch.finfo(torch.float32).smallest_normal * torch.finfo(torch.float32).eps
    original = torch.tensor([0.0, -0.0, tiny, 1.0, float("inf")])
    predicted = torch.tensor([-0.0, 0.0, -tiny, 1.0, torch.finfo(torch.float32).max])
    found = corrections(original, [predicted])
    assert found.steps.tolist() == [1, -1, 3, 1]
    assert (found.gaps.tolist(), found.exact.size, found.nbytes) == ([0, 0, 0, 1], 0, 8)


@pytest.mark.parametrize("positions", [[254], [255], [256], [0, 255, 511, 2000], [2999]])
def test_long_gaps(positions: list[int]) -> None:
    original = torch.arange(3_000, dtype=torch.float32)
    predicted = original.clone()
    predicted[positions] += 0.5
    found = corrections(original, [predicted])
    correct(predicted, found)
    assert torch.equal(predicted, original)
    assert (found.gaps != 255).sum() == len(positions)


def test_runs_that_do_not_fit() -> None:
    original, predicted = torch.arange(600.0), torch.arange(600.0).neg()
    good = corrections(original, [predicted])
    assert good.exact.size > 0
    for bad in (
        replace(good, gaps=good.gaps[:-1]),
        replace(good, steps=good.steps[:-1]),
        replace(good, exact=good.exact[:-1]),
        replace(good, gaps=np.concatenate([good.gaps[:-1], np.array([200], np.uint8)])),
    ):
        with pytest.raises(BadCheckpoint, match="do not fit"):
            correct(predicted.clone(), bad)
