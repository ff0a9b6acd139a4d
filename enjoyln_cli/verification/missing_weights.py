"""Which weights may be missing from a checkpoint, and which may not.

transformers initialises weights that a checkpoint does not store. That is right for a part that was
never trained, such as a new head or an unused pooler: then both models are compared with the same
generated values. It is wrong for a damaged checkpoint. A missing weight is an error if

    its module         has another parameter that is stored (a bias without its weight)
    another layer      stores the same weight (all layers but the third one)
    every output       changes if the generated values change

A class that the config does not name (``--model-class``) may have a new head. For such a class,
only the outputs of the base model count.
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
"""Number of missing weights whose influence on the outputs is tested, by one run each."""
MOST_NAMED = 3

Run = Callable[[Any], Any]
"""Runs a model on a few inputs."""


def require_weights(model: Any, missing: Iterable[str], name: str, run: Run) -> None:
    """Raises ``BadCheckpoint`` if ``model`` needs weights that its checkpoint does not store.

    ``missing`` are the names of weights with generated values. ``name`` is that of the checkpoint,
    for the message. ``model`` is unchanged afterwards.
    """
    parameters = {found for found, _ in model.named_parameters(remove_duplicate=False)}
    left = sorted(set(missing) & parameters)
    if not left:
        return
    needed = _next_to_stored(left, parameters - set(left)) or _seen_by_all_outputs(model, left, run)
    if needed:
        more = f" and {len(needed) - MOST_NAMED} more" if len(needed) > MOST_NAMED else ""
        raise BadCheckpoint(
            f"{name} does not store {', '.join(needed[:MOST_NAMED])}{more}, which "
            f"{type(model).__name__} needs; fetch the checkpoint again, or name the class that you "
            "use with --model-class"
        )


def _next_to_stored(missing: list[str], stored: set[str]) -> list[str]:
    """Those of the ``missing`` weights that must be stored, by the first two rules (see above)."""
    modules = {found.rpartition(".")[0] for found in stored}
    layers = {_without_numbers(found) for found in stored}
    return [
        found
        for found in missing
        if found.rpartition(".")[0] in modules - {""} or _without_numbers(found) in layers
    ]


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _seen_by_all_outputs(model: Any, missing: list[str], run: Run) -> list[str]:
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
    """The outputs of the last call of ``part`` while ``model`` runs."""
    found: dict[str, torch.Tensor] = {}

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        found.update(tensors(output))

    handle = part.register_forward_hook(keep)
    try:
        run(model)
    finally:
        handle.remove()
    return found
