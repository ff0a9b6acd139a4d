"""Neutral parameters of folded norms: weights of one and biases of zero, the result of a merge.

They stay in the model under their names. As long as they have these values, the norm skips them:

    weightless      y = x / sqrt(mean(x^2) + eps) + bias
    biasless        y = weight * x / sqrt(mean(x^2) + eps)

The flags ``weightless`` and ``biasless`` of a norm are set from the actual values whenever the
model is checked (see ``weight_watch``): at the first call and after each change of these
parameters. The config alone never sets them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor

from enjoyln_cli.kernels import Norms
from enjoyln_cli.models.norm_modules import PLAIN
from enjoyln_cli.runtime.modules import Folded


@dataclass(frozen=True)
class Neutral:
    """A parameter of a folded norm that may be neutral."""

    norm: str
    """Path of the norm."""
    name: str
    """Name of the parameter in the norm."""
    flag: str
    """The norm's attribute that says whether it is neutral: ``weightless`` or ``biasless``."""
    value: float
    """The value of all its elements if it is neutral."""

    @property
    def path(self) -> str:
        return f"{self.norm}.{self.name}"


def neutral_parameters(
    model: nn.Module, weightless: Iterable[str], biasless: Iterable[str]
) -> tuple[Neutral, ...]:
    """The weights of the norms at the paths ``weightless``, the biases of those at ``biasless``.

    Paths at which ``model`` has no folded norm are skipped.
    """
    found = [
        Neutral(path, norm.weight_name, "weightless", norm.unit)
        for path, norm in _folded(model, weightless)
    ]
    found += [
        Neutral(path, norm.bias_name, "biasless", 0.0) for path, norm in _folded(model, biasless)
    ]
    return tuple(found)


def _folded(model: nn.Module, paths: Iterable[str]) -> Iterator[tuple[str, Folded]]:
    for path in paths:
        norm = model.get_submodule(path)
        if isinstance(norm, Folded):
            yield path, norm


def set_flags(model: nn.Module, parameters: Iterable[Neutral]) -> list[Any]:
    """Set ``weightless`` and ``biasless`` on each norm.

    Returns the flags as facts for a ``Snapshot``.
    """
    facts = []
    for one in parameters:
        norm = model.get_submodule(one.norm)
        if isinstance(norm, Folded):
            own = vars(norm)
            own[one.flag] = _all_are(norm._parameters.get(one.name), one.value)  # type: ignore
            facts.append((own, one.flag, own[one.flag]))
    return facts


def _all_are(tensor: Any, value: float) -> bool:
    """Whether all elements equal ``value``, in a tensor whose changes torch counts."""
    if type(tensor) not in PLAIN or isinstance(tensor, FakeTensor):
        return False
    if tensor.is_meta or tensor.is_inference() or not tensor.is_floating_point():
        return False
    return bool((tensor.detach() == value).all())


def kinds_of_norms(
    model: nn.Module, weightless: Iterable[str], biasless: Iterable[str]
) -> list[tuple[torch.device, Norms]]:
    """The device of each folded norm of ``model``, and all that its speed depends on.

    Norms at the paths ``weightless`` and ``biasless`` are taken as without this parameter. Norms
    that have no tensor at all, or whose tensors are offloaded, are left out.
    """
    without = set(weightless), set(biasless)
    found = []
    for path, norm in model.named_modules():
        if not isinstance(norm, Folded):
            continue
        own = vars(norm)["_parameters"]
        named = (own.get(norm.weight_name), own.get(norm.bias_name))
        tensors = [tensor for tensor in named if tensor is not None]
        if not tensors or not tensors[0].is_floating_point():
            continue
        used = [t is not None and path not in skip for t, skip in zip(named, without, strict=True)]
        rows = getattr(model, "dtype", tensors[0].dtype)
        parameters = tensors[0].dtype if any(used) else rows
        kind = Norms(_name(rows), _name(parameters), used[0], used[1], tensors[0].numel())
        found.append((tensors[0].device, kind))
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
