"""One model of every mechanism, shrunken, with random weights: folded, it computes the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import census
import pytest
from census_config import shrink
from census_tables import summary
from transformers import CONFIG_MAPPING


def shrunken(model_type: str) -> Any:
    config = CONFIG_MAPPING[model_type]()
    shrink(config, 16, 224)
    return config


def test_parts_of_a_shrunken_config_fit_each_other() -> None:
    """By default this vision tower writes 3584 features, and this text model reads 4096."""
    config = shrunken("qwen3_vl")
    vision, text = config.vision_config, config.text_config
    assert vision.out_hidden_size == text.hidden_size
    assert vision.hidden_size % (4 * vision.num_heads) == 0
    assert list(vision.deepstack_visual_indexes) == [0, 1, 2] and vision.depth > 3
    assert 2 * sum(text.rope_parameters["mrope_section"]) == text.head_dim


def test_layers_that_are_read_by_number_exist() -> None:
    config = shrunken("vipllava")
    depth = config.vision_config.num_hidden_layers
    layers = config.vision_feature_layers
    assert len(layers) == 5 and all(-depth <= layer <= depth for layer in layers)
    assert list(shrunken("swin").depths) == [2, 2, 2, 2]
    assert list(shrunken("cvt").depth) == [1, 2, 3]
    assert 0 <= shrunken("mllama").text_config.cross_attention_layers[0] < 2


def test_heads_and_images_are_smaller_only_as_far_as_they_fit() -> None:
    assert shrunken("idefics3").vision_config.num_attention_heads == 2  # of 16, for 72 features
    assert shrunken("bert").num_attention_heads == 12  # of 48 features
    vision = shrunken("mllama").vision_config
    assert (vision.patch_size, vision.image_size) == (14, 112)
    assert shrunken("vit").image_size == 224


def test_a_hybrid_keeps_attention_and_an_entry_for_each_layer() -> None:
    assert shrunken("granitemoehybrid").layer_types == ["linear_attention", "full_attention"]
    gpt_neo, falcon = shrunken("gpt_neo"), shrunken("falcon_h1")
    assert gpt_neo.attention_layers == ["global", "local"] and gpt_neo.num_layers == 2
    assert falcon.mamba_n_heads * falcon.mamba_d_head == falcon.mamba_d_ssm


MECHANISMS = (
    "falcon", "deberta", "bigbird_pegasus", "wav2vec2", "convnext", "segformer", "blip", "canine",
)  # fmt: skip
"""Types of ``census.FAST`` with mechanisms that no other test folds."""


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MECHANISMS)
def test_a_folded_model_computes_what_it_did(model_type: str) -> None:
    """With its usual head, if any: then the embedding is tied."""
    model_class = [*census.classes_of(model_type)[:2]][-1]
    row = census.examine(model_class, model_type)
    assert row["status"] == "ok" and row.get("loaded", "ok") == "ok", row
    assert row["norms"] > 0
    assert row["folded"] + len(row["kept"]) == row["norms"]
    assert all(reason and culprit for _, reason, culprit in row["kept"])
    assert row["audit"].keys() == {norm for norm, _, _ in row["kept"]}
    assert not [answer for answer in row["audit"].values() if answer.startswith("missing rule")]


@pytest.mark.one_case
@pytest.mark.parametrize(
    "model_class, model_type",
    [
        ("DPRQuestionEncoder", "dpr"),  # its base model has a base model of its own
        ("ModernBertModel", "modernbert"),  # its first block has an ``nn.Identity`` for a norm
        ("DINOv3ViTModel", "dinov3_vit"),  # its base model is given hidden states
    ],
)
def test_a_result_of_an_unusual_class_runs_rms_norm(model_class: str, model_type: str) -> None:
    row = census.examine(model_class, model_type)
    assert row["status"] == "ok" and row["loaded"] == "ok" and row["folded"], row


def test_rows_of_every_mode_become_one_page() -> None:
    """GPT-2 has two norms in each of two layers, and one behind them."""
    modes = {mode: {mode: True} if mode else {} for mode in ("", *census.MODES)}
    rows = [
        census.examine("GPT2LMHeadModel", "gpt2", mode) | asked for mode, asked in modes.items()
    ]
    page = summary(rows)
    assert f"| gpt2 | GPT2LMHeadModel | 5 | 0 | {rows[0]['folded']} |" in page
    assert f"| gpt2 | GPT2LMHeadModel | 1/1 | 2/2 |  | {rows[2]['error']:.0e} |" in page
    assert "Wrong folds: 0" in page and "Wrong rotations: 0" in page
    assert "## With every option" in page


def test_a_result_that_computes_something_else_is_reported() -> None:
    import torch
    from eight_models import given, source

    from enjoyln_cli.analysis.analyze import analyze_config

    model = source("gpt2")
    plan = analyze_config(model.config, model_class="GPT2LMHeadModel").plan

    def loaded(plan: Any, bound: float = 1e-9) -> str:
        runs = [lambda m: m(**given("gpt2"))]
        return str(census.loading(model, plan, runs, torch.float64, bound)["loaded"])

    assert loaded(plan) == "ok"
    assert loaded(plan, -1.0) == "differs"
    less = replace(plan, centred_weights=plan.centred_weights[1:])
    assert loaded(less) == "differs"
    assert "proven for GPT2Model" in loaded(replace(plan, classes=("GPT2Model",)))
