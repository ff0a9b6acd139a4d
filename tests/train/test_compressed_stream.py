"""Streams of ``d - 1`` features: the same function, there and back, or a refusal by name."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from live_models import CHECKPOINTS, moved
from tiny_models import GPT2, PHI, VIT, calls, error, live
from torch import nn
from training import OPTIMIZERS, square_loss, train

from enjoyln_cli import Options, fold
from enjoyln_cli.errors import BadCheckpoint, NothingToFold, UnprovenCall, UnsupportedModel
from enjoyln_cli.train import compress_streams, decompress_streams
from enjoyln_cli.train.compressed_norm import CRMSNorm

EXACT = 1e-12
BASES = ("orthonormal", "last")
MODELS = {
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(**GPT2, tie_word_embeddings=False), 21),
    "phi": ("PhiForCausalLM", transformers.PhiConfig(**PHI), 24),
    "vit": ("ViTForImageClassification", transformers.ViTConfig(**VIT), 21),
}


class Net(nn.Module):
    """A residual stream of 9 features with two branches; ``affine`` norms may not be merged."""

    def __init__(self, affine: bool = False, p: float = 0.0) -> None:
        super().__init__()
        self.embed, self.drop = nn.Linear(5, 9), nn.Dropout(p)
        self.norms = nn.ModuleList(nn.LayerNorm(9, elementwise_affine=affine) for _ in range(3))
        self.reads = nn.ModuleList(nn.Linear(9, 7) for _ in range(2))
        self.writes = nn.ModuleList(nn.Linear(7, 9) for _ in range(2))
        self.head = nn.Linear(9, 3)

    def stream(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for norm, read, write in zip(self.norms, self.reads, self.writes, strict=False):
            x = x + self.drop(write(read(norm(x)).relu()))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norms[2](self.stream(x)))


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(4, 5, dtype=torch.float64)


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(((one - other).abs().max() / other.abs().max()).detach())


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("kind", "basis"), [("gpt2", "last"), ("phi", "orthonormal"), ("vit", "last")]
)
def test_models_compute_the_same_there_and_back(kind: str, basis: Any) -> None:
    model_class, config, size = MODELS[kind]
    model = live(model_class, config)
    original, shapes = copy.deepcopy(model), {n: p.shape for n, p in model.named_parameters()}
    given = [one for one in calls(original) if "inputs_embeds" not in one]
    done = compress_streams(model, basis=basis)
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    held = dict(model.named_parameters())
    assert {held[one.parameter].shape[one.dim] for one in done.streams[0].tensors} == {size - 1}
    assert all(error(model, original, one) < EXACT for one in given)
    assert decompress_streams(model, done) is model
    assert all(error(model, original, one) < EXACT for one in given)
    after = {n: p.shape for n, p in model.named_parameters() if n != "lm_head.bias"}
    assert after == {name: shape for name, shape in shapes.items() if name != "lm_head.bias"}


@pytest.mark.slow
def test_a_layer_without_a_bias_gets_that_of_the_norm() -> None:
    """GPT-2's head has no bias, so its last norm would keep one, which has a mean."""
    model_class, config, _ = MODELS["gpt2"]
    model = live(model_class, config)
    assert model.lm_head.bias is None
    given = {"input_ids": torch.tensor([[3, 4, 5]])}
    original = copy.deepcopy(model)
    compress_streams(model)
    assert float(model.lm_head.bias.detach().abs().max()) > 0.1
    assert type(model.transformer.ln_f) is nn.RMSNorm
    assert error(model, original, given) < EXACT
    embeds = {"inputs_embeds": torch.zeros(1, 3, 21, dtype=torch.float64)}
    with pytest.raises(UnprovenCall, match="inputs_embeds"):
        model(**embeds)


@pytest.mark.slow
def test_a_tied_head_cannot_take_the_weight_of_a_norm() -> None:
    tied = live("GPT2LMHeadModel", transformers.GPT2Config(**GPT2))
    with pytest.raises(UnsupportedModel, match=r"transformer.ln_f: the weight .* cannot be merged"):
        compress_streams(tied)


@pytest.mark.slow
def test_a_checkpoint_that_was_folded_and_merged(tmp_path: Path) -> None:
    folded = tmp_path / "out"
    options = Options(untie=True, merge="affine")
    fold(CHECKPOINTS / "gpt2", folded, options=options, verify=False)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model, original = (load(folded, dtype=torch.float64).eval() for _ in range(2))
    compress_streams(model, basis="last")
    assert error(model, original, {"input_ids": torch.arange(3, 12)[None]}) < EXACT


@pytest.mark.parametrize("basis", BASES)
def test_a_module_of_ones_own(basis: Any, x: torch.Tensor) -> None:
    model = moved(Net(affine=True))
    before = model(x)
    done = compress_streams(model, x, basis=basis)
    assert {type(norm) for norm in model.norms} == {nn.RMSNorm if basis != "last" else CRMSNorm}
    assert model.head.in_features == 8 and model.embed.out_features == 8
    assert difference(model(x), before) < EXACT
    with pytest.raises(UnprovenCall):
        model(x[None])
    other = moved(Net())
    with pytest.raises(BadCheckpoint, match="should have 8 features"):
        decompress_streams(other, done)
    model.float()
    decompress_streams(model, done)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert difference(model(x.float()).double(), before) < 1e-4
    assert isinstance(model(x[None].float()), torch.Tensor)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 9)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[2](self.stream(x) + self.table(torch.arange(4)))
        return y @ self.table.weight.T


def test_a_weight_that_writes_and_reads_stays_tied_in_the_orthonormal_basis(
    x: torch.Tensor,
) -> None:
    model = moved(Tied())
    before = model(x)
    with pytest.raises(UnsupportedModel, match="table.weight: it is tied"):
        compress_streams(model, x, basis="last")
    done = compress_streams(model, x)
    assert model.table.weight.shape == (6, 8) and difference(model(x), before) < EXACT
    assert difference(decompress_streams(model, done)(x), before) < EXACT


class ReadsRaw(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.head(self.stream(x))


class Counts(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[2](self.stream(x))
        return self.head(y) / math.sqrt(y.shape[-1])


class Measures(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norms[2](self.stream(x))) * self.stream(x).std(-1, keepdim=True)


class Activates(Net):
    def stream(self, x: torch.Tensor) -> torch.Tensor:
        return super().stream(x).relu()


class Beside(Net):
    def stream(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((super().stream(x), x), -1)[..., :9]


class Shows(Net):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        stream = self.stream(x)
        return {"logits": self.head(self.norms[2](stream)), "last_hidden_state": stream}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Shows, "the model returns it"),
        (ReadsRaw, "a product reads the stream before a norm"),
        (Counts, "Counts: its code computes something else for 8 features"),
        (Measures, "it depends on the number of features"),
        (Beside, "it holds the stream beside other features"),
        (Activates, "relu acts on single features"),
    ],
)
def test_what_cannot_be_compressed_is_refused_by_name(
    make: Callable[[], nn.Module], reason: str, x: torch.Tensor
) -> None:
    model = moved(make())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModel, match=reason):
        compress_streams(model, x)
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_models_without_such_a_stream_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="the model returns it"):
        compress_streams(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), torch.ones(1, 3))
    with pytest.raises(NothingToFold, match="no residual stream with LayerNorms"):
        compress_streams(nn.Sequential(nn.Linear(3, 3)), torch.ones(1, 3))
    with pytest.raises(UnsupportedModel, match="must be 'orthonormal' or 'last'"):
        compress_streams(nn.Linear(3, 3), torch.ones(1, 3), basis="first")  # type: ignore[arg-type]


def test_dropout_keeps_the_zero_mean_by_construction(x: torch.Tensor) -> None:
    """In training mode, the norms are LayerNorms of what the stream stands for."""
    model = moved(Net(p=0.5))
    done = compress_streams(model, x, basis="last")
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for norm in model.norms:
        norm.register_forward_hook(lambda _, args, y: seen.append((args[0], y)))
    model.train()
    first, second = model(x), model(x)
    assert difference(first, second) > 1e-2
    for z, y in seen:
        whole, normed = (torch.cat((t, -t.sum(-1, keepdim=True)), -1) for t in (z, y))
        assert difference(normed, nn.functional.layer_norm(whole, (9,))) < EXACT
    assert len(seen) == 6 and len(done.streams) == 1


@pytest.mark.parametrize(
    ("basis", "optimizer", "same"),
    [("orthonormal", "momentum", True), ("orthonormal", "AdamW", False), ("last", "SGD", False)],
)
def test_which_training_is_that_of_layer_norm(
    basis: Any, optimizer: str, same: bool, x: torch.Tensor
) -> None:
    """An orthonormal change of basis is seen by optimizers that act on single numbers."""
    plain, compressed = moved(Net()), moved(Net())
    done = compress_streams(compressed, x, basis=basis)
    for model in (plain, compressed):
        train(model, square_loss, [x, -x, x], OPTIMIZERS[optimizer](model.parameters()))
    apart = difference(decompress_streams(compressed, done)(x), plain(x))
    assert apart < 1e-11 if same else apart > 1e-6
