"""Models from other libraries than transformers, analysed as live modules."""

from __future__ import annotations

import pytest
import torch
from live_models import moved
from tiny_models import converted
from torch import nn

from enjoyln_cli import analyze
from enjoyln_cli.plan.plan import Plan


def same(model: nn.Module, plan: Plan, x: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(
            converted(model, plan, guarded=False)(x), model(x), rtol=1e-11, atol=1e-11
        )


class Encoder(nn.Module):
    """PyTorch's own encoder between a projection and a head."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(20, 4, 33, norm_first=norm_first)
        norm = nn.LayerNorm(20) if norm_first else None
        self.project, self.head = nn.Linear(5, 20), nn.Linear(20, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.project(x)))


def test_a_pre_ln_encoder_of_torch_folds_whole() -> None:
    model, x = moved(Encoder(norm_first=True)), torch.randn(2, 7, 5, dtype=torch.float64)
    plan = analyze(model, x).plan
    assert [v.status for v in plan.norms] == ["in_weights"] * 5
    assert "encoder.layers.0.self_attn.out_proj.weight" in {
        w.parameter for w in plan.centred_weights
    }
    assert same(model, plan, x)


def test_a_post_ln_encoder_of_torch_stays() -> None:
    model, x = moved(Encoder(norm_first=False)), torch.randn(2, 7, 5, dtype=torch.float64)
    plan = analyze(model, x).plan
    first, *others = plan.kept
    assert plan.folded == () and "read by encoder.layers.0.self_attn" in first.culprit
    assert {v.reason for v in others} == {"the output of a LayerNorm with weights is not zero-mean"}


class Heads(nn.Module):
    """Four normalised heads on a post-LN encoder, which torch runs as one fused op per layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(20, 4, 33, batch_first=True)
        self.project, self.encoder = nn.Linear(5, 20), nn.TransformerEncoder(layer, 2)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 3)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.project(x), src_key_padding_mask=padding)
        return torch.cat([head(x) for head in self.heads], -1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_fused_layer_of_torch_does_not_pass_over_a_centring() -> None:
    """One operation on the encoder's last norm folds the four norms of the heads.

    Without gradients, torch also packs the rows that are not padding into a nested tensor.
    """
    model, x = moved(Heads()), torch.randn(2, 7, 5, dtype=torch.float64)
    padding = torch.arange(7) >= torch.tensor([[7], [5]])
    plan = analyze(model, x, padding).plan
    assert [(op.module, op.place) for op in plan.subtractions] == [
        ("encoder.layers.1.norm2", "output")
    ]
    assert {v.norm for v in plan.folded} == {f"heads.{i}.0" for i in range(4)}
    for gradients in (False, True):
        with torch.set_grad_enabled(gradients):
            expected, got = model(x, padding), converted(model, plan, guarded=False)(x, padding)
        assert torch.allclose(got, expected, rtol=1e-11, atol=1e-11)
