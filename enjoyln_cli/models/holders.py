"""The transformers models that an object holds: a pipeline, an adapter, a sentence encoder.

What is done to a model is done to those inside, in place, and the object around stays what it is.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from enjoyln_cli.errors import UnsupportedModel

LIBRARIES = ("transformers.pipelines.", "sentence_transformers.")
"""Where classes come from that only hold a model, and tell its inputs by themselves."""


def holds_a_model(found: Any) -> bool:
    """Whether ``found`` is a pipeline of transformers or a model of sentence-transformers."""
    return any(f"{cls.__module__}.".startswith(LIBRARIES) for cls in type(found).__mro__)


def models_in(found: Any) -> list[nn.Module]:
    """The models of transformers in ``found``, or it, without those that are parts of another.

    Of a module that holds none, itself. Raises ``UnsupportedModel`` for what is no module and has
    none as its ``model``.
    """
    from transformers import PreTrainedModel

    outer = found if isinstance(found, nn.Module) else getattr(found, "model", None)
    if not isinstance(outer, nn.Module):
        raise UnsupportedModel(
            f"{type(found).__name__} is no model, and holds none as its attribute model; pass the "
            "model itself"
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
