"""Recipes of llm-compressor: the modifier that rotates, in an environment that has the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import CHECKPOINTS
from transformers import AutoModelForCausalLM

from enjoyln_cli import NothingToFold

pytestmark = pytest.mark.slow
llmcompressor = pytest.importorskip("llmcompressor")

IDS = torch.arange(3, 43)[None]


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS, use_cache=False).logits.float()
    return found


def loaded(name: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name).eval()


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("name", ["opt", "phi"])
def test_a_recipe_rotates_before_it_quantises(name: str, tmp_path: Path) -> None:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    from enjoyln_cli.quantisation.llm_compressor_modifier import EnjoylnRotateModifier

    original, model = loaded(name), loaded(name)
    llmcompressor.oneshot(model=model, recipe=EnjoylnRotateModifier(seed=3))
    assert error(logits(model), logits(original)) < 1e-5
    turned, head = model.get_output_embeddings().weight, original.get_output_embeddings().weight
    assert error(turned, head) > 0.5
    model = loaded(name)
    quantise = QuantizationModifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])
    recipe = [EnjoylnRotateModifier(seed=3), quantise]
    llmcompressor.oneshot(model=model, recipe=recipe, output_dir=str(tmp_path))
    result = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert 1e-4 < error(logits(result), logits(original)) < 0.02
    assert torch.equal(result.get_output_embeddings().weight, turned)


def test_a_recipe_in_yaml_knows_the_modifier(tmp_path: Path) -> None:
    from enjoyln_cli.quantisation import llm_compressor_modifier

    assert llm_compressor_modifier.EnjoylnRotateModifier.__name__ == "EnjoylnRotateModifier"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "default_stage:\n  default_modifiers:\n    EnjoylnRotateModifier: {seed: 3}\n"
    )
    original, model = loaded("phi"), loaded("phi")
    llmcompressor.oneshot(model=model, recipe=str(recipe))
    assert error(logits(model), logits(original)) < 1e-5
    assert error(model.lm_head.weight, original.lm_head.weight) > 0.5


def test_a_model_that_cannot_turn_stops_the_recipe() -> None:
    from enjoyln_cli.quantisation.llm_compressor_modifier import EnjoylnRotateModifier

    model = loaded("gpt2")
    with pytest.raises(NothingToFold):
        llmcompressor.oneshot(model=model, recipe=EnjoylnRotateModifier(untie=False, values=False))
