"""From a model and a call of it to a graph, with its parameters named.

A model class is built on the meta device (no weights), and what it runs is recorded (see
``recorder``), or captured by ``torch.export`` where a recording cannot tell all. Where that fails,
or leaves a norm's input without a shape, since shapes depend on the values of inputs, the ops of
one run on example values are written down instead (see ``dry_run``), and the graph holds for calls
of that kind.
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
    """The graphs of the calls of one model; each that can be recorded is recorded once."""

    def __init__(self, model: nn.Module, naming: Naming = str, inner: str | None = None) -> None:
        """``naming`` gives the plan's name of a path in ``model``.

        What the submodule ``inner`` returns counts as returned, so that a graph also proves the
        class of that submodule.
        """
        self.model = model
        self.naming = naming
        self.inner = inner
        self._recordings: dict[int, tuple[Call, Trace | None]] = {}
        """By the identity of a call. The call is kept too, so that no other gets its identity."""

    def accepts(self, call: Call) -> bool:
        """Whether the model takes inputs of this form: recorded, or tried without weights."""
        return self._recording(call) is not None or accepts(self.model, call)

    def capture(self, call: Call) -> Trace:
        """The graph of one call in eval mode, with ``aten.linear``, ``layer_norm`` etc. whole.

        Raises ``TraceFailed`` where the model neither exports nor runs without its weights.
        """
        if recording := self._recording(call):
            return recording
        model, exported, exporting = self.model, None, None
        weights = self._weights
        try:
            with ready(model) as watchers:
                exported = export_call(self._of(model, call, weights, watchers))
        except Exception as error:  # torch.export raises what it meets, of any class
            exported, exporting = None, error
        if exported is not None and not _normalises_unknown_shapes(exported.graph):
            return exported
        try:
            copied: list[torch.Tensor] = []
            bare = without_weights(model, copied)
            weights = replace(weights, locked={**weights.locked, **reason_outside(model, copied)})
            with ready(bare) as watchers:
                return run_call(self._of(bare, call, weights, watchers))
        except Exception as error:
            if exported is not None:
                return exported
            raise TraceFailed(
                f"{type(model).__name__} could not be traced ({call.label}): {say_why(error)}"
            ) from exporting

    def _recording(self, call: Call) -> Trace | None:
        """The graph of a call as it was recorded; ``None`` where export has to tell."""
        if id(call) not in self._recordings:
            self._recordings[id(call)] = call, self._record(call)
        return self._recordings[id(call)][1]

    def _record(self, call: Call) -> Trace | None:
        if is_recordable(self.model):
            with suppress(Exception), ready(self.model) as watchers:  # whatever it is, export tells
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
    """Whether a LayerNorm reads a tensor whose shape values decide, so that no axis is known."""
    called = (node for node in graph.nodes if packet(node) is aten.layer_norm)
    return any(shape_of(node) is None for node in called)


def record_call(this: CallToTrace) -> Trace:
    """The graph of a call as it is recorded. Raises where a recording cannot tell all."""
    runner = this.runner()
    found = record(runner, this.call.steps)
    settle(found.graph)
    replace_private_writes(found.graph)
    if left := mutating_ops(found.graph):
        raise TraceFailed(f"{left[0].target} writes where others may read")
    return annotate(
        this,
        found.graph,
        parameters=found.parameters,
        inputs=found.inputs,
        returned=fields_of(found.returned, found.layout),
        replaced=runner.replaced,
        outside=found.constants,
    )
