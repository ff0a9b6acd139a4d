"""A GPT-2 with its right plan, and results to verify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.checkpoint.config import load_config
from enjoyln_cli.checkpoint.reader import open_checkpoint
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.edited_tensors import CentredWeight
from enjoyln_cli.plan.fold_options import WriteOptions
from enjoyln_cli.plan.plan import MeanSubtraction, Plan, Verdict
from enjoyln_cli.recipe.from_plan import recipe_of
from enjoyln_cli.recipe.write import dump_recipe
from enjoyln_cli.rewrite.directory import fold_checkpoint

D, LAYERS, VOCABULARY, POSITIONS = 64, 2, 120, 40


def randomised(model: nn.Module, seed: int = 0) -> Any:
    """Random gamma, beta and biases; weights with a mean, in a stream of a size that LNs keep."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 1:
                parameter.copy_(0.2 * noise + (1.0 if "weight" in name else 0.05))
            elif "wte" in name or "wpe" in name or "embeddings" in name:
                parameter.copy_(0.5 * noise + 0.02)
            else:
                parameter.copy_(noise / len(parameter) ** 0.5 + 0.01)
    return model.eval()


def gpt2(seed: int = 0) -> Any:
    config = GPT2Config(
        n_embd=D,
        n_layer=LAYERS,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=POSITIONS,
        bos_token_id=0,
        eos_token_id=0,
    )
    return randomised(GPT2LMHeadModel(config), seed)


def right_plan() -> Plan:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wpe.weight": (POSITIONS, D)}
    for i in range(LAYERS):
        for part, width in (("attn", D), ("mlp", 4 * D)):
            shapes[f"transformer.h.{i}.{part}.c_proj.weight"] = (width, D)
            shapes[f"transformer.h.{i}.{part}.c_proj.bias"] = (D,)
    norms = [f"transformer.h.{i}.ln_{k}" for i in range(LAYERS) for k in (1, 2)]
    return Plan(
        "gpt2",
        "GPT2LMHeadModel",
        ("GPT2LMHeadModel",),
        tuple(
            Verdict(n, "with_subtraction", ("transformer.wte",))
            for n in [*norms, "transformer.ln_f"]
        ),
        tuple(CentredWeight(n, feature_axis(s), s) for n, s in shapes.items()),
        (MeanSubtraction("transformer.wte", "output", Axis(-1, 0, 1, D, 1), "tied"),),
        ("inputs_embeds",),
    )


def feature_axis(shape: tuple[int, ...]) -> Axis:
    return Axis(len(shape) - 1, 0, 1, D, 1)


def folded(source: Path, out: Path, plan: Plan, dtype: torch.dtype | None = None) -> Path:
    opened = open_source(str(source), weights=True)
    text = dump_recipe(recipe_of(plan, config=load_config(opened)))
    options = WriteOptions(dtype=dtype)
    fold_checkpoint(open_checkpoint(opened), plan, out, recipe_text=text, options=options)
    return out


FAMILIES = {
    "bert": "BertModel",
    "bloom": "BloomForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "vit": "ViTForImageClassification",
}
"""BERT's tied masked LM has nothing to fold; its base model has."""


def proven(source: Path, model_class: str) -> Plan:
    """The plan, which depends on the config and the shapes, not on the dtype."""
    settings = json.loads((source / "config.json").read_text()) | {"dtype": None}
    key = (model_class, json.dumps(settings, sort_keys=True))
    if key not in _PROVEN:
        _PROVEN[key] = _proven(source, model_class)
    return _PROVEN[key]


_PROVEN: dict[tuple[str, str], Plan] = {}


def _proven(source: Path, model_class: str) -> Plan:
    opened = open_source(str(source), weights=True)
    config, checkpoint = load_config(opened), open_checkpoint(opened)
    return analyze_config(config, checkpoint=checkpoint, model_class=model_class).plan
