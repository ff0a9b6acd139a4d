"""Decide by measurement whether a quantised model may run RMSNorm.

Rounding the weights of a centred layer to a few bits gives its output a mean again, so a quantised
model computes LayerNorm. But the means are as small as the rounding itself, and RMSNorm may be as
good. Which is better depends on the model and the quantiser, so both are measured on inputs of the
user, against the exact function.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from enjoyln_cli.comparison.metrics import distances, largest, relative
from enjoyln_cli.comparison.run import Outputs, run
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.holders import models_in
from enjoyln_cli.runtime.entries import entries
from enjoyln_cli.runtime.install import run_folded
from enjoyln_cli.runtime.loading import (
    Holder,
    marker_of,
    saved_class,
    watched_weights,
)
from enjoyln_cli.runtime.loading import optimize as optimize_centred
from enjoyln_cli.runtime.weight_watch import unedited, weight_checks

LIMIT = 1.25
"""RMSNorm is used if its error is at most this times that of LayerNorm."""

Inputs = Mapping[str, torch.Tensor]


def optimize(
    model: Holder, measured: Inputs | Sequence[Inputs] | None = None, *, exact: Any = None
) -> Holder:
    """Make a loaded converted model compute with RMSNorm, in place; returns it.

    For a pipeline, or a module that contains transformers models, converts the models inside. The
    model can be used as before: saving, copying, ``.to(...)``, ``generate``. In training mode it
    computes LayerNorm. After training it does so until ``refold``, unless its weights have not
    changed.

    ``measured`` is for a model that is quantised: one batch of inputs for its ``forward`` by name,
    or several. The outputs with LayerNorm and with RMSNorm are compared with those of ``exact``, a
    model that is not quantised (by default the checkpoint that ``model`` was loaded from, in
    float32). RMSNorm is used if its error is at most 1.25 times that of LayerNorm, and until a
    weight changes; otherwise there is a warning. Copies of the model compute LayerNorm. The model
    has to be in eval mode; layers inside it that are not, as those that a quantiser has just made,
    are set to eval mode.

    Raises ``BadCheckpoint`` if the config has no marker, ``UnsupportedModel`` if the fold is not
    proven for the class, or if there is nothing to compare with, ``NotCentred`` if a weight has
    changed or cannot be checked (with ``measured``: if a centred layer has no weight any more, as
    those of ``quantize_dynamic``); then nothing is changed.
    """
    if measured is None:
        return optimize_centred(model)
    batches = [measured] if isinstance(measured, Mapping) else list(measured)
    models = list(models_in(model))
    if len(models) != 1 or not batches:
        instead = "no inputs" if not batches else f"{len(models)} models"
        raise UnsupportedModel(f"measured needs inputs for one model; there are {instead}")
    inner: Any = models[0]
    if inner.training:
        raise UnsupportedModel(
            "the model is in training mode, in which its norms compute LayerNorm; call eval() on it"
        )
    marker = marker_of(inner)
    watched_weights(inner, marker)  # raises before anything is changed
    inner.eval()
    expected = run(_exact_model(inner) if exact is None else exact, _on(exact, batches))
    run_folded(inner, marker, unedited(inner))
    checks = weight_checks(inner)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="computing LayerNorm")
        layer_norm = _error(run(inner, _on(inner, batches)), expected)
        for module, check in checks:
            check.accept(module)
        rms_norm = _error(run(inner, _on(inner, batches)), expected)
        is_as_good = rms_norm <= LIMIT * layer_norm
        if not is_as_good:
            for _, check in checks:
                check.take_back()
            run(inner, _on(inner, batches[:1]))  # checks the weights, which warns once more
    trouble = next((entry.trouble for _, entry in entries(inner) if entry.trouble), "")
    if is_as_good and trouble:
        warnings.warn(f"computing LayerNorm: {trouble}", stacklevel=2)
    if not is_as_good:
        warnings.warn(
            f"computing LayerNorm: its error is {layer_norm:.2g} on these inputs, that of RMSNorm "
            f"{rms_norm:.2g} (limit {LIMIT} times)",
            stacklevel=2,
        )
    return model


def _exact_model(model: Any) -> Any:
    """The checkpoint that ``model`` was loaded from, in float32 and with LayerNorm."""
    folder = str(getattr(model.config, "_name_or_path", ""))
    if not folder:
        raise UnsupportedModel(
            "it is not known which checkpoint the model was loaded from; pass exact=, a model that "
            "is not quantised"
        )
    try:
        loaded = saved_class(folder).from_pretrained(folder, dtype=torch.float32)
    except OSError as error:
        raise UnsupportedModel(
            f"{folder}, which the model was loaded from, cannot be loaded ({error}); pass exact=, "
            "a model that is not quantised"
        ) from error
    return loaded.eval()


def _on(model: Any, batches: Sequence[Inputs]) -> list[dict[str, torch.Tensor]]:
    """The batches on the device of ``model``; as they are for ``None``."""
    device = torch.device("cpu") if model is None else next(model.parameters()).device
    return [{name: value.to(device) for name, value in batch.items()} for batch in batches]


def _error(outputs: Outputs, expected: Outputs) -> float:
    return largest(relative(distances(outputs, expected)))
