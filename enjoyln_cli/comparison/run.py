"""Run a model and collect the outputs to compare.

These are all floating tensors that ``forward`` returns by default, without the cache and the loss;
the user can choose some of them. A run in float64 is taken as exact: weights and activations are
float64, and operations for which a class asks for float32 run in float64 too.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.arithmetic import Float64
from enjoyln_cli.models.classes import dtype_of
from enjoyln_cli.models.load import silent
from enjoyln_cli.models.offload import on_disk
from enjoyln_cli.models.outputs import by_field, is_in_cache, match_names
from enjoyln_cli.runtime.call_guards import call_guards

Outputs = dict[str, torch.Tensor]
"""What a model returns for a batch, by name; on the CPU or memory-mapped from disk."""


def run(model: nn.Module, batches: Sequence[Batch], folder: Path | None = None) -> list[Outputs]:
    """The outputs of ``model`` for every batch, in the dtypes that it returns.

    A float64 model runs under ``Float64``. If a ``folder`` is given, outputs are stored in files
    there. From now on, the norms of a folded ``model`` compute RMSNorm even where LayerNorm is as
    good, so that an input with a mean shows. A model that draws random numbers, as ViTMAE for the
    patches that it masks, draws the same in each call.
    """

    def store(value: torch.Tensor) -> torch.Tensor:
        return on_disk(value, folder) if folder else value.cpu()

    for _, guard in call_guards(model):
        guard.state.literal = True
    outputs: list[Outputs] = []
    with torch.no_grad(), silent():
        for batch in batches:
            call = {**inputs_for(model, batch), **cache_flag(model)}
            in_float64 = Float64() if dtype_of(model) == torch.float64 else nullcontext()
            with in_float64, torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                output = model(**call)
            outputs.append({name: store(value) for name, value in tensors(output)})
            del output
    return outputs


@contextmanager
def encoded_once(model: Any) -> Iterator[None]:
    """Let the encoder of ``model`` return the same outputs for the same tensors, inside the block.

    The encoder takes most of the time of a speech model. It runs whenever a decoder's tokens are
    generated, a model is tried, or outputs are compared.

    Tensors are the same if they are one object. The outputs stay in memory until the block ends,
    and the weights may not change inside of it. Nothing happens for a model without an encoder, or
    for a folded model, which guards its calls.
    """
    is_pair = getattr(model.config, "is_encoder_decoder", False) and hasattr(model, "get_encoder")
    encoder = model.get_encoder() if is_pair and not call_guards(model) else model
    if encoder is model:
        yield
        return
    before, forward, of_class = vars(encoder).get("forward"), encoder.forward, type(encoder).forward
    names = list(inspect.signature(forward).parameters)
    known: dict[Any, tuple[Any, Any]] = {}

    @functools.wraps(of_class)
    def once(this: Any, *args: Any, **inputs: Any) -> Any:
        if this is not encoder:  # a copy of it, which may have other weights or none
            return of_class(this, *args, **inputs)
        if torch.is_grad_enabled():
            return forward(*args, **inputs)
        given = {**dict(zip(names, args, strict=False)), **inputs}
        told = {n: value for n, value in given.items() if value is not None and value is not False}
        told.pop("return_dict", None)
        key = tuple(sorted((name, id(value)) for name, value in told.items()))
        if key not in known:  # with the inputs, so that no other object gets their ids
            known[key] = forward(*args, **inputs), told
        return known[key][0]

    encoder.forward = MethodType(once, encoder)
    try:
        yield
    finally:
        if before is None:
            del encoder.forward
        else:
            encoder.forward = before


def inputs_for(model: nn.Module, batch: Batch) -> Batch:
    """The batch on the device of ``model``, with floating values in its dtype.

    Weights on the meta device are left on disk: then the model computes on the CPU.
    """
    devices = (weight.device for weight in model.parameters() if weight.device.type != "meta")
    device, dtype = next(devices, torch.device("cpu")), dtype_of(model)
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in batch.items()
    }


def cache_flag(model: Any) -> dict[str, Any]:
    """Turn the cache off: it would take memory and is not compared."""
    return {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}


def tensors(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating tensors of a model's output with their names, without the cache and losses."""
    for name, values in by_field(output).items():
        for value in values:
            if value.is_floating_point() and value.ndim and not is_in_cache(name):
                yield name, value


def choose_outputs(outputs: list[Outputs], names: Sequence[str]) -> list[Outputs]:
    """The outputs that match ``names`` (names or patterns); all of them if ``names`` is empty.

    Raises ``UnsupportedModel`` if no output of a batch matches.
    """
    if not names:
        return outputs
    chosen = [
        {name: value for name, value in batch.items() if name in match_names(names, batch)}
        for batch in outputs
    ]
    if not all(chosen):
        known = ", ".join(dict.fromkeys(name for batch in outputs for name in batch))
        raise UnsupportedModel(
            f"nothing to compare: the model returns {known}, and {', '.join(names)} matches "
            "none of these"
        )
    return chosen
