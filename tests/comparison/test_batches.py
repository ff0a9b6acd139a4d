"""Inputs that are made for a model, and the perplexity of inputs, against transformers' loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import BERT, VIT
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForMaskedLM,
    ViTConfig,
    ViTForImageClassification,
    ViTForMaskedImageModeling,
)
from verify_cases import VOCABULARY, gpt2, randomised

from enjoyln_cli.comparison import batches as inputs
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.text_scores import perplexity
from enjoyln_cli.errors import UnsupportedModel


def test_seeded_tokens() -> None:
    model = gpt2()
    model.config.pad_token_id, model.config.image_token_id = 5, 6
    batches = inputs.seeded_batches(model, 11, 0, torch.float32)
    assert [len(batch["input_ids"]) for batch in batches] == [8, 3]
    for batch in batches:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        assert ids.min() >= 0 and ids.max() < VOCABULARY
        assert torch.equal(ids == 5, mask == 0) and not (ids == 6).any()
        assert mask[:-1].all() and 0 < mask[-1].sum() < mask.shape[1]
    again = inputs.seeded_batches(model, 11, 0, torch.float32)
    assert all(
        torch.equal(a["input_ids"], b["input_ids"]) for a, b in zip(batches, again, strict=True)
    )


class OneImage(transformers.ViTModel):
    def forward(self, pixel_values: torch.Tensor, **kwargs: Any) -> Any:
        return super().forward(pixel_values.view(1, 1, 16, 16), **kwargs)


def test_a_model_that_takes_one_image_at_a_time_is_given_one() -> None:
    config = ViTConfig(**{**VIT, "image_size": 16, "patch_size": 8}, num_channels=1)
    batches = inputs.seeded_batches(OneImage(config), 3, 0, torch.float32)
    assert [batch["pixel_values"].shape for batch in batches] == [(1, 1, 16, 16)] * 3
    (batch,) = inputs.seeded_batches(transformers.ViTModel(config), 3, 0, torch.float32)
    assert batch["pixel_values"].shape == (3, 1, 16, 16)


def test_masked_patches_are_tried_where_the_class_takes_them() -> None:
    config = ViTConfig(**{**VIT, "image_size": 16, "patch_size": 8, "encoder_stride": 8})
    for cls, takes in ((ViTForMaskedImageModeling, True), (ViTForImageClassification, False)):
        model = randomised(cls(config))
        (batch,) = inputs.seeded_batches(model, 3, 0, torch.bfloat16)
        assert batch["pixel_values"].shape == (3, 3, 16, 16)
        assert batch["pixel_values"].dtype == torch.bfloat16
        masked = inputs.with_masked_patches(model, batch, 0)
        assert (masked is not None) == takes
        if masked is not None:
            plain, hidden = run(model, [batch, masked])
            assert plain["reconstruction"].shape == hidden["reconstruction"].shape
            assert not torch.equal(plain["reconstruction"], hidden["reconstruction"])


def test_inputs_that_cannot_be_generated() -> None:
    model = gpt2()
    model.main_input_name = "spectrogram"
    with pytest.raises(UnsupportedModel, match="spectrogram"):
        inputs.seeded_batches(model, 2, 0, torch.float32)


def ids(rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(5, VOCABULARY, (rows, 30), generator=generator)


def test_perplexity_of_a_causal_head() -> None:
    model = gpt2().double()
    batches = [{"input_ids": ids(4)}]
    found, tokens = perplexity(model, batches, None, 0)
    with torch.no_grad():
        output = model(input_ids=ids(4), labels=ids(4))
    loss = cross_entropy(output.logits[:, :-1].mT, ids(4)[:, 1:])
    assert tokens == 4 * 29 and found == pytest.approx(float(loss.exp()), rel=1e-11)
    step = torch.finfo(torch.float32).eps  # transformers computes its loss in float32
    assert float(output.loss) == pytest.approx(float(loss), rel=64 * step)


def test_perplexity_of_a_masked_head() -> None:
    config = BertConfig(**{**BERT, "vocab_size": VOCABULARY})
    model = randomised(BertForMaskedLM(config)).double()
    batch = {"input_ids": ids(40)}
    found, tokens = perplexity(model, [batch], 4, 0)
    hidden, chosen = inputs.mask_tokens(batch, 4, 0)
    assert tokens == int(chosen.sum()) and 0.12 < chosen.double().mean() < 0.20
    assert chosen.any(1).all() and (hidden["input_ids"][chosen] == 4).all()
    with torch.no_grad():
        logits = model(**hidden).logits[chosen]
        expected = cross_entropy(logits, batch["input_ids"][chosen]).exp()
    assert found == pytest.approx(float(expected), rel=1e-11)
    with pytest.raises(UnsupportedModel, match="no mask token"):
        perplexity(model, [batch], None, 0)


def test_a_run_leaves_the_cache_and_the_loss_out() -> None:
    (output,) = run(gpt2(), [{"input_ids": ids(2), "labels": ids(2)}])
    assert list(output) == ["logits"]
