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


class Channels(nn.LayerNorm):
    """Of (N, C, tokens), whose channels it normalises."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class Either(nn.LayerNorm):
    """A LayerNorm of (batch, tokens, features); of images it does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.ndim == 3 else x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize(
    ("module", "form"),
    [
        (Spelled("last"), LayerNormForm(-1, "weight", True, 1e-6, (2, 3, 4, 5))),
        (Spelled("last", eps=1e-12), LayerNormForm(-1, "weight", True, 1e-12, (2, 3, 4, 5))),
        (Spelled("channels"), LayerNormForm(1, "weight", True, 1e-6, (4,))),
        (Spelled("one plus"), LayerNormForm(-1, "1 + weight", True, 1e-6, (2, 3, 4, 5))),
        (nn.GroupNorm(1, WIDTH), LayerNormForm(-1, "weight", True, 1e-5, (2,))),
        (Channels(WIDTH), LayerNormForm(1, "weight", True, 1e-5, (3,))),
        (Either(WIDTH), LayerNormForm(-1, "weight", True, 1e-5, (3,))),
        (Wide(), LayerNormForm(-1, "1", False, 1e-5, (2, 3, 4, 5))),
        (nn.LayerNorm(WIDTH, bias=False), LayerNormForm(-1, "weight", False, 1e-5, (2, 3, 4, 5))),
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
        nn.GroupNorm(3, WIDTH - 1),
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
    """A writer, a norm and a reader, with features last, or channels first of so many positions."""

    def __init__(self, norm: nn.Module, positions: int = 0) -> None:
        super().__init__()
        kind: Any = (nn.Linear, nn.Conv1d, nn.Conv2d)[positions]
        more = (1,) if positions else ()
        self.norm = norm
        self.write, self.read = kind(WIDTH, WIDTH, *more), kind(WIDTH, WIDTH, *more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.norm(self.write(x)))


@pytest.mark.parametrize(
    ("norm", "shape", "tolerance"),
    [
        (Spelled("last"), (2, 5, WIDTH), 1e-13),
        (Spelled("channels"), (2, WIDTH, 3, 5), 1e-13),
        (Channels(WIDTH), (2, WIDTH, 7), 1e-13),
        (Either(WIDTH), (2, 5, WIDTH), 1e-13),
        (nn.GroupNorm(1, WIDTH), (7, WIDTH), 1e-13),
        (Spelled("one plus"), (2, 5, WIDTH), 1e-13),
        (Wide(), (2, 5, WIDTH), 1e-5),
    ],
)
def test_a_spelled_out_norm_folds_and_computes_the_same(
    norm: nn.Module, shape: tuple[int, ...], tolerance: float
) -> None:
    torch.manual_seed(0)
    positions = len(shape) - 2 if shape[1] == WIDTH else 0
    model = Block(copy.deepcopy(norm), positions).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.7, 0.4)
    x = torch.randn(shape, dtype=torch.float64)
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


def test_a_norm_is_one_only_for_inputs_of_as_many_dimensions() -> None:
    torch.manual_seed(0)
    model = Block(Either(WIDTH)).double().eval()
    nn.init.normal_(model.norm.bias, 0.7, 0.4)
    images, tokens = torch.randn(2, 3, 5, WIDTH).double(), torch.randn(2, 5, WIDTH).double()
    assert analyze_module(model, images).plan.norms == ()
    plan = analyze_module(model, tokens).plan
    folded = copy.deepcopy(model)
    centre_parameters(folded, plan)
    plain = copy.deepcopy(folded)
    install(folded, ["norm"], plan.ops)
    with torch.no_grad():
        assert torch.equal(folded(images), plain(images))  # as before, where it is not proven


def test_a_norm_that_is_almost_one_is_not_touched() -> None:
    model = Block(Spelled("sample variance")).double()
    plan = analyze_module(model, torch.randn(2, 5, WIDTH, dtype=torch.float64)).plan
    assert plan.norms == ()


class Named(nn.LayerNorm):
    """Carries the name and computes RMSNorm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / x.square().mean(-1, keepdim=True).sqrt()


def test_the_name_of_a_class_decides_nothing() -> None:
    model = Block(Named(WIDTH, bias=False)).double()
    (verdict,) = analyze_module(model, torch.randn(2, 5, WIDTH, dtype=torch.float64)).plan.norms
    assert verdict.status == "kept" and "computes something else" in verdict.reason


class Both(nn.Module):
    """Calls one norm with tokens and with images."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.write, self.norm = nn.Linear(WIDTH, WIDTH), norm

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.norm(self.write(x)), self.norm(self.write(x)[:, None])


def test_a_norm_that_is_also_called_where_it_is_none_stays() -> None:
    (verdict,) = analyze_module(Both(Either(WIDTH)), torch.randn(2, 5, WIDTH)).plan.norms
    assert verdict.status == "kept" and "4 dimensions" in verdict.reason


@pytest.mark.parametrize(("groups", "listed"), [(1, "static"), (3, "kept")])
def test_a_group_norm_of_rows_normalises_each_alone(groups: int, listed: str) -> None:
    """One group is a LayerNorm; of several, nothing here computes the RMSNorm."""
    width = 12
    rows = nn.Sequential(nn.Linear(5, width), nn.GroupNorm(groups, width), nn.Linear(width, 2))
    (verdict,) = analyze_module(rows, torch.randn(7, 5)).plan.norms
    assert verdict.status == listed and ("groups" in verdict.reason) == (groups > 1)
    images = nn.Sequential(nn.Conv2d(5, width, 1), nn.GroupNorm(groups, width))
    assert analyze_module(images, torch.randn(2, 5, 4, 4)).plan.norms == ()  # over positions too
