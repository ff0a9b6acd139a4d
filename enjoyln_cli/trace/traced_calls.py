"""Which calls of a model are traced, and which calls are covered by their graphs.

A model is called in a form that it accepts. What follows from the graphs holds for calls like
these. For transformers' classes that is said by the inputs that no trace was given; other code
shares no such convention, so there it is said by the forms of the traced calls themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from enjoyln_cli.calls.argument_trials import further_calls
from enjoyln_cli.calls.calls import Call, optional_inputs, ways_to_call
from enjoyln_cli.calls.generation import generated_calls
from enjoyln_cli.errors import TraceFailed, UnsupportedModel
from enjoyln_cli.models.classes import base_path
from enjoyln_cli.plan.covered_calls import (
    OTHER_CALLS,
    CallForm,
    CoveredCalls,
    attributes_of,
    is_stock,
)
from enjoyln_cli.plan.plan import Setting
from enjoyln_cli.trace.capture import Captures
from enjoyln_cli.trace.size_range import in_one_row, traced_forms
from enjoyln_cli.trace.trace import Trace


@dataclass(frozen=True, eq=False, kw_only=True)
class TracedModel:
    """The graphs of one model, and what its calls were given."""

    captures: Captures
    traces: tuple[Trace, ...]
    inputs: frozenset[str]
    """Names of the inputs that were given in any call."""
    forms: tuple[CallForm, ...] | None = None
    """The forms of the traced calls; ``None`` until ``with_forms`` has found them, which takes
    longer than the traces."""

    @property
    def model(self) -> nn.Module:
        return self.captures.model


def likely_calls(captures: Captures) -> list[Call]:
    """The calls to trace: in a form that the model accepts, or the likeliest if it accepts none.

    Raises ``UnsupportedModel`` where no inputs can be made up.
    """
    model = captures.model
    calls = accepted_calls(captures) or next(iter(ways_to_call(model)), None)
    if calls is None:
        raise UnsupportedModel(f"no inputs can be made up for {type(model).__name__}")
    return [*calls, *further_calls(model, calls[0]), *generated_calls(model)]


def accepted_calls(captures: Captures) -> list[Call] | None:
    """The calls in the first form that the model accepts; ``None`` if it accepts none."""
    ways = ways_to_call(captures.model)
    return next((calls for calls in ways if captures.accepts(calls[0])), None)


def trace_calls(captures: Captures, calls: Iterable[Call]) -> TracedModel:
    """The graphs of the calls that can be traced.

    A call of several steps that keeps its cache gives it to the next one. Of those with one label
    that are not required, the first that the model accepts is traced. Raises ``TraceFailed`` where
    a call that is required cannot be traced.
    """
    traces, inputs, labels = [], set(), set()
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
        for args, kwargs in call.steps:
            named = {**dict(zip(parameters, args, strict=False)), **kwargs}
            inputs |= {name for name, value in named.items() if value is not None}
        if len(call.steps) > 1 and (call.cache is not None or call.flags.get("use_cache")):
            inputs.add("past_key_values")
    return TracedModel(captures=captures, traces=tuple(traces), inputs=frozenset(inputs))


def with_forms(traced: TracedModel) -> TracedModel:
    """With the forms of its calls, and with traces of a single row where these do not hold."""
    traces = list(traced.traces)
    forms: list[CallForm] = []
    for trace in traced.traces:
        found = traced_forms(traced.model, trace)
        forms += found
        if not trace.by_example:
            alone = in_one_row(traced.model, trace.call, found)
            more = trace_calls(traced.captures, alone).traces
            traces += more
            forms += [form for one in more for form in traced_forms(traced.model, one)]
    return replace(traced, traces=tuple(traces), forms=tuple(forms))


def coverage_is_known(traced: Sequence[TracedModel]) -> bool:
    """Whether it is known which calls are covered: by convention, or by the forms of each call."""
    return _are_stock(traced) or _have_forms(traced)


def covered_calls(
    traced: Sequence[TracedModel], settings: Iterable[Setting]
) -> CoveredCalls | None:
    """The calls that were traced; ``None`` where the conventions of transformers say it.

    ``None`` too where nobody asked for their forms, since no norm changes. What ``settings`` of the
    config change is no longer as it was traced.
    """
    if _are_stock(traced) or not _have_forms(traced):
        return None
    changed = {setting.name.rpartition(".")[2] for setting in settings}
    attributes = (entry for one in traced for entry in attributes_of(one.model))
    return CoveredCalls(
        tuple(dict.fromkeys(form for one in traced for form in one.forms or ())),
        tuple(
            (owner, name, value)
            for owner, name, value in attributes
            if not changed or (name.rpartition(".")[2] not in changed and type(value) is not int)
        ),
    )


def unproven_inputs(traced: Sequence[TracedModel]) -> list[str]:
    """Optional inputs that no trace of any class covers.

    A class hands keywords that it does not know on to its base model. What that makes of them is
    proven where any class has been given them.
    """
    if not _are_stock(traced):
        return [OTHER_CALLS] if _have_forms(traced) else []
    left: set[str] = set()
    reached: set[str] = set()
    for one in traced:
        left |= set(optional_inputs(one.model)) - one.inputs
        if inner := base_path(one.model):
            reached |= set(optional_inputs(one.model.get_submodule(inner)))
    return sorted(left | reached.difference(*(one.inputs for one in traced)))


def _are_stock(traced: Sequence[TracedModel]) -> bool:
    return all(is_stock(one.model) for one in traced)


def _have_forms(traced: Sequence[TracedModel]) -> bool:
    return all(one.forms is not None for one in traced)
