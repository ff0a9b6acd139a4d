"""How large a mean rounding explains: a few times more is noticed, half of it is not."""

from __future__ import annotations

import pytest
import torch

from enjoyln_cli.plan.axis import Axis, centre
from enjoyln_cli.runtime.weight_check import unexplained_mean

AXIS = Axis(0, 0, 1, 96, 1)
HALF_EPS = [(torch.bfloat16, 0.5), (torch.float16, 0.5), (torch.float32, 0.5), (torch.float64, 16)]
"""The relative mean that rounding may leave, in units of eps; float64's mean is rounded too."""


def shifted(dtype: torch.dtype, by: float) -> torch.Tensor:
    """A centred weight whose columns get this mean, relative to their size."""
    weight = centre(torch.randn(96, 8, generator=torch.Generator().manual_seed(0)).double(), AXIS)
    wide = weight + by * weight.abs().mean(0)
    if dtype == torch.float64:
        return wide
    rounded = wide.to(dtype).double()
    left = by * weight.abs().mean(0) - rounded.mean(0)  # what rounding took from the mean
    place = rounded.abs().argmin(0)  # a small value is stored the most exactly
    rounded[place, torch.arange(8)] += 96 * left
    return rounded.to(dtype)


@pytest.mark.parametrize(("dtype", "allowed"), HALF_EPS)
def test_a_mean_that_rounding_does_not_explain_is_noticed(
    dtype: torch.dtype, allowed: float
) -> None:
    eps = torch.finfo(dtype).eps
    assert unexplained_mean(AXIS, shifted(dtype, allowed * eps / 2)) == 0
    for times in (2, 4):
        found = unexplained_mean(AXIS, shifted(dtype, times * allowed * eps))
        assert found == pytest.approx(times * allowed * eps, rel=0.5)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_mean_from_a_narrower_dtype_is_allowed_while_it_lasts(narrow: torch.dtype) -> None:
    """A weight may be stored in 16 bits and loaded in float32; training leaves those values."""
    eps = torch.finfo(narrow).eps
    loaded = shifted(narrow, eps / 4).float()
    assert unexplained_mean(AXIS, loaded) == 0
    trained = loaded + 1e-3 * loaded.abs().mean() * torch.linspace(0, 1, 96)[:, None]
    assert unexplained_mean(AXIS, trained) > eps / 8
    assert unexplained_mean(AXIS, shifted(narrow, 2 * eps).float()) > eps
