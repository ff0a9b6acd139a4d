"""Neutral parameters of folded norms: weights of one and biases of zero, the result of a merge.

They stay in the model under their names. As long as they have these values, the norm skips them:

    weightless      y = x / sqrt(mean(x^2) + eps) + bias
    biasless        y = weight * x / sqrt(mean(x^2) + eps)

The flags ``weightless`` and ``biasless`` of a norm are set from the actual values whenever the
model is checked (see ``weight_watch``): at the first call and after each change of these
parameters. The config alone never sets them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from enjoyln_cli.kernels import Norms
from enjoyln_cli.models.norm_modules import PLAIN
from enjoyln_cli.runtime.modules import Folded


def neutral_parameters(
    model: nn.Module, weightless: Collection[str], biasless: Collection[str]
) -> list[str]:
    """Paths of the weights of the norms ``weightless``, and of the biases of those ``biasless``."""
    norms = [*_folded(model)]
    weights = [f"{path}.{norm.weight_name}" for path, norm in norms if path in weightless]
    return weights + [f"{path}.{norm.bias_name}" for path, norm in norms if path in biasless]


def skip_neutral(model: nn.Module, weightless: Collection[str], biasless: Collection[str]) -> None:
    """Set ``weightless`` and ``biasless`` of each norm, by the values that it has now."""
    for path, norm in _folded(model):
        parameters: dict[str, Any] = vars(norm)["_parameters"]
        weight, bias = parameters.get(norm.weight_name), parameters.get(norm.bias_name)
        norm.weightless = path in weightless and _all_are(weight, norm.unit)
        norm.biasless = path in biasless and _all_are(bias, 0.0)


def _folded(model: nn.Module) -> Iterator[tuple[str, Folded]]:
    for path, norm in model.named_modules():
        if isinstance(norm, Folded):
            yield path, norm


def _all_are(tensor: Any, value: float) -> bool:
    """Whether all elements equal ``value``, in a tensor whose changes torch counts."""
    if type(tensor) not in PLAIN or tensor.is_meta or tensor.is_inference():
        return False
    if not tensor.is_floating_point():
        return False
    return bool((tensor.detach() == value).all())


def kinds_of_norms(
    model: nn.Module, weightless: Collection[str], biasless: Collection[str]
) -> list[tuple[torch.device, Norms]]:
    """The device of each folded norm of ``model``, and all that its speed depends on.

    Norms at the paths ``weightless`` and ``biasless`` are taken as without this parameter. Norms
    that have no tensor at all, or whose tensors are offloaded, are left out.
    """
    kinds = []
    for path, norm in _folded(model):
        parameters: dict[str, Any] = vars(norm)["_parameters"]
        weight, bias = parameters.get(norm.weight_name), parameters.get(norm.bias_name)
        tensor = bias if weight is None else weight
        if tensor is None or not tensor.is_floating_point():
            continue
        has_weight = weight is not None and path not in weightless
        has_bias = bias is not None and path not in biasless
        rows = getattr(model, "dtype", tensor.dtype)
        dtype = tensor.dtype if has_weight or has_bias else rows
        kind = Norms(rows, dtype, has_weight, has_bias, tensor.numel())
        kinds.append((tensor.device, kind))
    return kinds
