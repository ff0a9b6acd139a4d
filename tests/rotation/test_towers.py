"""Towers of vision models in the stock classes: what rotates, and which outputs change."""

from __future__ import annotations

import census
import pytest
import torch
import transformers
from tiny_models import live, rotated

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.comparison.run import choose_outputs, run
from enjoyln_cli.plan.fold_options import Options

TOWERS: list[tuple[str, str, int, set[str]]] = [
    ("dinov2", "Dinov2ForImageClassification", 1, set()),
    ("swin", "SwinForImageClassification", 3, set()),
    (
        "siglip", "SiglipModel", 2,
        {"text_model_output.last_hidden_state", "vision_model_output.last_hidden_state"},
    ),
    (
        "qwen2_vl", "Qwen2VLForConditionalGeneration", 2,
        {"image_outputs.last_hidden_state", "image_outputs.pooler_output"},
    ),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name", "streams", "changed"), TOWERS, ids=[tower[0] for tower in TOWERS]
)
def test_towers_rotate_in_the_stock_class(
    kind: str, name: str, streams: int, changed: set[str]
) -> None:
    row = census.examine(name, kind, "rotate")
    assert row["status"] == "ok" and row["error"] <= 1e-11, row
    assert row["rotated"].count("residual") == streams, row["not_rotated"]
    assert set(row["changed"]) == changed


@pytest.mark.slow
def test_a_tower_whose_last_norm_nothing_reads() -> None:
    """LLaVA takes the layer before the last, so the norm after the last is only returned."""
    small = {"hidden_size": 24, "intermediate_size": 33, "num_attention_heads": 4}
    image = {**small, "num_hidden_layers": 3, "image_size": 15, "patch_size": 5}
    config = transformers.LlavaConfig(
        vision_config=transformers.SiglipVisionConfig(**image),
        text_config=transformers.LlamaConfig(**small, num_hidden_layers=1, vocab_size=41),
        image_token_index=7, vision_feature_select_strategy="full", image_seq_length=9,
        tie_word_embeddings=False,
    )  # fmt: skip
    name, options = "LlavaForConditionalGeneration", Options(fold=False, rotate=True)
    plan = analyze_config(config, model_class=name, options=options).plan
    streams = [group for group in plan.rotated if group.kind == "residual"]
    assert [one.name.split(".")[1] for one in streams] == ["vision_tower", "multi_modal_projector"]
    assert "model.vision_tower.post_layernorm" not in streams[0].norms
    original = live(name, config)
    rotated_model = rotated(original, plan)
    pixels = torch.randn(1, 3, 15, 15, generator=torch.Generator().manual_seed(3)).double()
    inputs = {"input_ids": torch.tensor([[1, *[7] * 9, 3, 4, 9]]), "pixel_values": pixels}
    assert plan.outputs == ("logits",)
    new, old = (choose_outputs(run(m, [inputs]), ["logits"])[0] for m in (rotated_model, original))
    torch.testing.assert_close(new["logits"], old["logits"], rtol=1e-11, atol=1e-11)
