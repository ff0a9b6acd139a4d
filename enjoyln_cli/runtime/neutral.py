"""Neutral parameters of folded norms: weights of one and biases of zero, as a fusion leaves them.

They stay in the model under their names. As long as they have these values, the norm skips them:

    weightless      y = x / sqrt(mean(x^2) + eps) + bias
    biasless        y = weight * x / sqrt(mean(x^2) + eps)

The flags ``weightless`` and ``biasless`` of a norm are set from the actual values whenever the
model is checked (see ``weight_watch``): at the first call and after each change of these
parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn

from enjoyln_cli.kernels import Norms
from enjoyln_cli.models.norm_modules import PLAIN_TENSORS
from enjoyln_cli.runtime.modules import Folded


def neutral_parameters(model: nn.Module) -> list[str]:
    """Paths of the weights of folded norms that multiply by 1, and of their biases of zero."""
    return [
        f"{path}.{name}"
        for path, norm in _folded(model)
        for name, value in ((norm.weight_name, norm.unit), (norm.bias_name, 0.0))
        if _all_are(vars(norm)["_parameters"].get(name), value)
    ]


def skip_neutral(model: nn.Module, neutral: Collection[str]) -> None:
    """Let each norm skip its parameters at the paths ``neutral``, and no others."""
    for path, norm in _folded(model):
        norm.weightless = f"{path}.{norm.weight_name}" in neutral
        norm.biasless = f"{path}.{norm.bias_name}" in neutral


def _folded(model: nn.Module) -> Iterator[tuple[str, Folded]]:
    for path, norm in model.named_modules():
        if isinstance(norm, Folded):
            yield path, norm


def _all_are(tensor: Any, value: float) -> bool:
    """Whether all elements equal ``value``, in a tensor whose changes torch counts."""
    if type(tensor) not in PLAIN_TENSORS or tensor.is_meta or tensor.is_inference():
        return False
    if not tensor.is_floating_point():
        return False
    return bool((tensor.detach() == value).all())


def kinds_of_norms(model: nn.Module) -> list[tuple[torch.device, Norms]]:
    """The device of each folded norm of ``model``, and all that its speed depends on.

    Neutral parameters count as none. Norms that have no tensor at all, or whose tensors are
    offloaded, are left out.
    """
    kinds, neutral = [], {*neutral_parameters(model)}
    for path, norm in _folded(model):
        parameters: dict[str, Any] = vars(norm)["_parameters"]
        weight, bias = parameters.get(norm.weight_name), parameters.get(norm.bias_name)
        tensor = bias if weight is None else weight
        if tensor is None or not tensor.is_floating_point():
            continue
        has_weight = weight is not None and f"{path}.{norm.weight_name}" not in neutral
        has_bias = bias is not None and f"{path}.{norm.bias_name}" not in neutral
        rows = getattr(model, "dtype", tensor.dtype)
        dtype = tensor.dtype if has_weight or has_bias else rows
        kind = Norms(rows, dtype, has_weight, has_bias, tensor.numel())
        kinds.append((tensor.device, kind))
    return kinds
