"""Which weights may be missing from a checkpoint, and which make it another model.

transformers makes up what a checkpoint does not store. That is right for a part that its author
never trained, such as a new head or a pooler that nobody reads, and both models are then compared
with the same made-up values. It is wrong for a damaged checkpoint. A weight has to be stored where

    its module         has another parameter that is stored (a bias without its weight)
    another layer      stores the same weight (all layers but the third one)
    every output       changes with the made-up values

For a class that the config does not name (``--model-class``) a head may be new, so there the
outputs are those of the base model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from enjoyln_cli.comparison.run import tensors
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.models.load import fill, values_of
from enjoyln_cli.models.offload import reader_of

MOST_TRIED = 32
"""Weights whose influence is tried, one run for each."""
MOST_NAMED = 3

Run = Callable[[Any], Any]
"""Runs a model on a few inputs."""


def require_weights(model: Any, missing: Iterable[str], name: str, run: Run) -> None:
    """Raises ``BadCheckpoint`` for weights that ``model`` needs and its checkpoint does not store.

    ``missing`` have made-up values; ``name`` is the checkpoint's, to show. ``model`` is as before
    afterwards.
    """
    parameters = {found for found, _ in model.named_parameters(remove_duplicate=False)}
    left = sorted(set(missing) & parameters)
    if not left:
        return
    needed = _beside_stored(left, parameters - set(left)) or _read_everywhere(model, left, run)
    if needed:
        more = f" and {len(needed) - MOST_NAMED} more" if len(needed) > MOST_NAMED else ""
        raise BadCheckpoint(
            f"{name} does not store {', '.join(needed[:MOST_NAMED])}{more}, which "
            f"{type(model).__name__} needs; fetch the checkpoint again, or name the class that you "
            "use with --model-class"
        )


def _beside_stored(missing: list[str], stored: set[str]) -> list[str]:
    modules = {found.rpartition(".")[0] for found in stored}
    layers = {_of_any_layer(found) for found in stored}
    return [
        found
        for found in missing
        if found.rpartition(".")[0] in modules - {""} or _of_any_layer(found) in layers
    ]


def _of_any_layer(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _read_everywhere(model: Any, missing: list[str], run: Run) -> list[str]:
    """Those of the ``missing`` weights on which every output depends."""
    prefix = str(getattr(model, "base_model_prefix", ""))
    base = getattr(model, prefix, None) if prefix else None
    named = type(model).__name__ in (getattr(model.config, "architectures", None) or ())
    whole = named or not isinstance(base, nn.Module)
    part: Any = model if whole else base
    tried = [found for found in missing if whole or found.startswith(f"{prefix}.")][:MOST_TRIED]
    if not tried:
        return []
    before, reader, values = _outputs(part, model, run), reader_of(model), values_of(model)
    needed = []
    for found in tried:
        fill(values[found], found, reader, f"another {found}")
        after = _outputs(part, model, run)
        fill(values[found], found, reader, found)
        if before and not any(torch.equal(before[key], after[key]) for key in before):
            needed.append(found)
        if len(needed) > MOST_NAMED:
            break
    return needed


def _outputs(part: nn.Module, model: Any, run: Run) -> dict[str, torch.Tensor]:
    """What ``part`` returns while ``model`` runs, at its last call."""
    found: dict[str, torch.Tensor] = {}

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found.update(tensors(output))

    handle = part.register_forward_hook(keep)
    try:
        run(model)
    finally:
        handle.remove()
    return found
