"""A norm is known by what it computes: a LayerNorm is found, what only looks like one is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from enjoyln_cli.analysis import analyze_module
from enjoyln_cli.fold import centre_parameters
from enjoyln_cli.norms import install
from enjoyln_cli.probe import LayerNormForm, computes_rms_norm, layer_norm_form

WIDTH = 13


class Spelled(nn.Module):
    """LayerNorm in its own words, and the ways in which it can be almost one."""

    def __init__(self, kind: str = "last", eps: float = 1e-6) -> None:
        super().__init__()
        self.kind, self.tiny = kind, eps
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dim = 1 if self.kind == "channels" else -1
        centred = x - x.mean(dim, keepdim=True)
        variance = centred.pow(2).mean(dim, keepdim=True)
        weight, bias = self.weight, self.bias
        if dim == 1:
            weight, bias = weight[:, None, None], bias[:, None, None]
        if self.kind == "rms":
            return weight * x / torch.sqrt(x.pow(2).mean(dim, keepdim=True) + self.tiny) + bias
        if self.kind == "sample variance":
            variance = variance * WIDTH / (WIDTH - 1)
        if self.kind == "eps outside":
            return weight * centred / (variance.sqrt() + self.tiny) + bias
        if self.kind == "clipped":
            return (weight * centred / (variance + self.tiny).sqrt() + bias).clamp(-2, 2)
        gain = 1 + weight if self.kind == "one plus" else weight
        return gain * centred / (variance + self.tiny).sqrt() + bias


class Wide(nn.Module):
    """Casts to float32, has no parameters, and hides its eps."""

    normalized_shape = (WIDTH,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x.float(), self.normalized_shape, eps=1e-5)
        return y.to(x.dtype)


@pytest.mark.parametrize(
    ("module", "form"),
    [
        (Spelled("last"), LayerNormForm(-1, "weight", True, 1e-6)),
        (Spelled("last", eps=1e-12), LayerNormForm(-1, "weight", True, 1e-12)),
        (Spelled("channels"), LayerNormForm(1, "weight", True, 1e-6)),
        (Spelled("one plus"), LayerNormForm(-1, "1 + weight", True, 1e-6)),
        (Wide(), LayerNormForm(-1, "1", False, 1e-5)),
        (nn.LayerNorm(WIDTH, bias=False), LayerNormForm(-1, "weight", False, 1e-5)),
    ],
)
def test_a_layer_norm_is_found_in_any_words(module: nn.Module, form: LayerNormForm) -> None:
    assert layer_norm_form(module) == form
    assert layer_norm_form(copy.deepcopy(module).to("meta")) == form
    assert not computes_rms_norm(module)


@pytest.mark.parametrize(
    "module",
    [
        Spelled("rms"),
        Spelled("sample variance"),
        Spelled("eps outside"),
        Spelled("clipped"),
        nn.RMSNorm(WIDTH),
        nn.BatchNorm2d(WIDTH),
        nn.GroupNorm(1, WIDTH),
        nn.Linear(WIDTH, WIDTH),
        nn.Embedding(WIDTH, WIDTH),
        nn.Identity(),
    ],
    ids=lambda module: getattr(module, "kind", type(module).__name__),
)
def test_what_computes_something_else_is_no_layer_norm(module: nn.Module) -> None:
    assert layer_norm_form(module) is None


def test_an_rms_norm_is_found_by_its_values() -> None:
    assert computes_rms_norm(nn.RMSNorm(WIDTH, eps=1e-6))
    assert not computes_rms_norm(nn.LayerNorm(WIDTH, bias=False))


class Block(nn.Module):
    """A writer, a norm and a reader, with features last or channels first."""

    def __init__(self, norm: nn.Module, channels: bool) -> None:
        super().__init__()
        make: Any = (
            (lambda: nn.Conv2d(WIDTH, WIDTH, 1)) if channels else (lambda: nn.Linear(WIDTH, WIDTH))
        )
        self.write, self.norm, self.read = make(), norm, make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.norm(self.write(x)))


@pytest.mark.parametrize(
    ("norm", "tolerance"),
    [
        (Spelled("last"), 1e-13),
        (Spelled("channels"), 1e-13),
        (Spelled("one plus"), 1e-13),
        (Wide(), 1e-5),
    ],
)
def test_a_spelled_out_norm_folds_and_computes_the_same(norm: nn.Module, tolerance: float) -> None:
    channels = getattr(norm, "kind", "") == "channels"
    torch.manual_seed(0)
    model = Block(copy.deepcopy(norm), channels).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.7, 0.4)
    x = torch.randn((2, WIDTH, 3, 5) if channels else (2, 5, WIDTH), dtype=torch.float64)
    plan = analyze_module(model, x).plan
    assert [v.status for v in plan.norms] == ["static"]
    assert {writer.parameter for writer in plan.writers} == {"write.weight", "write.bias"}
    folded = copy.deepcopy(model)
    centre_parameters(folded, plan)
    install(folded, ["norm"], plan.ops)
    with torch.no_grad():
        assert torch.allclose(folded(x), model(x), rtol=tolerance, atol=tolerance)
        install(model, ["norm"], plan.ops)  # the weights as they were: RMSNorm sees a mean
        assert not torch.allclose(folded(x), model(x), rtol=1e-2, atol=1e-2)


def test_a_norm_that_is_almost_one_is_not_touched() -> None:
    model = Block(Spelled("sample variance"), False).double()
    plan = analyze_module(model, torch.randn(2, 5, WIDTH, dtype=torch.float64)).plan
    assert plan.norms == ()


class Named(nn.LayerNorm):
    """Carries the name and computes RMSNorm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


def test_the_name_of_a_class_decides_nothing() -> None:
    model = Block(Named(WIDTH, bias=False), False).double()
    (verdict,) = analyze_module(model, torch.randn(2, 5, WIDTH, dtype=torch.float64)).plan.norms
    assert verdict.status == "kept" and "computes something else" in verdict.reason
