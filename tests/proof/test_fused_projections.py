"""Query and key norms after one fused projection, for every way of splitting it.

Every such model folds, in memory and on disk. The queries and keys are centred in the projection;
the values, which no norm reads, keep their mean.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from folding_live import Computing, floats, fold_in_place, randomised
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.plan.axis import Axis

B, T, H, D = 2, 5, 3, 4
"""Rows, tokens, heads, and features of each head."""
Parts = tuple[torch.Tensor, ...]


def timm(y: torch.Tensor) -> Parts:
    return y.view(*y.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4).unbind(0)


def interleaved(y: torch.Tensor) -> Parts:
    y = y.view(*y.shape[:2], H, 3, D)
    return tuple(y[..., i, :].transpose(1, 2) for i in range(3))


FORMS: dict[str, Callable[[torch.Tensor], Parts]] = {
    "timm": timm,
    "unbind": lambda y: tuple(
        p.transpose(1, 2) for p in y.view(*y.shape[:2], 3, H, D).unbind(2)
    ),
    "by number": lambda y: tuple(
        y.reshape(*y.shape[:2], 3, H, D)[:, :, i].transpose(1, 2) for i in range(3)
    ),
    "split and squeezed": lambda y: tuple(
        p.squeeze(2).transpose(1, 2) for p in y.view(*y.shape[:2], 3, H, D).split(1, 2)
    ),
    "copied between": lambda y: (
        y.view(*y.shape[:2], 3, H, D).permute(2, 0, 3, 1, 4).contiguous().unbind(0)
    ),
    "interleaved": interleaved,
    "interleaved and chunked": lambda y: (
        y.view(*y.shape[:2], H, 3 * D).transpose(1, 2).chunk(3, -1)
    ),
    "two matrices of keys and values": lambda y: (
        y[..., : H * D].unflatten(-1, (H, D)).transpose(1, 2),
        *y[..., H * D :].view(*y.shape[:2], 2, H, D).permute(2, 0, 3, 1, 4).unbind(0),
    ),
}  # fmt: skip


class Attention(nn.Module):
    """Attention as in timm, with norms of queries and keys, and a norm after the projection."""

    def __init__(self, apart: Callable[[torch.Tensor], Parts], bias: bool = True) -> None:
        super().__init__()
        self.apart = apart
        self.qkv = nn.Linear(H * D, 3 * H * D, bias=bias)
        self.q_norm, self.k_norm = nn.LayerNorm(D), nn.LayerNorm(D)
        self.proj = nn.Linear(H * D, H * D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.apart(self.qkv(x))
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(x.transpose(1, 2).reshape(*x.shape[:1], -1, H * D))


X = floats(B, T, H * D) + 0.5
OTHERS = [(floats(B, T, H * D, seed=2) + 0.5,), (floats(B, 9, H * D, seed=3) + 0.5,)]


@pytest.mark.one_case
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_norms_of_queries_and_keys_fold(form: str, bias: bool) -> None:
    model = randomised(Attention(FORMS[form], bias))
    values = model.qkv.weight.detach().clone()
    plan = analyze_module(model, X).plan
    assert not plan.subtractions
    found = fold_in_place(model, X, others=OTHERS)
    assert found.folded == {"q_norm", "k_norm"} and found.error < 1e-12
    centred = {w.axis for w in plan.centred_weights if w.parameter == "qkv.weight"}
    if form.startswith("interleaved"):
        assert centred == {Axis(0, 0, H, D, 1, 3 * D), Axis(0, D, H, D, 1, 3 * D)}
        same = (model.qkv.weight == values).view(H, 3, D, -1)[:, 2]
    else:
        assert centred == {Axis(0, 0, H, D, 1), Axis(0, H * D, H, D, 1)}
        same = (model.qkv.weight == values)[2 * H * D :]
    assert same.all(), "the values keep their mean"


class Shown(Attention):
    """Something else than the norms also reads the projection, or a part of it."""

    def __init__(self, reads: Callable[..., torch.Tensor]) -> None:
        super().__init__(timm)
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.qkv(x)
        whole = y.view(*y.shape[:2], 3, H, D)
        q, k, v = whole.permute(2, 0, 3, 1, 4).unbind(0)
        seen = self.reads(y, whole, q, k, v)
        x = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(x.transpose(1, 2).reshape(*x.shape[:1], -1, H * D)) + seen


OBSERVERS: dict[str, tuple[Callable[..., torch.Tensor], set[str]]] = {
    "the whole as a view": (lambda y, whole, q, k, v: whole.relu().sum(), set()),
    "the queries": (lambda y, whole, q, k, v: q.relu().sum(), {"k_norm"}),
    "the keys by number": (lambda y, whole, q, k, v: whole[:, :, 1].relu().sum(), {"q_norm"}),
    "one feature of the queries": (
        lambda y, whole, q, k, v: whole[..., 0, :, 2].tanh().sum(), {"k_norm"},
    ),
    "the values": (lambda y, whole, q, k, v: whole[:, :, 2].relu().sum(), {"q_norm", "k_norm"}),
    "its shape": (
        lambda y, whole, q, k, v: torch.zeros_like(whole).sum(), {"q_norm", "k_norm"},
    ),
    "one feature for its shape": (
        lambda y, whole, q, k, v: torch.zeros_like(q[..., -1]).sum(), {"q_norm", "k_norm"},
    ),
    "another softmax": (
        lambda y, whole, q, k, v: q.softmax(-1).var() * whole[:, :, 0].softmax(-1).sum(),
        {"q_norm", "k_norm"},
    ),
}  # fmt: skip
"""The other reader, and the norms that fold nevertheless."""


@pytest.mark.one_case
@pytest.mark.parametrize("name", OBSERVERS)
def test_other_readers_of_a_part_are_checked(name: str) -> None:
    reads, folded = OBSERVERS[name]
    found = fold_in_place(randomised(Shown(reads)), X, others=OTHERS)
    assert found.folded == folded and found.error < 1e-12


def test_a_view_that_is_returned_is_seen() -> None:
    returned = Computing(
        lambda m, x: (m.attend(x), m.attend.qkv(x).view(*x.shape[:2], 3, H, D)),
        attend=Attention(timm),
    )
    assert not analyze_module(randomised(returned), X).plan.folded
