"""Recipes of llm-compressor: the modifier that rotates, and the mappings that ``report`` prints.

They are skipped where the library is not installed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import good
from live_models import CHECKPOINTS, shaken
from rounding import relative
from tiny_models import BERT
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from enjoyln_cli import NothingToFold

pytestmark = pytest.mark.slow
llmcompressor = pytest.importorskip("llmcompressor")
datasets = pytest.importorskip("datasets")

IDS = torch.arange(3, 43)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS, use_cache=False).logits.float()
    return found


def loaded(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name).eval()


def test_a_recipe_rotates_before_it_quantises(tmp_path: Path) -> None:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    from enjoyln_cli.quantisation.llm_compressor_modifier import EnjoylnRotateModifier

    original, model = loaded("opt"), loaded("opt")
    quantise = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    recipe = [EnjoylnRotateModifier(seed=3), quantise]
    llmcompressor.oneshot(model=model, recipe=recipe, output_dir=str(tmp_path))
    result = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 1e-4 < relative(logits(result), logits(original)) < 0.02
    rotated, head = result.get_output_embeddings().weight, original.get_output_embeddings().weight
    assert relative(rotated, head) > 0.5


def test_a_recipe_in_yaml_knows_the_modifier(tmp_path: Path) -> None:
    from enjoyln_cli.quantisation import llm_compressor_modifier

    assert llm_compressor_modifier.EnjoylnRotateModifier.__name__ == "EnjoylnRotateModifier"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "default_stage:\n  default_modifiers:\n    EnjoylnRotateModifier: {seed: 3}\n"
    )
    original, model = loaded("phi"), loaded("phi")
    llmcompressor.oneshot(model=model, recipe=str(recipe))
    assert relative(logits(model), logits(original)) < 1e-5
    assert relative(model.lm_head.weight, original.lm_head.weight) > 0.5


def test_a_model_that_cannot_rotate_stops_the_recipe() -> None:
    from enjoyln_cli.quantisation.llm_compressor_modifier import EnjoylnRotateModifier

    model = loaded("gpt2")
    with pytest.raises(NothingToFold):
        llmcompressor.oneshot(model=model, recipe=EnjoylnRotateModifier(untie=False, values=False))


def llama() -> Any:
    """A Llama whose parameters are all random, with fewer heads for keys than for queries."""
    torch.manual_seed(4)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {**BERT, **heads, "vocab_size": 101, "hidden_size": 32}
    return shaken(LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)))


def sections(model: Any, folder: Path) -> dict[str, Any]:
    """What ``report --mappings`` prints for a model, by the name of the modifier."""
    model.save_pretrained(folder)
    found: dict[str, Any] = yaml.safe_load(good("report", folder, "--mappings", "llm-compressor"))
    return found


def calibrated(model: Any, recipe: Any) -> None:
    """Carry out a recipe, which runs the model on four rows of ids."""
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 100, (4, 24), generator=generator).tolist()
    rows = {"input_ids": ids, "attention_mask": [[1] * 24] * 4}
    llmcompressor.oneshot(
        model=model,
        recipe=recipe,
        dataset=datasets.Dataset.from_dict(rows),
        processor=AutoTokenizer.from_pretrained(CHECKPOINTS / "opt"),
        pipeline="basic",
    )


@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_smoothing_by_the_mappings_keeps_the_function(name: str, tmp_path: Path) -> None:
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

    model = llama() if name == "llama" else loaded(name)
    found = sections(model, tmp_path / name)["SmoothQuantModifier"]
    model = type(model).from_pretrained(tmp_path / name)
    before, exact = copy.deepcopy(model.state_dict()), logits(model)
    modifier = SmoothQuantModifier(smoothing_strength=0.7, **found)
    calibrated(model, modifier)
    assert relative(logits(model), exact) < 1e-5
    norms = {n for n, m in model.named_modules() if type(m).__name__.endswith("Norm")}
    smoothed = {n for n in norms if not torch.equal(before[f"{n}.weight"], weight_of(model, n))}
    others = {"transformer.ln_f", "transformer.word_embeddings_layernorm", "model.norm"}
    assert smoothed == norms - others


def weight_of(model: Any, module: str) -> torch.Tensor:
    weight: torch.Tensor = model.get_parameter(f"{module}.weight").data
    return weight


def test_awq_finds_the_layers_of_the_mappings(tmp_path: Path) -> None:
    from llmcompressor.modifiers.transform.awq import AWQMapping, AWQModifier

    model, at = llama(), "model.layers.1"
    found = sections(model, tmp_path / "model")["AWQModifier"]["mappings"]
    modifier = AWQModifier(mappings=[AWQMapping(**mapping) for mapping in found])
    for module in model.modules():  # AWQ leaves layers that are not to be quantised
        if isinstance(module, torch.nn.Linear):
            module.quantization_scheme = None  # type: ignore[assignment]
    modifier._set_resolved_mappings(model)  # it runs on GPUs only
    resolved = {one.smooth_name: set(one.balance_names) for one in modifier._resolved_mappings}
    assert len(resolved) == 4
    assert resolved[f"{at}.input_layernorm"] == {f"{at}.self_attn.{n}_proj" for n in "qkv"}
    readers = {f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"}
    assert resolved[f"{at}.post_attention_layernorm"] == readers


def test_spinquant_fuses_the_norms_of_the_mappings(tmp_path: Path) -> None:
    from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier
    from llmcompressor.modifiers.transform.spinquant.norm_mappings import NormMapping

    model = llama()
    found = sections(model, tmp_path / "model")["SpinQuantModifier"]["norm_mappings"]
    exact = logits(model)
    modifier = SpinQuantModifier(norm_mappings=[NormMapping(**mapping) for mapping in found])
    modifier._fuse_norms(model)
    assert relative(logits(model), exact) < 1e-5
    norms = [m for m in model.modules() if type(m).__name__ == "LlamaRMSNorm"]
    assert len(norms) == 5 and all(bool((m.weight == 1).all()) for m in norms)
