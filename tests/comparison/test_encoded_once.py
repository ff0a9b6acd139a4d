"""An encoder runs once for calls that share its inputs, and again for any others."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertModel, T5Config, T5ForConditionalGeneration

from enjoyln_cli.comparison.run import encoded_once


@pytest.fixture
def model() -> Any:
    torch.manual_seed(2)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    made = T5ForConditionalGeneration(T5Config(vocab_size=40, decoder_start_token_id=0, **sizes))
    for weight in made.parameters():
        torch.nn.init.normal_(weight, 0.1, 0.6)
    return made.eval()


def runs_of(module: Any) -> list[int]:
    """Grows by an element whenever the layers inside of ``module`` run."""
    seen: list[int] = []
    module.block[0].register_forward_hook(lambda *_: seen.append(1))
    return seen


def test_calls_and_generation_share_the_encoder(model: Any) -> None:
    ids, mask = torch.randint(1, 40, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        alone = model.generate(**inputs, max_new_tokens=4)
        before = model(**inputs, decoder_input_ids=alone).logits
        seen = runs_of(model.get_encoder())
        with encoded_once(model):
            together = model.generate(**inputs, max_new_tokens=4)
            after = model(**inputs, decoder_input_ids=together).logits
    assert len(seen) == 1
    assert torch.equal(alone, together) and torch.equal(before, after)


def test_other_tensors_and_gradients_run_it_again(model: Any) -> None:
    ids, start = torch.randint(1, 40, (1, 7)), torch.zeros(1, 1, dtype=torch.int64)
    encoder = model.get_encoder()
    seen = runs_of(encoder)
    with encoded_once(model):
        with torch.no_grad():
            first = model(input_ids=ids, decoder_input_ids=start).logits
            other = model(input_ids=ids.flip(1), decoder_input_ids=start).logits
            model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=start)
        model(input_ids=ids, decoder_input_ids=start).logits.sum().backward()
    assert len(seen) == 4 and not torch.equal(first, other)
    assert encoder.block[0].layer[0].layer_norm.weight.grad is not None
    assert "forward" not in vars(encoder)


def test_a_copy_runs_its_own_encoder(model: Any) -> None:
    call = {"input_ids": torch.randint(1, 40, (1, 7)), "decoder_input_ids": torch.zeros(1, 1).int()}
    other = deepcopy(model)
    with torch.no_grad():
        other.get_encoder().embed_tokens.weight.mul_(0.5)
        expected = other(**call).logits
        with encoded_once(model):
            copied = deepcopy(model)
            copied.get_encoder().embed_tokens.weight.mul_(0.5)
            model(**call)
            assert torch.equal(copied(**call).logits, expected)


def test_a_model_without_an_encoder_is_left_alone() -> None:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8}
    bert = BertModel(BertConfig(vocab_size=20, num_hidden_layers=1, **sizes)).eval()
    with encoded_once(bert):
        assert "forward" not in vars(bert.encoder)
