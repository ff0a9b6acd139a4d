"""Pictures whose sizes or places are read as values, in models without weights."""

from __future__ import annotations

import pytest
import torch
from folding_live import error, randomised
from tiny_models import converted
from torch import nn
from transformers import CONFIG_MAPPING, LlavaConfig, LlavaForConditionalGeneration
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.calls.calls import input_sets
from enjoyln_cli.comparison.batches import seeded_batches
from enjoyln_cli.models.meta_device import without_weights
from enjoyln_cli.trace.capture import Recorder
from enjoyln_cli.trace.traced_calls import accepted_calls


class Features(nn.Module):
    """A vision tower of which only the merged patches are used."""

    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> torch.Tensor:
        merged: torch.Tensor = self.tower(hidden_states, grid_thw=grid_thw).pooler_output
        return merged


@pytest.mark.slow
def test_a_tower_of_patch_rows_folds_for_other_grids() -> None:
    config = CONFIG_MAPPING["qwen2_vl"]().vision_config
    config.depth, config.embed_dim, config.hidden_size, config.num_heads = 2, 32, 24, 2
    tower = randomised(Features(qwen2_vl.Qwen2VisionTransformerPretrainedModel(config)))
    width = config.in_channels * config.temporal_patch_size * config.patch_size**2

    def grid(*sides: tuple[int, int]) -> dict[str, torch.Tensor]:
        rows = torch.tensor([[1, *side] for side in sides])
        patches = torch.randn(int(rows.prod(1).sum()), width, dtype=torch.float64)
        return {"hidden_states": patches, "grid_thw": rows}

    found = analyze_module(tower, **grid((4, 4), (2, 4)))
    assert found.problem.flow.traces[0].by_values and not found.plan.kept
    folded = converted(tower, found.plan, guarded=False)
    for sides in ([(4, 4), (2, 4)], [(6, 2)]):
        assert error(folded, tower, **grid(*sides)) <= 1e-12


def test_images_in_a_text_get_a_token_for_each_feature() -> None:
    vision = {
        "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "projection_dim": 8,
        "num_attention_heads": 2, "image_size": 24, "patch_size": 6,
    }  # fmt: skip
    text = {
        "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1, "vocab_size": 41,
        "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    config = LlavaConfig(
        vision_config={"model_type": "clip_vision_model", **vision},
        text_config={"model_type": "llama", **text},
        image_token_id=40,
    )
    model = LlavaForConditionalGeneration(config).eval()
    given = next(
        form for form in input_sets(model, 2, 7) if form.keys() == {"input_ids", "pixel_values"}
    )
    assert given["input_ids"].leading == (40,) * 16 and given["input_ids"].shape == (2, 23)
    main = (accepted_calls(Recorder(without_weights(model))) or [])[0]
    assert main.label == "prefill and decode" and "pixel_values" in main.steps[0][1]
    (batch,) = seeded_batches(model, 2, 0, torch.float32)
    assert [int(row.sum()) for row in batch["input_ids"] == 40] == [16, 16]
    with torch.no_grad():
        assert model(**batch).logits.isfinite().all()
