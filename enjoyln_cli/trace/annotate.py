"""Turn a captured graph into a ``Trace``: name its parameters, inputs and outputs.

A recording (``recorder``) has nodes only. This module adds the names of parameters, inputs and
output fields, and what is known about shared memory, norms and insertion points.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from enjoyln_cli.calls.calls import Call
from enjoyln_cli.calls.composition import Composition, composition_of
from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.insertion_points import ambiguous_points, blocks, insertion_points_of
from enjoyln_cli.models.outputs import is_fed_back
from enjoyln_cli.trace.recorder import RecordedRun
from enjoyln_cli.trace.shared_storage import reason_outside
from enjoyln_cli.trace.steps import Steps, Watchers
from enjoyln_cli.trace.trace import Naming, Trace, path_in_model


@dataclass(frozen=True, kw_only=True)
class CallToTrace:
    """A call of a model that is about to be traced, and a copy of the model for that.

    Parameters have the model's own names.
    """

    original: nn.Module
    model: nn.Module
    """The copy."""
    call: Call
    naming: Naming
    inner: str | None
    """Path of a submodule whose outputs count as returned, too."""
    ties: Mapping[str, tuple[str, ...]]
    """All names of each parameter, by each of them."""
    locked: Mapping[str, str]
    """Parameters that must not be edited, and why."""
    watchers: Watchers

    def runner(self) -> Steps:
        return Steps(self.model, self.call.flags, self.inner, self.watchers, self.call.cache)


def annotate(
    this: CallToTrace,
    recording: RecordedRun,
    *,
    changed: Iterable[str] = (),
    scaled: Iterable[str] = (),
) -> Trace:
    """The trace of a recorded call.

    ``changed`` are parameters that the call changes, so that they must not be edited; ``scaled``
    are parameters that it only multiplies by numbers.
    """
    model, naming = this.model, this.naming
    order = inspect.signature(model.forward).parameters
    steps = pytree.tree_flatten_with_path(this.call.steps)[0]
    names = [_input_name(path, order) for path, _ in steps]
    accepted = accepted_by(model)
    leaves = {naming(path) for path, module in model.named_modules() if not any(module.children())}
    results: Any = recording.graph.output_node().args[0]
    returned = _fields_of(list(results), recording.layout)
    unusable_points = this.watchers.places.unusable_points | ambiguous_points(recording.graph)
    locked = {**_locked_by_call(this, changed, recording.constants.values()), **this.locked}
    return Trace(
        label=this.call.label,
        graph=recording.graph,
        parameters={
            node: tuple(dict.fromkeys(map(naming, this.ties[name])))
            for node, name in recording.parameters.items()
        },
        inputs=dict(zip(recording.inputs, names, strict=True)),
        naming=naming,
        required=this.call.required,
        leaves=frozenset(leaves),
        blocks=frozenset(map(naming, blocks(model))),
        model_class=type(model).__name__,
        returned=returned,
        fed_back=frozenset(
            f for fields in returned.values() for f in fields if is_fed_back(f, accepted)
        ),
        call=this.call,
        composition_after=_composition_after(this),
        called_with_more=frozenset(
            naming(path_in_model(path)) for path in recording.called_with_more
        ),
        locked={naming(name): reason for name, reason in locked.items()},
        scaled=frozenset(map(naming, scaled)),
        places={
            node: (naming(path), at)
            for node, (path, at) in insertion_points_of(recording.graph).items()
        },
        unusable_points=frozenset((naming(path), at) for path, at in unusable_points),
    )


def _composition_after(this: CallToTrace) -> Composition | None:
    """What the model would consist of after the call; ``None`` if no module has another class then.

    BigBird replaces an attention by a module of another class if a text is short.
    """
    before, after = (
        {path: type(module) for path, module in model.named_modules()}
        for model in (this.original, this.model)
    )
    if before == after:
        return None
    kept, made = composition_of(this.original), composition_of(this.model)
    return {path: (kept if cls is before.get(path) else made)[path] for path, cls in after.items()}


def _locked_by_call(
    this: CallToTrace, changed: Iterable[str], outside: Iterable[Any]
) -> dict[str, str]:
    """The parameters that the call changes, or reads through unnamed tensors, with the reason.

    Raises ``TraceFailed`` if the call reads parameters of the model itself, and not of its copy.
    """
    tensors = [value for value in pytree.tree_leaves(list(outside)) if torch.is_tensor(value)]
    reasons = dict.fromkeys(changed, "a call of the model changes it")
    if around := reason_outside(this.original, tensors):
        raise TraceFailed(
            f"its code reads {min(around)} through a global or a weak reference; read it as an "
            "attribute of the module"
        )
    return reasons | reason_outside(this.model, tensors)


def _fields_of(returned: list[Node], layout: pytree.TreeSpec) -> dict[Node, tuple[str, ...]]:
    """The output fields of each value that ``Steps`` returned, without escaped values.

    A value that only the submodule ``inner`` returned has no field. Values in the last entry of the
    result, which left a call without being returned, are left out. ``layout`` is the structure of
    the result.
    """
    fields: dict[Node, dict[str, None]] = {node: {} for node in returned}
    *steps, (_, others) = pytree.tree_unflatten(returned, layout)
    for by_name, _ in steps:
        for name, nodes in by_name.items():
            for node in nodes:
                fields[node][name] = None
    return {node: tuple(names) for node, names in fields.items() if node not in others}


def _input_name(path: Any, order: Mapping[str, inspect.Parameter]) -> str:
    """The name of the argument of ``forward`` for a value at ``path`` in the steps.

    A value nested in an argument is named ``extra.add``; items of ``*args`` are named ``*2``.
    """
    _, kind, *places = (str(getattr(key, "key", getattr(key, "idx", key))) for key in path)
    if kind == "0":  # by position
        named = [name for name, p in order.items() if p.kind <= p.POSITIONAL_OR_KEYWORD]
        place = int(places[0])
        places[0] = named[place] if place < len(named) else f"*{place}"
    return ".".join(places)
