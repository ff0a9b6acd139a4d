"""What is verified: two checkpoints, and how each of them is loaded, edited and run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.checkpoint.config import load_config
from enjoyln_cli.checkpoint.marker import Marker
from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.run import choose_outputs, run
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event, default_listener
from enjoyln_cli.models.load import elements, load
from enjoyln_cli.models.memory import first_blocks, room_for_weights
from enjoyln_cli.models.offload import Offload, reader_of
from enjoyln_cli.models.outputs import config_returning
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.install import install
from enjoyln_cli.text import size

Embed = Callable[[dict[str, torch.Tensor], Batch], dict[str, torch.Tensor]]


@dataclass(frozen=True)
class CheckpointPair:
    """The two checkpoints, and how to load and run them."""

    original: Checkpoint
    folded: Checkpoint
    marker: Marker
    plan: Plan
    dtype: torch.dtype
    trust_remote_code: bool
    layers: int | None = None
    """If set, run only the first ``layers`` blocks of both models."""
    device_map: str = "auto"
    max_memory: int | None = None
    """Bytes of memory for the process; ``None`` for what the machine has left."""
    folder: Path | None = None
    """A directory for weights and outputs that are on disk while models run."""
    event: Event = default_listener
    embed: Embed | None = None
    """Adds the sentence embedding of a sentence-transformers pipeline to the outputs."""
    sizes: dict[Path, dict[str, int]] = field(default_factory=dict, compare=False)
    """For each checkpoint that was loaded before, the number of elements of each weight."""

    def read_sizes(self, checkpoint: Checkpoint) -> dict[str, int]:
        """The number of elements of each weight of ``checkpoint``; imports its class.

        Raises ``UnsupportedModel`` if ``layers`` does not shorten the model.
        """
        folder, name = checkpoint.source.path, self.marker.model_class
        if folder not in self.sizes:
            sizes = elements(folder, name, self._config(checkpoint), self.trust_remote_code)
            if self.layers is not None:
                whole = self._config(checkpoint, is_cut=False)
                uncut = elements(folder, name, whole, self.trust_remote_code)
                if sizes.keys() == uncut.keys():
                    raise UnsupportedModel(
                        f"{name} has the same weights with a config of {self.layers} blocks, so "
                        "--layers cannot shorten it: leave that option out"
                    )
            self.sizes[folder] = sizes
        return self.sizes[folder]

    def _config(self, checkpoint: Checkpoint, is_cut: bool = True) -> Any:
        config = load_config(checkpoint.source, self.trust_remote_code)
        config = config_returning(config, self.marker.outputs)
        return config if self.layers is None or not is_cut else first_blocks(config, self.layers)

    def load(
        self, checkpoint: Checkpoint, dtype: torch.dtype, missing: set[str] | None = None
    ) -> Any:
        """``checkpoint`` as the marker's class; names that it does not store go to ``missing``."""
        folder, name = checkpoint.source.path, self.marker.model_class
        sizes, config = self.read_sizes(checkpoint), self._config(checkpoint)
        room = room_for_weights(sizes, dtype, self.device_map, self.max_memory)
        offload = None
        if room is not None and self.folder:
            offload = Offload(self.folder, room)
            total = sum(sizes.values()) * dtype.itemsize
            what = f"{size(total)} in {str(dtype).removeprefix('torch.')}"
            resident = f"{size(min(room, total))} of it stay in memory"
            self.event("stage", f"reading weights from disk as layers run: {what}, {resident}")
        return load(folder, name, config, dtype, self.trust_remote_code, offload, missing)

    def run(self, model: Any, batch: Batch) -> dict[str, torch.Tensor]:
        """The outputs that are compared, for one batch."""
        folder = self.folder if reader_of(model) or self.max_memory else None
        outputs = run(model, [batch], folder)
        if self.marker.outputs:
            return choose_outputs(outputs, self.marker.outputs)[0]
        return self.embed(outputs[0], batch) if self.embed else outputs[0]

    def install(self, model: Any) -> None:
        """Make ``model`` compute RMSNorm where the marker says so."""
        modules = {name for name, _ in model.named_modules()}
        norms, ops = self.marker.rmsnorm, self.marker.centering
        if self.layers is not None:
            norms = tuple(name for name in norms if name in modules)
            ops = tuple(op for op in ops if op.module in modules)
        inputs, unproven, covered = (
            self.marker.entry_inputs,
            self.marker.unproven,
            self.marker.covered,
        )
        install(model, norms, ops, inputs, unproven, covered=covered)

    def centre(self, model: Any) -> None:
        """Carry out the plan on the original's weights in memory."""
        plan = self.plan
        if self.layers is not None:
            names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
            names |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
            plan = replace(
                plan,
                writers=tuple(w for w in plan.writers if w.parameter in names),
                untied=tuple(untied for untied in plan.untied if untied.parameter in names),
                widened=tuple(mlp for mlp in plan.widened if mlp.second.parameter in names),
                merged=tuple(
                    norm for norm in plan.merged if {n.parameter for n in norm.names} <= names
                ),
            )
        centre_parameters(model, plan)
