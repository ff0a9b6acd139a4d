"""Simulated quantisation, and what makes it inaccurate."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from enjoyln_cli.comparison.simulated_rounding import (
    Scheme,
    linear_layers,
    round_to,
    simulated,
)


@pytest.fixture(scope="module")
def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(n_embd=24, n_layer=1, n_head=2, vocab_size=31, n_positions=8)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("bits", [4, 8])
def test_rounding_is_off_by_half_a_step_at_most(bits: int) -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(bits)) * 5 + 1
    rounded = round_to(x, bits, 1)
    step = x.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    fine = 2**bits * torch.finfo(x.dtype).eps  # a division and a product, each rounded once
    assert ((rounded - x).abs() <= step * (0.5 + fine)).all()
    whole = rounded / step
    assert ((whole - whole.round()).abs() < fine).all()
    torch.testing.assert_close(rounded.abs().amax(1), x.abs().amax(1))


def test_gradients_pass_through_rounding_and_scale() -> None:
    x = torch.tensor([[0.3, -1.4, 2.6, -7.0]], requires_grad=True)  # 7 steps of 1 to each side
    upstream = torch.tensor([[1.0, -2.0, 0.5, 3.0]])
    round_to(x, 4, 1).backward(upstream)
    rounded = torch.tensor([[0.0, -1.0, 3.0, -7.0]])
    to_scale = (upstream * (rounded - x.detach())).sum()  # the scale is |x_3| / 7
    expected = upstream.clone()
    expected[0, 3] -= to_scale / 7
    torch.testing.assert_close(x.grad, expected)


def test_rows_of_zeros_stay_zeros() -> None:
    assert not round_to(torch.zeros(3, 5), 4, 1).any()


def test_linear_layers_are_rounded_but_not_the_head(gpt2: GPT2LMHeadModel) -> None:
    names = set(linear_layers(gpt2))
    assert "transformer.h.0.mlp.c_fc" in names
    assert "lm_head" not in names
    assert set(linear_layers(nn.Sequential(nn.Linear(2, 3), nn.Conv1d(2, 3, 1)))) == {"0"}


@pytest.mark.parametrize("layer", [nn.Linear(6, 10), Conv1D(10, 6)])
def test_each_output_of_a_weight_has_its_own_scale(layer: nn.Module) -> None:
    outputs = 1 if isinstance(layer, Conv1D) else 0
    with torch.no_grad():
        layer.weight.select(outputs, 3).mul_(1000.0)  # one large output
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    exact = layer(x)
    with simulated(nn.Sequential(layer), Scheme(8, None)):
        found = layer(x)
    others = [at for at in range(10) if at != 3]
    error = (found - exact)[:, others].norm() / (exact - layer.bias)[:, others].norm()
    assert 0 < error < 0.05


def test_the_weights_are_back_after_the_block_and_after_an_error(gpt2: GPT2LMHeadModel) -> None:
    ids = torch.tensor([[1, 2, 3]])
    before = copy.deepcopy(gpt2.state_dict())
    exact = gpt2(ids).logits
    held = {name: id(parameter) for name, parameter in gpt2.named_parameters()}
    with simulated(gpt2, Scheme(4, 4)):
        assert not torch.equal(gpt2(ids).logits, exact)
    with pytest.raises(RuntimeError), simulated(gpt2, Scheme(8, 8)):
        gpt2.transformer.h[0].mlp.c_fc(torch.zeros(2, 3))
    assert {name: id(parameter) for name, parameter in gpt2.named_parameters()} == held
    assert all(torch.equal(gpt2.state_dict()[name], value) for name, value in before.items())
    assert torch.equal(gpt2(ids).logits, exact)


def test_a_rounded_weight_has_a_gradient() -> None:
    layer = nn.Linear(6, 3)
    with simulated(nn.Sequential(layer), Scheme(4, None)):
        layer(torch.eye(6)).square().sum().backward()
    rounded = round_to(layer.weight.detach(), 4, 1) + layer.bias.detach()[:, None]
    is_largest = layer.weight.abs() == layer.weight.abs().amax(1, keepdim=True)
    assert layer.weight.grad is not None
    torch.testing.assert_close(layer.weight.grad[~is_largest], 2 * rounded[~is_largest])


def test_fewer_bits_cost_more(gpt2: GPT2LMHeadModel) -> None:
    ids = torch.randint(31, (4, 8), generator=torch.Generator().manual_seed(1))
    exact, errors = gpt2(ids).logits, []
    for bits in ((8, 8), (4, None), (4, 4)):
        with simulated(gpt2, Scheme(*bits)):
            errors.append(float((gpt2(ids).logits - exact).detach().norm()))
    assert 0 < errors[0] < errors[1] < errors[2]
