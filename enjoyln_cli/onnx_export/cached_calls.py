"""The calls of a model that generates: an encoder, and a decoder with its cache.

A decoder reads any number of new tokens after the tokens in its cache. An empty cache is keys and
values of length 0. Inputs and outputs are named as in optimum and transformers.js:
``past_key_values.N.key`` and ``present.N.key`` of the layer ``N``, with ``.decoder`` and
``.encoder`` before ``.key`` where a decoder has two attentions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.metrics import distances_of
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.load import refusing, silent
from enjoyln_cli.onnx_export.call import BATCH, DECODER, IDS, LENGTH, MASK, Axes, ProgramCall
from enjoyln_cli.onnx_export.cross_cache import PRESENT
from enjoyln_cli.plan.cache_argument import CACHE, cache_argument, returned_cache

MODEL, ENCODER, MERGED = "model", "encoder_model", "decoder_model_merged"
"""The names of programs, and so of files."""
POSITIONS, TYPES = "position_ids", "token_type_ids"
STATES, ENCODED, ENCODED_MASK = (
    "last_hidden_state",
    "encoder_hidden_states",
    "encoder_attention_mask",
)
LOGITS = "logits"
ENCODED_LENGTH = f"encoder_{LENGTH}"
SAME = 0.01
"""How far apart logits may be by rounding: float16 takes a tenth of it."""
PAST, NEW = 5, 3
"""Tokens in the traced cache, and after it. All sizes of one call differ, so that torch does not
take them for one."""


def generation_calls(model: Any, batch: Batch, axes: Axes) -> dict[str, ProgramCall]:
    """The calls to trace, by the names of their programs.

    ``batch`` are inputs of ``model``, with their dynamic ``axes``. Raises ``UnsupportedModel`` if
    the model does not generate with a cache of keys and values.
    """
    if model.config.is_encoder_decoder:
        return _encoder_and_decoder(model, batch, axes)
    others = sorted(batch.keys() - {IDS, MASK, POSITIONS, TYPES})
    if others:
        raise UnsupportedModel(
            f"{type(model).__name__} reads {', '.join(others)} besides tokens; such a model cannot "
            "be exported with its cache"
        )
    ids = batch[IDS].repeat(1, NEW)[:, :NEW]
    positions = ids if needs_positions(model, ids) else None
    return {MODEL: cached_call(model, {IDS: ids}, {IDS: {0: BATCH, 1: LENGTH}}, positions)}


def cached_call(model: Any, read: Batch, axes: Axes, positions: torch.Tensor | None) -> ProgramCall:
    """The call of a decoder that reads ``NEW`` tokens, or their embeddings, after ``PAST`` others.

    ``read`` has the new tokens as its only input, with its dynamic ``axes``. ``positions`` are of
    the same rank as the positions that the model needs; ``None`` if it needs none.
    """
    ((name, value),) = read.items()
    new = torch.cat([value] * NEW, 1)[:, :NEW]
    cache = _first_cache(model, {name: new}, {name: new})
    past = named_cache(_layers(model, cache), f"{CACHE}.{{}}.")
    inputs = {name: new, MASK: torch.ones(len(new), PAST + NEW, dtype=torch.int64)}
    named = {**axes, MASK: {0: BATCH, 1: f"total_{LENGTH}"}}
    if positions is not None:
        shape = (*positions.shape[:-1], NEW)
        inputs[POSITIONS] = torch.arange(PAST, PAST + NEW).expand(shape).contiguous()
        named[POSITIONS] = {len(shape) - 2: BATCH, len(shape) - 1: LENGTH}
    return _with_cache(CachedDecoder(model), inputs, named, past, {})


def _encoder_and_decoder(model: Any, batch: Batch, axes: Axes) -> dict[str, ProgramCall]:
    encoder = model.get_encoder()
    accepted = accepted_by(encoder)
    read = {name: value for name, value in batch.items() if name in accepted}
    long = {LENGTH: ENCODED_LENGTH}
    encode = ProgramCall(
        Encoder(model, tuple(read)),
        read,
        (STATES,),
        {n: {at: long.get(axis, axis) for at, axis in axes[n].items()} for n in read},
    )
    with torch.no_grad(), silent():
        encoded = encoder(**read)
    states = encoded[0]
    decoder = CachedDecoder(model, type(encoded))
    ids = batch[f"{DECODER}{IDS}"].repeat(1, NEW)[:, :NEW]
    inputs = {IDS: ids, ENCODED: states}
    if MASK in batch:
        inputs[ENCODED_MASK] = batch[MASK]
    named: Axes = {
        IDS: {0: BATCH, 1: f"{DECODER}{LENGTH}"},
        ENCODED: {0: BATCH, 1: ENCODED_LENGTH},
        ENCODED_MASK: {0: BATCH, 1: ENCODED_LENGTH},
    }
    whole = {**batch, f"{DECODER}{IDS}": ids}
    cache = _first_cache(model, decoder.arguments(inputs), whole)
    if not all(hasattr(cache, f"{kind}_attention_cache") for kind in ("self", "cross")):
        raise _other_cache(model, f"is {type(cache).__name__}")
    past, cross = (
        named_cache(_layers(model, part), f"{CACHE}.{{}}.{kind}.")
        for part, kind in (
            (cache.self_attention_cache, "decoder"),
            (cache.cross_attention_cache, "encoder"),
        )
    )
    return {
        ENCODER: encode,
        MERGED: _with_cache(decoder, inputs, named, past, cross),
    }


def _with_cache(
    module: CachedDecoder, inputs: Batch, axes: Axes, past: Batch, cross: Batch
) -> ProgramCall:
    """The call of a decoder with its ``past``; ``cross`` is computed from the encoder's states."""
    lengths = {0: BATCH, 2: f"past_{DECODER if cross else ''}{LENGTH}"}
    past = {n: v.new_zeros(*v.shape[:2], PAST, v.shape[3]) for n, v in past.items()}
    axes = {name: axes[name] for name in inputs} | {name: lengths for name in past}
    present = {name: name.replace(CACHE, PRESENT, 1) for name in (*past, *cross)}
    module.names = (*inputs, *past)
    module.returned = (LOGITS, *present.values())
    return ProgramCall(
        module,
        {**inputs, **past},
        module.returned,
        axes,
        tuple(present[name] for name in cross),
    )


class Encoder(nn.Module):
    """The encoder of a model; it takes its inputs by position."""

    def __init__(self, model: Any, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.eval()

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The last hidden states, of shape ``(batch, length, features)``."""
        found = self.model.get_encoder()(**dict(zip(self.names, args, strict=True)))
        return (found[0],)


class CachedDecoder(nn.Module):
    """A model that takes its new tokens and its cache by position, and returns the longer cache."""

    names: tuple[str, ...]
    returned: tuple[str, ...]

    def __init__(self, model: Any, encoded: Callable[..., Any] | None = None) -> None:
        """``encoded`` is the class of what the model's encoder returns, if it has an encoder."""
        super().__init__()
        self.model, self.encoded = model, encoded
        self.eval()

    def arguments(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of the model's ``forward`` for the ``inputs`` without the cache."""
        if self.encoded is None:
            return dict(inputs)
        found = {
            f"{DECODER}{IDS}": inputs[IDS],
            "encoder_outputs": self.encoded(last_hidden_state=inputs[ENCODED]),
        }
        return found | ({MASK: inputs[ENCODED_MASK]} if ENCODED_MASK in inputs else {})

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs ``returned``: logits, and the keys and values of each layer."""
        from transformers import DynamicCache, EncoderDecoderCache

        given = dict(zip(self.names, args, strict=True))
        past = [value for name, value in given.items() if name.startswith(CACHE)]
        inputs = {name: value for name, value in given.items() if not name.startswith(CACHE)}
        cache: Any = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
        if self.encoded is not None:
            cache = EncoderDecoderCache(cache, DynamicCache())
        argument = cache_argument(self.model.forward) or CACHE
        logits = self.model(**self.arguments(inputs), **{argument: cache}, use_cache=True).logits
        parts = [cache]
        if isinstance(cache, EncoderDecoderCache):
            parts = [cache.self_attention_cache, cache.cross_attention_cache]
        layers = [layer for part in parts for layer in part.layers]
        return (logits, *(value for layer in layers for value in (layer.keys, layer.values)))


def needs_positions(model: Any, ids: torch.Tensor) -> bool:
    """Whether padded ``ids`` need ``position_ids``: without them, the model computes other logits.

    Some models count the tokens in the attention mask themselves, or use no positions.
    """
    if not {POSITIONS, MASK} <= accepted_by(model):
        return False
    mask = torch.ones_like(ids)
    mask[:, 0] = 0
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    alone = _first_call(model, {IDS: ids, MASK: mask}).logits
    told = _first_call(model, {IDS: ids, MASK: mask, POSITIONS: counted}).logits
    return not torch.equal(alone[:, 1:], told[:, 1:])


def named_cache(layers: list[tuple[torch.Tensor, torch.Tensor]], prefix: str) -> Batch:
    """The keys and values of the layers by name; ``prefix`` has a place for the layer's number."""
    return {
        f"{prefix.format(at)}{kind}": value
        for at, layer in enumerate(layers)
        for kind, value in zip(("key", "value"), layer, strict=True)
    }


def _layers(model: Any, cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The keys and values of each layer of a cache; ``UnsupportedModel`` for other states."""
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if cache is None or not getattr(cache, "layers", None):
        if not getattr(model.config, "is_decoder", True):
            raise UnsupportedModel(
                f"{type(model).__name__} cannot be exported: it generates, but keeps no cache, "
                "since its config has is_decoder false; set it to true, or let architectures name "
                "a class that does not generate"
            )
        raise _other_cache(model, "is empty")
    for layer in cache.layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _other_cache(model, f"holds other states ({type(layer).__name__})")
    return [(layer.keys, layer.values) for layer in cache.layers if layer.is_initialized]


def _other_cache(model: Any, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{type(model).__name__} cannot be exported: its cache {what}, where keys and values of "
        "each layer are needed"
    )


def _first_cache(model: Any, arguments: dict[str, Any], whole: dict[str, Any]) -> Any:
    """The cache that ``model`` returns for its first tokens.

    ``whole`` are the arguments of a call without a cache, with the same tokens. Raises
    ``UnsupportedModel`` if that computes other logits: if a call of FSMT with a cache has several
    tokens, they see the tokens after them.
    """
    found, exact = _first_call(model, arguments), _first_call(model, whole, use_cache=False)
    if distances_of({LOGITS: found.logits}, {LOGITS: exact.logits})[LOGITS].relative > SAME:
        raise UnsupportedModel(
            f"{type(model).__name__} computes other logits with a cache than without, for several "
            "tokens in a call"
        )
    return returned_cache(found)


def _first_call(model: Any, arguments: dict[str, Any], use_cache: bool = True) -> Any:
    """What ``model`` returns for its first tokens, with a new cache or without."""
    words = f"{type(model).__name__} does not run with a cache"
    with torch.no_grad(), silent(), refusing(UnsupportedModel, words):
        return model(**arguments, use_cache=use_cache)
