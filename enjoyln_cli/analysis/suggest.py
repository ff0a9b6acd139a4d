"""Which options of ``fold`` would convert more LayerNorms of a model, and how many.

Decides what is worth trying: wider MLPs wherever norms stay, separate copies of tied weights where
a tied weight is what keeps one. Each answer is a plan of its own, on the graphs that are there or,
for copies, on new ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from enjoyln_cli.analysis.analyze import Analysis
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.plan.plan import Options, Plan
from enjoyln_cli.proof.explain import obstacles
from enjoyln_cli.proof.min_cut import Parameter


@dataclass(frozen=True)
class Suggestion:
    """An option of the command, with what becomes of the norms when it is given."""

    option: str
    """As it is typed: ``--widen-mlp``."""
    become_rmsnorm: int | None
    """``None`` where nobody has counted, since that takes as long as the analysis."""
    layernorms: int
    """Of so many: the class that an option chooses may have fewer."""


def suggestions(
    found: Analysis, options: Options, *, count_untied: bool = False
) -> tuple[Suggestion, ...]:
    """The options that convert more norms than ``found``, a plan with ``options``, does.

    What copies of tied weights gain takes new graphs, so it is counted on request only.
    """
    if not found.plan.kept:
        return ()
    tried: list[Suggestion] = []
    if not options.widen_mlp:
        wider = _plan(found, replace(options, widen_mlp=True))
        tried += better(found.plan, [("--widen-mlp", wider)])
    if not options.untie and _rests_on_tied_weights(found):
        if count_untied:
            untied = _plan(found, replace(options, untie=True))
            tried += better(found.plan, [("--untie", untied)])
        else:
            tried.append(Suggestion("--untie", None, len(found.plan.norms)))
    return tuple(tried)


def better(plan: Plan, others: Iterable[tuple[str, Plan | None]]) -> Iterator[Suggestion]:
    """Of plans with one more option each, those that convert more than ``plan`` does."""
    for option, other in others:
        if other is not None and len(other.folded) > len(plan.folded):
            yield Suggestion(option, len(other.folded), len(other.norms))


def _plan(found: Analysis, options: Options) -> Plan | None:
    """The plan with other options; ``None`` where the model does not allow them."""
    try:
        return found.under(options).plan
    except EnjoyLNError:
        return None


def _rests_on_tied_weights(found: Analysis) -> bool:
    """Whether a weight that the model uses under several names keeps one of the norms."""
    problem, tied = found.problem, Counter(found.problem.groups.values())
    kept = (verdict.norm for verdict in found.plan.kept if verdict.norm in problem.norms)
    return any(
        isinstance(obstacle.source, Parameter) and tied[obstacle.source.name] > 1
        for norm in kept
        for obstacle in obstacles(problem, found.cut, norm)
    )
