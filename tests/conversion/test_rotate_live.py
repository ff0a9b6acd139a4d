"""``rotate`` of a model in memory: the same function, and a checkpoint that loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import CHECKPOINTS, shaken
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from enjoyln_cli import EnjoyLNError, NothingToFold, UnsupportedModel, rotate
from enjoyln_cli.comparison.run import run

CLASSES = {"bert": AutoModelForMaskedLM, "vit": AutoModelForImageClassification}


def trained(name: str) -> Any:
    return CLASSES.get(name, AutoModelForCausalLM).from_pretrained(CHECKPOINTS / name).eval()


def outputs_of(model: Any) -> torch.Tensor:
    inputs = {"input_ids": torch.arange(3, 37)[None]}
    if model.config.model_type == "vit":
        noise = torch.Generator().manual_seed(1)
        inputs = {"pixel_values": torch.randn((2, 3, 32, 32), generator=noise)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.arange(3, 15)[None]
    (found,) = run(model.double(), [inputs])
    return next(iter(found.values()))


def changed(before: Any, after: Any) -> set[str]:
    old, new = before.state_dict(), after.state_dict()
    return {name for name in old if not torch.equal(old[name], new[name])}


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["opt", "bert", "vit"])
def test_a_rotated_model_computes_the_same_and_can_be_saved(name: str, tmp_path: Path) -> None:
    model = trained(name).double()
    before = copy.deepcopy(model)
    expected = outputs_of(before)
    plan = rotate(model, seed=4)
    error = float((outputs_of(model) - expected).norm() / expected.norm())
    assert error < 1e-12
    stream = [group for group in plan.rotated if group.kind == "residual"]
    assert bool(stream) == (name != "bert")
    for group in plan.rotated:
        assert changed(before, model) >= {tensor.parameter for tensor in group.tensors}
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert changed(model, loaded) == set()
    assert float((outputs_of(loaded) - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.slow
def test_seeds_and_options_choose_what_rotates() -> None:
    tied = trained("gpt2")
    plan = rotate(tied, untie=False)
    assert {group.kind for group in plan.rotated} == {"values"}
    assert tied.lm_head.weight is tied.transformer.wte.weight
    first, second = trained("phi"), trained("phi")
    rotate(first, values=False, seed=1)
    rotate(second, values=False, seed=2)
    value = "model.layers.0.self_attn.dense.weight"
    assert changed(first, second) >= {value, "model.embed_tokens.weight"}
    assert not changed(trained("phi"), first) & {"model.layers.0.self_attn.q_layernorm.weight"}


def test_a_head_that_the_config_cannot_untie_stays_tied() -> None:
    torch.manual_seed(2)
    sizes = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(vocab_size=61, decoder_start_token_id=0, **sizes))
    shaken(model).double()
    expected = outputs_of(model)
    plan = rotate(model)
    assert plan.rotated and not plan.untied
    assert model.lm_head.weight is model.shared.weight
    assert float((outputs_of(model) - expected).norm() / expected.norm()) < 1e-12


def test_what_is_refused_changes_nothing() -> None:
    model = trained("opt")
    before = copy.deepcopy(model)
    model.config.enjoyln = {"source": "somewhere"}
    with pytest.raises(EnjoyLNError, match="OPTForCausalLM"):
        rotate(model)
    del model.config.enjoyln
    with pytest.raises(UnsupportedModel, match="Linear is no model of transformers"):
        rotate(nn.Linear(3, 3))
    name, layer = "model.decoder.layers.1.fc1", model.model.decoder.layers[1].fc1
    rounded = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    weight, layer.weight = layer.weight, rounded
    with pytest.raises(UnsupportedModel, match=rf"{name}.weight is quantised \(int8\)"):
        rotate(model)
    layer.weight = weight
    hooks = [
        module.register_forward_hook(lambda module, args, result: result.relu())
        for path, module in model.named_modules()
        if path.endswith(("v_proj", "out_proj", "fc1", "fc2", "embed_tokens"))
    ]
    with pytest.raises(NothingToFold, match="nothing of OPTForCausalLM can be rotated"):
        rotate(model)
    for hook in hooks:
        hook.remove()
    assert changed(before, model) == set()
    assert model.lm_head.weight is model.model.decoder.embed_tokens.weight
