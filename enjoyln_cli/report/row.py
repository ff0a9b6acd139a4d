"""A plan as plain data, ready for JSON.

The numbers are counts of the plan's entries. Nothing is decided or measured here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from enjoyln_cli.plan import call_text

if TYPE_CHECKING:
    from enjoyln_cli.analysis.output_gains import Gain
    from enjoyln_cli.analysis.suggest import Suggestion
    from enjoyln_cli.plan.plan import Plan
    from enjoyln_cli.report.placement import Kind, Place

Row = dict[str, Any]
"""One model's report, ready for JSON."""


def row(
    model: str,
    plan: Plan,
    paper: Sequence[str] | None = None,
    gains: Sequence[Gain] = (),
    options: Mapping[str, Plan] | None = None,
    suggested: Sequence[Suggestion] = (),
    places: Mapping[Kind, Mapping[Place, int]] | None = None,
) -> Row:
    """One model's report as plain data: all that ``report`` shows.

    * ``paper``: the norms that the paper's Algorithm 1 would convert; without it there is no such
      entry.
    * ``gains``: norms that could be converted too if some outputs may change.
    * ``options``: from option name to the plan with this option added.
    * ``suggested``: options of ``fold`` that convert more norms.
    * ``places``: how many norms of each kind stand where; without it there is no such entry.

    The keys are documented in ``docs/formats.md``.
    """
    shapes = {(w.parameter, w.tensor if w.held else ""): w.shape for w in plan.writers}
    found: Row = {
        "model": model,
        "model_type": plan.model_type,
        "model_class": plan.model_class,
        "classes": list(plan.classes),
        "outputs": list(plan.outputs),
        "layernorms": len(plan.norms),
        **_norm_counts(plan),
        "stay_layernorm": len(plan.kept),
        "tensors_centred": len(shapes),
        "parameters_centred": sum(prod(shape) for shape in shapes.values()),
        "suggestions": [vars(one) for one in suggested],
        "norms_that_stay": [
            {"name": v.norm, "reason": v.reason, "culprit": v.culprit, "path": list(v.path)}
            for v in plan.kept
        ],
        "verdicts": [
            {"name": v.norm, "verdict": VERDICTS[v.status], "subtractions": list(v.ops)}
            for v in plan.norms
        ],
        "subtractions": [
            {"module": c.module, "place": c.place, "reason": c.reason} for c in plan.ops
        ],
        "centred_tensors": [{"tensor": w.tensor, "shape": list(w.shape)} for w in plan.writers],
        "widened": [
            {
                "tensor": one.second.tensor,
                "attribute": one.attribute,
                "from": one.size,
                "to": one.to,
                "subtracts": one.subtracts,
            }
            for one in plan.widened
        ],
        "merged_norms": [
            {
                "name": one.norm,
                "weight": bool(one.weight),
                "bias": bool(one.bias),
                "into": [reader.weight.tensor for reader in one.readers],
            }
            for one in plan.merged
        ],
        "unmerged_norms": [
            {"name": one.norm, "reason": one.reason, "culprit": one.culprit}
            for one in plan.unmerged
        ],
        "merged_scales": list(
            dict.fromkeys(one.scale.tensor for one in plan.edited_tensors if one.scale)
        ),
        "rotated": [
            {
                "name": basis.name,
                "kind": basis.kind,
                "size": basis.size,
                "fixes_ones": basis.fixes_ones,
                "tensors": sorted({one.tensor for one in basis.tensors}),
                "inputs": list(basis.inputs),
            }
            for basis in plan.turned
        ],
        "not_rotated": [
            {
                "name": basis.name,
                "kind": basis.kind,
                "size": basis.size,
                "reason": basis.reason,
                "culprit": basis.culprit,
            }
            for basis in plan.bases
            if basis.reason
        ],
        "untied": [
            {"tensor": u.tensor, "copy_of": u.stored, "parameters": prod(u.shape)}
            for u in plan.untied
        ],
        "settings": {setting.name: setting.value for setting in plan.settings},
        "entry_inputs": list(plan.entry_inputs),
        "unproven": list(plan.unproven),
        "calls": [call_text.to_text(form) for form in plan.covered.forms] if plan.covered else None,
        "by_example": list(plan.by_example),
        "already_rmsnorm": dict(plan.other_norms),
        "gains": [
            {"without": list(g.without), "norms": g.norms, "outputs": list(g.outputs)}
            for g in gains
        ],
    }
    if paper is not None:
        found["paper"] = list(paper)
    if places is not None:
        found["norm_places"] = {kind: dict(counts) for kind, counts in places.items()}
    if options:
        found["options"] = {name: _norm_counts(p) for name, p in options.items()}
    return found


def _norm_counts(plan: Plan) -> Row:
    statuses = [verdict.status for verdict in plan.norms]
    return {
        "become_rmsnorm": len(plan.folded),
        "in_weights_alone": statuses.count("static"),
        "with_added_subtraction": statuses.count("centred"),
        "added_subtractions": len(plan.ops),
    }


VERDICTS = {
    "static": "in_weights_alone",
    "centred": "with_added_subtraction",
    "kept": "stays_layernorm",
}
"""The ``status`` of a ``plan.Verdict``, and its name in reports."""
