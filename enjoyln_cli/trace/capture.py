"""Capture the graph of one call of a model, by the first of three methods that works.

1. Record the ops of a run on the meta device (``recorder.record``). This is the fastest method, but
   only for models without weights and calls without side effects.
2. Capture the call with ``torch.export`` (``export``).
3. If that fails, or if the input of a norm has no fixed shape since shapes depend on values: record
   the ops of one run on example values (``recorder.record_example``). The graph then holds for
   calls of this kind only.

Each works on a copy of the model without weights that is made for this one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import torch
from torch import nn
from torch.fx import Graph, Node

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.in_place import mark_written, mutating_ops, replace_private_writes
from enjoyln_cli.graph.insertion_points import settle
from enjoyln_cli.graph.nodes import aten, packet, shape_of
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.models.meta_device import (
    copy_without_weights,
    on_cpu,
    on_meta,
    weightless,
    without_memory,
)
from enjoyln_cli.models.norm_modules import first_names
from enjoyln_cli.plan.trusted_code import is_stock
from enjoyln_cli.trace.annotate import CallToTrace, Weights, annotate, fields_of
from enjoyln_cli.trace.failure_reasons import say_why
from enjoyln_cli.trace.recorder import Recording, is_recordable, record, record_example
from enjoyln_cli.trace.shared_storage import reason_of_sharing, reason_outside, ties
from enjoyln_cli.trace.steps import Steps, quiet, watch
from enjoyln_cli.trace.torch_export import export_call
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
        self.is_stock = is_stock(model)
        """Whether the model follows transformers' conventions (see ``plan.trusted_code``)."""
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
        exported, exporting = None, None
        try:
            with quiet(call.training):
                exported = export_call(self.prepared(call))
        except Exception as error:  # torch.export passes on exceptions of any class
            exporting = error
        if exported is not None and not _normalises_unknown_shapes(exported.graph):
            return exported
        try:
            with quiet(call.training):
                return record_example_call(self.prepared(call, on_meta))
        except Exception as error:
            if exported is not None:
                return exported
            raise TraceFailed(
                f"{type(self.model).__name__} could not be traced ({call.label}): {say_why(error)}"
            ) from exporting

    def prepared(
        self, call: Call, stand_in: Callable[[nn.Parameter], nn.Parameter] = without_memory
    ) -> CallToTrace:
        """``call`` with a copy of the model that runs it (see ``copy_without_weights``)."""
        copied: list[torch.Tensor] = []
        bare = copy_without_weights(self.model, stand_in, copied)
        own = {*map(id, stored_weights(self.model).values())}
        others = [tensor for tensor in copied if id(tensor) not in own]
        locked = {**reason_outside(self.model, others), **self._weights.locked}
        return CallToTrace(
            model=bare,
            call=call,
            naming=self._named,
            inner=self.inner,
            weights=replace(self._weights, locked=locked),
            watchers=watch(bare, call.training),
        )

    def _recording(self, call: Call) -> Trace | None:
        """The recorded graph of a call; ``None`` if it cannot be recorded."""
        if id(call) not in self._recordings:
            self._recordings[id(call)] = call, self._record(call)
        return self._recordings[id(call)][1]

    def _record(self, call: Call) -> Trace | None:
        if is_recordable(self.model):
            with suppress(Exception), quiet(call.training):  # export reports any error
                return record_call(self.prepared(call))
        return None

    @cached_property
    def _weights(self) -> Weights:
        return Weights(self.model, ties(self.model), reason_of_sharing(self.model))

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        return first_names(self.model)

    def _named(self, path: str) -> str:
        return self.naming(self._aliases.get(path, path))


def accepts(model: nn.Module, call: Call) -> bool:
    """Whether the model accepts inputs of this form, found by a run without weights."""
    try:
        bare = copy_without_weights(model, on_meta).train(call.training)
        with quiet(call.training), weightless():
            Steps(bare, call.flags, None, cache=call.cache)(*on_cpu(call.steps))
    except Exception:  # with inputs of a wrong form, a model may raise any exception
        return False
    return True


def _normalises_unknown_shapes(graph: Graph) -> bool:
    """Whether a LayerNorm reads a tensor whose shape depends on values, so its axis is unknown."""
    called = (node for node in graph.nodes if packet(node) is aten.layer_norm)
    return any(shape_of(node) is None for node in called)


def record_call(this: CallToTrace) -> Trace:
    """The recorded graph of a call. Raises an exception if a recording cannot capture it."""
    found = record(this.runner(), this.call.steps)
    _settle(found)
    if left := mutating_ops(found.graph):
        raise TraceFailed(f"{left[0].target} writes to memory that other ops may read")
    return _annotated(this, found)


def record_example_call(this: CallToTrace) -> Trace:
    """The graph of a call with its example inputs. Raises an exception if it cannot be recorded."""
    runner = this.runner()
    found, computed = record_example(runner, this.call.steps)
    _settle(found)
    if any(map(computed.holds_real, found.constants.values())):
        raise TraceFailed("a value leaves the graph as a parameter or a tensor of another class")
    mark_written(found.graph, _sharing(this, found.parameters))
    trace = _annotated(this, found, runner.replaced | runner.written)
    read = runner.read_values or any(map(_tells_python, found.graph.nodes))
    read |= any(map(computed.holds, found.constants.values()))
    return replace(trace, by_example=True, by_values=read)


def _settle(found: Recording) -> None:
    settle(found.graph)
    replace_private_writes(found.graph)


def _annotated(this: CallToTrace, found: Recording, changed: Iterable[str] = ()) -> Trace:
    return annotate(
        this,
        found.graph,
        parameters=found.parameters,
        inputs=found.inputs,
        returned=fields_of(found.returned, found.layout),
        changed=changed,
        outside=found.constants.values(),
    )


def _tells_python(node: Node) -> bool:
    """Whether the node's result makes later code depend on values: as a number or as a shape."""
    told = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not told.isdisjoint(getattr(node.target, "tags", ()))


def _sharing(this: CallToTrace, parameters: Mapping[Node, torch.Tensor]) -> list[Node]:
    """The nodes of parameters that share memory with other tensors."""
    locked, tied = this.weights.locked, this.weights.ties
    named = {id(tensor): name for name, tensor in stored_weights(this.model).items()}
    names = {node: named[id(tensor)] for node, tensor in parameters.items()}
    return [node for node, name in names.items() if name in locked or len(tied[name]) > 1]
