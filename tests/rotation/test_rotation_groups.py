"""Which values of a model can be rotated, and that rotating them changes no output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_models import moved
from tiny_models import rotated
from torch import nn
from torch.nn import functional as F

from enjoyln_cli.analysis.analyze import analyze_calls, analyze_module
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.plan.fold_options import Options

ROTATED = Options(fold=False, rotate=True)


# One stream, and what may happen in it.

D = 12


class Stream(nn.Module):
    """A residual stream with one block, and ``inside`` applied to it before the last norm."""

    def __init__(self, inside: Callable[[Stream, torch.Tensor], Any]) -> None:
        super().__init__()
        self.inside = inside
        self.enter, self.norm, self.last = nn.Linear(7, D), nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down, self.head = nn.Linear(D, 9), nn.Linear(9, D), nn.Linear(D, 5)
        self.scale, self.part = nn.Parameter(torch.ones(D)), nn.LayerNorm(D // 2)
        self.other, self.half = nn.Linear(7, D), nn.Linear(7, D // 2)
        self.grouped = nn.Conv1d(D, D, 3, padding=1, groups=3)
        self.mixing = nn.Conv1d(D, D, 3, padding=1)
        self.router, self.experts = nn.Linear(D, 3), nn.Parameter(torch.zeros(3, D, D))
        self.rms = nn.RMSNorm(D)
        self.lora, self.wide, self.back = nn.Linear(D, D), nn.Linear(D, 9), nn.Linear(9, D)
        self.first, self.both, self.pair = nn.LayerNorm(D), nn.LayerNorm(2 * D), nn.Linear(2 * D, D)
        self.rest, self.more, self.cut = nn.Linear(D, 6), nn.LayerNorm(D + 6), nn.Linear(D + 6, D)
        for name, persistent in (("stored", True), ("fixed", False)):
            values = torch.arange(24.0).view(2, D).sin()
            self.register_buffer(name, values, persistent=persistent)
        moved(self)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.enter(x)
        h = h + self.down(F.relu(self.up(self.norm(h))))
        h = self.inside(self, h)
        if isinstance(h, tuple):
            return self.head(self.last(h[0])), h[1]
        return self.head(self.last(h))


def in_one(h: torch.Tensor) -> torch.Tensor:
    """Both tokens side by side, as one token."""
    return h.reshape(2, 1, 2 * D)


def by_feature(h: torch.Tensor) -> torch.Tensor:
    """Both tokens feature by feature, as one token."""
    return h.mT.reshape(2, 1, 2 * D)


def class_and_mean(h: torch.Tensor) -> torch.Tensor:
    return torch.cat([h[:, :1], h.mean(1, keepdim=True)], -1)


def rope(h: torch.Tensor) -> torch.Tensor:
    first, second = h.chunk(2, -1)
    return torch.cat([-second, first], -1)


ROTATES: dict[str, Callable[[Stream, torch.Tensor], Any]] = {
    "nothing": lambda m, h: h,
    "other tokens": lambda m, h: h + h.roll(1, 1) * 0.5,
    "an LayerScale before the sum": lambda m, h: h + m.scale * m.back(F.relu(m.wide(h))),
    "a scaled layer from the stream to itself": lambda m, h: h + m.scale * m.lora(h),
    "a convolution over channels": lambda m, h: h + m.mixing(h.mT).mT,
    "an RMSNorm": lambda m, h: h + m.down(F.relu(m.wide(m.rms(h)))),
    "a LayerNorm by hand": lambda m, h: h + m.down(m.wide(by_hand(h))),
    "a router and its experts": lambda m, h: h + routed(m, h),
    "a mask over tokens": lambda m, h: h.masked_fill(torch.tensor([[[False], [True]]]), 0),
    "attention over tokens": lambda m, h: (
        h + F.scaled_dot_product_attention(m.wide(h), m.wide(h), h)
    ),
    "tokens in one": lambda m, h: h + m.pair(in_one(h)),
    "a norm, then tokens in one, by feature": lambda m, h: h + m.pair(by_feature(m.first(h))),
    "a norm over tokens in one": lambda m, h: h + m.pair(m.both(in_one(h))),
    "a norm by hand over tokens in one": lambda m, h: h + m.pair(by_hand(in_one(h))),
    "a norm, then a token beside the mean": lambda m, h: h + m.pair(class_and_mean(m.first(h))),
    "tokens in one, in part": lambda m, h: h + m.pair(torch.cat([h[:, :1], h[:, 1:]], -1)[:, -1:]),
    "an adapter": lambda m, h: h + m.back(m.wide(h)) + m.lora(h),
    "positions in the checkpoint": lambda m, h: h + m.stored,
}
STAYS: dict[str, tuple[Callable[[Stream, torch.Tensor], Any], str]] = {
    "an activation": (lambda m, h: F.gelu(h), "gelu acts on single features"),
    "a rotary embedding": (
        lambda m, h: h * 0.5 + rope(h), "chunk acts on single features"
    ),
    "a grouped convolution": (lambda m, h: h + m.grouped(h.mT).mT, "a grouped convolution"),
    "a scale on the stream": (lambda m, h: m.scale * h, "a vector multiplies it"),
    "a norm over a part": (
        lambda m, h: h + torch.cat([m.part(h[..., :6]), h[..., 6:]], -1), "acts on single features"
    ),
    "single features": (lambda m, h: h + h[..., :1], "acts on single features"),
    "the caller": (lambda m, h: (h, h), "the model returns it"),
    "a constant": (lambda m, h: h + torch.arange(12.0), "it is an input or a constant"),
    "positions in the code": (
        lambda m, h: h + m.fixed, "it is a constant that the checkpoint does not store"
    ),
    "a norm that is added": (
        lambda m, h: h + m.norm(h), "its result is read by add, which is not a linear layer"
    ),
    "a norm beside the stream": (
        lambda m, h: h + m.pair(torch.cat([m.first(h), h], -1)), "also reads other features"
    ),
    "a norm over other features, too": (
        lambda m, h: h + m.cut(m.more(torch.cat([h, m.rest(h)], -1))), "other elements"
    ),
    "some features replaced": (
        lambda m, h: h + torch.slice_scatter(h, m.rest(h), 2, 6), "written to a part"
    ),
}  # fmt: skip


def by_hand(h: torch.Tensor) -> torch.Tensor:
    centred = h - h.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def routed(m: Stream, h: torch.Tensor) -> torch.Tensor:
    shares = m.router(h).softmax(-1)
    return torch.einsum("bte,btd,edf->btf", shares, h, m.experts)


def rows(seed: int = 3) -> torch.Tensor:
    return torch.randn(2, 2, 7, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("case", ROTATES)
def test_a_stream_that_rotates(case: str) -> None:
    model = Stream(ROTATES[case])
    plan = analyze_module(model, rows(), options=ROTATED).plan
    assert not [
        group.reason for group in plan.rotation_groups if group.kind == "residual" and group.reason
    ]
    rotated_model = rotated(model, plan)
    assert not torch.allclose(rotated_model.enter.weight, model.enter.weight)
    torch.testing.assert_close(rotated_model(rows(4)), model(rows(4)), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("case", STAYS)
def test_a_stream_that_stays(case: str) -> None:
    inside, reason = STAYS[case]
    model = Stream(inside)
    plan = analyze_module(model, rows(), options=ROTATED).plan
    kept = next(group for group in plan.rotation_groups if group.name == "enter.weight")
    assert reason in kept.reason, kept
    rotated_model = rotated(model, plan)
    torch.testing.assert_close(rotated_model(rows(4)), model(rows(4)), rtol=1e-11, atol=1e-11)


def test_an_input_that_a_norm_reads_stays() -> None:
    model = moved(nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 3)))
    (kept,) = analyze_module(model, rows(), options=ROTATED).plan.rotation_groups
    assert (kept.reason, kept.culprit) == ("it is an input of the model", "input")


def test_a_weight_that_is_read_twice_stays() -> None:
    model = Stream(lambda m, h: h + m.down(m.up(m.norm(h))) * m.norm.weight.sum())
    plan = analyze_module(model, rows(), options=ROTATED).plan
    (kept,) = plan.rotation_groups
    assert kept.reason == "the parameters of a norm are also read by sum"
    assert kept.culprit == "norm.weight"


def test_a_zero_in_a_weight_keeps_the_bias_from_being_divided() -> None:
    model = Stream(ROTATES["nothing"])
    with torch.no_grad():
        model.last.weight[2] = 0
    plan = analyze_module(model, rows(), options=ROTATED).plan
    assert {one.norm: one.divided for one in plan.fused} == {"norm": "norm.bias", "last": ""}
    torch.testing.assert_close(rotated(model, plan)(rows(4)), model(rows(4)), rtol=0, atol=1e-11)
    model.head.bias = None
    (kept,) = analyze_module(model, rows(), options=ROTATED).plan.rotation_groups
    assert kept.culprit == "last" and "has a zero" in kept.reason


@pytest.mark.parametrize("joined", [in_one, by_feature, class_and_mean])
def test_a_bias_that_cannot_be_divided_moves_into_each_group(
    joined: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    model = Stream(lambda m, h: h + m.pair(joined(m.first(h))))
    with torch.no_grad():
        model.first.weight[2] = 0
    plan = analyze_module(model, rows(), options=ROTATED).plan
    (fusion,) = [one for one in plan.fused if one.norm == "first"]
    assert fusion.bias == "first.bias" and not fusion.divided
    torch.testing.assert_close(rotated(model, plan)(rows(4)), model(rows(4)), rtol=0, atol=1e-11)


class ListedHeads(nn.Module):
    """An attention whose values are some heads of a projection, by a list of their numbers.

    An activation reads the other heads, so only the listed heads can rotate.
    """

    def __init__(self, heads: list[int]) -> None:
        super().__init__()
        self.heads = heads
        self.others = {0, 1, 2, 3, 4} - {head % 5 for head in heads}
        self.project, self.queries = nn.Linear(7, 5 * 6), nn.Linear(7, 6)
        self.out = nn.Linear(6 * len(heads), 5)
        moved(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.project(x).view(2, 2, 5, 6)
        values, asked = heads[:, :, self.heads], self.queries(x).unsqueeze(1)
        mixed = F.scaled_dot_product_attention(asked, asked, values.transpose(1, 2))
        read: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return read + sum(F.gelu(heads[:, :, at]).sum(-1, keepdim=True) for at in self.others)


@pytest.mark.parametrize("heads", [[-1], [3, 4], [0, 2, 4], [-3, -2], [4, 0], [-1, 0], [0, 1, 3]])
def test_values_are_heads_by_their_numbers(heads: list[int]) -> None:
    model = ListedHeads(heads)
    plan = analyze_module(model, rows(), options=ROTATED).plan
    torch.testing.assert_close(rotated(model, plan)(rows(4)), model(rows(4)), rtol=0, atol=1e-11)
    listed = [group.reason for group in plan.rotation_groups]
    if heads in ([4, 0], [-1, 0], [0, 1, 3]):  # no slice takes these
        assert listed == ["gelu acts on single features, so it does not commute with a rotation"]
        return
    assert listed == [""]
    (written,) = [one.axis for one in plan.rotated[0].tensors if one.parameter == "project.weight"]
    assert [(written.start + (written.step or 6) * at) // 6 for at in range(written.outer)] == [
        head % 5 for head in heads
    ]


class Heard(nn.Module):
    """Reads token ids, and features through a norm if it is given some."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.last = nn.Embedding(6, D), nn.LayerNorm(9), nn.LayerNorm(D)
        self.project, self.head = nn.Linear(9, D), nn.Linear(D, 5)
        moved(self)

    def forward(self, ids: torch.Tensor, features: torch.Tensor | None = None) -> torch.Tensor:
        h: torch.Tensor = self.table(ids)
        if features is not None:
            h = h + self.project(self.norm(features))
        out: torch.Tensor = self.head(self.last(h))
        return out


def test_an_input_that_the_model_never_computes_stays() -> None:
    """``inputs_embeds`` can come from the rotated model, ``features`` can not."""
    ids, features = torch.tensor([[1, 2, 4]]), torch.randn(1, 3, 9).double()
    calls = [
        Call("ids", (((ids,), {}),)),
        Call("features", (((ids, features), {}),), required=False),
    ]
    plan = analyze_calls(Heard(), calls, options=ROTATED).plan
    rotated_model, kept = plan.rotation_groups
    assert rotated_model.name == "table.weight" and not rotated_model.reason
    assert kept.reason == "it is an input that the model never computes"
    assert (kept.kind, kept.culprit) == ("residual", "features")
