"""What folding gains where the user does not need every output of a model.

A returned tensor sees the mean of what it holds. Decides, for each output that stands in the way
of a shift, how many more norms the minimum cut folds once that output may change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from enjoyln_cli.proof import min_cut as cuts
from enjoyln_cli.proof.min_cut import Problem

MAX_OUTPUTS = 8
"""Outputs that are tried; each takes one minimum cut on the graphs that are there."""


@dataclass(frozen=True)
class Gain:
    """More norms fold if some outputs may change."""

    without: tuple[str, ...]
    """Fields of the output: several where one tensor is returned under each of them."""
    norms: int
    outputs: tuple[str, ...]
    """All others, to be asked for: fields, or the outputs that hold nothing but such fields."""


def gains(problem: Problem, model_class: str) -> tuple[Gain, ...]:
    """The outputs of ``model_class`` that keep norms, each by itself.

    Choosing outputs is choosing one class, so the plan for that class alone is what each count is
    set against.
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
            found.append(Gain(without, more, _held(kept - fed_back, fields)))
    return tuple(found)


def _narrowed(problem: Problem, traces: int, required: frozenset[str]) -> Problem:
    """The same problem in the first ``traces`` alone, for ``required`` outputs."""
    norms = {
        norm: tuple(value for value in calls if value.trace < traces)
        for norm, calls in problem.norms.items()
    }
    flow = problem.flow.narrowed(traces, required)
    return Problem(
        flow=flow,
        norms=norms,
        locked=problem.locked,
        groups=problem.groups,
        scales=problem.scales,
        widenings=problem.widenings,
    )


def _held(fields: Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """``fields``, with an output of which all ``known`` fields are among them as one name."""
    wanted = set(fields)
    split = {f.partition(".")[0] for f in known if f not in wanted}
    return tuple(
        dict.fromkeys(
            field if (top := field.partition(".")[0]) in split else top for field in sorted(wanted)
        )
    )
