"""The ground truth: LayerNorms of ten full-size models, each class by itself."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from enjoyln_cli.analysis.analyze import analyze_config

OPT_350M = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "ffn_dim": 4096,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
}
BLOOM_560M = {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}
PHI_2 = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32}

ROWS: list[tuple[str, dict[str, Any], str, tuple[int, int, int, int]]] = [
    ("gpt2", {}, "GPT2LMHeadModel", (25, 0, 25, 1)),
    ("gpt2", {}, "GPT2Model", (25, 25, 25, 0)),
    ("bert", {}, "BertModel", (25, 1, 1, 0)),
    ("bert", {}, "BertForMaskedLM", (26, 0, 0, 0)),
    ("opt", {}, "OPTForCausalLM", (25, 0, 25, 1)),
    ("opt", OPT_350M, "OPTForCausalLM", (48, 0, 0, 0)),
    ("bloom", BLOOM_560M, "BloomForCausalLM", (50, 0, 49, 1)),
    ("phi", PHI_2, "PhiForCausalLM", (33, 33, 33, 0)),
    ("phi", {"num_hidden_layers": 4, "qk_layernorm": True}, "PhiForCausalLM", (13, 13, 13, 0)),
    ("vit", {}, "ViTForImageClassification", (25, 25, 25, 0)),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("model_type", "settings", "model_class", "expected"), ROWS)
def test_norms_static_folded_and_operations(
    model_type: str, settings: dict[str, Any], model_class: str, expected: tuple[int, ...]
) -> None:
    config = CONFIG_MAPPING[model_type](**settings)
    plan = analyze_config(config, model_class=model_class).plan
    static = sum(verdict.status == "static" for verdict in plan.norms)
    assert (len(plan.norms), static, len(plan.folded), len(plan.ops)) == expected
    assert plan.classes == (model_class,)
    assert all(verdict.reason and verdict.culprit for verdict in plan.kept)


HEADS: list[tuple[str, str, tuple[int, int, int, int]]] = [
    # Heads that read the last norm, with no embedding tied to them: all folds in the weights.
    ("gpt2", "GPT2ForSequenceClassification", (5, 5, 5, 0)),
    ("opt", "OPTModel", (5, 5, 5, 0)),
    # BLOOM's norm after the embedding folds once nothing is tied; what it feeds needs an operation.
    ("bloom", "BloomModel", (6, 1, 6, 1)),
    ("bloom", "BloomForSequenceClassification", (6, 1, 6, 1)),
    # Post-LN: only the norm after the untied embeddings.
    ("bert", "BertForSequenceClassification", (5, 1, 1, 0)),
    ("phi", "PhiModel", (3, 3, 3, 0)),
    ("phi", "PhiForSequenceClassification", (3, 3, 3, 0)),
    ("vit", "ViTModel", (5, 5, 5, 0)),
    ("vit", "ViTForMaskedImageModeling", (5, 5, 5, 0)),
]


@pytest.mark.one_case
@pytest.mark.parametrize(("model_type", "model_class", "expected"), HEADS)
def test_every_head_has_verdicts_of_its_own(
    model_type: str, model_class: str, expected: tuple[int, ...]
) -> None:
    layers = {"gpt2": "n_layer", "bloom": "n_layer"}.get(model_type, "num_hidden_layers")
    config = CONFIG_MAPPING[model_type](**{layers: 2})
    plan = analyze_config(config, model_class=model_class).plan
    static = sum(verdict.status == "static" for verdict in plan.norms)
    assert (len(plan.norms), static, len(plan.folded), len(plan.ops)) == expected


def test_by_default_a_base_checkpoint_is_planned_for_its_head_too() -> None:
    config = CONFIG_MAPPING["gpt2"](n_layer=2)
    config.architectures = ["GPT2Model"]
    plan = analyze_config(config).plan
    assert {"GPT2Model", "GPT2LMHeadModel"} <= set(plan.classes)
    assert [op.module for op in plan.ops] == ["wte"]
    assert all(writer.parameter != "wte.weight" for writer in plan.writers)
