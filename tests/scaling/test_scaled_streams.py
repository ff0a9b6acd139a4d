"""Streams at another power of two: the same function, bit for bit, or a reason."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
import transformers as T
from torch import nn

from enjoyln_cli.analysis.analyze import analyze_calls, analyze_config
from enjoyln_cli.calls.calls import Call
from enjoyln_cli.comparison.batches import complete_batch, unpadded_batches
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.scaling.float16 import scale_streams
from enjoyln_cli.scaling.scaled_streams import ScaledStream, scaled_streams

SIZES = {"hidden_size": 34 * 4, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {**SIZES, "intermediate_size": 70, "vocab_size": 101}
IMAGE = {**SIZES, "intermediate_size": 70, "image_size": 32, "patch_size": 8}
ONES = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "ViTForImageClassification": (T.ViTConfig, IMAGE),
    "Dinov2ForImageClassification": (T.Dinov2Config, IMAGE),
    "LlamaForCausalLM": (T.LlamaConfig, TEXT),
    "GPT2LMHeadModel": (T.GPT2Config, {
        **ONES, "n_embd": 36, "n_head": 4, "n_layer": 2, "vocab_size": 101,
        "tie_word_embeddings": False}),
    "Gemma3ForCausalLM": (T.Gemma3TextConfig, {
        **TEXT, **ONES, "head_dim": 12, "tie_word_embeddings": False}),
}  # fmt: skip


def random_model(name: str) -> Any:
    kind, settings = MODELS[name]
    torch.manual_seed(0)
    model = getattr(T, name)(kind(architectures=[name], **settings)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter) + 0.05)
    return model


def streams_of(model: Any) -> list[ScaledStream]:
    options = Options(fold=False, rotate=True)
    return scaled_streams(analyze_config(model.config, options=options).problem)


def outputs(model: Any) -> torch.Tensor:
    torch.manual_seed(1)
    (batch,) = unpadded_batches(model, ((2, 7),), torch.float64)
    with torch.no_grad():
        found: torch.Tensor = model(**complete_batch(model, batch, torch.float64))[0]
    return found


@pytest.mark.parametrize("name", MODELS)
def test_a_scaled_stream_computes_the_same(name: str) -> None:
    model = random_model(name)
    before = outputs(model)
    streams = [stream for stream in streams_of(model) if stream.is_scaled]
    assert max(len(stream.norms) for stream in streams) >= 5
    scale_streams(model, dict.fromkeys(streams, 3))
    # Gemma computes 1 + weight in float32
    within = 1e-5 if any(stream.shifted for stream in streams) else 0.0
    torch.testing.assert_close(outputs(model), before, rtol=within, atol=within)


def test_an_output_that_may_change_follows_the_scale() -> None:
    """CLIP returns its last stream beside the embedding of the picture."""
    name = "CLIPVisionModelWithProjection"
    config = T.CLIPVisionConfig(architectures=[name], projection_dim=16, **IMAGE)
    torch.manual_seed(0)
    model = getattr(T, name)(config).double().eval()
    options, norm = Options(fold=False, rotate=True), "vision_model.encoder.layers.0.layer_norm1"

    def stream(outputs: tuple[str, ...]) -> ScaledStream:
        problem = analyze_config(config, options=options, outputs=outputs).problem
        found = scaled_streams(problem, keeps_all=not outputs)
        return next(each for each in found if each.norm == norm)

    obstacle = stream(()).obstacle
    assert obstacle is not None and obstacle.reason == "the model returns it"
    (batch,) = unpadded_batches(model, ((2, 7),), torch.float64)
    with torch.no_grad():
        before = model(**batch)
        scale_streams(model, {stream(("image_embeds",)): 3})
        after = model(**batch)
    assert torch.equal(after.image_embeds, before.image_embeds)
    assert torch.equal(after.last_hidden_state, before.last_hidden_state / 8)


def test_an_eps_without_an_attribute_is_refused() -> None:
    """OLMo passes a number to ``layer_norm``."""
    settings = {**TEXT, **ONES, "tie_word_embeddings": False}
    model = T.OlmoForCausalLM(T.OlmoConfig(architectures=["OlmoForCausalLM"], **settings))
    stream = streams_of(model)[0]
    with pytest.raises(UnsupportedModel, match="no attribute of its own for its eps of 1e-05"):
        scale_streams(model, {stream: 3})


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "LlamaForCausalLM"])
def test_eps_has_to_follow(name: str) -> None:
    model = random_model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e-2)  # variances near eps
    before = outputs(model)
    stream = next(stream for stream in streams_of(model) if stream.is_scaled)
    norm, (_, eps) = next(iter(stream.norms.items()))
    scale_streams(model, {stream: 3})
    assert torch.equal(outputs(model), before)
    module = model.get_submodule(norm)
    (attribute,) = (n for n, v in vars(module).items() if v == eps / 64)
    setattr(module, attribute, eps)
    assert not torch.allclose(outputs(model), before, rtol=1e-3)


class Block(nn.Module):
    """A residual stream that a linear layer writes, and a norm and a subclass's ``read`` read."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.out = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 6)
        self.other = nn.Linear(6, 6)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor) -> Any:
        stream = self.inp(x)
        return self.out(self.norm(stream)) + self.other(self.read(stream))


class Relu(Block):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


class Square(Block):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x * x


class Ratio(Block):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x.square() / x.abs().amax(-1, keepdim=True)


class Shared(Block):
    """The same weight reads the norm."""

    def forward(self, x: torch.Tensor) -> Any:
        stream = self.inp(x)
        return self.out(self.norm(stream)) + self.out(stream)


class Activation(Block):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Number(Block):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Clamp(Block):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(-1, 1)


class Mask(Block):
    def read(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, x, torch.zeros_like(x))


class Returned(Block):
    def forward(self, x: torch.Tensor) -> Any:
        stream = self.inp(x)
        return self.out(self.norm(stream)), stream


class Written(Block):
    def forward(self, x: torch.Tensor) -> Any:
        stream = torch.nn.functional.gelu(self.inp(x))
        return self.out(self.norm(stream))


class SameThree(Block):
    """Scores depend on the scale of queries and keys."""

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


class NumberOfItsOwn(Block):
    """The number is an attribute, but no eps."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = 1.0

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


class ByProduct(Block):
    """A program returns this field too, though the class is not used for it."""

    def forward(self, x: torch.Tensor) -> Any:
        stream = self.inp(x)
        return {"logits": self.out(self.norm(stream)), "encoder_last_hidden_state": stream}


def stream_of(model: nn.Module) -> ScaledStream:
    call = Call("a call", (((torch.randn(3, 5, dtype=torch.float64),), {}),))
    options = Options(fold=False, rotate=True)
    (stream,) = scaled_streams(analyze_calls(model, [call], options=options).problem)
    return stream


@pytest.mark.parametrize(("kind", "power"), [(Block, 1), (Relu, 1), (Square, 2), (Ratio, 1)])
def test_a_linear_reader_takes_the_inverse(kind: type[Block], power: int) -> None:
    model = kind().double().eval()
    x = torch.randn(4, 5, dtype=torch.float64)
    before = model(x)
    stream = stream_of(model)
    assert stream.obstacle is None
    assert stream.parameters["inp.bias"] == Fraction(-1)
    assert stream.parameters["other.weight"] == Fraction(power)
    scale_streams(model, {stream: 5})
    assert torch.equal(model(x), before)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Activation, "tanh reads its scale"),
        (Number, "no eps of a norm"),
        (NumberOfItsOwn, "no eps of a norm"),
        (SameThree, "does not follow from the scales of its operands"),
        (ByProduct, "the model returns it"),
        (Clamp, "clamp reads its scale"),
        (Mask, "gt reads its scale"),
        (Returned, "the model returns it"),
        (Written, "gelu gives another function at another scale"),
        (Shared, "held at two scales"),
    ],
)
def test_what_notices_a_scale_is_named(kind: type[Block], reason: str) -> None:
    stream = stream_of(kind().double().eval())
    assert stream.obstacle is not None
    assert reason in stream.obstacle.reason


def test_a_weight_that_would_be_rounded_is_refused() -> None:
    model = Block().half().eval()
    with torch.no_grad():
        model.inp.weight.fill_(169 * 2.0**-24)  # an odd number of float16's smallest steps
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedModel, match=r"inp\.weight would be rounded at 0\.125"):
        scale_streams(model, {stream_of(Block().double().eval()): 3})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
