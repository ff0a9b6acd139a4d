"""Every option for the trained checkpoints: folded in any dtype, a result is exact and complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from live_models import CHECKPOINTS
from rounding import as_exact
from safetensors.torch import load_file
from stored_files import stored_plan
from verify_cases import FAMILIES

from enjoyln_cli import Options, UnsupportedModel, fold, from_pretrained, load_recipe, verify
from enjoyln_cli.edits.planned_edits import edits_of
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.read import parse_recipe
from enjoyln_cli.recipe.write import dump_recipe
from enjoyln_cli.runtime.modules import Folded

OPTIONS = {
    "plain": Options(),
    "untie": Options(untie=True),
    "bias": Options(merge="bias"),
    "affine": Options(merge="affine"),
    "rotate": Options(fold=False, rotate=True, untie=True, seed=3),
    "fold and rotate": Options(rotate=True, untie=True, seed=4),
    "untie and widen": Options(untie=True, widen_mlp=True),
}
BERT = "BertForMaskedLM"
ROWS = [
    ("gpt2", "plain", "float32", 7),
    ("vit", "plain", "bfloat16", 7),
    ("opt", "untie", "float16", 1),
    (BERT, "untie and widen", "bfloat16", 3),
    ("phi", "bias", "float32", 5),
    ("bloom", "affine", "float16", 8),
    ("phi", "rotate", "bfloat16", 5),
    ("gpt2", "fold and rotate", "float32", 4),
]
"""A family, an option, the dtype that the source is stored in, and how many edits there are.

GPT-2 has 3 layers, BERT and ViT too, and OPT, BLOOM and Phi have 4. Each layer has 2 norms (Phi: 3)
and values that can rotate; another norm ends the model, and BLOOM's embedding has one, which fuses
into nothing.
"""


def edited(plan: Plan, option: str) -> int:
    """How many norms, copies, MLPs or rotation groups the option is about."""
    if "rotate" in option:
        return len(plan.rotated)
    if "widen" in option:
        return len(plan.widened)
    if option == "untie":
        return len(plan.untied)
    return len(plan.folded) if option == "plain" else len(plan.fused)


def stored_in(dtype: str, family: str, model_class: str, folder: Path) -> Path:
    if dtype == "float32":
        return CHECKPOINTS / family
    cls = getattr(transformers, model_class)
    cls.from_pretrained(CHECKPOINTS / family, dtype=dtype).save_pretrained(folder)
    return folder


def loaded_as(cls: Any, folder: Path) -> tuple[torch.Tensor, dict[str, Any]]:
    """The first output of the stock class in float64, and what transformers says of the loading."""
    model, info = cls.from_pretrained(folder, dtype=torch.float64, output_loading_info=True)
    return output(model), info


def output(model: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "pixel_values":
        values = torch.randn(2, 3, 32, 32, generator=generator, dtype=torch.float64)
    else:
        values = torch.randint(3, 500, (2, 16), generator=generator)
    with torch.no_grad():
        return model.eval()(values)[0]


@pytest.mark.one_case
@pytest.mark.parametrize(("family", "option", "dtype", "number"), ROWS)
def test_a_result_is_exact_and_complete(
    family: str, option: str, dtype: str, number: int, tmp_path: Path
) -> None:
    model_class = FAMILIES.get(family, family)
    family = "bert" if family == BERT else family
    source, out = stored_in(dtype, family, model_class, tmp_path / "source"), tmp_path / "out"
    options = OPTIONS[option]
    plan = fold(source, out, model_class=model_class, options=options, verify=False).plan
    assert edited(plan, option) == number
    if option == "untie":
        assert not plan.kept and not plan.subtractions

    found = verify(out)  # by the plan that is stored in it
    assert found.passed, found.failures
    assert found.identity_error <= 1e-12
    if not options.rotate:
        assert found.ratio <= 1.1 and found.stock_ratio <= 1.1
        assert max(found.norm_input_mean.values()) < 2 * torch.finfo(getattr(torch, dtype)).eps

    cls = getattr(transformers, model_class)
    exact, info = loaded_as(cls, source)
    stock, stock_info = loaded_as(cls, out)
    assert stock_info == info and not info["mismatched_keys"]
    model = from_pretrained(out, cls, dtype=torch.float64)
    assert sum(isinstance(module, Folded) for module in model.modules()) == len(plan.folded)
    for result in (stock, output(model)):
        assert as_exact(result, exact, exact, getattr(torch, dtype))

    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    changed = edits_of(plan).keys()
    for name in before.keys() - changed:
        assert before[name].dtype == after[name].dtype and torch.equal(before[name], after[name])

    recipe = load_recipe(out / "enjoyln_recipe.yaml")
    config = transformers.AutoConfig.from_pretrained(source)
    text = dump_recipe(recipe_of(plan, config=config, options=options))
    assert text == (out / "enjoyln_recipe.yaml").read_text()
    assert recipe.options == options
    assert parse_recipe(dump_recipe(recipe), where="again") == recipe
    assert edits_of(stored_plan(out)) == edits_of(plan)
    follow = {"model_class": model_class, "recipe": out / "enjoyln_recipe.yaml"}
    fold(source, tmp_path / "again", verify=False, **follow)
    for name in ("model.safetensors", "enjoyln_recipe.yaml"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_a_dtype_that_torch_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'fp16' is not a floating dtype; use float64"):
        fold(CHECKPOINTS / "gpt2", tmp_path / "out", dtype="fp16")
