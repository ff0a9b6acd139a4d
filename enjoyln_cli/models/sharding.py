"""Weights that ``fully_shard`` (the second version of torch's FSDP) has split over processes.

A split weight is a DTensor. Reading one as a whole is a step that all processes take together, so
whoever does it has to do it for the same weights in the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules in ``model`` whose parameters ``fully_shard`` has split."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def whole(tensor: Any) -> torch.Tensor:
    """The tensor with the values of all processes; the tensor itself if it is not split."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore


def write_whole_tensor(tensor: Any, values: torch.Tensor) -> None:
    """Set a tensor to ``values``, which every process has; each writes the part that it holds.

    Torch does not count the change, so that a backward pass which has saved the tensor still runs.
    """
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        place = (tensor.device_mesh, tensor.placements)
        values = distribute_tensor(values.to(tensor.dtype), *place, src_data_rank=None)
    tensor.data.copy_(values)


@contextmanager
def in_shards(model: nn.Module) -> Iterator[None]:
    """Within the block, every split parameter of ``model`` is a DTensor that can be written.

    FSDP replaces them by whole copies for a forward pass, and drops what is written to a copy.
    """
    gathered = [module for module in sharded_modules(model) if _is_gathered(module)]
    for module in gathered:
        module.reshard()
    try:
        yield
    finally:
        for module in gathered:
            module.unshard()


def _is_gathered(module: nn.Module) -> bool:
    """Whether the parameters of a split module are whole copies at present."""
    below = {id(p) for inner in sharded_modules(module)[1:] for p in inner.parameters()}
    own = (parameter for parameter in module.parameters() if id(parameter) not in below)
    return any(not hasattr(parameter, "full_tensor") for parameter in own)
