"""Capture the graph of one call of a model, by the first of three methods that works.

1. Record the ops of a run on the meta device (``recorder``). This is the fastest method, but only
   for models without weights and calls without side effects.
2. Capture the call with ``torch.export`` (``export``).
3. If that fails, or if the input of a norm has no fixed shape since shapes depend on values: record
   the ops of one run on example values (``dry_run``). The graph then holds for calls of this kind
   only.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn
from torch.fx import Graph

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.effects.isolated_run import Watchers, ready
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.in_place import mutating_ops, replace_private_writes
from enjoyln_cli.graph.insertion_points import settle
from enjoyln_cli.graph.nodes import aten, packet, shape_of
from enjoyln_cli.models.meta_device import without_weights
from enjoyln_cli.models.norm_modules import first_names
from enjoyln_cli.trace.annotate import CallToTrace, Weights, annotate, fields_of
from enjoyln_cli.trace.dry_run import accepts, run_call
from enjoyln_cli.trace.export import export_call
from enjoyln_cli.trace.failure_reasons import say_why
from enjoyln_cli.trace.recorder import is_recordable, record
from enjoyln_cli.trace.shared_storage import (
    read_without_torch,
    reason_of_sharing,
    reason_outside,
    ties,
)
from enjoyln_cli.trace.trace import Naming, Trace


class Captures:
    """Captures the graphs of one model's calls, and keeps those that were recorded."""

    def __init__(self, model: nn.Module, naming: Naming = str, inner: str | None = None) -> None:
        """``naming`` converts a path in ``model`` to the name that the plan uses.

        Outputs of the submodule ``inner`` count as returned, so that a graph also proves the class
        of that submodule.
        """
        self.model = model
        self.naming = naming
        self.inner = inner
        self._recordings: dict[int, tuple[Call, Trace | None]] = {}
        """By the ``id`` of a call. The call itself is kept, so that its ``id`` is not reused."""

    def accepts(self, call: Call) -> bool:
        """Whether the model accepts inputs of this form, found by a run without weights."""
        return self._recording(call) is not None or accepts(self.model, call)

    def capture(self, call: Call) -> Trace:
        """The graph of one call in its mode, in which ``aten.linear`` etc. are single nodes.

        Raises ``TraceFailed`` if the model can neither be exported nor run without its weights.
        """
        if recording := self._recording(call):
            return recording
        model, exported, exporting = self.model, None, None
        weights = self._weights
        try:
            with ready(model, call.training) as watchers:
                exported = export_call(self._of(model, call, weights, watchers))
        except Exception as error:  # torch.export passes on exceptions of any class
            exported, exporting = None, error
        if exported is not None and not _normalises_unknown_shapes(exported.graph):
            return exported
        try:
            copied: list[torch.Tensor] = []
            bare = without_weights(model, copied)
            weights = replace(weights, locked={**weights.locked, **reason_outside(model, copied)})
            with ready(bare, call.training) as watchers:
                return run_call(self._of(bare, call, weights, watchers))
        except Exception as error:
            if exported is not None:
                return exported
            raise TraceFailed(
                f"{type(model).__name__} could not be traced ({call.label}): {say_why(error)}"
            ) from exporting

    def _recording(self, call: Call) -> Trace | None:
        """The recorded graph of a call; ``None`` if it cannot be recorded."""
        if id(call) not in self._recordings:
            self._recordings[id(call)] = call, self._record(call)
        return self._recordings[id(call)][1]

    def _record(self, call: Call) -> Trace | None:
        if is_recordable(self.model):
            mode = ready(self.model, call.training)
            with suppress(Exception), mode as watchers:  # export reports any error
                return record_call(self._of(self.model, call, self._weights, watchers))
        return None

    @cached_property
    def _weights(self) -> Weights:
        model = self.model
        return Weights(
            model, ties(model), {**read_without_torch(model), **reason_of_sharing(model)}
        )

    def _of(
        self, model: nn.Module, call: Call, weights: Weights, watchers: Watchers
    ) -> CallToTrace:
        aliases = first_names(self.model)

        def named(path: str) -> str:
            return self.naming(aliases.get(path, path))

        return CallToTrace(
            model=model,
            call=call,
            naming=named,
            inner=self.inner,
            weights=weights,
            watchers=watchers,
        )


def _normalises_unknown_shapes(graph: Graph) -> bool:
    """Whether a LayerNorm reads a tensor whose shape depends on values, so its axis is unknown."""
    called = (node for node in graph.nodes if packet(node) is aten.layer_norm)
    return any(shape_of(node) is None for node in called)


def record_call(this: CallToTrace) -> Trace:
    """The recorded graph of a call. Raises an exception if a recording cannot capture it."""
    runner = this.runner()
    found = record(runner, this.call.steps)
    settle(found.graph)
    replace_private_writes(found.graph)
    if left := mutating_ops(found.graph):
        raise TraceFailed(f"{left[0].target} writes to memory that other ops may read")
    return annotate(
        this,
        found.graph,
        parameters=found.parameters,
        inputs=found.inputs,
        returned=fields_of(found.returned, found.layout),
        changed=(),
        outside=found.constants,
    )
