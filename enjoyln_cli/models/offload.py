"""A model that does not fit in memory: a weight is read when the layer that holds it runs.

Decides where a weight is. Every tensor is left on the disk, and accelerate's hooks ask a mapping
for those of a layer before it runs, and let go of them afterwards. That mapping is a ``Reader``:
what is asked for is what was made for its name, or else what the files hold, and stays in memory
where there is room for it. So a model can be edited without being anywhere as a whole.
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

Value = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Offload:
    """How much of a model stays in memory, and where there is room for the rest."""

    folder: Path
    """For weights that the files hold in another layout than the model does."""
    room: int
    """Bytes of weights that may stay in memory from one layer's run to its next."""


@dataclass
class Reader(Mapping[str, torch.Tensor]):
    """The weights of a model by the names of its parameters, each read when it is asked for."""

    stored: Mapping[str, torch.Tensor]
    room: int
    made: dict[str, Value] = field(default_factory=dict)
    kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self.kept:
            return self.kept[name]
        with torch._C.DisableTorchFunction():  # however the model computes, files are read alike
            value = self.source(name)()
        if value.nbytes <= self.room:
            self.room -= value.nbytes
            self.kept[name] = value
        return value

    def __iter__(self) -> Iterator[str]:
        return iter({**dict.fromkeys(self.stored), **self.made})

    def __len__(self) -> int:
        return len(self.stored.keys() | self.made.keys())

    def source(self, name: str) -> Value:
        """What gives the value that ``name`` has now, whatever it becomes later."""
        return self.made.get(name) or partial(self.stored.__getitem__, name)

    def make(self, name: str, value: Value) -> None:
        """From now on ``name`` is what ``value`` returns, of the parameter's dtype and shape."""
        if name in self.kept:
            self.room += self.kept.pop(name).nbytes
        self.made[name] = value


def read_when_needed(model: nn.Module, room: int) -> Reader:
    """Put a ``Reader`` between the files and a model that accelerate has left on the disk."""
    maps = [found for module in model.modules() for found in _maps(module)]
    reader = Reader(maps[0].dataset, room)
    known = set(reader.stored)
    for name, tied_to in getattr(model, "all_tied_weights_keys", {}).items():
        if name not in known:
            reader.make(name, reader.source(tied_to))
    for found in maps:
        found.dataset = reader
    return reader


def reader_of(model: nn.Module) -> Reader | None:
    """What reads the weights of ``model``; ``None`` for one that is in memory."""
    found = (one.dataset for module in model.modules() for one in _maps(module))
    return next((one for one in found if isinstance(one, Reader)), None)


def _maps(module: nn.Module) -> Iterator[Any]:
    """The mappings that the hooks of ``module`` ask; several hooks are one that holds them."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        found = getattr(one, "weights_map", None)
        if hasattr(found, "dataset"):
            yield found


def on_disk(value: torch.Tensor, folder: Path) -> torch.Tensor:
    """The same values in a file without a name, mapped into memory; it goes with the tensor."""
    if not value.numel():
        return value
    handle, name = tempfile.mkstemp(dir=folder)
    os.close(handle)
    mapped = torch.from_file(name, shared=True, size=value.numel(), dtype=value.dtype)
    os.unlink(name)
    return mapped.view(value.shape).copy_(value)
