"""Run a model that does not fit in memory: weights are read when their layer runs.

All tensors stay on disk. Before a layer runs, accelerate's hooks get its weights from a mapping,
and drop them afterwards. That mapping is a ``WeightsOnDemand``. It returns the value that was set
for a name with ``make``, or else the value in the files, and keeps it in memory if there is room.
So a model can be edited without having all of it in memory or on disk again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

LoadTensor = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Offload:
    """How much of a model may stay in memory, and a folder on disk for temporary weights."""

    folder: Path
    """Holds weights that the model needs in another layout than the files have."""
    free_bytes: int
    """Bytes of weights that may stay in memory between runs of their layers."""


@dataclass
class WeightsOnDemand(Mapping[str, torch.Tensor]):
    """The weights of a model by the names of its parameters; each is read when it is requested."""

    stored: Mapping[str, torch.Tensor]
    """The weights in the files."""
    free_bytes: int
    """Bytes of further weights that may be kept in memory."""
    made: dict[str, LoadTensor] = field(default_factory=dict)
    """Functions that compute the weights which were set with ``make``."""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weights that are kept in memory."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.kept:
            return self.kept[name]
        with torch._C.DisableTorchFunction():  # modes around the model must not affect reading
            value = self.source(name)()
        if value.nbytes <= self.free_bytes:
            self.free_bytes -= value.nbytes
            self.kept[name] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self.stored), **self.made})

    def __len__(self) -> int:
        return len(self.stored.keys() | self.made.keys())

    def source(self, name: str) -> LoadTensor:
        """A function that returns the present value of ``name``, even if it is set again later."""
        return self.made.get(name) or partial(self.stored.__getitem__, name)

    def make(self, name: str, value: LoadTensor) -> None:
        """Set ``name`` to what ``value()`` returns, which has the parameter's dtype and shape."""
        if name in self.kept:
            self.free_bytes += self.kept.pop(name).nbytes
        self.made[name] = value


def read_when_needed(model: nn.Module, free_bytes: int) -> WeightsOnDemand:
    """Put a ``WeightsOnDemand`` between the files and a model that accelerate has left on disk."""
    maps = [found for module in model.modules() for found in _maps(module)]
    reader = WeightsOnDemand(maps[0].dataset, free_bytes)
    known = set(reader.stored)
    for name, tied_to in getattr(model, "all_tied_weights_keys", {}).items():
        if name not in known:
            reader.make(name, reader.source(tied_to))
    for found in maps:
        found.dataset = reader
    return reader


def reader_of(model: nn.Module) -> WeightsOnDemand | None:
    """The reader of a model whose weights are on disk; ``None`` if they are in memory."""
    found = (one.dataset for module in model.modules() for one in _maps(module))
    return next((one for one in found if isinstance(one, WeightsOnDemand)), None)


def _maps(module: nn.Module) -> Iterator[Any]:
    """The weight mappings of accelerate's hooks on ``module``."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        found = getattr(one, "weights_map", None)
        if hasattr(found, "dataset"):
            yield found


def on_disk(value: torch.Tensor, folder: Path) -> torch.Tensor:
    """Copy a tensor to an unnamed file that is mapped into memory, and vanishes with the tensor."""
    if not value.numel():
        return value
    handle, name = tempfile.mkstemp(dir=folder)
    os.close(handle)
    mapped = torch.from_file(name, shared=True, size=value.numel(), dtype=value.dtype)
    os.unlink(name)
    return mapped.view(value.shape).copy_(value)
