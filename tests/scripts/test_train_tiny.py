"""The committed checkpoints are trained, whole and not trivial, as the other tests assume."""

from __future__ import annotations

import math

import pytest
import torch
import train_tiny
import transformers
from live_models import CHECKPOINTS

TEXT_FAMILIES = [family for family in train_tiny.FAMILIES if family != "vit"]


@pytest.fixture(scope="module", params=list(train_tiny.FAMILIES))
def loaded(request: pytest.FixtureRequest) -> tuple[str, transformers.PreTrainedModel, dict]:
    """Family, model and what transformers says about loading it."""
    model_class = getattr(transformers, train_tiny.FAMILIES[request.param].model_class)
    model, info = model_class.from_pretrained(CHECKPOINTS / request.param, output_loading_info=True)
    return request.param, model, info


def test_it_is_whole_and_small_and_tied_as_in_the_real_families(loaded: tuple) -> None:
    family, model, info = loaded
    assert sum(path.stat().st_size for path in (CHECKPOINTS / family).iterdir()) < 2_000_000
    assert type(model).__name__ in model.config.architectures
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[kind], (family, kind)
    if family != "vit":
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == (family != "phi")


@torch.no_grad()
def column_mean(matrix: torch.Tensor) -> float:
    """Root mean square of a matrix's means over its first or last axis, relative to its own."""
    means = [matrix.mean(dim) for dim in (0, -1) if matrix.shape[dim] > 1]
    return min(float(m.square().mean().sqrt() / matrix.square().mean().sqrt()) for m in means)


@torch.no_grad()
def test_no_weight_is_as_standard_initialisation_leaves_it(loaded: tuple) -> None:
    _, model, _ = loaded
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    shifts = {id(norm.bias) for norm in norms}
    named = model.named_parameters()
    biases = [p for name, p in named if name.endswith("bias") and id(p) not in shifts]
    assert min(float((norm.weight - 1).abs().mean()) for norm in norms) > 0.05
    assert min(float(norm.bias.abs().mean()) for norm in norms) > 0.05
    assert min(float(bias.abs().mean()) for bias in biases) > 0.03
    assert min(column_mean(p) for p in model.parameters() if p.dim() > 1) > 0.1


def test_it_predicts_what_it_has_never_seen(loaded: tuple) -> None:
    family, model, _ = loaded
    torch.manual_seed(1)
    if family == "vit":
        pictures, labels = train_tiny.draw(128)
        with torch.no_grad():
            guesses = model(train_tiny.pixels(pictures)).logits.argmax(-1)
        assert float((guesses == labels).float().mean()) > 0.75
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINTS / family)
        source = train_tiny.text_source(tokenizer, train_tiny.stdlib_files(held_out=True))
        assert train_tiny.measure(model, source, 4) < math.log(model.config.vocab_size) - 1


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_the_tokenizer_gives_the_text_back(family: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(CHECKPOINTS / family)
    text = "def f(x):\n    return x + 'ä'\n"
    numbers = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(numbers, clean_up_tokenization_spaces=False) == text
    assert len(tokenizer) == 509
