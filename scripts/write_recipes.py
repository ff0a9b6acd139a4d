"""Writes the recipes that come with enjoyln, from the default configs of their families.

    python scripts/write_recipes.py [FAMILY ...] [-o recipes]

Each is proven again, for the classes that load such a checkpoint. A recipe is valid for every size
of its family, so the script uses configs with four layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING
from transformers.utils import logging

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.recipe.from_plan import DEPENDS, recipe_of
from enjoyln_cli.recipe.write import dump_recipe


@dataclass(frozen=True)
class Family:
    """The class that most checkpoints store; ``depends`` are the attributes that matter."""

    model_class: str
    depends: Sequence[str] = DEPENDS
    sizes: dict[str, int] = field(default_factory=lambda: {"num_hidden_layers": 4})


FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", sizes={"n_layer": 4}),
    "bert": Family("BertForMaskedLM"),
    "opt": Family("OPTForCausalLM", (*DEPENDS, "do_layer_norm_before")),
    "bloom": Family("BloomForCausalLM", sizes={"n_layer": 4}),
    "phi": Family("PhiForCausalLM", (*DEPENDS, "qk_layernorm")),
    "vit": Family("ViTForImageClassification", depends=()),
}


def recipe_text(name: str) -> str:
    """The recipe of one family, proven for its default config."""
    family = FAMILIES[name]
    config = CONFIG_MAPPING[name](**family.sizes)
    config.architectures = [family.model_class]
    recipe = recipe_of(analyze_config(config).plan, config=config, depends=family.depends)
    return dump_recipe(replace(recipe, versions={}))


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
