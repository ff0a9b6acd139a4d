"""Compares Table 3 of Enjoy-LN with exact folds: docs/paper_table.md.

    python scripts/paper_table.py > docs/paper_table.md

The counts are those of the full-size configurations. The last column is measured: the trained
checkpoints of ``tests/checkpoints`` are folded by Algorithm 1 as printed, run in float64, and
compared with the original. Every norm that the algorithm marks becomes RMSNorm, and every weight
that produces its input is centred, whatever else reads that weight.
"""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from enjoyln_cli import analyze
from enjoyln_cli.analysis.analyze import Analysis
from enjoyln_cli.comparison.batches import seeded_batches
from enjoyln_cli.comparison.metrics import distances, relative
from enjoyln_cli.comparison.run import run
from enjoyln_cli.errors import NothingToFold, UnsupportedModel
from enjoyln_cli.models.classes import build, class_named
from enjoyln_cli.plan.plan import Plan, Verdict, Writer
from enjoyln_cli.proof.min_cut import Item, Parameter
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.install import install
from enjoyln_cli.train.streams import MERGED, plan_streams

ROOT = Path(__file__).parent.parent
PHI_2 = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32}
BLOOM_560M = {"hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}

MODELS: list[tuple[str, str, str, dict[str, Any], str, str]] = [
    ("GPT-2", "gpt2", "GPT2LMHeadModel", {}, "100 %", "gpt2"),
    ("BERT base", "bert", "BertModel", {}, "96 %, 100 %", "bert"),
    ("ViT base", "vit", "ViTForImageClassification", {}, "100 %", "vit"),
    ("Phi-2", "phi", "PhiForCausalLM", PHI_2, "100 %", "phi"),
    ("OPT-125m", "opt", "OPTForCausalLM", {}, "100 %", "opt"),
    ("BLOOM-560m", "bloom", "BloomForCausalLM", BLOOM_560M, "83 %, 100 %", "bloom"),
]
"""Name, type, class, settings, the paper's percentages (the second one with a centred embedding),
and the checkpoint on which the error is measured."""
RMS_MODELS = {
    "Phi-3": "phi3",
    "Qwen2": "qwen2",
    "T5": "t5",
    "LLaMA": "llama",
    "Mamba2": "mamba2",
}


def printed_plan(model: nn.Module, found: Analysis) -> Plan:
    """The plan of Algorithm 1 as printed: its norms, and all weights in their graphs."""
    problem, shapes = found.problem, dict(model.named_parameters(remove_duplicate=False))
    waiting: list[Item] = [problem.item(v) for norm in found.paper for v in problem.norms[norm]]
    visited: dict[Item, None] = {}
    while waiting:
        item = waiting.pop()
        if item not in visited:
            visited[item] = None
            sources = () if isinstance(item, Parameter) else problem.flow.sources(item)
            if not isinstance(sources, Opaque):
                waiting.extend(problem.item(value) for value in sources)
    writers = tuple(
        Writer(item.name, item.name, item.axis, tuple(shapes[item.name].shape))
        for item in visited
        if isinstance(item, Parameter)
    )
    norms = tuple(Verdict(norm, "static") for norm in found.paper)
    return Plan("", type(model).__name__, (), norms, writers, ())


def printed_error(model: nn.Module, found: Analysis, batches: list[Any]) -> float:
    """Relative error of the worst output of the printed plan. Changes ``model``."""
    exact = run(model, batches)
    plan = printed_plan(model, found)
    centre_parameters(model, plan)
    install(model, found.paper, ())
    return max(relative(distances(run(model, batches), exact)).values())


def checkpoint_error(folder: Path, model_class: str) -> float:
    load = getattr(transformers, model_class).from_pretrained
    model = load(folder, dtype=torch.float64).eval()
    found = analyze(model.config, model_class=model_class)
    return printed_error(model, found, seeded_batches(model, 16, 0, torch.float64))


def vision_row() -> str:
    """The row of the tests' network in the style of VMamba, with random weights."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from live_models import moved
    from state_space import StateSpaceVision

    model, x = moved(StateSpaceVision()), torch.randn(2, 3, 32, 24, dtype=torch.float64)
    found = analyze(model, x)
    with torch.no_grad():
        exact = model(x)
        centre_parameters(model, printed_plan(model, found))
        error = float((install(model, found.paper, ())(x) - exact).norm() / exact.norm())
    yes = "yes" if compressible(moved(StateSpaceVision()), x) else "no"
    return row("VMamba (a small one, random weights)", "71 %", found, error, yes)


def compressible(model: nn.Module, *example: Any) -> bool:
    """Whether the streams of a model can be held as ``d - 1`` features; reads no weights."""
    try:
        plan_streams(model, analyze(model, *example, options=MERGED), "last")
    except (NothingToFold, UnsupportedModel):
        return False
    return True


def compressed(config: Any, model_class: str) -> str:
    """Whether a class can be compressed as it is, or with a head of its own."""
    if compressible(build(class_named(model_class), config)):
        return "yes"
    if getattr(config, "tie_word_embeddings", False):
        untied = copy.deepcopy(config)
        untied.tie_word_embeddings = False
        return "untied" if compressible(build(class_named(model_class), untied)) else "no"
    return "no"


def row(name: str, paper: str, found: Analysis, error: float, compressed: str) -> str:
    plan = found.plan
    static = sum(verdict.status == "static" for verdict in plan.norms)
    cells = (
        name,
        len(plan.norms),
        paper,
        len(found.paper),
        static,
        f"{len(plan.folded)}, {len(plan.ops)} op" if plan.ops else len(plan.folded),
        f"{100 * error:.2g} %" if error > 1e-9 else f"{error:.0e}",
        compressed,
    )
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    print("# Table 3 of Enjoy-LN, and what is exact\n")
    print(
        "Written by `scripts/paper_table.py`. If the paper has two percentages, the second is with"
    )
    print(
        "a centred embedding. `exact` folds change no output. `error` is how much Algorithm 1, as"
    )
    print("printed, changes the outputs of the small trained checkpoints in `tests/checkpoints`.")
    print("[The papers' claims](papers.md) has more, and says which papers are meant.")
    print("`CRMSNorm`: whether the streams can be held as d - 1 features, as Pre-RMSNorm proposes")
    print(
        "([how](training.md#streams-of-d--1-features-crmsnorm)); `untied`: with a separate head.\n"
    )
    columns = ("model", "LNs", "paper", "Algorithm 1", "exact, in weights", "exact, with ops")
    print(f"| {' | '.join((*columns, 'error', 'CRMSNorm'))} |")
    print("|---|---|---|---|---|---|---|---|")
    for name, model_type, model_class, settings, paper, folder in MODELS:
        config = transformers.CONFIG_MAPPING[model_type](**settings)
        error = checkpoint_error(ROOT / "tests" / "checkpoints" / folder, model_class)
        found = analyze(config, model_class=model_class)
        cell = compressed(config, model_class)
        print(row(f"{name} ({model_class})", paper, found, error, cell))
    print(vision_row())
    print("\nThese have RMSNorm already, and no LayerNorm:\n")
    for name, model_type in RMS_MODELS.items():
        config = transformers.CONFIG_MAPPING[model_type]()
        model_class = transformers.MODEL_MAPPING[type(config)].__name__
        plan = analyze(config, model_class=model_class).plan
        counts = ", ".join(f"{count} {kind}" for kind, count in plan.other_norms)
        print(f"* {name}: {counts}, {len(plan.norms)} LayerNorms")


if __name__ == "__main__":
    main()
