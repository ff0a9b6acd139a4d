"""Models with few outputs, on few inputs: exact results always pass, wrong results never.

Their ratios of rounding errors are far above the limit by chance for many seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from stored_files import changed
from verify_cases import folded, proven, randomised

from enjoyln_cli import verify
from enjoyln_cli.plan.plan import Plan

SEEDS = 5
SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
Tensors = dict[str, torch.Tensor]


def bert(labels: int) -> transformers.PreTrainedModel:
    config = transformers.BertConfig(
        **SIZES, intermediate_size=96, vocab_size=90, max_position_embeddings=40, num_labels=labels
    )
    return transformers.BertForSequenceClassification(config)


def vit(labels: int) -> transformers.PreTrainedModel:
    config = transformers.ViTConfig(
        **SIZES, intermediate_size=96, image_size=16, patch_size=8, num_labels=labels
    )
    return transformers.ViTForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], transformers.PreTrainedModel], str]] = {
    "50 labels": (lambda: bert(50), "float16"),
    "one number": (lambda: bert(1), "float32"),
    "three classes": (lambda: vit(3), "bfloat16"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, Plan]]:
    """The checkpoint of a name, its exact fold, and the plan; each is made once."""

    @cache
    def one(name: str) -> tuple[Path, Path, Plan]:
        build, dtype = MODELS[name]
        root, model = tmp_path_factory.mktemp("few"), randomised(build())
        if "bert" in model.config.model_type:
            model.bert.embeddings.word_embeddings.weight.data[0] = 0.3
        model.to(getattr(torch, dtype)).save_pretrained(root / "in")
        plan = proven(root / "in", type(model).__name__)
        return root / "in", folded(root / "in", root / "out", plan), plan

    return one


@pytest.mark.slow
def test_no_seed_refuses_an_exact_fold(made: Any) -> None:
    above = 0
    for name, seed in product(MODELS, range(SEEDS)):
        _, out, _ = made(name)
        found = verify(out, samples=4, seed=seed, write=False)
        assert found.passed, (name, seed, found.summary)
        assert found.identity_error < 1e-14
        above += max(found.ratio, found.stock_ratio) > found.max_ratio
    assert above, "the ratio alone would have refused some"


def first_writer(plan: Plan) -> str:
    return next(writer.tensor for writer in plan.centred_weights if len(writer.shape) > 1)


WRONG: dict[str, Callable[[Tensors, Tensors, Plan], object]] = {
    "one weight not centred": lambda new, old, plan: new.update(
        {first_writer(plan): old[first_writer(plan)]}
    ),
    "another weight centred": lambda new, old, plan: new["classifier.weight"].sub_(
        new["classifier.weight"].float().mean().to(new["classifier.weight"].dtype)
    ),
    "a bias dropped": lambda new, old, plan: next(
        value for name, value in new.items() if "layernorm" in name.lower() and "bias" in name
    ).zero_(),
    "one number damaged": lambda new, old, plan: new[first_writer(plan)].view(-1)[5].add_(0.25),
    "one position damaged": lambda new, old, plan: (
        next(value for name, value in new.items() if "position_embeddings" in name)
        .view(-1)[-48:]
        .add_(0.25)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrong", "name"), zip(["a weight that the plan leaves out", *WRONG], cycle(MODELS))
)
def test_every_seed_finds_a_wrong_fold(wrong: str, name: str, made: Any, tmp_path: Path) -> None:
    source, out, plan = made(name)
    if wrong in WRONG:
        old = load_file(source / "model.safetensors")
        out = changed(out, tmp_path / "wrong", lambda new: WRONG[wrong](new, old, plan))
    else:
        left = tuple(
            writer for writer in plan.centred_weights if writer.tensor != first_writer(plan)
        )
        out = folded(source, tmp_path / "wrong", replace(plan, centred_weights=left))
    for seed in range(2):
        assert not verify(out, samples=1 + seed, seed=seed, write=False).passed, seed
