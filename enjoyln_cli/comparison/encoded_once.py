"""Run the encoder of a model once for inputs that several calls share.

Generating a decoder's tokens, trying whether a model runs, and its outputs to compare all begin
with the encoder, which takes most of the time of a speech model.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from enjoyln_cli.runtime.call_guards import call_guards


@contextmanager
def encoded_once(model: Any) -> Iterator[None]:
    """Inside the block, the encoder of ``model`` returns the same outputs for the same tensors.

    Tensors are the same if they are one object. The outputs stay in memory until the block ends,
    and the weights may not change inside of it. Nothing happens for a model without an encoder, or
    for a folded model, which guards its calls.
    """
    is_pair = getattr(model.config, "is_encoder_decoder", False) and hasattr(model, "get_encoder")
    encoder = model.get_encoder() if is_pair and not call_guards(model) else model
    if encoder is model:
        yield
        return
    before, forward = vars(encoder).get("forward"), encoder.forward
    names = list(inspect.signature(forward).parameters)
    known: dict[Any, tuple[Any, Any]] = {}

    @functools.wraps(forward)
    def once(*args: Any, **inputs: Any) -> Any:
        if torch.is_grad_enabled():
            return forward(*args, **inputs)
        given = {**dict(zip(names, args, strict=False)), **inputs}
        told = {n: value for n, value in given.items() if value is not None and value is not False}
        told.pop("return_dict", None)
        key = tuple(sorted((name, id(value)) for name, value in told.items()))
        if key not in known:  # with the inputs, so that no other object gets their ids
            known[key] = forward(*args, **inputs), told
        return known[key][0]

    encoder.forward = once
    try:
        yield
    finally:
        if before is None:
            del encoder.forward
        else:
            encoder.forward = before
