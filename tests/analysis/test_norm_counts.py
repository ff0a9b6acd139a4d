"""The ground truth: LayerNorms of models with two layers, each class by itself."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from enjoyln_cli.analysis.analyze import analyze_config

POST_LN = {"word_embed_proj_dim": 512, "do_layer_norm_before": False}

ROWS: list[tuple[str, dict[str, Any], str, tuple[int, int, int, int]]] = [
    ("gpt2", {}, "GPT2LMHeadModel", (5, 0, 5, 1)),
    # Heads that read the last norm, with no embedding tied to them: all folds in the weights.
    ("gpt2", {}, "GPT2Model", (5, 5, 5, 0)),
    ("gpt2", {}, "GPT2ForSequenceClassification", (5, 5, 5, 0)),
    # Post-LN: only the norm after untied embeddings.
    ("bert", {}, "BertModel", (5, 1, 1, 0)),
    ("bert", {}, "BertForSequenceClassification", (5, 1, 1, 0)),
    ("bert", {}, "BertForMaskedLM", (6, 0, 0, 0)),
    # A norm of shared layers counts once.
    ("albert", {"hidden_size": 24, "num_attention_heads": 2}, "AlbertModel", (3, 1, 1, 0)),
    ("opt", {}, "OPTForCausalLM", (5, 0, 5, 1)),
    ("opt", {}, "OPTModel", (5, 5, 5, 0)),
    ("opt", POST_LN, "OPTForCausalLM", (4, 0, 0, 0)),
    # BLOOM's norm after the embedding folds once nothing is tied; its result needs an operation.
    ("bloom", {}, "BloomForCausalLM", (6, 0, 5, 1)),
    ("bloom", {}, "BloomForSequenceClassification", (6, 1, 6, 1)),
    ("phi", {}, "PhiForCausalLM", (3, 3, 3, 0)),
    ("phi", {"qk_layernorm": True}, "PhiForCausalLM", (7, 7, 7, 0)),
    ("vit", {}, "ViTForImageClassification", (5, 5, 5, 0)),
    ("vit", {}, "ViTForMaskedImageModeling", (5, 5, 5, 0)),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("model_type", "settings", "model_class", "expected"), ROWS)
def test_norms_static_folded_and_operations(
    model_type: str, settings: dict[str, Any], model_class: str, expected: tuple[int, ...]
) -> None:
    layers = {"gpt2": "n_layer", "bloom": "n_layer"}.get(model_type, "num_hidden_layers")
    config = CONFIG_MAPPING[model_type](**{layers: 2}, **settings)
    plan = analyze_config(config, model_class=model_class).plan
    static = sum(verdict.status == "in_weights" for verdict in plan.norms)
    assert (len(plan.norms), static, len(plan.folded), len(plan.subtractions)) == expected
    assert plan.classes == (model_class,)
    assert all(verdict.reason and verdict.culprit for verdict in plan.kept)


def test_a_base_checkpoint_is_planned_for_its_head_too() -> None:
    config = CONFIG_MAPPING["gpt2"](n_layer=2)
    config.architectures = ["GPT2Model"]
    plan = analyze_config(config).plan
    assert {"GPT2Model", "GPT2LMHeadModel"} <= set(plan.classes)
