"""How ``generate`` calls a language model, recorded, and logits processors that take less time.

Which arguments reach ``forward`` depends on ``generate`` and on the model's own
``prepare_inputs_for_generation``. So ``generate`` runs once without weights, and its calls of
``forward`` are recorded. Three calls are traced together: a prefill, the decoding step after it,
and the next turn of a conversation, which adds several tokens to the cache.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from enjoyln_cli.calls.calls import BATCH, TOKENS, Call
from enjoyln_cli.models.meta_device import meta_weights, without_weights
from enjoyln_cli.plan.cache_argument import CACHE, NAMES, cache_argument, returned_cache

_TURN = 3
"""Number of tokens in the next turn."""
_FIXED = {"do_sample": False, "disable_compile": True, "eos_token_id": None}
_WAYS: dict[str, dict[str, Any]] = {
    "": {},
    " without a cache": {"use_cache": False},
}

GeneratedCall = tuple[tuple[Any, ...], dict[str, Any]]


def generated_positions(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The positions of tokens that ``generate`` passes to ``forward``, of shape ``(rows, tokens)``.

    They have shape ``(3, rows, tokens)`` if the tokens of a picture have a time, height and width.
    """
    others = {name: value for name, value in batch.items() if name != "input_ids"}
    found = model._prepare_position_ids_for_generation(batch["input_ids"], others)
    return found[1:] if found.ndim > 2 else found.expand(len(batch["input_ids"]), -1)


def suppressed_by_index(processors: Any) -> Any:
    """The same logits processors; to suppress tokens, they do not search the vocabulary.

    transformers looks for each of its tokens in the whole vocabulary in each step: a quarter of the
    time of Whisper tiny in 8 bits.
    """
    from transformers.generation import logits_process

    def suppress(processor: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, processor.suppress_tokens.long(), -torch.inf)

    def suppress_at_begin(processor: Any, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[-1] != processor.begin_index:
            return scores
        return scores.index_fill(1, processor.begin_suppress_tokens.long(), -torch.inf)

    calls = {
        logits_process.SuppressTokensLogitsProcessor: suppress,
        logits_process.SuppressTokensAtBeginLogitsProcessor: suppress_at_begin,
    }
    for processor in processors:
        kind = type(processor)
        if kind in calls:
            processor.__class__ = type(kind.__name__, (kind,), {"__call__": calls[kind]})
    return processors


def generated_calls(model: Any) -> Iterator[Call]:
    """The calls of ``forward`` by ``generate``; empty for an encoder-decoder."""
    if not (hasattr(model, "can_generate") and model.can_generate()):
        return
    if getattr(model.config, "is_encoder_decoder", False):
        return
    present: list[Any] = []
    for way, options in _WAYS.items():
        for tokens, padded in ((TOKENS, True), (TOKENS, False), (1, False)):
            try:
                call = _call(_recorded(model, tokens, padded, options))
            except Exception:  # custom models that cannot generate like this may raise anything
                continue
            inputs = pytree.tree_map(_shape, call.steps)
            if (way, inputs) not in present:
                present.append((way, inputs))
                prompt = f"{tokens} {'padded ' if padded else ''}tokens"
                yield replace(call, label=f"generate{way}, {prompt}")


def _call(steps: list[GeneratedCall]) -> Call:
    """The steps that use the cache, without the cache itself; only the first if none does."""
    (args, first), *others = steps
    cache = _taken(first)
    caching = [step for step in others if _taken(step[1]) is not None]
    return Call("generate", ((args, first), *caching), required=False, cache=cache)


def _taken(given: dict[str, Any]) -> Any:
    """The cache among the arguments of a step, which it is taken from."""
    found = [given.pop(name, None) for name in NAMES]
    return next((cache for cache in found if cache is not None), None)


def _recorded(
    model: nn.Module, tokens: int, padded: bool, options: dict[str, Any]
) -> list[GeneratedCall]:
    """The arguments of each call of ``forward`` in two turns of a conversation by ``generate``."""
    bare: Any = without_weights(model)
    forward = bare.forward
    steps: list[GeneratedCall] = []

    @functools.wraps(forward)
    def recording(*args: Any, **kwargs: Any) -> Any:
        steps.append(pytree.tree_map(_copied, (args, kwargs)))
        with meta_weights():
            result = forward(*args, **kwargs)
        result.logits = torch.zeros(result.logits.shape, device="cpu")
        return result

    def generate(ids: torch.Tensor, new: int, **given: Any) -> Any:
        mask = torch.ones_like(ids)
        mask[0, 0] = 0
        given |= {"attention_mask": mask} if padded else {}
        given |= {"max_new_tokens": new, "return_dict_in_generate": True, **_FIXED}
        return bare.generate(ids, **given)

    ids = torch.arange(1, 1 + BATCH * tokens).reshape(BATCH, tokens) % bare.config.vocab_size
    own = "forward" in vars(bare)
    bare.forward = recording
    try:
        with torch.no_grad():
            found = generate(ids, 2, **options)
            if not options and tokens > 1:
                turn = torch.cat((found.sequences, ids[:, : _TURN - 1]), 1)
                generate(turn, 1, **{cache_argument(forward) or CACHE: returned_cache(found)})
    finally:
        if own:
            bare.forward = forward
        else:
            del bare.forward
    return steps


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)
