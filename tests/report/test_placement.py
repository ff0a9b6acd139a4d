"""Where norms stand: a module for each place, and models whose places are well known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import BERT, GPT2, PHI, TOKENS
from torch import nn

from enjoyln_cli import analyze
from enjoyln_cli.cli.console import write_reports
from enjoyln_cli.conversion.inspect import Inspection
from enjoyln_cli.report.placement import norm_places

SIZE = 6


class WrittenOut(nn.Module):
    """An RMSNorm in single operations; in float32 its casts return the input itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Layers(nn.Module):
    """Two layers around ``step``, with norms called ``a`` and ``b``, and one called ``last``."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        make = norm if norm is WrittenOut else lambda: norm(SIZE)
        self.first = nn.Linear(SIZE, SIZE)
        self.f = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.a = nn.ModuleList(make() for _ in range(2))
        self.b = nn.ModuleList(make() for _ in range(2))
        self.last = make()

    def step(self, x: torch.Tensor, f: Any, a: Any, b: Any) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for f, a, b in zip(self.f, self.a, self.b, strict=True):
            x = self.step(x, f, a, b)
        return self.last(x)


class Pre(Layers):
    def step(self, x: Any, f: Any, a: Any, b: Any) -> Any:
        x = x + f(a(x))
        return x + 0.5 * f(b(x)).relu()


class Parallel(Layers):
    def step(self, x: Any, f: Any, a: Any, b: Any) -> Any:
        return f(a(x)) + f(b(x)).relu() + x


class Post(Layers):
    def step(self, x: Any, f: Any, a: Any, b: Any) -> Any:
        x = a(x + f(x))
        return b(x + f(x).relu())


class Sandwich(Layers):
    def step(self, x: Any, f: Any, a: Any, b: Any) -> Any:
        return x + 2.0 * b(f(a(x)))


class ResPost(Layers):
    def step(self, x: Any, f: Any, a: Any, b: Any) -> Any:
        return x + b(f(x)) + a(f(x).relu())


class Inner(Layers):
    """Norms of queries and keys before and after a rotation; the rotation adds no branch."""

    def step(self, x: Any, f: Any, a: Any, b: Any) -> Any:
        q = a(f(x))
        q = q * 0.8 + torch.cat((-q[..., 3:], q[..., :3]), -1) * 0.6
        return x + f(b(q))


class Positions(Layers):
    """Each layer adds the same positions, which its input is computed from as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        where, x = self.first(x).sigmoid(), self.first(x)
        for f, a, b in zip(self.f, self.a, self.b, strict=True):
            x = a(x + f(x + where))
            x = b(x + f(x + where).relu())
        return x


class LongSkip(Layers):
    """A sum around both layers makes their norms no inner ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        x = early.tanh()
        for f, a, b in zip(self.f, self.a, self.b, strict=True):
            x = a(x + f(x))
            x = b(x + f(x).relu())
        return self.last((early + x).relu())


class Plain(Layers):
    def step(self, x: Any, f: Any, a: Any, b: Any) -> Any:
        return f(b(f(a(x)))).relu()


@pytest.mark.parametrize("norm", [nn.LayerNorm, WrittenOut])
@pytest.mark.parametrize(
    ("net", "places"),
    [
        (Pre, {"pre": 4, "final": 1}),
        (Parallel, {"pre": 4, "final": 1}),
        (Post, {"post": 4, "other": 1}),
        (Sandwich, {"pre": 2, "branch_end": 2, "final": 1}),
        (ResPost, {"branch_end": 4, "final": 1}),
        (Inner, {"final": 1, "inside": 4}),
        (Positions, {"post": 4, "other": 1}),
        (LongSkip, {"post": 4, "other": 1}),
        (Plain, {"other": 5}),
    ],
)
def test_each_place(net: type[Layers], norm: type[nn.Module], places: dict[str, int]) -> None:
    found = norm_places(analyze(net(norm).eval(), torch.randn(2, 3, SIZE)))
    assert found == {"LayerNorm" if norm is nn.LayerNorm else "RMSNorm": places}


DECODER = {**TOKENS, "hidden_size": 24, "intermediate_size": 33, "num_hidden_layers": 2,
           "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8,
           "max_position_embeddings": 31}  # fmt: skip
BOTH = {**TOKENS, "d_model": 24, "encoder_layers": 1, "decoder_layers": 2,
        "encoder_attention_heads": 3, "decoder_attention_heads": 3, "encoder_ffn_dim": 33,
        "decoder_ffn_dim": 33, "max_position_embeddings": 31,
        "decoder_start_token_id": 1}  # fmt: skip


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("model_type", "settings", "places"),
    [
        ("phi", {**PHI, "qk_layernorm": True}, {"LayerNorm": {"pre": 2, "final": 1, "inside": 4}}),
        ("gpt2", GPT2, {"LayerNorm": {"pre": 4, "final": 1}}),
        ("bert", BERT, {"LayerNorm": {"post": 4, "other": 1}}),
        ("bart", BOTH, {"LayerNorm": {"post": 8, "other": 2}}),
        ("gemma2", DECODER, {"RMSNorm": {"pre": 4, "branch_end": 4, "final": 1}}),
        ("olmo2", DECODER, {"RMSNorm": {"branch_end": 4, "final": 1, "inside": 4}}),
    ],
)
def test_models(model_type: str, settings: Any, places: Any) -> None:
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    name = transformers.MODEL_MAPPING[type(config)].__name__
    assert norm_places(analyze(config, model_class=name)) == places


def test_the_report_says_where_norms_stand(capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.CONFIG_MAPPING["olmo2"](**DECODER)
    report = Inspection("one", config, analyze(config, model_class="Olmo2Model")).report()
    assert report.to_json()["norm_places"]["RMSNorm"]["branch_end"] == 4
    write_reports([report], "table")
    assert "  RMSNorms: 4 branch end, 1 final, 4 inside\n" in capsys.readouterr().out
