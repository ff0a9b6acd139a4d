"""The traps of the mathematics, each on a small model: the norm is kept, and the reason is right.

For every trap, the forbidden edit is also forced, and shown to change the output. A similar model
without the trap folds, and computes the same function.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding_live import VOCAB, Computing, D, floats, ids, randomised
from live_models import install
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.plan.plan import Verdict
from enjoyln_cli.runtime.install import fold_in_memory

Change = Callable[[nn.Module], Any]
ROWS, SIGNAL, IMAGE = floats(3, D) + 0.3, floats(2, 4, 6) + 0.3, floats(2, 4, 6, 6) + 0.3


def error(model: nn.Module, change: Change, *inputs: torch.Tensor) -> float:
    """Relative error that ``change``, made in place, causes in the output."""
    with torch.no_grad():
        before = model(*inputs)
        change(model)
        after = model(*inputs)
    return float((after - before).norm() / before.norm())


def centred(*parameters: str) -> Change:
    """Centres parameters, though that is not proven."""

    def change(model: nn.Module) -> None:
        for name in parameters:
            parameter = model.get_parameter(name)
            parameter.sub_(parameter.mean(1 if name == "embed.weight" else 0, keepdim=True))

    return change


def forced(*parameters: str) -> Change:
    """Centres parameters, and makes ``norm`` an RMSNorm."""

    def change(model: nn.Module) -> None:
        centred(*parameters)(model)
        install(model, ["norm"], ())

    return change


def fused(model: Any) -> None:
    """Fuses the scale into the layer before it."""
    for parameter in (model.writer.weight, model.writer.bias):
        parameter.mul_(model.scale.reshape(-1, *(1,) * (parameter.ndim - 1)))
    model.scale.fill_(1)


WRITER = ("writer.weight", "writer.bias")


def verdict(model: nn.Module, *inputs: torch.Tensor) -> Verdict:
    return next(v for v in analyze_module(model, *inputs).plan.norms if v.norm == "norm")


def stem(run: Callable[..., Any], affine: bool = True, tied: bool = False, **more: Any) -> Any:
    """An embedding, a hidden layer, the norm under test, another norm, and a head."""
    embed, head = nn.Embedding(VOCAB, D), nn.Linear(D, VOCAB, bias=False)
    if tied:
        head.weight = embed.weight
    parts = {"embed": embed, "writer": nn.Linear(D, D), "norm": nn.LayerNorm(D), "head": head}
    parts["first"] = nn.LayerNorm(D, elementwise_affine=affine)
    return randomised(Computing(run, **parts, **more))


def residual(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = m.embed(tokens)
    return x + m.writer(F.layer_norm(x, (D,)))


def plain(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    return m.head(m.norm(residual(m, tokens)))


def post_norm(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = m.first(m.embed(tokens))
    return m.head(m.norm(x + m.writer(x)))


def returned(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = m.embed(tokens)
    return torch.cat((x, m.norm(x)), 1)


def dropped(training: bool) -> Callable[..., torch.Tensor]:
    return lambda m, tokens: m.head(m.norm(F.dropout(residual(m, tokens), 0.5, training)))


def written(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = residual(m, tokens).clone()
    x[:, 0].mul_(torch.arange(1.0, D + 1, dtype=x.dtype))
    return m.head(m.norm(x))


def squared(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = residual(m, tokens)
    return m.head(m.norm(x * x))


def self_attention(m: Any, tokens: torch.Tensor) -> torch.Tensor:
    x = residual(m, tokens)
    query = m.writer(F.layer_norm(x, (D,)))
    return m.head(m.norm(F.scaled_dot_product_attention(query, x, x)))


def side_by_side() -> nn.Module:
    parts = {"left": nn.Linear(D, D), "right": nn.Linear(D, D), "norm": nn.LayerNorm(2 * D)}
    both = Computing(lambda m, x: m.norm(torch.cat((m.left(x), m.right(x)), -1)), **parts)
    return randomised(both)


def channels_normed(conv: nn.Module) -> nn.Module:
    parts = {"conv": conv, "norm": nn.LayerNorm(8)}
    return randomised(Computing(lambda m, x: m.norm(m.conv(x).transpose(1, 2)), **parts))


def convolution(groups: int) -> nn.Module:
    return channels_normed(nn.Conv1d(4, 8, 3, padding=1, groups=groups))


def weight_normed(dim: int) -> nn.Module:
    """A convolution with weight normalisation, as wav2vec2's for positions."""
    return channels_normed(weight_norm(nn.Conv1d(4, 8, 3), dim=dim))


def scaled(*shape: int, also: str = "") -> Any:
    """LayerScale; ``also`` names another reader of the scale, or of the scaled weight."""

    def run(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = m.embed(tokens)
        inner = F.layer_norm(x, (D,))
        value = m.writer(inner)
        x = x + m.scale * value.view(-1, D).view(value.shape)
        if also == "scale":
            x = x + m.other(inner * m.scale)
        if also == "weight":
            x = x + m.other(F.gelu(m.writer(inner)))
        if also == "value":
            x = x + m.other(F.gelu(value))
        if also == "scale of two layers":
            x = x + m.scale * m.other(inner)
        if also == "tied":
            x = x + m.other(inner)
        return m.norm(x)

    model = stem(run, other=nn.Linear(D, D), scale=nn.Parameter(torch.ones(*shape)))
    if also == "tied":
        model.other.bias = model.scale
    if also == "bias of its own layer":
        model.writer.bias = model.scale
    return randomised(model)


def scaled_image(groups: int = 1, drop: bool = False) -> nn.Module:
    """A scaled convolution whose channels move to the end, as in ConvNeXt and BEiT."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(m.conv(x), 0.5, training=drop)
        x = m.scale.view(8, 1, 1) * x if drop else m.scale[:, None, None] * x
        return m.norm(x.flatten(2).transpose(1, 2))

    conv, scale = nn.Conv2d(4, 8, 3, groups=groups), nn.Parameter(torch.ones(8))
    return randomised(Computing(run, conv=conv, scale=scale, norm=nn.LayerNorm(8)))


ELSEWHERE, PRODUCT = "also read by", "elementwise product"
SIDES = [f"{part}.{name}" for part in ("left", "right") for name in ("weight", "bias")]
TRAPS: dict[str, tuple[nn.Module, torch.Tensor, str, str, Change | None]] = {
    "1: the output of an affine norm": (
        stem(post_norm), ids(), "output of a LayerNorm with weights", "first", forced(*WRITER),
    ),
    "2: a tied embedding": (
        stem(plain, tied=True), ids(), ELSEWHERE, "embed.weight|head", centred("embed.weight"),
    ),
    "3: a stream that is returned": (
        stem(returned), ids(), "", "embed.weight", centred("embed.weight"),
    ),
    "4: features side by side": (side_by_side(), ROWS, "concatenation", "", forced(*SIDES)),
    "7: the scale is read": (scaled(D, also="scale"), ids(), ELSEWHERE, "", fused),
    "7: the weight is read": (scaled(D, also="weight"), ids(), ELSEWHERE, "", fused),
    "7: the value is read": (scaled(D, also="value"), ids(), PRODUCT, "", fused),
    "7: two layers have one scale": (
        scaled(D, also="scale of two layers"), ids(), "several layers", "", fused,
    ),
    "7: a tied scale": (scaled(D, also="tied"), ids(), ELSEWHERE, "", fused),
    "7: a scale that is a bias": (
        scaled(D, also="bias of its own layer"), ids(), ELSEWHERE, "", fused,
    ),
    "7: a scaled grouped convolution": (scaled_image(groups=2), IMAGE, PRODUCT, "", None),
    "7: dropout before the scale": (scaled_image(drop=True), IMAGE, PRODUCT, "", None),
    "8: dropout in training": (stem(dropped(True)), ids(), "dropout in training", "", None),
    "9: a grouped convolution": (
        convolution(groups=2), SIGNAL, "grouped convolution", "",
        forced("conv.weight", "conv.bias"),
    ),
    **{
        f"a weight that is divided by its norm over {dim}": (
            weight_normed(dim), SIGNAL, "weight_norm", "",
            forced("conv.parametrizations.weight.original1", "conv.bias"),
        )
        for dim in (0, 2)
    },
    "a write in place through a view": (
        stem(written), ids(), "", "", forced("embed.weight", *WRITER),
    ),
    "a product with itself": (stem(squared), ids(), "", "", centred("embed.weight")),
    "values that are keys": (stem(self_attention), ids(), "", "", centred("embed.weight")),
}  # fmt: skip
"""By the trap: a model, its inputs, the reason and the culprit of the verdict, and a wrong edit."""


@pytest.mark.parametrize("trap", TRAPS)
def test_a_norm_in_a_trap_is_kept(trap: str) -> None:
    model, inputs, reason, culprit, change = TRAPS[trap]
    found = verdict(model, inputs)
    assert found.status == "stays_layernorm" and reason in found.reason
    assert re.search(culprit, found.culprit)
    if change:
        assert error(model, change, inputs) > 1e-3


FREE: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "a plain stem": (stem(plain), ids()),
    "1: a norm without weights": (stem(post_norm, affine=False), ids()),
    "7: ops that move whole features": (scaled_image(), IMAGE),
    "8: dropout in evaluation": (stem(dropped(False)), ids()),
    "9: a whole convolution": (convolution(groups=1), SIGNAL),
}


def folded(model: nn.Module, inputs: torch.Tensor) -> float:
    """The relative error after all is folded that is proven, which includes ``norm``."""
    plan = analyze_module(model, inputs).plan
    assert "norm" in {verdict.norm for verdict in plan.folded}
    return error(model, lambda live: fold_in_memory(live, plan), inputs)


@pytest.mark.parametrize("case", FREE)
def test_a_norm_beside_a_trap_folds(case: str) -> None:
    model, inputs = FREE[case]
    assert folded(model, inputs) < 1e-12


@pytest.mark.parametrize("shape", [(D,), (1, 1, D), (1,)])
def test_a_layer_scale_is_fused_into_the_layer_before_it(shape: tuple[int, ...]) -> None:
    """The layer's weight alone must not be centred. One number for all features stays."""
    model = scaled(*shape)
    assert folded(model, ids()) < 1e-12
    assert torch.equal(model.scale.detach(), torch.ones(shape).double()) == (max(shape) > 1)
    if shape == (D,):
        assert error(scaled(D), forced("embed.weight", *WRITER), ids()) > 1e-3


def test_one_operation_for_two_norms_pays() -> None:
    """An operation for two norms is worth its cost; an operation for a single norm is not."""

    def two_norms(m: Any, tokens: torch.Tensor) -> torch.Tensor:
        x = m.embed(tokens)
        return m.head(m.norm(x + m.writer(m.first(x))))

    model = stem(two_norms, tied=True)
    plan = analyze_module(model, ids()).plan
    assert [op.module for op in plan.subtractions] == ["embed"]
    assert {v.status for v in plan.norms} == {"with_subtraction"}
    assert folded(model, ids()) < 1e-12


def test_group_norm_over_positions_sees_a_shift_of_each_position() -> None:
    """Trap 6."""
    model = randomised(nn.Sequential(nn.Conv1d(4, 8, 3, padding=1), nn.GroupNorm(1, 8)))
    plan = analyze_module(model, SIGNAL).plan
    assert not plan.norms and not plan.centred_weights
    assert error(model, centred("0.weight"), SIGNAL) > 1e-3


class OwnForward(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 1


def test_what_cannot_be_swapped_is_kept() -> None:
    parts = {"embed": nn.Embedding(VOCAB, D), "norm": OwnForward(D)}
    model = Computing(lambda m, tokens: F.layer_norm(m.norm(m.embed(tokens)), (D,)), **parts)
    reasons = {v.norm: v.reason for v in analyze_module(randomised(model), ids()).plan.norms}
    assert "does not compute a LayerNorm" in reasons["norm"]
    assert any("called as a function" in reason for reason in reasons.values())
