"""What is shown of one model: its plan, counts of the plan, and what other options would change.

Nothing is decided or measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from enjoyln_cli.calls.call_text import to_text
from enjoyln_cli.plan import schema

if TYPE_CHECKING:
    from enjoyln_cli.analysis.output_gains import OutputGain
    from enjoyln_cli.analysis.suggest import Suggestion
    from enjoyln_cli.plan.plan import Plan

_LEFT_OUT = frozenset({"needs", "mlps", "covered", "given"})
"""Fields of a plan that only a proof needs, or that are no plain data."""


@dataclass(frozen=True)
class Counts:
    """How many norms and tensors a plan changes."""

    layernorms: int
    become_rmsnorm: int
    in_weights: int
    with_subtraction: int
    subtractions: int
    stays_layernorm: int
    tensors_centred: int
    parameters_centred: int


def counts_of(plan: Plan) -> Counts:
    """The counts of a plan's entries. A parameter that is stored twice is centred once."""
    shapes = {
        (w.parameter, w.tensor if w.module_axis else ""): w.shape for w in plan.centred_weights
    }
    statuses = [verdict.status for verdict in plan.norms]
    return Counts(
        layernorms=len(plan.norms),
        become_rmsnorm=len(plan.folded),
        in_weights=statuses.count("in_weights"),
        with_subtraction=statuses.count("with_subtraction"),
        subtractions=len(plan.subtractions),
        stays_layernorm=len(plan.kept),
        tensors_centred=len(shapes),
        parameters_centred=sum(prod(shape) for shape in shapes.values()),
    )


@dataclass(frozen=True)
class ModelReport:
    """All that ``enjoyln report`` shows of one model."""

    model: str
    plan: Plan
    paper: Sequence[str] | None = None
    """The norms that the paper's Algorithm 1 would convert, if they are to be shown."""
    gains: Sequence[OutputGain] = ()
    """Norms that could be converted too if some outputs may change."""
    suggestions: Sequence[Suggestion] = ()
    """Options of ``fold`` that convert more norms."""

    @property
    def counts(self) -> Counts:
        """The counts of the plan."""
        return counts_of(self.plan)

    @property
    def calls(self) -> tuple[str, ...] | None:
        """The signatures of the proven calls as text; ``None`` if proven calls are not limited."""
        covered = self.plan.covered
        return tuple(map(to_text, covered.signatures)) if covered else None

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data; ``docs/formats.md`` documents the keys."""
        return schema.plain(
            {
                "model": self.model,
                **vars(self.counts),
                "plan": schema.plain(self.plan, _LEFT_OUT),
                "calls": self.calls,
                "gains": self.gains,
                "suggestions": self.suggestions,
                **({} if self.paper is None else {"paper": self.paper}),
            }
        )
