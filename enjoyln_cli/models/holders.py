"""Find the transformers models inside a pipeline, an adapter or a sentence encoder.

enjoyln changes the inner models in place; the object around them stays the same.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from enjoyln_cli.errors import UnsupportedModel

LIBRARIES = ("transformers.pipelines.", "sentence_transformers.")
"""Modules whose classes hold a model and prepare its inputs themselves."""


def holds_a_model(found: Any) -> bool:
    """Whether ``found`` is a pipeline of transformers or a model of sentence-transformers."""
    return any(f"{cls.__module__}.".startswith(LIBRARIES) for cls in type(found).__mro__)


def models_in(found: Any) -> list[nn.Module]:
    """The outermost transformers models in ``found``; a module without any counts as the model.

    Raises ``UnsupportedModel`` if ``found`` is not a module and has no module as its ``model``.
    """
    from transformers import PreTrainedModel

    outer = found if isinstance(found, nn.Module) else getattr(found, "model", None)
    if not isinstance(outer, nn.Module):
        raise UnsupportedModel(
            f"{type(found).__name__} is not a model and has no model as its attribute model; pass "
            "the model itself"
        )
    models: list[nn.Module] = []

    def walk(module: nn.Module) -> None:
        if isinstance(module, PreTrainedModel):
            models.append(module)
            return
        for child in module.children():
            walk(child)

    walk(outer)
    return models or [outer]
