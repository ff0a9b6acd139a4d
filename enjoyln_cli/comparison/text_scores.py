"""Scores of language models: perplexity on a text, and divergence of two models' predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from enjoyln_cli.comparison.batches import Batch, mask_tokens
from enjoyln_cli.comparison.run import Outputs, run
from enjoyln_cli.errors import UnsupportedModel


def divergence(got: Outputs, own: Outputs) -> tuple[float | None, float | None]:
    """Mean KL divergence of the folded model's logits from the original's, and top-1 agreement.

    Over the last dimension of the output ``logits``. The divergence is in nats, the agreement a
    fraction. ``(None, None)`` if there is no such output.
    """
    total = agreed = 0.0
    count = 0
    for a, b in zip(got, own, strict=True):
        if "logits" not in b or b["logits"].shape[-1] < 2 or a["logits"].shape != b["logits"].shape:
            return None, None
        width = b["logits"].shape[-1]
        rows = max(1, (1 << 22) // width)
        folded, original = a["logits"].reshape(-1, width), b["logits"].reshape(-1, width)
        for x, y in zip(folded.split(rows), original.split(rows), strict=True):
            p, q = y.double().log_softmax(-1), x.double().log_softmax(-1)
            total += float((p.exp() * (p - q)).nan_to_num().sum())
            agreed += float((x.argmax(-1) == y.argmax(-1)).sum())
            count += len(x)
    return (total / count, agreed / count) if count else (None, None)


def head_kind(model: nn.Module) -> str:
    """The kind of language model head: ``causal`` or ``masked``.

    Raises ``UnsupportedModel`` for other classes.
    """
    from transformers.models.auto import modeling_auto as auto

    name = type(model).__name__
    if name in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or name.endswith("ForCausalLM"):
        return "causal"
    if name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values() or name.endswith("ForMaskedLM"):
        return "masked"
    raise UnsupportedModel(f"{name} has no language model head, so --text gives no perplexity")


def perplexity(
    model: nn.Module, batches: Sequence[Batch], mask_token: int | None, seed: int
) -> tuple[float, int]:
    """The exponential of the mean loss per token, in float64, and the number of these tokens.

    Causal heads predict each next token. Masked heads predict the 15 % of tokens that are masked.
    """
    kind, loss, count = head_kind(model), 0.0, 0
    if kind == "masked" and mask_token is None:
        raise UnsupportedModel("the tokenizer has no mask token, so --text gives no perplexity")
    for index, batch in enumerate(batches):
        ids = batch["input_ids"]
        chosen = torch.ones_like(ids[:, 1:], dtype=torch.bool)
        if kind == "masked":
            batch, chosen = mask_tokens(batch, int(mask_token or 0), seed + index)
        (output,) = run(model, [batch])
        for row, (logits, target, use) in enumerate(
            zip(output["logits"], ids if kind == "masked" else ids[:, 1:], chosen, strict=True)
        ):
            del row
            wanted = logits[: len(target)][use].double().log_softmax(-1)
            loss -= float(wanted.gather(1, target[use][:, None]).sum())
            count += int(use.sum())
    return math.exp(min(loss / max(count, 1), 700.0)), count
