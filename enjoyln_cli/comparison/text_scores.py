"""Scores of language models: their perplexity on a text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from enjoyln_cli.comparison.batches import Batch, mask_tokens
from enjoyln_cli.comparison.run import run
from enjoyln_cli.errors import UnsupportedModel


def head_kind(model: nn.Module) -> Literal["causal", "masked"] | None:
    """The kind of language model head; ``None`` for a class without such a head."""
    from transformers.models.auto import modeling_auto as auto

    name = type(model).__name__
    if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or name.endswith("ForCausalLM"):
        return "causal"
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() or name.endswith("ForMaskedLM"):
        return "masked"
    return None


def perplexity(
    model: nn.Module, batches: Sequence[Batch], mask_token: int | None, seed: int
) -> tuple[float, int]:
    """The exponential of the mean loss per token, in float64, and the number of tokens.

    ``model`` has a language model head. A causal head predicts each next token, a masked one the
    15 % of tokens that are masked.
    """
    kind, loss, count = head_kind(model), 0.0, 0
    assert kind is not None
    for index, batch in enumerate(batches):
        shown, predicted = with_predicted_tokens(kind, batch, mask_token, seed + index)
        (output,) = run(model, [shown])
        more, tokens = text_loss(output["logits"], predicted)
        loss, count = loss + more, count + tokens
    return perplexity_of(loss, count), count


def perplexity_of(loss: float, count: int) -> float:
    """The perplexity for a loss in nats, summed over ``count`` tokens."""
    return math.exp(min(loss / max(count, 1), 700.0))


NOT_PREDICTED = -100
"""Marks tokens that are not scored, as in torch's ``cross_entropy``."""


def with_predicted_tokens(
    kind: str, batch: Batch, mask_token: int | None, seed: int
) -> tuple[Batch, torch.Tensor]:
    """The batch as a head of this ``kind`` sees it, and the token that each logit predicts.

    The tokens are int64, shaped as ``input_ids``; ``NOT_PREDICTED`` marks tokens without a score.
    """
    ids = batch["input_ids"]
    if kind == "causal":
        after_the_last = torch.full_like(ids[:, :1], NOT_PREDICTED)
        return batch, torch.cat([ids[:, 1:], after_the_last], 1)
    if mask_token is None:
        raise UnsupportedModel("the tokenizer has no mask token, so --text gives no perplexity")
    masked, chosen = mask_tokens(batch, mask_token, seed)
    return masked, torch.where(chosen, ids, NOT_PREDICTED)


def text_loss(logits: torch.Tensor, predicted: torch.Tensor) -> tuple[float, int]:
    """The loss in nats summed over the ``predicted`` tokens, in float64, and their number."""
    loss, count = 0.0, 0
    for row, tokens in zip(logits, predicted, strict=True):  # one row in float64 at a time
        chosen = tokens != NOT_PREDICTED
        likelihoods = row[: len(tokens)][chosen].double().log_softmax(-1)
        loss -= float(likelihoods.gather(1, tokens[chosen][:, None]).sum())
        count += int(chosen.sum())
    return loss, count
