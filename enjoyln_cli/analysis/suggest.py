"""Which options of ``fold`` would convert more LayerNorms of a model, and how many.

Wider MLPs are tried if any norm stays LayerNorm, and separate copies of tied weights if a tied
weight prevents a conversion. Each answer takes a plan of its own. For wider MLPs the plan uses the
existing graphs; copies need new graphs, which take as long as the analysis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from enjoyln_cli.analysis.analyze import Analysis
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.proof.explain import obstacles
from enjoyln_cli.proof.min_cut import Parameter


@dataclass(frozen=True)
class Suggestion:
    """An option of ``fold``, and how many norms it would convert."""

    option: str
    """As it is typed: ``--widen-mlp``."""
    become_rmsnorm: int
    layernorms: int
    """The number of norms in all; a class that the option chooses may have fewer."""


def suggestions(analysis: Analysis, options: Options) -> tuple[Suggestion, ...]:
    """The options that convert more norms than ``found``, which was made with ``options``."""
    if not analysis.plan.kept:
        return ()
    tried: list[Suggestion] = []
    if not options.widen_mlp:
        wider = analysis.plan_under(replace(options, widen_mlp=True))
        tried += better(analysis.plan, [("--widen-mlp", wider)])
    if not options.untie and _rests_on_tied_weights(analysis):
        untied = analysis.plan_under(replace(options, untie=True))
        tried += better(analysis.plan, [("--untie", untied)])
    return tuple(tried)


def better(plan: Plan, others: Iterable[tuple[str, Plan | None]]) -> Iterator[Suggestion]:
    """The options among ``others`` whose plan converts more norms than ``plan``."""
    for option, other in others:
        if other is not None and len(other.folded) > len(plan.folded):
            yield Suggestion(option, len(other.folded), len(other.norms))


def _rests_on_tied_weights(analysis: Analysis) -> bool:
    """Whether a tied weight prevents the conversion of any norm."""
    problem, tied = analysis.problem, Counter(analysis.problem.groups.values())
    kept = (verdict.norm for verdict in analysis.plan.kept if verdict.norm in problem.norms)
    return any(
        isinstance(obstacle.source, Parameter) and tied[obstacle.source.name] > 1
        for norm in kept
        for obstacle in obstacles(problem, analysis.cut, norm)
    )
