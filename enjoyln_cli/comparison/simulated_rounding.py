"""Simulate round-to-nearest quantisation of linear layers.

Integers of ``b`` bits are symmetric: ``q = round(x / s)`` with ``s = max |x| / (2^(b-1) - 1)``. The
weight of a layer has a scale ``s`` for each output, and its inputs have a scale for each token. A
single large feature makes the scale of its token large, so that all others lose digits. Embeddings
and the layer that computes the logits stay as they are, as most quantisers leave them.

Gradients pass straight through the rounding to the nearest integer, and through the scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Scheme:
    """Bits of the weights and of the inputs of linear layers; ``None`` leaves the inputs."""

    weight_bits: int
    input_bits: int | None
    per_token: bool = True
    """Whether each token has a scale of its own; otherwise all tokens of a call share one."""
    group: int | None = None
    """How many neighbouring inputs of a weight share a scale; ``None``: all inputs of an output."""
    rounds_results: bool = False
    """Whether the results of layers get the bits of inputs, with one scale for a call."""


def input_dimension(module: nn.Module) -> int | None:
    """The dimension of inputs in the weight of a linear layer; ``None`` for other modules."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        return 1
    return 0 if isinstance(module, Conv1D) else None


def head_of(model: Any) -> Any:
    """The layer that computes the logits; ``None`` if there is none."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def path_of_head(model: Any) -> list[str]:
    """The path of the layer that computes the logits; empty if there is none."""
    head = head_of(model)
    return [name for name, module in model.named_modules() if module is head]


def linear_layers(model: Any) -> dict[str, nn.Module]:
    """The linear layers of ``model`` by path, without the layer that computes the logits."""
    head = head_of(model)
    return {
        name: module
        for name, module in model.named_modules()
        if input_dimension(module) is not None and module is not head
    }


def round_to(x: torch.Tensor, bits: int, dim: int | None, group: int | None = None) -> torch.Tensor:
    """``x`` rounded to symmetric integers of ``bits`` bits, and multiplied by the scale again.

    There is one scale for each slice of ``dim``, or for ``group`` neighbours in it if they divide
    it, and for all of ``x`` if ``dim`` is ``None``.
    """
    if group and dim is not None and x.shape[dim] % group == 0:
        in_groups = x.unflatten(dim, (-1, group))
        inner = dim % x.dim() + 1
        return round_to(in_groups, bits, inner).flatten(inner - 1, inner)
    top = 2 ** (bits - 1) - 1
    wide = x.float()
    largest = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = largest / top
    scale = torch.where(scale == 0, 1.0, scale)
    steps = wide / scale
    rounded = steps + (steps.round() - steps).detach()  # exact: both are close to each other
    return (rounded.clamp(-top, top) * scale).to(x.dtype)


@contextmanager
def simulated(
    model: Any, scheme: Scheme, only: Iterable[nn.Module] | None = None
) -> Iterator[None]:
    """Let the linear layers of ``model`` compute with rounded weights and inputs inside the block.

    ``only`` are the layers to round instead, among them the head or embeddings. A weight is rounded
    in each call of its layer, and is back afterwards.
    """

    def begin(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        is_table = isinstance(module, nn.Embedding)
        weight, dim = module.weight, 1 if is_table else input_dimension(module)
        assert isinstance(weight, torch.Tensor) and dim is not None
        originals[module] = weight
        rounded = round_to(weight, scheme.weight_bits, dim, scheme.group)
        module._parameters["weight"] = rounded  # type: ignore[assignment]
        if scheme.input_bits is None or is_table or not args:
            return args
        dim = -1 if scheme.per_token else None
        return (round_to(args[0], scheme.input_bits, dim), *args[1:])

    def end(module: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
        module._parameters["weight"] = originals.pop(module)
        if scheme.rounds_results and scheme.input_bits and not isinstance(module, nn.Embedding):
            return round_to(result, scheme.input_bits, None)
        return result

    originals: dict[nn.Module, Any] = {}
    layers = linear_layers(model).values() if only is None else only
    with ExitStack() as stack:
        for module in layers:
            stack.callback(module.register_forward_pre_hook(begin).remove)
            stack.callback(module.register_forward_hook(end).remove)
        try:
            yield
        finally:
            for module, weight in originals.items():
                module._parameters["weight"] = weight
