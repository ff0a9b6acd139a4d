"""Which bytes does a tensor cover, and do two tensors share any?

On the meta device, memory has no address; there tensors share memory if they have the same storage
object.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch


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


PlaceInMemory = tuple[str, Extent]


def extent_of(tensor: torch.Tensor) -> Extent | None:
    """Where a tensor lies in memory; ``None`` if it has no elements or no storage."""
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


def identity_of(tensor: torch.Tensor) -> object:
    """A key that two tensors share if they are the same elements of the same memory."""
    return extent_of(tensor) or id(tensor)


def placed(named: Iterable[tuple[str, torch.Tensor]]) -> list[PlaceInMemory]:
    """The names with the extents of their tensors, without tensors that have none."""
    return [(name, found) for name, tensor in named if (found := extent_of(tensor))]


def overlapping(places: Iterable[PlaceInMemory]) -> Iterator[tuple[PlaceInMemory, PlaceInMemory]]:
    """All pairs of places that overlap, found in one pass over the sorted places."""
    before: list[PlaceInMemory] = []
    for place in sorted(places, key=lambda place: (str(place[1].memory), place[1].start)):
        before = [p for p in before if p[1].overlaps(place[1])]
        yield from ((other, place) for other in before)
        before.append(place)
