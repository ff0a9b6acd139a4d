"""Writes the recipes that come with enjoyln, from the default configs of their families.

    python scripts/write_recipes.py [FAMILY ...] [-o recipes]

Every variant is proven again, for the classes that load such a checkpoint. A recipe is valid for
every size of its family, so the script uses configs with four layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.recipe.from_plan import DEPENDS, merge_recipes, recipe_of
from enjoyln_cli.recipe.write import dump_recipe


@dataclass(frozen=True)
class Family:
    """Classes to prove with each of ``settings``; ``depends`` are the attributes that differ."""

    classes: tuple[str, ...]
    settings: tuple[dict[str, Any], ...] = ({},)
    depends: Sequence[str] = DEPENDS
    sizes: dict[str, int] = field(default_factory=lambda: {"num_hidden_layers": 4})


TIED = ({"tie_word_embeddings": True}, {"tie_word_embeddings": False})
POST_LN = {"do_layer_norm_before": False, "word_embed_proj_dim": 512}

FAMILIES = {
    "gpt2": Family(("GPT2LMHeadModel", "GPT2Model"), TIED, sizes={"n_layer": 4}),
    "bert": Family(("BertForMaskedLM", "BertModel"), TIED),
    "opt": Family(
        ("OPTForCausalLM", "OPTModel"),
        tuple(tied | form for form in ({"do_layer_norm_before": True}, POST_LN) for tied in TIED),
        (*DEPENDS, "do_layer_norm_before"),
    ),
    "bloom": Family(("BloomForCausalLM", "BloomModel"), TIED, sizes={"n_layer": 4}),
    "phi": Family(
        ("PhiForCausalLM", "PhiModel"),
        ({"qk_layernorm": False}, {"qk_layernorm": True}),
        (*DEPENDS, "qk_layernorm"),
    ),
    "vit": Family(
        ("ViTForImageClassification", "ViTModel", "ViTForMaskedImageModeling"), depends=()
    ),
}


def recipe_text(name: str) -> str:
    """The recipe of one family, with all variants proven."""
    family, recipes = FAMILIES[name], []
    for model_class in family.classes:
        for setting in family.settings:
            config = CONFIG_MAPPING[name](**family.sizes, **setting)
            config.architectures = [model_class]
            plan = analyze_config(config).plan
            recipes.append(recipe_of(plan, config=config, depends=family.depends))
    return dump_recipe(merge_recipes(recipes))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("-o", "--out", type=Path, default=Path(__file__).parent.parent / "recipes")
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in arguments.families or FAMILIES:
        path = arguments.out / f"{name}.yaml"
        path.write_text(recipe_text(name), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
