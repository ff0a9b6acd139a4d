"""Large features move from norms into the linear layers that read them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import BERT, GPT2, PHI, WHISPER, calls, error, live, main_call
from torch import nn
from transformers import BertConfig, GPT2Config, NemotronConfig, PhiConfig, WhisperConfig

from enjoyln_cli.analysis.analyze import analyze_module
from enjoyln_cli.comparison.simulated_rounding import Scheme, simulated
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.plan import Plan, UntiedParameter
from enjoyln_cli.quantisers.schemes import FORMATS, ONNX, OPENVINO, SCHEMES, TORCHAO
from enjoyln_cli.scaling.smoothing import SmoothedNorm, smooth, smoothable, smoothing

OUTLIERS = [3, 11]
READ_BY_LINEAR_LAYERS = Options(fold=False, merge="affine")
MODELS: dict[str, tuple[Any, list[str]]] = {
    "GPT2LMHeadModel": (GPT2Config(**GPT2), ["ln_1", "ln_2"] * 2),  # the head is tied
    "PhiForCausalLM": (PhiConfig(**PHI), ["input_layernorm"] * 2 + ["final_layernorm"]),
    "NemotronForCausalLM": (
        NemotronConfig(**PHI | {"num_attention_heads": 2, "num_key_value_heads": 2}),
        ["input_layernorm", "post_attention_layernorm"] * 2 + ["norm"],
    ),
    "WhisperForConditionalGeneration": (
        WhisperConfig(**WHISPER),
        ["self_attn_layer_norm", "final_layer_norm"] * 2
        + ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm", "layer_norm"],
    ),
    # all norms but the last are read by a residual sum, too
    "BertForMaskedLM": (BertConfig(**BERT), ["LayerNorm"]),
}


def plan_of(model: nn.Module, *args: Any) -> Plan:
    return analyze_module(model, *args, options=READ_BY_LINEAR_LAYERS).plan


def planted(name: str) -> tuple[Any, Plan]:
    """A model in float64 with features that are 30 times as large as others, and its plan."""
    model = live(name, MODELS[name][0])
    plan = plan_of(model)
    with torch.no_grad():
        for norm in plan.fused:
            for part in (norm.weight, norm.bias or norm.divided):
                if part:
                    model.get_parameter(part)[OUTLIERS] *= 30.0
            for reader in norm.readers:
                weight = model.get_parameter(reader.weight.parameter)
                (weight if reader.dim == 0 else weight.T)[OUTLIERS] /= 10.0
    return model, plan


@pytest.mark.one_case
@pytest.mark.parametrize("name", MODELS)
def test_a_smoothed_model_computes_the_same_and_rounds_better(name: str) -> None:
    model, plan = planted(name)
    norms = smoothable(plan.fused, plan)
    assert [norm.norm.rpartition(".")[2] for norm in norms] == MODELS[name][1]
    smoothed = smoothing(model, norms, [main_call(model)])
    assert [one.norm for one in smoothed] == [*norms]
    changed = copy.deepcopy(model)
    smooth(changed, smoothed)
    is_speech = name == "WhisperForConditionalGeneration"
    for given in [main_call(model)] if is_speech else calls(model):
        assert error(changed, model, given) < 1e-12
    for norm in norms:
        after, before = (one.get_parameter(f"{norm.norm}.weight") for one in (changed, model))
        assert after[OUTLIERS].abs().max() < 0.3 * before[OUTLIERS].abs().max()
    apart = []
    for one in (model, changed):
        with torch.no_grad():
            exact = one(**main_call(model)).logits
            with simulated(one, Scheme(8, 8, per_token=False)):
                apart.append(float((one(**main_call(model)).logits - exact).norm()))
    assert apart[1] < 0.8 * apart[0]


def test_without_large_features_smoothing_is_not_worth_trying() -> None:
    model = live("GPT2LMHeadModel", MODELS["GPT2LMHeadModel"][0])
    assert smoothing(model, plan_of(model).fused, [main_call(model)]) == ()


class Merging(nn.Module):
    """A norm whose features are read twice side by side, and a norm and a layer without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(6), nn.LayerNorm(5, bias=False)
        self.both, self.last = nn.Linear(12, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pairs = self.both(self.first(x).reshape(len(x), -1, 12))
        result: torch.Tensor = self.last(self.second(pairs.tanh()))
        return result


def test_a_layer_may_read_features_several_times() -> None:
    torch.manual_seed(0)
    model, x = Merging().double().eval(), torch.randn(3, 4, 6, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    norms = plan_of(model, x).fused
    assert [(norm.norm, norm.readers[0].outer) for norm in norms] == [("first", 2), ("second", 1)]
    sizes = [len(model.get_parameter(f"{norm.norm}.weight")) for norm in norms]
    factors = [torch.rand(size, dtype=torch.float64) + 0.5 for size in sizes]
    changed = copy.deepcopy(model)
    smooth(changed, [SmoothedNorm(*pair) for pair in zip(norms, factors, strict=True)])
    assert torch.allclose(changed(x), model(x), rtol=1e-12, atol=1e-14)
    assert torch.allclose(changed.both.weight, model.both.weight * factors[0].repeat(2))


def test_norms_whose_layers_are_tied_are_left_alone() -> None:
    """An untied candidate has copies of the weights, but the original has not."""
    plan = plan_of(live("PhiForCausalLM", MODELS["PhiForCausalLM"][0]))
    everything = smoothable(plan.fused, plan)
    for tied in ("lm_head.weight", "model.layers.1.mlp.fc1.weight"):
        head = UntiedParameter("other.weight", source=tied)
        rest = smoothable(plan.fused, replace(plan, untied=(head,)))
        left = {norm.norm for norm in everything} - {norm.norm for norm in rest}
        last = {"lm_head.weight": "final_layernorm"}.get(tied, "layers.1.input_layernorm")
        assert left == {f"model.{last}"}


def test_only_inputs_of_8_bits_that_share_a_scale_are_smoothed() -> None:
    smoothed = {
        (form, name)
        for form, target in FORMATS.items()
        for name in target.schemes
        if SCHEMES[name].can_be_smoothed(form)
    }
    assert {(ONNX, "w8a8"), (ONNX, "w8a8-static"), (TORCHAO, "w8a8")} <= smoothed
    assert {name for _, name in smoothed} == {"w8a8", "w8a8-static"}
    assert OPENVINO not in {form for form, _ in smoothed}  # NNCF smooths by itself
