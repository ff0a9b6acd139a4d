"""Which layers read each norm, as ``report --mappings`` prints it for recipes of llm-compressor."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import GPT2, good, refused
from folding_live import Computing
from live_models import CHECKPOINTS, moved
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.report.quantiser_mappings import norm_mappings

SIZES = {
    "vocab_size": 53,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def printed(folder: Path, *options: object) -> str:
    return good("report", folder, "--mappings", "llm-compressor", *options)


def mappings_of(config: PretrainedConfig, class_name: str, folder: Path) -> dict[str, Any]:
    """What is printed for a config."""
    config.architectures = [class_name]
    config.save_pretrained(folder)
    found: dict[str, Any] = yaml.safe_load(printed(folder))
    return found


def test_a_norm_with_bias_is_smoothed_but_not_fused() -> None:
    text = printed(CHECKPOINTS / "opt")
    found = yaml.safe_load(text)
    attention = [rf"re:model\.decoder\.layers\.\d+\.self_attn\.{n}_proj$" for n in "qkv"]
    assert found["SmoothQuantModifier"]["mappings"] == [
        [attention, r"re:model\.decoder\.layers\.\d+\.self_attn_layer_norm$"],
        [
            [r"re:model\.decoder\.layers\.\d+\.fc1$"],
            r"re:model\.decoder\.layers\.\d+\.final_layer_norm$",
        ],
    ]
    awq = [(m["smooth_layer"], m["balance_layers"]) for m in found["AWQModifier"]["mappings"]]
    assert awq == [(norm, layers) for layers, norm in found["SmoothQuantModifier"]["mappings"]]
    assert "SpinQuantModifier" not in found and "lm_head" not in text


@pytest.mark.slow
def test_a_norm_without_bias_is_fused_into_the_head_as_well(tmp_path: Path) -> None:
    config = LlamaConfig(num_hidden_layers=2, tie_word_embeddings=True, **SIZES)
    found = mappings_of(config, "LlamaForCausalLM", tmp_path)
    *_, last = found["SpinQuantModifier"]["norm_mappings"]
    assert last == {"norm": "model.norm", "linears": ["lm_head"]}
    smoothed = [norm for _, norm in found["SmoothQuantModifier"]["mappings"]]
    assert len(smoothed) == 2 and "model.norm" not in smoothed
    assert re.match(smoothed[0].removeprefix("re:"), "model.layers.11.input_layernorm")
    assert not re.match(smoothed[0].removeprefix("re:"), "model.layers.11.input_layernorm.x")


@pytest.mark.slow
def test_only_the_layers_with_such_readers_are_matched(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        num_hidden_layers=4,
        mlp_only_layers=[0, 2],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        **SIZES,
    )
    found = mappings_of(config, "Qwen3MoeForCausalLM", tmp_path)
    _, *dense = found["SmoothQuantModifier"]["mappings"]
    assert dense == [
        [
            [f"model.layers.{layer}.mlp.{n}_proj" for n in ("gate", "up")],
            f"model.layers.{layer}.post_attention_layernorm",
        ]
        for layer in (0, 2)
    ]
    assert "since it is read by Qwen3MoeTopKRouter, which is no nn.Linear: model.layers.1,3" in (
        printed(tmp_path)
    )


def test_what_has_no_mapping_is_a_comment() -> None:
    text = printed(GPT2)
    assert "since it is read by Conv1D, which is no nn.Linear: transformer.h.0-2.ln_1-2" in text
    assert yaml.safe_load(text) is None and "No mapping is proven" in text
    assert "q_layernorm" in next(line for line in printed(CHECKPOINTS / "phi").splitlines()[1:])


def test_a_norm_that_some_outputs_of_a_layer_read_has_no_mapping() -> None:
    """The first outputs of a linear layer read a norm, and the others its input."""

    def run(m: Any, x: torch.Tensor) -> torch.Tensor:
        h, weight, bias = m.enter(x), m.wide.weight, m.wide.bias
        first = F.linear(m.norm(h), weight[:4], bias[:4])
        return first.sum(-1) + F.linear(h, weight[4:], bias[4:]).sum(-1)

    parts = {"enter": nn.Linear(7, 12), "norm": nn.LayerNorm(12), "wide": nn.Linear(12, 10)}
    model = moved(Computing(run, **parts))
    x = torch.randn(2, 7, dtype=torch.float64)
    plan = analyze_module(model, x, options=Options(fold=False, merge="affine")).plan
    assert [one.norm for one in plan.fused] == ["norm"] and not norm_mappings(plan, model)


@pytest.mark.parametrize("option", [("--json",), ("--why", "a"), (GPT2,), ("--write-recipe", "x")])
def test_mappings_are_printed_alone(option: tuple[object, ...]) -> None:
    arguments = ("report", GPT2, "--mappings", "llm-compressor", *option)
    assert "--mappings takes one MODEL" in refused(*arguments, status=2)
