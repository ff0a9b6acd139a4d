"""Runs a model and says what it returns.

Compared is every floating tensor that ``forward`` returns by default, the cache apart, or of these
the outputs that a user has chosen. A run is exact when weights, activations and every place where a
class asks for float32 are in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.kernels import literally
from enjoyln_cli.models.classes import dtype_of
from enjoyln_cli.models.load import silent
from enjoyln_cli.models.offload import on_disk
from enjoyln_cli.models.outputs import CACHE, by_field, match_names

Outputs = list[dict[str, torch.Tensor]]
"""One dict per batch: the name of an output to its values, on the CPU or mapped from the disk."""


class Float64(TorchFunctionMode):
    """Float32 means float64: softmax, rotary angles and norms that widen keep up with the rest."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        wide = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def run(model: nn.Module, batches: Sequence[Batch], folder: Path | None = None) -> Outputs:
    """What ``model`` returns for every batch, in the dtype in which it returns it.

    Floating inputs are cast to the model's dtype. A float64 model runs exactly (``Float64``). With
    a ``folder`` outputs are kept on its disk.
    """

    def kept(value: torch.Tensor) -> torch.Tensor:
        return on_disk(value, folder) if folder else value.cpu()

    dtype = dtype_of(model)
    outputs: Outputs = []
    with torch.no_grad(), silent(), literally():
        for batch in batches:
            given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
            if dtype == torch.float64:
                with Float64():
                    output = model(**given, **_flags(model))
            else:
                output = model(**given, **_flags(model))
            outputs.append({name: kept(value) for name, value in tensors(output)})
            del output
    return outputs


def _flags(model: Any) -> dict[str, Any]:
    """No cache: it would be kept in memory and is not compared."""
    return {"use_cache": False} if getattr(model.config, "use_cache", None) is not None else {}


def tensors(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating tensors of a model's output with their names, without the cache and losses."""
    for name, values in by_field(output).items():
        for value in values:
            if value.is_floating_point() and value.ndim and CACHE not in name.split("."):
                yield name, value


def choose_outputs(outputs: Outputs, names: Sequence[str]) -> Outputs:
    """The outputs that ``names`` (or patterns) choose; all of them where there are no names.

    Raises ``UnsupportedModel`` where a batch then has nothing to compare.
    """
    if not names:
        return outputs
    kept = [
        {name: value for name, value in batch.items() if name in match_names(names, batch)}
        for batch in outputs
    ]
    if not all(kept):
        known = ", ".join(dict.fromkeys(name for batch in outputs for name in batch))
        raise UnsupportedModel(
            f"nothing to compare: the model returns {known}, and {', '.join(names)} matches "
            "none of these"
        )
    return kept
