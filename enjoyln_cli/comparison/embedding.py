"""The sentence embedding of a sentence-transformers pipeline, as one more output to compare.

The modules after the transformer (pooling, dense, normalisation) are loaded by that library, each
from its folder. They are applied to the transformer's outputs, in their dtype and on their device.
Gradients of the embedding reach these outputs, but not the modules' weights.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from enjoyln_cli.checkpoint.sentence_transformers import MODULES
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.run import Outputs
from enjoyln_cli.events import Event
from enjoyln_cli.text import first_line

LIBRARY = "sentence_transformers"
EMBEDDING = "sentence_embedding"
TOKENS = "last_hidden_state"

Embed = Callable[[Outputs, Batch], Outputs]
"""Returns the outputs of a transformer with the sentence embedding added."""


def embedder(source: Source, event: Event) -> Embed | None:
    """A function that adds the sentence embedding to a transformer's outputs for a batch.

    ``None`` if the checkpoint is not a sentence-transformers pipeline, or if its modules cannot be
    loaded. In the second case a warning says why, and only the transformer's outputs are compared.
    """
    if not (source.root / MODULES).is_file():
        return None
    try:
        modules = _modules(source)
    except Exception as error:  # the library does not check the files: any error is possible
        needs = "these need: pip install sentence-transformers"
        why = needs if isinstance(error, ImportError) else first_line(error)
        event("warning", f"comparing token embeddings, not sentence embeddings: {why}")
        return None

    def add(outputs: Outputs, batch: Batch) -> Outputs:
        tokens = outputs.get(TOKENS)
        if tokens is None or "input_ids" not in batch:
            return outputs
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        features: dict[str, Any] = {"token_embeddings": tokens, "attention_mask": mask}
        for module in modules:
            features = copy.deepcopy(module).to(tokens)(features)
        found = features.get(EMBEDDING)  # absent if no module pools
        return outputs if found is None else {**outputs, EMBEDDING: found}

    return add


def _modules(source: Source) -> list[torch.nn.Module]:
    """The modules after the transformer. Raises ``ValueError`` for a class of another library."""
    _, *behind = json.loads((source.root / MODULES).read_text(encoding="utf-8"))
    found = []
    for entry in behind:
        package, _, name = str(entry["type"]).rpartition(".")
        if package.partition(".")[0] != LIBRARY:
            raise ValueError(f"{entry['type']} is not a class of {LIBRARY}")
        cls: Any = getattr(import_module(package), name)
        module = cls.load(str(source.root / entry["path"]))
        found.append(module.eval().requires_grad_(False))
    return found
