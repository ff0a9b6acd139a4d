"""Read recipes from YAML text: the edits made to a checkpoint, or those to make.

    version: 1
    model_type: gpt2
    variants:
    - model_class: GPT2LMHeadModel
      classes: [GPT2LMHeadModel, GPT2Model]
      outputs: [logits]                          # outputs that stay unchanged; without it, all
      when: {tie_word_embeddings: true}          # required values of config attributes
      norms:                                     # fold, keep, fold_with: [modules], keep: reason
        transformer.h.{i}.ln_1: {fold_with: [transformer.wte]}
        transformer.h.{i}.ln_2: {keep: why, culprit: where}
      centre:                                    # parameters: W <- W - mean(W)
        transformer.wpe.weight: {dim: 1}
        transformer.h.{i}.attn.c_proj.weight: {dim: 1}
      centring_ops:
        transformer.wte: {place: output, dim: -1, size: n_embd, reason: why}
      merge:                                     # norms merged into linear layers; or keep: reason
        transformer.h.{i}.ln_2:                  # its weight becomes ones, its bias zeros
          weight: transformer.h.{i}.ln_2.weight
          bias: transformer.h.{i}.ln_2.bias
          readers:
          - {weight: transformer.h.{i}.mlp.fc.weight, dim: 0, bias: transformer.h.{i}.mlp.fc.bias}
      rotate:                                    # values that an orthogonal matrix turns
        transformer.wte.weight: {kind: stream, size: n_embd, fixes_ones: true}
      widen:                                     # MLPs that grow, by their second weight
        encoder.layer.{i}.output.dense.weight:
          {first: encoder.layer.{i}.inter.weight, bias: encoder.layer.{i}.inter.bias,
          size: 3072, to: 3080, features: 768, attribute: intermediate_size, subtracts: true}
      untie:                                     # tied parameters that are stored as copies
        lm_head.weight: {source: transformer.wte.weight}
      config: {tie_word_embeddings: false}       # entries of config.json that change
      entry_inputs: [inputs_embeds]
      unproven: [cross_attn_head_mask]
      calls: ["Net(x=float[a, b])"]              # for custom code: the only proven calls
    options: {widen_mlp: true}                   # those of ``plan.Options``
    versions: {torch: 2.13.0}

The keys are the fields of ``recipe.model.Variant``, and in a line those of the plan's dataclasses.
``keep`` in any section leaves a name as it is. A name with ``{i}`` stands for every layer; a line
with a layer number overrides it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enjoyln_cli.checkpoint.result_files import RECIPE_FILE
from enjoyln_cli.errors import RecipeError
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.model import Recipe, prefix_errors, variant_for
from enjoyln_cli.recipe.yaml_text import MAX_CHARS, load, one_line

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def tried_to_merge(folder: Path) -> bool:
    """Whether the checkpoint in ``folder`` was converted with ``--merge``, by its recipe.

    A norm of it that still has a weight or a bias cannot be merged.
    """
    try:
        return load_recipe(folder / RECIPE_FILE).options.merge is not None
    except RecipeError:
        return False


def load_recipe(path: str | Path) -> Recipe:
    """Read a recipe file. Raises ``RecipeError`` if it cannot be read or is not a recipe."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
    except (OSError, ValueError) as error:  # a name with a NUL character, or no text
        raise RecipeError(f"{path}: cannot be read as text: {one_line(error)}") from None
    return parse_recipe(text, where=str(path))


def shipped_recipe(plan: Plan, config: Any = None) -> Recipe | None:
    """The recipe shipped with enjoyln for a plan's model type, class and config, if any.

    ``config`` is a mapping or a transformers config.
    """
    file = _shipped() / f"{plan.model_type}.yaml"
    if not re.fullmatch(r"[\w-]+", plan.model_type) or not file.is_file():
        return None
    recipe = parse_recipe(file.read_text(encoding="utf-8"), where=f"recipes/{file.name}")
    try:
        variant = variant_for(recipe, plan.model_type, plan.model_class, config)
    except RecipeError:
        return None
    return replace(recipe, variants=(variant,))


def _shipped() -> Traversable:
    """Where the shipped recipes are: in the package, or in a checkout that is not installed."""
    try:
        return resources.files("enjoyln_cli.recipes")
    except ModuleNotFoundError:
        return Path(__file__).parents[2] / "recipes"


def parse_recipe(text: str, *, where: str) -> Recipe:
    """A recipe from its text; ``where`` names the text in messages.

    Raises ``RecipeError``: one line with the key, the value found, and what is valid there.
    """
    with prefix_errors(where):
        try:
            recipe = schema.read(Recipe, load(text))
        except ValueError as error:
            raise RecipeError(str(error)) from None
        return replace(recipe, where=where)
