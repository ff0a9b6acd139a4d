"""How many more norms fold if the user does not need every output of a model.

Centring a value that the model returns changes that output. For each output that prevents centring,
this module solves the minimum cut again with that output free to change, and counts the norms.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from enjoyln_cli.proof import min_cut as cuts
from enjoyln_cli.proof.min_cut import Problem

MAX_OUTPUTS = 8
"""How many outputs are tried at most; each takes one minimum cut."""


@dataclass(frozen=True)
class OutputGain:
    """Additional norms that fold if some outputs may change."""

    without: tuple[str, ...]
    """The output fields that may change; several if they all return one tensor."""
    norms: int
    """How many more norms fold."""
    outputs: tuple[str, ...]
    """All other outputs, which the user has to list: whole outputs or fields of them."""


def gains(problem: Problem, model_class: str) -> tuple[OutputGain, ...]:
    """How many more norms fold for each output of ``model_class`` that alone may change.

    A plan with chosen outputs holds for one class only, so each count is relative to the plan for
    that class alone.
    """
    traces = tuple(t for t in problem.flow.traces if t.model_class == model_class)
    fields = {f for trace in traces for names in trace.returned.values() for f in names}
    required = frozenset(fields if problem.flow.required is None else problem.flow.required)
    fed_back = frozenset().union(*(trace.fed_back for trace in traces))
    before = _narrowed(problem, len(traces), required)
    folded = len(cuts.solve(before).folded)
    standing = dict.fromkeys(
        tuple(f for f in names if f in required)
        for names in before.flow.reached()
        if fed_back.isdisjoint(names)
    )
    found = []
    for without in list(standing)[:MAX_OUTPUTS]:
        kept = required - set(without)
        more = len(cuts.solve(_narrowed(problem, len(traces), kept)).folded) - folded
        if without and more > 0:
            found.append(OutputGain(without, more, joined_fields(kept - fed_back, fields)))
    return tuple(found)


def _narrowed(problem: Problem, traces: int, required: frozenset[str]) -> Problem:
    """The problem of the first ``traces`` traces, with ``required`` outputs fixed."""
    norms = {
        norm: tuple(value for value in calls if value.trace < traces)
        for norm, calls in problem.norms.items()
    }
    return replace(problem, flow=problem.flow.narrowed(traces, required), norms=norms)


def joined_fields(fields: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """``fields``, where an output that has all its ``known`` fields among them is one name."""
    wanted = set(fields)
    split = {f.partition(".")[0] for f in known if f not in wanted}
    return tuple(
        dict.fromkeys(
            field if (top := field.partition(".")[0]) in split else top for field in sorted(wanted)
        )
    )
