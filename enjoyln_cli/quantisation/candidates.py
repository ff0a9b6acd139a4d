"""The candidates that may quantise best: a model as it is, untied, with rotated values, or rotated.

The best of these is also tried with smoothed norms (see ``scaling.smoothing``).

A rotation unties the head. Where an untied head has scales of its own, the untied model is tried as
well: its gain is no merit of a rotation.

Each candidate is a proven plan (see ``analysis``), which is carried out on the model in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from enjoyln_cli.analysis.analyze import analyze_config
from enjoyln_cli.errors import TraceFailed, UnsupportedModel
from enjoyln_cli.events import Event
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.plan import NormFusion, Plan, RotationGroup
from enjoyln_cli.quantisation.layer_bits import FinerLayer, in_words
from enjoyln_cli.quantisers.schemes import RoundingMethod
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.scaling.smoothing import SmoothedNorm, smoothable

ORIGINAL, ROTATED, GPTQ = "original", "rotated", "gptq"


@dataclass(frozen=True)
class Candidate:
    """The original, or the model edited by a plan that changes no output."""

    name: str
    """``original``, ``values only``, or ``rotated, seed 3``."""
    plan: Plan | None
    """The edits; ``None`` for the original."""
    rounding: RoundingMethod = "nearest"
    smoothed: tuple[SmoothedNorm, ...] = ()
    """Norms of the edited model whose features are divided by numbers of their own."""
    finer: tuple[FinerLayer, ...] = ()
    """Layers that get more bits than the scheme says."""

    @property
    def title(self) -> str:
        """The name, with the number of finer layers: ``original, 2 layers in float``."""
        return f"{self.name}, {in_words(self.finer)}" if self.finer else self.name

    @property
    def key(self) -> tuple[str, tuple[FinerLayer, ...]]:
        """What tells it from the other candidates of a model: the name and the finer layers."""
        return self.name, self.finer

    @property
    def kind(self) -> str:
        """``ORIGINAL``, ``ROTATED`` or ``GPTQ``: candidates of a kind take about as long."""
        if self.rounding != "nearest":
            return GPTQ
        return ROTATED if self.is_rotated else ORIGINAL

    @property
    def is_rotated(self) -> bool:
        """Whether more than the values of attentions is rotated."""
        return self.plan is not None and any(b.kind != "values" for b in self.plan.rotated)

    @property
    def seed(self) -> int:
        """The seed of its rotations; 0 if it has none."""
        return self.plan.seed if self.plan else 0

    def differs_in_seed(self, other: Candidate) -> bool:
        """Whether it rotates what ``other`` rotates, by other matrices."""
        if not (self.plan and other.plan):
            return False
        return self.seed != other.seed and replace(self.plan, seed=other.seed) == other.plan


def rounded_by_error(candidate: Candidate) -> Candidate:
    """The same candidate, its weights rounded by the outputs' error (GPTQ)."""
    return replace(candidate, name=f"{candidate.name}, GPTQ", rounding="gptq")


def candidates(
    plan: Plan | None, seeds: Sequence[int], rounds_untied_heads: bool
) -> list[Candidate]:
    """The original, and the candidates by ``plan``, which rotates all that can rotate.

    A head gains nothing from its own copy of the weights if it is rounded as before, or not at all.
    """
    found = [Candidate(ORIGINAL, None)]
    if plan is None or not plan.rotated:
        return found
    if plan.untied and rounds_untied_heads:
        found.append(Candidate("untied", replace(plan, rotation_groups=(), fused=())))
    values = tuple(group for group in plan.rotated if group.kind == "values")
    if values:
        alone = replace(_rotating(plan, values), untied=(), settings=())
        found.append(Candidate("values only", alone))
    written = tuple(group for group in plan.rotated if not group.online_rotation)
    for name, rotation_groups, fewer in (
        ("rotated", written, values),
        ("rotated with a product", plan.rotated, written),
    ):
        if len(rotation_groups) > len(fewer):
            rotating = _rotating(plan, rotation_groups)
            found += [
                Candidate(f"{name}, seed {seed}", replace(rotating, seed=seed)) for seed in seeds
            ]
    return found


def _rotating(plan: Plan, rotation_groups: tuple[RotationGroup, ...]) -> Plan:
    """The plan that rotates some of its rotation groups only."""
    inside = {norm for group in rotation_groups for norm in group.norms}
    fused = tuple(fusion for fusion in plan.fused if fusion.norm in inside)
    return replace(plan, rotation_groups=rotation_groups, fused=fused)


def rotation_plan(
    opened: OpenedModel, event: Event, online_rotations: bool = False
) -> tuple[Plan | None, tuple[NormFusion, ...]]:
    """The plan that rotates everything that can rotate, and the norms that can be smoothed.

    ``None`` if the model cannot be analysed. With ``online_rotations``, a stream may be rotated by
    a product that is added at its head.
    """
    reason = ""
    for untie in (True, False):
        options = Options(fold=False, rotate=True, untie=untie, online_rotations=online_rotations)
        try:
            found = analyze_config(opened.config, checkpoint=opened.checkpoint, options=options)
            fused = found.under(Options(fold=False, merge="affine")).plan.fused
            return found.plan, smoothable(fused, found.plan)
        except (UnsupportedModel, TraceFailed) as error:
            reason = reason or str(error)
    event("warning", f"only the original is quantised: nothing could be rotated: {reason}")
    return None, ()
