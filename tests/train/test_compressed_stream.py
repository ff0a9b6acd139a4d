"""Streams of ``d - 1`` features: the same function and the same training, there and back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from live_models import moved
from tiny_models import GPT2, PHI, VIT, calls, error, live
from torch import nn
from training import OPTIMIZERS, square_loss, train

from enjoyln_cli.errors import NothingToFold, UnsupportedModel
from enjoyln_cli.train import compress, decompress
from enjoyln_cli.train.compressed_stream import CRMSNorm, coordinates_of

EXACT = 1e-11
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
MODELS: dict[str, tuple[str, Any, int]] = {
    "last": (
        "GPT2LMHeadModel",
        transformers.GPT2Config(**GPT2, **NO_DROPOUT, tie_word_embeddings=False),
        21,
    ),
    "heads": (
        "PhiForCausalLM",
        transformers.PhiConfig(**{**PHI, "resid_pdrop": 0.0, "qk_layernorm": True}),
        24,
    ),
    "orthonormal": ("ViTForImageClassification", transformers.ViTConfig(**VIT), 21),
}


class Net(nn.Module):
    """A residual stream of 9 features with two branches, and dropout at rate ``p`` on it."""

    def __init__(self, p: float = 0.0, affine: bool = True) -> None:
        super().__init__()
        self.embed, self.drop = nn.Linear(5, 9), nn.Dropout(p)
        self.norms = nn.ModuleList(nn.LayerNorm(9, elementwise_affine=affine) for _ in range(3))
        self.reads = nn.ModuleList(nn.Linear(9, 7, bias=bool(i)) for i in range(2))
        self.writes = nn.ModuleList(nn.Linear(7, 9) for _ in range(2))
        self.head = nn.Linear(9, 3)

    def stream(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for norm, read, write in zip(self.norms, self.reads, self.writes, strict=False):
            x = x + self.drop(write(read(norm(x)).relu()))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norms[2](self.stream(x)))


class Returned(Net):
    def forward(self, x: torch.Tensor) -> Any:
        stream = self.stream(x)
        return self.head(self.norms[2](stream)), stream


class Sigmoid(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norms[2](self.stream(x).sigmoid()))


class Count(Net):
    """The number of features is a number in its code."""

    def forward(self, x: torch.Tensor) -> Any:
        stream = self.stream(x)
        return self.head(self.norms[2](stream)) * (1.0 if stream.shape[-1] == 9 else 2.0)


class Shared(Net):
    """The mean is subtracted by an operation, since the stream is also summed up."""

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norms[2](self.stream(x))) + self.embed.weight.sum()


X = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", ["last", "orthonormal"])
def test_the_coordinates_hold_what_has_no_mean(kind: Any) -> None:
    down, up = coordinates_of(7, kind)
    centring = torch.eye(7, dtype=torch.float64) - 1 / 7
    torch.testing.assert_close(up.T @ down, centring, rtol=0, atol=1e-14)
    torch.testing.assert_close(down @ up.T, torch.eye(6).double(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", ["last", "orthonormal"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_it_trains_as_with_layer_norm(kind: Any, optimizer: str) -> None:
    model = moved(Net())
    other = copy.deepcopy(model)
    before = [*other.parameters()]
    done = compress(other, kind, example=X)
    assert all(isinstance(norm, CRMSNorm) for norm in other.norms)
    assert other.embed(X).shape == (4, 8) and other.head.in_features == 8
    torch.testing.assert_close(other(X), model(X), rtol=EXACT, atol=EXACT)
    xs = [X, X.roll(1, 0), -X] * 3
    losses = [
        train(one, square_loss, xs, OPTIMIZERS[optimizer](one.parameters()), 0.3)
        for one in (model, other)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=EXACT)
    assert decompress(other, done) is other
    held = dict(other.named_parameters())
    assert held.keys() == dict(model.named_parameters()).keys()
    assert {*map(id, before)} == {*map(id, held.values())}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(held[name], parameter, rtol=EXACT, atol=EXACT)
    assert other.head.in_features == 9 and not any(m._forward_hooks for m in other.modules())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["last", "heads", "orthonormal"])
def test_models_compute_the_same_there_and_back(kind: Any) -> None:
    name, config, size = MODELS[kind]
    model = live(name, config)
    original = copy.deepcopy(model)
    given = [one for one in calls(original) if "inputs_embeds" not in one]
    done = compress(model, "last" if kind == "heads" else kind)
    left = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    assert len(left) == (4 if kind == "heads" else 0)  # of queries and keys, which keep theirs
    widths = {module.parametrizations for module, _ in done.parametrised}
    assert len(widths) > 8 and {width for _, width in done.sizes} == {size}
    assert all(error(model, original, one) < EXACT for one in given)
    decompress(model, done)
    states = model.state_dict(), original.state_dict()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Net(p=0.1), "needs all of its features|would not read zero-mean"),
        (Returned(), "needs all of its features|would not read zero-mean"),
        (Sigmoid(), "needs all of its features|would not read zero-mean"),
        (Count(), "its code needs all features: Count returns something else"),
        (Net(affine=False), "no residual stream"),
        (Shared(), "needs all of its features|would not read zero-mean"),
    ],
)
def test_a_stream_that_needs_all_features_is_refused(model: nn.Module, reason: str) -> None:
    model = moved(model)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises((UnsupportedModel, NothingToFold), match=reason):
        compress(model, example=X)
    assert model.state_dict().keys() == before.keys()


@pytest.mark.slow
def test_a_tied_head_and_a_model_without_norms_are_refused() -> None:
    tied = live("GPT2LMHeadModel", transformers.GPT2Config(**GPT2, **NO_DROPOUT))
    with pytest.raises(UnsupportedModel, match="can only be subtracted by an added"):
        compress(tied)
    with pytest.raises(NothingToFold, match="no residual stream"):
        compress(moved(nn.Sequential(nn.Linear(5, 5))), example=X)
    with_dropout = live("PhiForCausalLM", transformers.PhiConfig(**{**PHI, "resid_pdrop": 0.1}))
    with pytest.raises(UnsupportedModel):
        compress(with_dropout)
