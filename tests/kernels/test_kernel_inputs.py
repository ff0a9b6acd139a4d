"""Unusual tensors (nested, negated, functional): a folded norm gives the same as LayerNorm."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_models import install, moved
from rounding import TIMES, lost_by_norms
from torch import Tensor, nn

from enjoyln_cli import kernels

D = 16


def rows(*shape: int) -> Tensor:
    """Random rows with zero mean."""
    x = torch.randn(*shape, D, generator=torch.Generator().manual_seed(2))
    return x - x.mean(-1, keepdim=True)


def nested(**how: Any) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([rows(2), rows(3) * 2], **how)


def off_by_a_word(dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.zeros(1), rows(3, 4).flatten()]).to(dtype)[1:].view(3, 4, D)


KINDS: dict[str, Callable[[], Tensor]] = {
    "negated": lambda: torch._neg_view(rows(3, 4)),
    "part of a conjugate": lambda: torch.complex(rows(3), 2 * rows(3)).conj().imag,
    "part of a complex one": lambda: torch.complex(rows(3), 2 * rows(3)).real,
    "expanded": lambda: rows(1, 1).expand(3, 4, D),
    "transposed": lambda: rows(4, 3).transpose(0, 1),
    "features apart": lambda: rows(3).T.contiguous().T,
    "without rows": lambda: rows(0, 3),
    "off by a word": lambda: off_by_a_word(torch.float32),
    "off by half a word": lambda: off_by_a_word(torch.bfloat16),
    "zeros without memory": lambda: torch._efficientzerotensor((3, D)),
    "nested": nested,
    "jagged": lambda: nested(layout=torch.jagged),
    "with a gradient": lambda: rows(3).requires_grad_(),
}


def pair() -> tuple[Any, Any]:
    stock = moved(nn.LayerNorm(D)).float().requires_grad_(False)
    return install(copy.deepcopy(stock), [""], []), stock


def flat(y: Tensor) -> Tensor:
    return torch.cat([row.flatten() for row in y.unbind()]) if y.is_nested else y


def close(found: Tensor, expected: Tensor) -> bool:
    """Whether they differ by no more than two norms that lose what torch's own loses."""
    bound = TIMES * lost_by_norms(expected.dtype) * (1 + expected.double().abs())
    return bool(((found.double() - expected.double()).abs() <= bound).all())


@pytest.mark.parametrize("kind", KINDS)
def test_inputs(kind: str) -> None:
    folded, stock = pair()
    x = KINDS[kind]()
    if x.dtype == torch.bfloat16:
        folded, stock = folded.to(x.dtype), stock.to(x.dtype)
    found, expected = folded(x), stock(x)
    assert found.dtype == expected.dtype and (x.is_nested or found.shape == expected.shape)
    assert close(flat(found), flat(expected))


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_a_parameter_that_is_negated(which: str) -> None:
    folded, stock = pair()
    for norm in (folded, stock):
        value = torch._neg_view(getattr(norm, which).detach())
        setattr(norm, which, nn.Parameter(value, requires_grad=False))
    assert close(folded(rows(3)), stock(rows(3)))


def test_a_weight_of_zeros_without_memory_is_no_missing_weight() -> None:
    zeros, bias = torch._efficientzerotensor((D,)), torch.randn(D)
    with torch.no_grad():
        found = kernels.rms_norm(rows(3), zeros, bias, 1e-5)
    assert torch.equal(found, bias.expand(3, D))


def test_a_functional_tensor_and_a_batch_of_vmap() -> None:
    folded, stock = pair()
    wrapped = torch._to_functional_tensor(rows(3))
    assert close(torch._from_functional_tensor(folded(wrapped)), stock(rows(3)))
    assert close(torch.func.vmap(folded)(rows(3, 4)), stock(rows(3, 4)))


@pytest.mark.parametrize("grad", [True, False])
def test_a_norm_without_memory_has_a_shape(grad: bool) -> None:
    folded, _ = pair()
    with torch.set_grad_enabled(grad):
        y = folded.to("meta")(torch.empty(3, D, device="meta"))
        assert (y.shape, y.device.type) == ((3, D), "meta")
        x, weight = torch.empty(3, D, device="meta"), torch.empty(D, device="meta")
        assert kernels.rms_norm(x, weight, None, 1e-5).shape == x.shape
        assert kernels.rms_norm(x, weight, None, 1e-5, literal=True).shape == x.shape
