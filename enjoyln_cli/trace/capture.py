"""Capture the graph of one call of a model, by recording the ops of one run without weights.

The run has the values of the example inputs (``recorder.record``). If Python reads none of these,
the graph holds for all values. If it does, a further run shows whether the graph holds for all
values in spite of that (``holds_for_all_values``). Otherwise it holds for calls of this kind only.

All these runs take the branches that the code takes while it is exported, since these need the
fewest values. Only if the code fails there, it takes its usual branches.

Each recording works on a copy of the model without weights that is made for this one graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.in_place import (
    mark_written,
    replace_private_writes,
    replace_scalings,
)
from enjoyln_cli.graph.insertion_points import settle
from enjoyln_cli.graph.nodes import depends_on_values
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.models.meta_device import (
    copy_without_weights,
    forget_buffers,
    is_mask,
    meta_weights,
    on_cpu,
)
from enjoyln_cli.models.norm_modules import first_names
from enjoyln_cli.plan.trusted_code import is_stock
from enjoyln_cli.trace.annotate import CallToTrace, annotate
from enjoyln_cli.trace.failure_reasons import say_why
from enjoyln_cli.trace.recorder import record
from enjoyln_cli.trace.shared_storage import reason_of_sharing, reason_outside, ties
from enjoyln_cli.trace.size_range import holds_for_all_values
from enjoyln_cli.trace.steps import Steps, quiet, watch
from enjoyln_cli.trace.trace import Naming, Trace


class Recorder:
    """Captures the graphs of one model's calls."""

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
        """Whether the model accepts such inputs, found by a run without weights."""
        return self._recording(call) is not None or accepts(self.model, call)

    def capture(self, call: Call) -> Trace:
        """The graph of one call in its mode, in which ``aten.linear`` etc. are single nodes.

        Raises ``TraceFailed`` if the model cannot run without its weights.
        """
        if (trace := self._recording(call)) is not None:
            return self._for_all_values(trace, exporting=True)
        try:
            return self._for_all_values(self._record(call, exporting=False), exporting=False)
        except Exception as error:  # of the model's code, or of torch
            raise TraceFailed(
                f"{type(self.model).__name__} could not be traced ({call.label}): {say_why(error)}"
            ) from error

    def _recording(self, call: Call) -> Trace | None:
        """The graph of a call as its code is exported; ``None`` if the code fails there."""
        if id(call) not in self._recordings:
            trace = None
            with suppress(Exception):  # of the model's code, or of torch
                trace = self._record(call, exporting=True)
            self._recordings[id(call)] = call, trace
        return self._recordings[id(call)][1]

    def _record(self, call: Call, exporting: bool) -> Trace:
        with quiet(call.training, exporting):
            return record_call(self.prepared(call))

    def _for_all_values(self, trace: Trace, exporting: bool) -> Trace:
        """``trace``, which no longer counts as ``by_values`` if it holds for all values."""
        if trace.by_values:
            with suppress(Exception), quiet(trace.call.training, exporting):
                holds = holds_for_all_values(self.prepared(trace.call), trace.graph)
                return replace(trace, by_values=not holds)
        return trace

    def prepared(self, call: Call) -> CallToTrace:
        """``call`` with a copy of the model that runs it (see ``copy_without_weights``)."""
        copied: list[torch.Tensor] = []
        bare = copy_without_weights(self.model, copied)
        own = {*map(id, stored_weights(self.model).values())}
        others = [tensor for tensor in copied if id(tensor) not in own]
        return CallToTrace(
            original=self.model,
            model=bare,
            call=call,
            naming=self._named,
            inner=self.inner,
            ties=self._ties,
            locked={**reason_outside(self.model, others), **self._locked},
            watchers=watch(bare, call.training),
        )

    @cached_property
    def _ties(self) -> Mapping[str, tuple[str, ...]]:
        return ties(self.model)

    @cached_property
    def _locked(self) -> Mapping[str, str]:
        return reason_of_sharing(self.model)

    @cached_property
    def _aliases(self) -> Mapping[str, str]:
        return first_names(self.model)

    def _named(self, path: str) -> str:
        return self.naming(self._aliases.get(path, path))


def accepts(model: nn.Module, call: Call) -> bool:
    """Whether the model accepts such inputs, found by a run without weights."""
    try:
        bare = copy_without_weights(model).train(call.training)
        forget_buffers(bare, keep_integers=True)
        with quiet(call.training, exporting=False), meta_weights():
            Steps(bare, call.flags, None, cache=call.cache)(*on_cpu(call.steps))
    except Exception:  # with wrong inputs, a model may raise any exception
        return False
    return True


def record_call(this: CallToTrace) -> Trace:
    """The graph of a call with its example inputs, and whether Python read their values.

    Raises an exception if it cannot be recorded.
    """
    forget_buffers(this.model, keep_integers=True)
    runner = this.runner()
    recording, computed = record(runner, this.call.steps)
    settle(recording.graph)
    replace_private_writes(recording.graph)
    constants = recording.constants.values()
    if any(map(computed.holds_real, constants)):
        raise TraceFailed("a value leaves the graph as a parameter or a tensor of another class")
    names = recording.parameters
    tied_or_locked = [
        node for node, name in names.items() if name in this.locked or len(this.ties[name]) > 1
    ]
    scaled = replace_scalings(recording.graph, names.keys() - {*tied_or_locked})
    scaled_names = {names[node] for node in scaled} - runner.replaced
    mark_written(recording.graph, tied_or_locked)
    changed = runner.replaced | (runner.written - scaled_names)
    trace = annotate(this, recording, changed=changed, scaled=scaled_names)
    read = recording.read_values or any(map(_tells_python, recording.graph.nodes))
    return replace(trace, by_values=read or any(map(computed.holds, constants)))


def _tells_python(node: Node) -> bool:
    """Whether the node's result makes later code depend on values: as a number or as a shape."""
    if node.target is torch.ops.aten.index.Tensor:
        indices: Any = node.args[1]
        return any(index is not None and is_mask(index.meta["val"]) for index in indices)
    return depends_on_values(node.target)
