"""What a cut says of a model's parts: each norm's verdict, the stored tensors to centre, the ops.

A tensor is stored under one name, or under several where the file repeats what the model ties, or
in another layout; a writer is one stored tensor and the axis its mean lies along.
"""

from __future__ import annotations

from enjoyln_cli.analysis.stored_layout import Conversion
from enjoyln_cli.analysis.stored_names import Candidate
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.plan import Centring, Scale, Verdict, Writer
from enjoyln_cli.proof import explain
from enjoyln_cli.proof.min_cut import Cut, Problem
from enjoyln_cli.proof.pullback import Opaque


def stored_names(found: Candidate, groups: dict[str, str]) -> dict[str, list[str]]:
    """The first name of each tied group to those of its names that the checkpoint stores."""
    names: dict[str, list[str]] = {}
    for name, group in groups.items():
        if name in found.stored or name in found.converted:
            names.setdefault(group, []).append(name)
    return names


def verdict_on(problem: Problem, cut: Cut, norm: str, refused: dict[str, str]) -> Verdict:
    """Folded, and what that takes; or kept, and why. ``refused`` has the reasons known before."""
    if norm in refused:
        return Verdict(norm, "kept", reason=refused[norm], culprit=norm)
    if norm not in cut.folded:
        found = explain.obstacle(problem, cut, norm)
        return Verdict(norm, "kept", reason=found.reason, culprit=found.culprit, path=found.path)
    support = cut.folded[norm]
    needs = tuple(dict.fromkeys(writer.name for writer in support.writers))
    ops = tuple(dict.fromkeys(op.module for op in support.ops))
    mlps = tuple(mlp.second for mlp in support.mlps)
    return Verdict(norm, "centred" if ops else "static", ops=ops, needs=needs, mlps=mlps)


def writers_of(problem: Problem, cut: Cut, found: Candidate) -> tuple[Writer, ...]:
    """One writer for each stored tensor behind each centred parameter, in the model's order."""
    wanted = {p for support in cut.folded.values() for p in support.writers}
    shapes = dict(found.model.named_parameters(remove_duplicate=False))
    names = stored_names(found, problem.groups)
    made: list[Writer] = []
    for parameter, name in ((p, name) for p in wanted for name in names[p.name]):
        axis, shape = parameter.axis, tuple(shapes[name].shape)
        by = problem.scales.get(parameter.name)
        scale = Scale(by, found.stored[by][0]) if by else None
        tensors = found.stored.get(name, ())
        made += [Writer(name, tensor, axis, shape, scale=scale) for tensor in tensors]
        if name in found.converted:
            made += _converted_writers(found.converted[name], name, axis)
    order = {name: position for position, name in enumerate(shapes)}
    return tuple(sorted(made, key=lambda w: (order[w.parameter], w.tensor, w.axis)))


def _converted_writers(layout: Conversion, name: str, axis: Axis) -> list[Writer]:
    stored = layout.stored(name, axis)
    pairs = () if isinstance(stored, Opaque) else stored
    return [
        Writer(name, tensor, on_disk, layout.sources[tensor], axis) for tensor, on_disk in pairs
    ]


def ops_of(problem: Problem, cut: Cut) -> tuple[Centring, ...]:
    """Every op that stays, once; what enters a call, as ``inputs_embeds`` does, has none."""
    carriers = dict.fromkeys(op for support in cut.folded.values() for op in support.ops)
    return tuple(
        Centring(c.module, c.place, c.axis, explain.own_mean(problem, c))
        for c in carriers
        if c.place != "entry"
    )
