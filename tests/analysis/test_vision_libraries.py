"""Live vision models of timm and torchvision: which norms fold exactly, and why others stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_models import moved
from tiny_models import converted
from torch import nn

from enjoyln_cli import analyze
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.entries import input_means

NOT_ZERO_MEAN = "the output of a LayerNorm with weights is not zero-mean"
GROUPED = "a grouped convolution, whose channels see different inputs"
READ = "a weight it depends on is also used elsewhere, where centring it would be noticed"
SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 2}


def timm_model(name: str, **settings: Any) -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model(name, pretrained=False, num_classes=5, **settings)


def planned(model: nn.Module) -> Plan:
    """The plan for 32 by 32 pixels; on three inputs, each folded norm's input has zero mean."""
    moved(model)
    images = [torch.randn(2, 3, 32, 32, dtype=torch.float64) * 10**i for i in range(3)]
    plan = analyze(model, images[0]).plan
    folded = converted(model, plan)
    for x in images:
        with torch.no_grad(), input_means(folded) as seen:
            expected, got = model(x), folded(x)
        assert (got - expected).abs().max() <= 1e-9 * expected.abs().max()
        assert set(seen) == {verdict.norm for verdict in plan.folded}
        assert max(seen.values()) <= 1e-9
    return plan


def static(plan: Plan) -> set[str]:
    return {verdict.norm for verdict in plan.norms if verdict.status == "static"}


def kept(plan: Plan) -> dict[str, str]:
    return {verdict.norm: verdict.reason for verdict in plan.kept}


def blocks(prefix: str, count: int, *names: str) -> set[str]:
    return {f"{prefix}.{i}.{name}" for i in range(count) for name in names or ("norm1", "norm2")}


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
@pytest.mark.parametrize("fused", [False, True])
def test_timm_vit_folds_whole(name: str, fused: bool) -> None:
    """Pre-LN: only norms read the stream, and the heads read the last norm.

    Patches, positions, class and distillation tokens, ``proj`` and ``fc2`` are added to the stream.
    """
    model = timm_model(name, **SMALL)
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused  # type: ignore[assignment]
    plan = planned(model)
    assert static(plan) == {*blocks("blocks", 2), "norm"}
    assert kept(plan) == {} and plan.ops == ()


def test_timm_convnext_folds_its_stem() -> None:
    """The stem's convolution reads all channels, so the stem's norm folds.

    The norms in the blocks follow depthwise convolutions. These read the stream of each stage too,
    so no weight that adds to it can be centred. The first stage's stream begins with the affine
    output of the stem's norm.
    """
    plan = planned(timm_model("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 12, 16, 20)))
    assert static(plan) == {"stem.1"}
    inside = dict.fromkeys([f"stages.{i}.blocks.0.norm" for i in range(4)], GROUPED)
    between = dict.fromkeys(["stages.2.downsample.0", "stages.3.downsample.0", "head.norm"], READ)
    assert kept(plan) == {**inside, **between, "stages.1.downsample.0": NOT_ZERO_MEAN}


def swin_stages(first: str, second: str, plan: Plan, stem: str, merging: str, last: str) -> None:
    """Six of eleven norms fold: that of the patches, four of the second stage, and the last one.

    The first stage's stream begins with the affine norm of the patches. Patch merging concatenates
    it four by four, and its norm reads the means of the parts. So that norm and the four of the
    first stage stay. The second stage begins with a linear layer, and only norms read its stream.
    """
    assert static(plan) == {stem, *blocks(second, 2), last}
    assert plan.ops == ()
    found = kept(plan)
    assert set(found) == {*blocks(first, 2), merging}
    assert "mixes" in found[merging] or "other dimensions" in found[merging]
    assert {found[f"{first}.0.{name}"] for name in ("norm1", "norm2")} == {NOT_ZERO_MEAN}
    later = {v.norm: v for v in plan.kept if v.norm.startswith(f"{first}.1")}
    assert {v.reason for v in later.values()} <= {NOT_ZERO_MEAN, READ}


def test_timm_swin() -> None:
    settings = {"embed_dim": 12, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4}
    plan = planned(timm_model("swin_tiny_patch4_window7_224", img_size=32, **settings))
    first, second = "layers.0.blocks", "layers.1.blocks"
    swin_stages(first, second, plan, "patch_embed.norm", "layers.1.downsample.norm", "norm")


def test_torchvision_vit_folds_whole() -> None:
    """As timm's, with ``nn.MultiheadAttention``, whose ``out_proj`` is centred."""
    models = pytest.importorskip("torchvision").models
    plan = planned(models.VisionTransformer(32, 8, 2, 3, 24, 33, num_classes=5))
    layers = {f"encoder.layers.encoder_layer_{i}" for i in range(2)}
    assert static(plan) == {"encoder.ln", *(f"{at}.ln_{j}" for at in layers for j in (1, 2))}
    assert kept(plan) == {} and plan.ops == ()
    writers = {writer.parameter for writer in plan.writers}
    assert {f"{at}.self_attention.out_proj.weight" for at in layers} <= writers
