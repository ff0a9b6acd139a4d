"""Choose and trace the calls of a model, and state which calls their graphs cover.

A model is called with inputs that it accepts, and the proof holds for calls like these. For
transformers' classes, coverage is described by the inputs that no trace had. Custom models share no
conventions, so for them it is described by the signatures of the traced calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from enjoyln_cli.calls.argument_trials import further_calls
from enjoyln_cli.calls.calls import Call, ways_to_call
from enjoyln_cli.calls.generation import generated_calls
from enjoyln_cli.calls.input_sets import optional_inputs
from enjoyln_cli.errors import TraceFailed, UnsupportedModel
from enjoyln_cli.models.classes import base_path
from enjoyln_cli.plan.cache_argument import CACHE, in_plans
from enjoyln_cli.plan.covered_calls import (
    OTHER_CALLS,
    CallSignature,
    CoveredCalls,
    attributes_of,
)
from enjoyln_cli.plan.plan import Setting
from enjoyln_cli.trace.capture import Recorder
from enjoyln_cli.trace.size_range import in_one_row, traced_signatures
from enjoyln_cli.trace.trace import Trace


@dataclass(frozen=True, eq=False, kw_only=True)
class ModelTraces:
    """The graphs of one model, and the inputs of the traced calls."""

    captures: Recorder
    traces: tuple[Trace, ...]
    inputs: frozenset[str]
    """Names of the inputs that any call had."""
    signatures: tuple[CallSignature, ...] | None = None
    """The signatures of the traced calls; ``None`` until ``with_signatures`` computes them, which
    takes longer than the traces."""

    @property
    def model(self) -> nn.Module:
        return self.captures.model

    @property
    def training(self) -> bool:
        """Whether the traced calls are in training mode."""
        return any(trace.call.training for trace in self.traces)


def likely_calls(captures: Recorder) -> list[Call]:
    """The calls to trace: with inputs that the model accepts, or else the most likely inputs.

    Raises ``UnsupportedModel`` if no example inputs can be made.
    """
    model = captures.model
    calls = accepted_calls(captures) or next(iter(ways_to_call(model)), None)
    if calls is None:
        raise UnsupportedModel(f"no inputs can be made up for {type(model).__name__}")
    if captures.is_stock:
        return calls
    return [*calls, *further_calls(model, calls[0]), *generated_calls(model)]


def accepted_calls(captures: Recorder) -> list[Call] | None:
    """The first alternative of ``ways_to_call`` that the model accepts, or ``None``."""
    ways = ways_to_call(captures.model)
    return next((calls for calls in ways if captures.accepts(calls[0])), None)


def trace_calls(captures: Recorder, calls: Iterable[Call]) -> ModelTraces:
    """Trace the calls; optional calls only if the model accepts them and they can be traced.

    Of several optional calls with the same label, the first that works is traced. A switch counts
    as traced only if the calls with it have all other inputs and switches, too. Raises
    ``TraceFailed`` if a required call cannot be traced.
    """
    traces, labels = [], set()
    named: list[set[str]] = []  # the inputs and switches of each trace
    parameters = inspect.signature(captures.model.forward).parameters
    for call in calls:
        if not call.required and (call.label in labels or not captures.accepts(call)):
            continue
        try:
            traces.append(captures.capture(call))
        except TraceFailed:
            if call.required:
                raise
            continue
        labels.add(call.label)
        names = set(call.flags)
        for args, kwargs in call.steps:
            passed = {**dict(zip(parameters, args, strict=False)), **kwargs}
            names |= {in_plans(name) for name, value in passed.items() if value is not None}
        if len(call.steps) > 1 and (call.cache is not None or call.flags.get("use_cache")):
            names.add(CACHE)
        named.append(names)
    inputs = set().union(*named)
    switches = {switch for trace in traces for switch in trace.call.flags}
    partly = {s for s in switches if not inputs <= set().union(*(n for n in named if s in n))}
    return ModelTraces(captures=captures, traces=tuple(traces), inputs=frozenset(inputs - partly))


def with_signatures(traced: ModelTraces) -> ModelTraces:
    """``traced`` with the signatures of its calls, and single-row traces if these need them."""
    traces = list(traced.traces)
    signatures: list[CallSignature] = []
    for trace in traced.traces:
        found = traced_signatures(traced.model, trace)
        signatures += found
        if not (trace.by_values or traced.captures.is_stock):
            alone = in_one_row(trace.call, found)
            more = trace_calls(traced.captures, alone).traces
            traces += more
            signatures += [
                signature for one in more for signature in traced_signatures(traced.model, one)
            ]
    return replace(traced, traces=tuple(traces), signatures=tuple(signatures))


def coverage_is_known(traced: Sequence[ModelTraces]) -> bool:
    """Whether coverage is known: for transformers' classes, or by the signatures of the calls."""
    return _are_stock(traced) or _have_signatures(traced)


def covered_calls(
    traced: Sequence[ModelTraces], settings: Iterable[Setting]
) -> CoveredCalls | None:
    """The covered calls of custom models.

    ``None`` for transformers' classes, which follow conventions, and if no norm changes: then no
    signatures were computed. With traces in training mode, too, both modes have to prove a call.
    Attributes that ``settings`` of the config change are left out.
    """
    if _are_stock(traced) or not _have_signatures(traced):
        return None
    changed = {setting.name.rpartition(".")[2] for setting in settings}
    attributes = (entry for one in traced for entry in attributes_of(one.model))
    signatures: dict[bool, list[CallSignature]] = {}
    for one in traced:
        signatures.setdefault(one.training, []).extend(one.signatures or ())
    return CoveredCalls(
        tuple(dict.fromkeys(_in_every_mode(list(signatures.values())))),
        tuple(
            (owner, name, value)
            for owner, name, value in attributes
            if not changed or (name.rpartition(".")[2] not in changed and type(value) is not int)
        ),
    )


def _in_every_mode(signatures: list[list[CallSignature]]) -> Iterator[CallSignature]:
    """The signatures of one mode, or the signatures that both modes prove, under all conditions.

    Signatures with the same arguments have the same names for their sizes.
    """
    first, *others = signatures
    for signature in first:
        alike = [
            next(
                (
                    o
                    for o in other
                    if (o.owner, o.arguments) == (signature.owner, signature.arguments)
                ),
                None,
            )
            for other in others
        ]
        if None not in alike:
            conditions = (c for one in (signature, *alike) if one for c in one.conditions)
            yield replace(signature, conditions=tuple(dict.fromkeys(conditions)))


def unproven_inputs(traced: Sequence[ModelTraces]) -> list[str]:
    """Optional inputs that no trace of any class covers.

    A class passes unknown keywords on to its base model, so the base model's optional inputs count
    too, unless some class was traced with them.
    """
    if not _are_stock(traced):
        return [OTHER_CALLS] if _have_signatures(traced) else []
    left: set[str] = set()
    reached: set[str] = set()
    for one in traced:
        left |= set(map(in_plans, optional_inputs(one.model))) - one.inputs
        if inner := base_path(one.model):
            reached |= set(map(in_plans, optional_inputs(one.model.get_submodule(inner))))
    return sorted(left | reached.difference(*(one.inputs for one in traced)))


def _are_stock(traced: Sequence[ModelTraces]) -> bool:
    return all(one.captures.is_stock for one in traced)


def _have_signatures(traced: Sequence[ModelTraces]) -> bool:
    return all(one.signatures is not None for one in traced)
