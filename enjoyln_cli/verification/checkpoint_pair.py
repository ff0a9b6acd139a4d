"""What is verified: two checkpoints, and how each of them is loaded, edited and run."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.checkpoint.marker import Marker
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.embedding import Embed
from enjoyln_cli.comparison.run import Outputs, choose_outputs, run
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.models.classes import build
from enjoyln_cli.models.memory import bytes_for_weights, fits
from enjoyln_cli.models.offload import Offload, reader_of
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.recipe.stock_targets import StockTarget
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.text import dtype_name, size
from enjoyln_cli.verification.verify_options import VERIFY_DEFAULTS, VerifyOptions


@dataclass(frozen=True)
class CheckpointPair:
    """The two checkpoints, and how to load and run them."""

    original: OpenedModel
    folded: OpenedModel
    marker: Marker
    plan: Plan
    """By which the original is edited."""
    target: StockTarget | None
    """How the folded model is stored as another class, if it is."""
    dtype: torch.dtype
    options: VerifyOptions = VERIFY_DEFAULTS
    folder: Path | None = None
    """A directory for weights and outputs that are on disk while models run."""
    event: Event = default_listener
    embed: Embed | None = None
    """Adds the sentence embedding of a sentence-transformers pipeline to the outputs."""

    def offload(self, opened: OpenedModel, dtype: torch.dtype) -> Offload | None:
        """How much stays in memory; ``None`` for all of it.

        If the stored tensors would fit, the class is not built to tell how large its weights are.
        """
        stored = sum(prod(tensor.shape) for tensor in opened.checkpoint.tensors.values())
        limits = self.options.device_map, self.options.max_memory
        if self.folder is None or fits(stored, dtype, *limits):
            return None
        bare = build(opened.cls, opened.config)
        sizes = {name: parameter.numel() for name, parameter in bare.named_parameters()}
        free_bytes = bytes_for_weights(sizes, dtype, *limits)
        if free_bytes is None:
            return None
        total = sum(sizes.values()) * dtype.itemsize
        weights = f"{size(total)} in {dtype_name(dtype)}"
        resident = f"{size(min(free_bytes, total))} of it stay in memory"
        self.event("stage", f"reading weights from disk as layers run: {weights}, {resident}")
        return Offload(self.folder, free_bytes)

    def run(self, model: Any, batch: Batch) -> Outputs:
        """The outputs that are compared, for one batch."""
        folder = self.folder if reader_of(model) or self.options.max_memory else None
        outputs = run(model, [batch], folder)
        if self.marker.plan.outputs:
            return choose_outputs(outputs, self.marker.plan.outputs)[0]
        return self.embed(outputs[0], batch) if self.embed else outputs[0]
