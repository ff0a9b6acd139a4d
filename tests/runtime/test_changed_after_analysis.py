"""A plan is refused for a model that computes something else than when it was analysed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from live_models import moved
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from enjoyln_cli import analyze, centre_parameters, fold_in_memory
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.train import reparametrize


class Gate(nn.Module):
    """Multiplies by what it may read: plain attributes that hold other layers and weights."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for held in self.read:
            weight = held["layer"].weight if isinstance(held, dict) else held
            x = x * (1 + weight.mean())
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(6, 8)
        self.norm, self.gate, self.last = nn.LayerNorm(8), Gate(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.gate(self.norm(self.first(x) + self.second(x))))


class Shifted(nn.Module):
    """A parametrisation that reads the weight of another layer through a list."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.others[0].weight.mean()


class Summed(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + self.weight.mean()


def net() -> Net:
    torch.manual_seed(5)
    return moved(Net())


def parametrised(model: Net) -> None:
    parametrize.register_parametrization(model.last, "weight", Shifted(model.first))
    model.eval()


def hooked(model: Net) -> None:
    model.second.register_forward_hook(lambda _module, _args, out: out + out.mean(-1, True))


def hooked_before(model: Net) -> None:
    model.register_forward_pre_hook(lambda module, args: (args[0] + module.first.weight.mean(),))


def forward_replaced(model: Net) -> None:
    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, layer.bias) + layer.weight.mean()

    model.second.forward = MethodType(forward, model.second)  # type: ignore[method-assign]


def module_replaced(model: Net) -> None:
    model.gate = nn.Softmax(dim=-1)  # type: ignore[assignment]


def class_replaced(model: Net) -> None:
    model.first.__class__ = Summed


def layer_added(model: Net) -> None:
    model.gate.add_module("inner", nn.Linear(2, 2))


def weight_in_a_list(model: Net) -> None:
    model.gate.read.append(model.first.weight)


def layer_in_a_dictionary(model: Net) -> None:
    model.gate.read.append({"layer": model.second})


CHANGES = [
    parametrised, hooked, hooked_before, forward_replaced, module_replaced, class_replaced,
    layer_added, weight_in_a_list, layer_in_a_dictionary,
]  # fmt: skip


@pytest.fixture(scope="module")
def plans() -> dict[Any, Any]:
    """Plans by what carries them out."""
    x = torch.ones(4, 6, dtype=torch.float64)
    plan = analyze(net(), x).plan
    assert plan.folded
    trained = reparametrize(net(), example=x)
    return {fold_in_memory: plan, centre_parameters: plan, reparametrize: trained}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("edit", [fold_in_memory, centre_parameters, reparametrize])
def test_a_change_after_the_analysis(
    edit: Callable[..., Any], change: Callable[[Net], None], plans: dict[Any, Any]
) -> None:
    model = net()
    change(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match=r"since the model was analysed; analyse it again"):
        edit(model, plans[edit])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert type(model.norm) is nn.LayerNorm


@pytest.fixture
def global_hook() -> Iterator[None]:
    handle = register_module_forward_hook(lambda _module, _args, out: out * 2)
    yield
    handle.remove()


@pytest.mark.usefixtures("global_hook")
def test_a_hook_of_all_modules(plans: dict[Any, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="hook"):
        centre_parameters(net(), plans[centre_parameters])


def test_a_hook_after_the_model_itself(plans: dict[Any, Any]) -> None:
    """It sees the same outputs as before."""
    model, x = net(), torch.randn(4, 6, dtype=torch.float64)
    model.register_forward_hook(lambda _module, _args, out: out * 2)
    expected = model(x)
    assert torch.allclose(fold_in_memory(model, plans[fold_in_memory])(x), expected, rtol=1e-12)


@pytest.mark.parametrize("change", [parametrised, hooked, forward_replaced, weight_in_a_list])
def test_the_same_change_before_the_analysis(change: Callable[[Net], None]) -> None:
    """Such a model is folded as far as it may be, also as a copy and after training."""
    model, x = net(), torch.randn(4, 6, dtype=torch.float64)
    change(model)
    expected = model(x)
    plan = analyze(model, x).plan
    other = copy.deepcopy(model)
    for one in (model, other, model):  # the last is converted already
        fold_in_memory(one, plan)
        assert torch.allclose(one(x), expected, rtol=0, atol=1e-12)


class Thorough(nn.Linear):
    """A layer that its model replaces by a simpler one in a call with few rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 0.0


class Switching(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = Thorough(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) < 9 and type(self.last) is Thorough:
            weight, bias = self.last.weight, self.last.bias
            self.last = nn.Linear(8, 3, device="meta")
            self.last.weight, self.last.bias = weight, bias
        return super().forward(x)


def test_a_layer_that_a_call_of_the_model_replaces() -> None:
    torch.manual_seed(5)
    model, x = moved(Switching()), torch.randn(4, 6, dtype=torch.float64)
    plan = analyze(model, x).plan
    assert plan.folded
    other = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(x)
        folded = fold_in_memory(model, plan)
        assert torch.allclose(folded(x), expected, rtol=1e-12)
    other.last = Summed(8, 3)
    with pytest.raises(UnsupportedModel, match="the class of last changed since"):
        fold_in_memory(other, plan)
