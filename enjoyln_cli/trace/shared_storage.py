"""Find tensors that share memory: tied parameters, and weights that must not be edited.

Weights are parameters and stored buffers. Two parameters with the same memory, shape and strides
are one tied weight. Any other tensor that shares memory with a weight (a part of it, another view,
another buffer, a constant of the graph) reads the weight without its name in the graph. Such a
weight must not be edited.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from enjoyln_cli.models.extents import PlaceInMemory, identity_of, overlapping, placed
from enjoyln_cli.models.load import stored_weights


def ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each name of a weight all its names, in the order of the model."""
    together: dict[Any, list[str]] = {}
    for name, tensor in stored_weights(model).items():
        together.setdefault(identity_of(tensor), []).append(name)
    return {name: tuple(names) for names in together.values() for name in names}


def reason_of_sharing(model: nn.Module) -> dict[str, str]:
    """Weights that share memory with another parameter or buffer, and so must not be edited.

    Maps names to reasons. Tied parameters, which are the same weight under several names, are not
    included (see ``analysis.untying``).
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found: dict[str, str] = {}
    places = placed([*parameters.items(), *buffers.items()])
    for (one, first), (other, second) in overlapping(places):
        if one in parameters and other in parameters and first == second:
            continue
        found.setdefault(one, f"it shares its memory with {other}")
        found.setdefault(other, f"it shares its memory with {one}")
    weights = stored_weights(model)
    return {name: reason for name, reason in found.items() if name in weights}


def reason_outside(model: nn.Module, tensors: Iterable[torch.Tensor]) -> dict[str, str]:
    """Weights of ``model`` that share memory with one of ``tensors``: names to reasons."""
    others = placed(("", tensor) for tensor in tensors)
    if not others:
        return {}
    named = placed(stored_weights(model).items())
    reason = "its memory is also read through a tensor that is not a parameter"
    return dict.fromkeys(_shared_with_unnamed([*named, *others]), reason)


def _shared_with_unnamed(places: Iterable[PlaceInMemory]) -> set[str]:
    pairs = overlapping(places)
    names = {name for pair in pairs if "" in (pair[0][0], pair[1][0]) for name, _ in pair}
    return names - {""}
