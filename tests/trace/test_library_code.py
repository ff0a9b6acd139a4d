"""Code as libraries write it: it asks for torch's modes, devices and addresses, and is traced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rounding import as_exact
from torch import nn

from enjoyln_cli import analyze
from enjoyln_cli.kernels import literally
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.install import install

WIDTH = 14
Step = Callable[[torch.Tensor], torch.Tensor]


def in_autocast(h: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device_type=h.device.type, enabled=False):
        return h * 2


def cast_as_autocast(h: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(h.device.type):
        return h.to(torch.get_autocast_dtype(h.device.type))
    return h


def checked_for_export(h: torch.Tensor) -> torch.Tensor:
    if torch.compiler.is_exporting():  # as timm does for images of other sizes
        torch._check(h.shape[1] < 1000)
    return h


STEPS: dict[str, Step] = {
    "autocast is off": in_autocast,
    "the dtype of autocast": cast_as_autocast,
    "a check for exporters": checked_for_export,
    "compiling": lambda h: h if torch.compiler.is_compiling() else h.clone(),
    "gradients": lambda h: h.clone() if torch.is_grad_enabled() and h.requires_grad else h,
    "default dtype": lambda h: h if torch.get_default_dtype().is_floating_point else h.clone(),
    "alignment": lambda h: h if h.is_meta or h.data_ptr() % 16 == 0 else h.clone(),
    "a kernel of CUDA": lambda h: h.contiguous() if h.is_cuda else h,
}


class Net(nn.Module):
    """Takes a step of ``STEPS`` on the stream in front of its norm."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.embed, self.norm, self.head = (
            nn.Linear(5, WIDTH),
            nn.LayerNorm(WIDTH),
            nn.Linear(14, 3),
        )
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.step(self.embed(x))))


def random(model: nn.Module) -> Any:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.6 if parameter.dim() == 1 else 0.1, 0.3)
    return model.double().eval()


def require_same(model: nn.Module, plan: Any, *args: Any, **kwargs: Any) -> None:
    """The folded model computes what ``model`` does, and would not if its weights had means."""
    folded, names = copy.deepcopy(model), [verdict.norm for verdict in plan.folded]
    centre_parameters(folded, plan)
    install(folded, names, plan.ops, covered=plan.covered)
    with torch.no_grad(), literally():
        expected = model(*args, **kwargs)
        assert as_exact(folded(*args, **kwargs), expected, expected)
        install(model, names, plan.ops, covered=plan.covered)
        assert not torch.allclose(model(*args, **kwargs), expected, rtol=1e-3)


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("step", STEPS)
def test_a_mode_or_a_device_may_choose_how_to_compute(step: str, place: str) -> None:
    model, x = random(Net(STEPS[step])), torch.randn(2, 7, 5, dtype=torch.float64)
    plan = analyze(copy.deepcopy(model).to(place), x.to(place)).plan
    assert [verdict.status for verdict in plan.norms] == ["static"]
    require_same(model, plan, x)


def test_torchs_functions_are_as_before() -> None:
    before = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast.__init__
    analyze(random(Net(in_autocast)), torch.randn(2, 7, 5, dtype=torch.float64))
    assert before == (torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast.__init__)
    with pytest.raises(RuntimeError):
        torch.is_autocast_enabled("meta")


def encoder() -> Any:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True)
    return random(nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False))


@pytest.mark.one_case
@pytest.mark.parametrize("mask", ["causal", "boolean", "a band"])
@pytest.mark.parametrize("is_causal", [None, False])
def test_a_transformer_encoder_takes_a_mask(mask: str, is_causal: bool | None) -> None:
    """Torch compares the mask with a causal one if ``is_causal`` is not given."""
    masks = {
        "causal": nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64),
        "boolean": torch.ones(7, 7, dtype=torch.bool).tril(2).logical_not(),
        "a band": torch.full((7, 7), -torch.inf, dtype=torch.float64).triu(3),
    }
    wrapped, x = Stream(), torch.randn(2, 7, 5, dtype=torch.float64)
    given = {"mask": masks[mask], "is_causal": is_causal}
    plan = analyze(wrapped, x, **given).plan
    assert len(plan.folded) == len(plan.norms) == 5
    require_same(wrapped, plan, x, **given)


class Stream(nn.Module):
    """An encoder of torch behind a layer that writes its stream."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder = random(nn.Linear(5, WIDTH)), encoder()
        self.eval()

    def forward(self, x: torch.Tensor, mask: Any, is_causal: Any) -> Any:
        return self.encoder(self.embed(x), mask, is_causal=is_causal)


@pytest.mark.slow
def test_a_transformer_decoder_takes_a_mask() -> None:
    layer = nn.TransformerDecoderLayer(WIDTH, 2, 32, batch_first=True, norm_first=True)
    model = random(nn.TransformerDecoder(layer, 2, nn.LayerNorm(WIDTH)))
    x = torch.randn(2, 7, WIDTH, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=torch.float64)
    plan = analyze(model, x, x.flip(1), tgt_mask=mask).plan
    assert len(plan.folded) == len(plan.norms) == 7
