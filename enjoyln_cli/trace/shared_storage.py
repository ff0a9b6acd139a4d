"""Find tensors that share memory: tied parameters, and weights that must not be edited.

Weights are parameters and stored buffers. Two parameters with the same memory, shape and strides
are one tied weight. Any other tensor that shares memory with a weight (a part of it, another view,
another buffer, a constant of the graph) reads the weight without its name in the graph. Such a
weight must not be edited. On the meta device, memory has no address; there tensors share memory if
they have the same storage object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from enjoyln_cli.models.load import stored_weights


@dataclass(frozen=True)
class Extent:
    """The bytes between the first and the last element of a tensor."""

    memory: tuple[Any, ...]
    """A device, or a storage without an address."""
    start: int
    stop: int
    layout: tuple[Any, ...]
    """Shape, strides and dtype."""

    def overlaps(self, other: Extent) -> bool:
        same = self.memory == other.memory
        return same and self.start < other.stop and other.start < self.stop


Place = tuple[str, Extent]


def extent_of(tensor: torch.Tensor) -> Extent | None:
    """Where a tensor lies in memory; ``None`` for one without elements or without a storage."""
    try:
        storage = tensor.untyped_storage()
        address = 0 if tensor.is_meta else storage.data_ptr()
        item, offset = tensor.element_size(), tensor.storage_offset()
        if tensor.numel() == 0:
            return None
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, lazy, or a wrapper
        return None
    memory = (str(tensor.device),) if address else ("storage", storage._cdata)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    start = address + offset * item
    layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return Extent(memory, int(start), int(start + span * item), layout)


def ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each name of a weight all its names, in the order of the model."""
    together: dict[Any, list[str]] = {}
    for name, tensor in stored_weights(model).items():
        found = extent_of(tensor)
        key = id(tensor) if found is None else found
        together.setdefault(key, []).append(name)
    return {name: tuple(names) for names in together.values() for name in names}


def reason_of_sharing(model: nn.Module) -> dict[str, str]:
    """Weights that share memory with another parameter or buffer, and so must not be edited.

    Maps names to reasons. Tied parameters, which are the same weight under several names, are not
    included (see ``analysis.untying``).
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found: dict[str, str] = {}
    placed = _placed([*parameters.items(), *buffers.items()])
    for (one, first), (other, second) in _overlapping(placed):
        if one in parameters and other in parameters and first == second:
            continue
        found.setdefault(one, f"it shares its memory with {other}")
        found.setdefault(other, f"it shares its memory with {one}")
    weights = stored_weights(model)
    return {name: reason for name, reason in found.items() if name in weights}


def reason_outside(model: nn.Module, tensors: Iterable[torch.Tensor]) -> dict[str, str]:
    """Weights of ``model`` that share memory with one of ``tensors``: names to reasons."""
    others = _placed(("", tensor) for tensor in tensors)
    if not others:
        return {}
    named = _placed(stored_weights(model).items())
    reason = "its memory is also read through a tensor that is not a parameter"
    return dict.fromkeys(_shared_with_unnamed([*named, *others]), reason)


def _shared_with_unnamed(places: Iterable[Place]) -> set[str]:
    pairs = _overlapping(places)
    names = {name for pair in pairs if "" in (pair[0][0], pair[1][0]) for name, _ in pair}
    return names - {""}


def _placed(named: Iterable[tuple[str, torch.Tensor]]) -> list[Place]:
    return [(name, found) for name, tensor in named if (found := extent_of(tensor))]


def _overlapping(places: Iterable[Place]) -> Iterator[tuple[Place, Place]]:
    """All pairs of places that overlap, found in one pass over the sorted places."""
    before: list[Place] = []
    for place in sorted(places, key=lambda place: (str(place[1].memory), place[1].start)):
        before = [p for p in before if p[1].overlaps(place[1])]
        yield from ((other, place) for other in before)
        before.append(place)
