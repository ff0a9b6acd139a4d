"""Choose and trace the calls of a model, and state which calls their graphs cover.

A model is called with inputs that it accepts, and the proof holds for calls like these. For
transformers' classes, coverage is described by the inputs that no trace had. Custom models share no
conventions, so for them it is described by the forms of the traced calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

from enjoyln_cli.calls.argument_trials import further_calls
from enjoyln_cli.calls.calls import Call, ways_to_call
from enjoyln_cli.calls.generation import generated_calls
from enjoyln_cli.calls.input_forms import optional_inputs
from enjoyln_cli.errors import TraceFailed, UnsupportedModel
from enjoyln_cli.models.classes import base_path
from enjoyln_cli.plan.cache_argument import CACHE, in_plans
from enjoyln_cli.plan.covered_calls import (
    OTHER_CALLS,
    CallForm,
    CoveredCalls,
    attributes_of,
)
from enjoyln_cli.plan.plan import Setting
from enjoyln_cli.trace.capture import Captures
from enjoyln_cli.trace.size_range import in_one_row, traced_forms
from enjoyln_cli.trace.trace import Trace


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedModel:
    """The graphs of one model, and the inputs of the traced calls."""

    captures: Captures
    traces: tuple[Trace, ...]
    inputs: frozenset[str]
    """Names of the inputs that any call had."""
    forms: tuple[CallForm, ...] | None = None
    """The forms of the traced calls; ``None`` until ``with_forms`` computes them, which takes
    longer than the traces."""

    @property
    def model(self) -> nn.Module:
        return self.captures.model

    @property
    def training(self) -> bool:
        """Whether the traced calls are in training mode."""
        return any(trace.call.training for trace in self.traces)


def likely_calls(captures: Captures) -> list[Call]:
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


def accepted_calls(captures: Captures) -> list[Call] | None:
    """The first alternative of ``ways_to_call`` that the model accepts, or ``None``."""
    ways = ways_to_call(captures.model)
    return next((calls for calls in ways if captures.accepts(calls[0])), None)


def trace_calls(captures: Captures, calls: Iterable[Call]) -> TracedModel:
    """Trace the calls; optional ones only if the model accepts them and they can be traced.

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
    return TracedModel(captures=captures, traces=tuple(traces), inputs=frozenset(inputs - partly))


def with_forms(traced: TracedModel) -> TracedModel:
    """``traced`` with the forms of its calls, and with single-row traces if those need them."""
    traces = list(traced.traces)
    forms: list[CallForm] = []
    for trace in traced.traces:
        found = traced_forms(traced.model, trace)
        forms += found
        if not (trace.by_values or traced.captures.is_stock):
            alone = in_one_row(trace.call, found)
            more = trace_calls(traced.captures, alone).traces
            traces += more
            forms += [form for one in more for form in traced_forms(traced.model, one)]
    return replace(traced, traces=tuple(traces), forms=tuple(forms))


def coverage_is_known(traced: Sequence[TracedModel]) -> bool:
    """Whether coverage is known: for transformers' classes, or by the forms of the calls."""
    return _are_stock(traced) or _have_forms(traced)


def covered_calls(
    traced: Sequence[TracedModel], settings: Iterable[Setting]
) -> CoveredCalls | None:
    """The covered calls of custom models.

    ``None`` for transformers' classes, which follow conventions, and if the forms were not computed
    since no norm changes. With traces in training mode, too, a call has to be proven in both modes.
    Attributes that ``settings`` of the config change are left out.
    """
    if _are_stock(traced) or not _have_forms(traced):
        return None
    changed = {setting.name.rpartition(".")[2] for setting in settings}
    attributes = (entry for one in traced for entry in attributes_of(one.model))
    forms: dict[bool, list[CallForm]] = {}
    for one in traced:
        forms.setdefault(one.training, []).extend(one.forms or ())
    return CoveredCalls(
        tuple(dict.fromkeys(_in_every_mode(list(forms.values())))),
        tuple(
            (owner, name, value)
            for owner, name, value in attributes
            if not changed or (name.rpartition(".")[2] not in changed and type(value) is not int)
        ),
    )


def _in_every_mode(forms: list[list[CallForm]]) -> Iterator[CallForm]:
    """The forms of one mode, or those that are proven in both modes, under the conditions of both.

    Forms with the same arguments have the same names for their sizes.
    """
    first, *others = forms
    for form in first:
        alike = [
            next((o for o in other if (o.owner, o.arguments) == (form.owner, form.arguments)), None)
            for other in others
        ]
        if None not in alike:
            conditions = (c for one in (form, *alike) if one for c in one.conditions)
            yield replace(form, conditions=tuple(dict.fromkeys(conditions)))


def unproven_inputs(traced: Sequence[TracedModel]) -> list[str]:
    """Optional inputs that no trace of any class covers.

    A class passes unknown keywords on to its base model, so the base model's optional inputs count
    too, unless some class was traced with them.
    """
    if not _are_stock(traced):
        return [OTHER_CALLS] if _have_forms(traced) else []
    left: set[str] = set()
    reached: set[str] = set()
    for one in traced:
        left |= set(map(in_plans, optional_inputs(one.model))) - one.inputs
        if inner := base_path(one.model):
            reached |= set(map(in_plans, optional_inputs(one.model.get_submodule(inner))))
    return sorted(left | reached.difference(*(one.inputs for one in traced)))


def _are_stock(traced: Sequence[TracedModel]) -> bool:
    return all(one.captures.is_stock for one in traced)


def _have_forms(traced: Sequence[TracedModel]) -> bool:
    return all(one.forms is not None for one in traced)
