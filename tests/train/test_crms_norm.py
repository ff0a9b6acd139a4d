"""CRMSNorm: the formula of the paper, and the norm of an orthonormal basis."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from enjoyln_cli.train import crms_norm
from enjoyln_cli.train.compressed_norm import CRMSNorm, orthonormal_norm
from enjoyln_cli.train.compressed_stream import compressed_tensor, decompressed_tensor

EPS = 3e-3
D = 8


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(2, 3, D - 1, dtype=torch.float64) + 0.4


@pytest.fixture
def parameters() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randn(D - 1, dtype=torch.float64), torch.randn(D - 1, dtype=torch.float64)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).detach().abs().max()) <= 1e-14 * float(other.detach().abs().max())


def test_it_is_rms_norm_of_the_whole_vector_without_its_last_feature(
    x: torch.Tensor, parameters: tuple[torch.Tensor, torch.Tensor]
) -> None:
    weight, bias = parameters
    whole = torch.cat((x, -x.sum(-1, keepdim=True)), -1)
    expected = F.layer_norm(whole, (D,), eps=EPS)[..., :-1]
    assert close(crms_norm(x, eps=EPS), expected)
    assert close(CRMSNorm(D - 1, EPS)(x), expected)
    assert close(crms_norm(x, weight, bias, EPS), expected * weight + bias)


def test_in_an_orthonormal_basis_it_is_a_plain_rms_norm(x: torch.Tensor) -> None:
    """With the weight ``sqrt(d / (d - 1))`` and ``eps * d / (d - 1)``."""
    whole = torch.cat((x, x.sum(-1, keepdim=True)), -1)  # with a mean, which is left out
    z = compressed_tensor(whole, "orthonormal", False)
    norm = orthonormal_norm(D - 1, EPS, x)
    assert norm.eps == pytest.approx(EPS * D / (D - 1), rel=1e-15)
    assert close(norm.weight, torch.full_like(z[0, 0], math.sqrt(D / (D - 1))))
    back = decompressed_tensor(norm(z), "orthonormal", False)
    assert close(back, F.layer_norm(whole, (D,), eps=EPS))
    assert float(back.mean(-1).abs().max()) < 1e-15


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_dtypes_are_rounded_once(x: torch.Tensor, dtype: torch.dtype) -> None:
    narrow = x.to(dtype).requires_grad_()
    y = crms_norm(narrow, eps=EPS)
    exact = crms_norm(narrow.detach().double(), eps=EPS)
    assert y.dtype == dtype
    bound = 0.51 * torch.finfo(dtype).eps + 4 * torch.finfo(torch.float32).eps
    assert float(((y - exact) / exact).detach().abs().max()) < bound
    y.sum().backward()
    assert narrow.grad is not None and narrow.grad.dtype == dtype
