"""Which tensors lie in the same memory: a weight is known by its storage, not by its name.

Two parameters over the same memory, with the same shape and strides, are one tied weight. Any other
tensor over memory of a parameter (a part of it, another view, a buffer, a constant of the graph)
reads that parameter where no graph shows it under the parameter's name, so the parameter has to
stay as it is. On the meta device memory has no address; there the storage itself says which it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn

from enjoyln_cli.effects.reachable import Snapshot


@dataclass(frozen=True)
class Extent:
    """The bytes between the first and the last element of a tensor."""

    memory: tuple[Any, ...]
    """A device, or one storage that has no address."""
    start: int
    stop: int
    layout: tuple[Any, ...]
    """Shape, strides and dtype."""

    def overlaps(self, other: Extent) -> bool:
        same = self.memory == other.memory
        return same and self.start < other.stop and other.start < self.stop


Place = tuple[str, Extent]


def extent_of(tensor: torch.Tensor) -> Extent | None:
    """Where a tensor lies; ``None`` for one without elements, or without memory of its own."""
    try:
        storage = tensor.untyped_storage()
        address = 0 if tensor.is_meta else storage.data_ptr()
        item, offset = tensor.element_size(), tensor.storage_offset()
        if tensor.numel() == 0:
            return None
    except (RuntimeError, NotImplementedError, ValueError):  # sparse, not made yet, a wrapper
        return None
    memory = (str(tensor.device),) if address else ("storage", storage._cdata)
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    start = address + offset * item
    layout = (tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)
    return Extent(memory, int(start), int(start + span * item), layout)


def ties(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every parameter name to all names of the same weight, the model's first one first."""
    together: dict[Any, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        found = extent_of(tensor)
        key = id(tensor) if found is None else found
        together.setdefault(key, []).append(name)
    return {name: tuple(names) for names in together.values() for name in names}


def reason_of_sharing(model: nn.Module) -> dict[str, str]:
    """Why a parameter cannot be edited: a part of it, or another view, is one of the model's too.

    Parameters that are the same weight under several names (see ``analysis.untying``) are not among
    them.
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
    return {name: reason for name, reason in found.items() if name in parameters}


def read_without_torch(model: nn.Module) -> dict[str, str]:
    """Why a parameter cannot be edited: an array or storage that its code holds lies in its memory.

    What is read of that is no operation, and stands in a graph as a number at most.
    """
    parameters = _placed(model.named_parameters(remove_duplicate=False))
    if not any(len(extent.memory) == 1 for _, extent in parameters):
        return {}  # none has an address
    held = [("", found) for one in Snapshot(model).memory if (found := _extent_of_memory(one))]
    reason = "its memory is also read without torch, as by an array over it"
    return dict.fromkeys(_shared_with_unnamed([*parameters, *held]), reason)


def _extent_of_memory(held: Any) -> Extent | None:
    """Where an array, a storage or a view of memory lies; ``None`` for one that has no bytes."""
    if isinstance(held, (torch.UntypedStorage, torch.TypedStorage)):
        start, size = held.data_ptr(), held.nbytes()
        return Extent((str(held.device),), start, start + size, ()) if start and size else None
    array = numpy.asarray(held)
    steps = [(n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)]
    first = array.__array_interface__["data"][0]
    start = first + sum(step for step in steps if step < 0)
    stop = first + sum(step for step in steps if step > 0) + array.itemsize
    return Extent(("cpu",), start, stop, ()) if array.nbytes else None


def reason_outside(model: nn.Module, tensors: Iterable[torch.Tensor]) -> dict[str, str]:
    """Why a parameter of ``model`` cannot be edited: one of ``tensors`` lies in its memory."""
    others = _placed(("", tensor) for tensor in tensors)
    if not others:
        return {}
    named = _placed(model.named_parameters(remove_duplicate=False))
    reason = "its memory is also read through a tensor that is not a parameter"
    return dict.fromkeys(_shared_with_unnamed([*named, *others]), reason)


def _shared_with_unnamed(places: Iterable[Place]) -> set[str]:
    pairs = _overlapping(places)
    names = {name for pair in pairs if "" in (pair[0][0], pair[1][0]) for name, _ in pair}
    return names - {""}


def _placed(named: Iterable[tuple[str, torch.Tensor]]) -> list[Place]:
    return [(name, found) for name, tensor in named if (found := extent_of(tensor))]


def _overlapping(places: Iterable[Place]) -> Iterator[tuple[Place, Place]]:
    """Every two places that have bytes in common, by going through memory once."""
    before: list[Place] = []
    for place in sorted(places, key=lambda place: (str(place[1].memory), place[1].start)):
        before = [p for p in before if p[1].overlaps(place[1])]
        yield from ((other, place) for other in before)
        before.append(place)
