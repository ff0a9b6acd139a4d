"""Further calls for custom models: each optional argument is passed once.

Classes of transformers are called as the library documents it (see ``calls``). For any other class
only the signature is known. So each optional argument is passed by itself, in addition to the main
inputs with and without a mask: a tensor if the default is ``None``, another number if it is a
number. The proof then also covers these calls, and may keep norms as LayerNorm because of them.
Values that the code rejects stay unproven.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from enjoyln_cli.calls.calls import Call, example, keeps_cache
from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.calls.input_spec import InputSpec
from enjoyln_cli.plan.cache_argument import NAMES

SEVERAL = 3
"""New tokens of a call that goes on with a cache."""


def further_calls(model: Any, main: Call) -> Iterator[Call]:
    """Calls to trace in addition to ``main``; a model may reject some."""
    masked = main.steps[0][1]
    bare = {name: value for name, value in masked.items() if name != "attention_mask"}
    input_sets = {tuple(inputs): inputs for inputs in (masked, bare)}
    if "token_type_ids" in accepted_by(model) and "input_ids" in masked:
        types = torch.zeros_like(masked["input_ids"])
        input_sets["token_type_ids",] = {**masked, "token_type_ids": types}
    for inputs in input_sets.values():
        beside = ", ".join(inputs)
        yield Call(beside, (((), inputs),), required=False)
        if keeps_cache(model):
            flags = {"use_cache": False}
            yield Call(f"{beside}, use_cache=False", (((), inputs),), flags, required=False)
    if keeps_cache(model) and {"input_ids", "attention_mask"} <= masked.keys():
        yield from _with_cache(model, masked["input_ids"])
    for inputs in (masked, bare) if len(bare) < len(masked) else (masked,):
        yield from _one_more(model, inputs, {*masked, *NAMES})


def _with_cache(model: Any, ids: torch.Tensor) -> Iterator[Call]:
    """Calls that fill a cache, or go on with it, with a mask: so programs are exported.

    In ``main``, both steps have a mask. A proof for all sizes then needs conditions on the sizes of
    the first mask, which the second step does not have. Here at most one step has a mask.
    """
    rows, seen = ids.shape[:2]
    for tokens, past in ((seen, 0), (1, seen), (SEVERAL, seen)):
        places = torch.arange(past, past + tokens).expand(rows, tokens).contiguous()
        last = {"input_ids": ids[:, :tokens], "attention_mask": ids.new_ones(rows, past + tokens)}
        for inputs in (last, {**last, "position_ids": places}):
            if inputs.keys() <= accepted_by(model):
                first = [((), {"input_ids": ids})] * bool(past)
                label = f"{', '.join(inputs)}, {tokens} tokens after {past}"
                steps = (*first, ((), inputs))
                yield Call(label, steps, {"use_cache": True}, required=False)


def _one_more(model: Any, inputs: dict[str, Any], known: set[str]) -> Iterator[Call]:
    """Calls with ``inputs`` and one further argument each, with several values to try for it."""
    beside = ", ".join(inputs)
    rows, *others = next(iter(inputs.values())).shape
    tokens, width = (*others, 1)[0], getattr(model.config, "hidden_size", None)
    shapes = [InputSpec((rows,), 2), InputSpec((rows, tokens), 2)]
    if isinstance(width, int):
        shapes += [InputSpec((rows, tokens, width)), InputSpec((rows, width))]
    for name, parameter in inspect.signature(model.forward).parameters.items():
        values: list[Any] = []
        if type(parameter.default) in (int, float):
            values = [parameter.default + (1 if type(parameter.default) is int else 0.5)]
        elif parameter.default is None and name not in known:
            values = [example(model, spec) for spec in shapes]
        for value in values:
            yield Call(f"{beside}, {name}", (((), {**inputs, name: value}),), required=False)
