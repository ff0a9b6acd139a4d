"""Models with LayerScale, folded on disk: the scale moves into the layer before it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fold_cases import written
from live_models import moved
from torch import nn
from transformers import CONFIG_MAPPING, Dinov2Model

from enjoyln_cli import analyze, fold, verify
from enjoyln_cli.report.notes import counts

SMALL = {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_size": 24,
    "intermediate_size": 33,
    "image_size": 20,
    "patch_size": 5,
    "num_labels": 5,
    "layer_scale_init_value": 0.1,
}


def save(folder: Path) -> None:
    """Random gammas, betas and biases; scales of both signs, between 0.1 and 2, and a zero."""
    model = moved(Dinov2Model(CONFIG_MAPPING["dinov2"](**SMALL)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lambda" in name:
                sign = torch.where(torch.rand_like(parameter) < 0.3, -1.0, 1.0)
                parameter.copy_(sign * (0.1 + 1.9 * torch.rand_like(parameter)))
                parameter[3] = 0
    model.bfloat16().save_pretrained(folder)


def test_a_model_with_layer_scale_folds_whole(tmp_path: Path) -> None:
    save(tmp_path / "source")
    plan = fold(tmp_path / "source", tmp_path / "out", verify=False).plan
    assert [v.status for v in plan.norms] == ["in_weights"] * 5
    scaled = {w.scale for w in plan.centred_weights if w.scale}
    scales = {scale.tensor for scale in scaled}
    assert (
        len(scales) == len(scaled) == 4
        and sum(w.scale is not None for w in plan.centred_weights) == 8
    )
    assert counts(plan).endswith("4 scales fused into them")
    before, after = written(tmp_path / "source"), written(tmp_path / "out")
    assert all(torch.equal(after[name], torch.ones_like(after[name])) for name in scales)
    assert all(float(before[name][3]) == 0 for name in scales)
    found = verify(tmp_path / "out")
    assert found.passed and found.identity_error <= 1e-12 and found.stock_ratio <= 1.1


def test_the_proof_says_what_is_fused() -> None:
    found = str(analyze(CONFIG_MAPPING["dinov2"](**SMALL)).why("encoder.layer.0.norm2"))
    assert "centred in the weights after encoder.layer.0.layer_scale1.lambda1 is fused" in found


class Scaled(nn.Module):
    """Two layers whose outputs are scaled and normalised."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale, self.norm = nn.Parameter(torch.rand(6) + 0.5), nn.LayerNorm(6)
        self.shared = shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x) * self.scale)
        if self.shared == "layers":
            return y + self.second(x) * self.scale
        if self.shared == "weight":
            return y + self.first.weight.sum()
        return y + self.scale if self.shared == "elsewhere" else y


@pytest.mark.parametrize(
    ("shared", "why"),
    [
        ("", None),
        ("layers", "a scale of the features is applied to the outputs of several layers"),
        ("weight", "a scale of the features, and a weight that it scales is also read by sum"),
        ("elsewhere", "a scale of the features, and it is also read by add"),
    ],
)
def test_a_scale_with_other_readers_is_named(shared: str, why: str | None) -> None:
    found = analyze(Scaled(shared), example_calls=[((torch.randn(2, 6),), {})])
    assert len(found.plan.folded) == (why is None)
    assert why is None or why in str(found.why("norm"))
