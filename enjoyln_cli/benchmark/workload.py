"""The inputs that a model is timed on: their sizes, and the two phases of a text model.

    prefill  one call on whole rows, without a cache
    decode   one token for each row in every call, with a cache: the last ``STEPS`` tokens

Decides which of the requested sizes a model can run. A length beyond its table of positions is left
out. Inputs without a length (images) are taken once for each number of rows. A model that returns
no cache has no decode.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from enjoyln_cli.benchmark.timing import Task
from enjoyln_cli.calls.calls import keeps_cache
from enjoyln_cli.comparison.batches import Batch, most_tokens, unpadded_batch
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import dtype_of
from enjoyln_cli.plan.cache_argument import CACHE, cache_argument, returned_cache

PHASES = ("prefill", "decode")
STEPS = 8
"""Tokens in one run of decode; half of the text if that is shorter."""
TEXT = ("decoder_input_ids", "input_ids")


@dataclass(frozen=True)
class Size:
    """Inputs of one size."""

    inputs: Batch
    rows: int
    tokens: int | None
    """``None`` if the inputs have no length to choose."""

    @property
    def items(self) -> int:
        """The number of tokens, or of rows if there are no tokens."""
        return self.rows * (self.tokens or 1)

    def to(self, device: torch.device) -> Size:
        """The inputs on ``device``."""
        moved = {name: value.to(device) for name, value in self.inputs.items()}
        return Size(moved, self.rows, self.tokens)

    def __str__(self) -> str:
        if self.tokens:
            return f"{self.rows} x {self.tokens} tokens"
        name, value = next(iter(self.inputs.items()))
        return f"{name} {' x '.join(map(str, value.shape))}"


def sizes(model: Any, pairs: Sequence[tuple[int, int]]) -> tuple[list[Size], list[str]]:
    """The distinct inputs for these rows and tokens, and a line for each that is left out.

    The inputs are on the CPU, from the fewest tokens (or rows) to the most.
    Raises ``UnsupportedModel`` if none is left, or if no inputs can be made up.
    """
    limit = most_tokens(model.config.get_text_config())
    by_shape: dict[Any, Size] = {}
    left_out: dict[str, None] = {}
    for rows, tokens in pairs:
        fits = limit is None or tokens <= limit
        inputs = unpadded_batch(model, rows, tokens if fits else 1, dtype_of(model))
        read = next((inputs[name] for name in TEXT if name in inputs), None)
        if read is None or fits:
            size = Size(inputs, rows, None if read is None else read.shape[1])
            by_shape.setdefault(tuple((n, v.shape) for n, v in inputs.items()), size)
        else:
            left_out[f"{tokens} tokens: {type(model).__name__} takes at most {limit}"] = None
    if not by_shape:
        raise UnsupportedModel(
            f"nothing to measure: {'; '.join(left_out)}; use a smaller --seq-len"
        )
    return sorted(by_shape.values(), key=lambda size: size.items), list(left_out)


def prefill(model: Any, inputs: Batch) -> Task:
    """One call of ``model`` on ``inputs``."""
    caching = getattr(model.config, "use_cache", None) is not None
    flags = {"use_cache": False} if caching else {}
    return Task(lambda _: model(**inputs, **flags))


@dataclass(frozen=True)
class Prompt:
    """A text whose first part the model has read, so that decode can begin."""

    cache: Any
    following: dict[str, Any]
    """Inputs of each further call, except the cache."""
    steps: int


def prompt(model: Any, size: Size) -> Prompt | None:
    """Let ``model`` read the inputs of ``size`` except the last tokens, which are decoded.

    Returns ``None`` if the model returns no cache.
    """
    tokens = size.tokens or 0
    steps = min(STEPS, tokens // 2)
    if not steps or not keeps_cache(model):
        return None
    advancing = next(name for name in TEXT if name in size.inputs)
    long = {name for name, v in size.inputs.items() if v.ndim > 1 and v.shape[1] == tokens}
    if advancing == "decoder_input_ids":
        long = {advancing}
    start = {n: v[:, : tokens - steps] if n in long else v for n, v in size.inputs.items()}
    try:
        read = model(**start, use_cache=True)
    except TypeError:  # the class passes the keyword on to a function that does not take it
        return None
    cache = returned_cache(read)
    if cache is None:
        return None
    following: dict[str, Any] = {advancing: size.inputs[advancing][:, -1:]}
    encoded = getattr(read, "encoder_last_hidden_state", None)
    if advancing == "decoder_input_ids" and encoded is not None:
        following["encoder_outputs"] = (encoded,)
    return Prompt(cache, following, steps)


def decode(model: Any, text: Prompt) -> Task:
    """Calls on single tokens, one after the other, each run from a copy of the same cache."""

    name = cache_argument(model.forward) or CACHE

    def run(cache: Any) -> None:
        for _ in range(text.steps):
            model(**text.following, **{name: cache}, use_cache=True)

    return Task(run, lambda: copy.deepcopy(text.cache), text.steps)
