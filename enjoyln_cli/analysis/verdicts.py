"""From a cut to a plan: each norm's verdict, the stored tensors to centre, the operations.

A writer is one stored tensor and the axis to centre it over. A parameter has several writers if the
file stores copies of a tied tensor, or if it is built from several tensors of another layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from torch import nn

from enjoyln_cli.analysis.config_size import widenings_for
from enjoyln_cli.analysis.output_gains import joined_fields
from enjoyln_cli.analysis.problem import CheckpointTraces, Statement
from enjoyln_cli.analysis.stored_layout import Conversion
from enjoyln_cli.analysis.stored_names import StoredClass, stored_in_groups
from enjoyln_cli.calls.calls import input_embeddings
from enjoyln_cli.calls.composition import composition_of
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.plan.axis import Axis, feature_axis
from enjoyln_cli.plan.edited_tensors import (
    BakedNorm,
    CentredWeight,
    EditedTensor,
    NamedParameter,
    RotatedTensor,
)
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.plan import (
    ASKED_TO_KEEP,
    NOT_ASKED,
    MeanSubtraction,
    NormFusion,
    Plan,
    RotationGroup,
    UnfusedNorm,
    Verdict,
    size_settings,
)
from enjoyln_cli.proof import explain
from enjoyln_cli.proof.layer_norms import rms_norms
from enjoyln_cli.proof.min_cut import Cut, Parameter, Problem
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.rotation.found_group import FoundGroup
from enjoyln_cli.rotation.norm_fusion import Move, find_fusions
from enjoyln_cli.rotation.rotations import Rotations, planned_groups, rotations
from enjoyln_cli.trace.trace import Trace
from enjoyln_cli.trace.traced_calls import covered_calls, unproven_inputs

Edited = TypeVar("Edited", bound=EditedTensor)


def plan_of(family: CheckpointTraces, statement: Statement, cut: Cut, options: Options) -> Plan:
    """The plan for a cut of the stated problem."""
    problem, reference, traces = statement.problem, family.reference, family.traces
    norms = problem.norms.keys() | statement.refused.keys()
    paths = [path for path, _ in reference.model.named_modules() if path in norms]
    subtracting = {mlp for support in cut.folded.values() for mlp in support.mlps}
    widened = widenings_for(subtracting, problem.widenings.resizes, reference.stored)
    table = _token_table(reference.model, problem.groups)
    known = rotations(problem, options, table) if options.rotate else Rotations(())
    fused, unfused = _fusions(statement, cut, family, options, known)
    tensors = partial(rotated_tensors, problem, reference)
    rotation_groups = planned_groups(known, problem, fused, unfused, tensors)
    if any(group.reason for group in rotation_groups):  # norms whose weight need not move after all
        known = known.that_rotate(rotation_groups)
        if options.merge is not None:
            fused, unfused = _fusions(statement, cut, family, options, known)
        else:  # each norm is decided by itself
            fused = tuple(one for one in fused if one.norm in known.specs)
            unfused = tuple(one for one in unfused if one.norm in known.specs)
    writers = writers_of(problem, cut, reference)
    rows = tuple(_given_rows(statement, writers))
    entries = (e for support in cut.folded.values() for e in support.entries if e not in rows)
    return Plan(
        model_type=family.model_type,
        model_class=reference.name,
        classes=family.classes,
        norms=tuple(verdict_on(problem, cut, path, statement.refused) for path in paths),
        centred_weights=writers,
        subtractions=ops_of(problem, cut),
        entry_inputs=tuple(dict.fromkeys(entries)),
        unproven=tuple(
            dict.fromkeys(
                (
                    *unproven_inputs(family.traced),
                    *known.unproven,
                    *rows,
                    *_unread(reference, traces),
                )
            )
        ),
        other_norms=tuple(sorted(Counter(rms_norms(reference.model).values()).items())),
        outputs=family.outputs or _outputs_that_stay(problem, rotation_groups, options),
        by_example=tuple(dict.fromkeys(t.label for t in traces if t.by_values)),
        widened=widened,
        fused=fused,
        unfused=unfused,
        rotation_groups=rotation_groups,
        seed=options.seed,
        settings=size_settings(widened),
        covered=covered_calls(family.traced, size_settings(widened)),
        training=any(one.training for one in family.traced),
        compositions=(
            composition_of(reference.model),
            *(
                trace.composition_after
                for trace in traces
                if trace.composition_after and trace.model_class == reference.name
            ),
        ),
    )


def _outputs_that_stay(
    problem: Problem, rotation_groups: Sequence[RotationGroup], options: Options
) -> tuple[str, ...]:
    """The outputs that the class is used for, if others change; empty if none does."""
    traces, required = problem.flow.traces, problem.flow.required
    changes = options.fold or options.merge or any(group.outputs for group in rotation_groups)
    if required is None or not changes:
        return ()
    fields = (f for trace in traces for names in trace.returned.values() for f in names)
    return joined_fields(required.difference(*(trace.fed_back for trace in traces)), fields)


def _given_rows(statement: Statement, writers: Iterable[CentredWeight]) -> Iterator[str]:
    """The inputs that take the place of rows of tables that a norm is baked into."""
    for writer in writers:
        if writer.baked:
            table = statement.problem.groups.get(writer.parameter, writer.parameter)
            yield from statement.inputs_of_tables[table]


def _unread(reference: StoredClass, traces: Sequence[Trace]) -> list[str]:
    """The stored parameters that no trace reads; empty if nothing was traced."""
    used = (names for t in traces for node, names in t.parameters.items() if node.users)
    reached = {name for names in used for name in names}
    parameters = dict(reference.model.named_parameters(remove_duplicate=False))
    stored = [name for name in (*reference.stored, *reference.converted) if name in parameters]
    return [name for name in stored if traces and name not in reached]


def _token_table(model: nn.Module, groups: Mapping[str, str]) -> Parameter | None:
    """The weight of ``get_input_embeddings()``; ``None`` if the model has none."""
    table = input_embeddings(model)
    for name, parameter in model.named_parameters():
        if table is not None and parameter is table.weight:
            return Parameter(groups.get(name, name), feature_axis(tuple(parameter.shape)))
    return None


def _fusions(
    statement: Statement, cut: Cut, family: CheckpointTraces, options: Options, known: Rotations
) -> tuple[tuple[NormFusion, ...], tuple[UnfusedNorm, ...]]:
    """The norms that are fused: norms asked for, and norms in rotation groups that are rotated.

    Folded norms are asked for; if no norm is to be folded, all norms that could be swapped are.
    """
    problem, reference = statement.problem, family.reference
    specs = known.specs
    moves: dict[str, Move] = dict.fromkeys(specs, "weight")
    if options.merge is not None:
        could_fold = {norm for norm, why in statement.refused.items() if why == NOT_ASKED}
        asked = {*cut.folded} if options.fold else could_fold
        specs |= {norm: spec for norm, spec in statement.specs.items() if norm in asked}
        for norm in asked:
            moves[norm] = "affine" if norm in moves else options.merge
    baked = {norm.weight for norm in problem.baked.values()}
    specs = {norm: spec for norm, spec in specs.items() if f"{norm}.weight" not in baked}
    if not specs:
        return (), ()
    stored = {
        name: tensors[0] for name, tensors in reference.stored.items() if statement.single(name)
    }
    ops = {op for support in cut.folded.values() for op in support.ops if op.place != "entry"}
    centred = {node for op in ops for _, node in problem.carried(op)}
    order = [path for path, _ in reference.model.named_modules() if path in specs]
    return find_fusions(
        problem.flow,
        {path: specs[path] for path in order},
        problem.groups,
        stored,
        statement.stored_weight,
        centred,
        lambda bias, weight, offset: reference.lost_by_division(
            stored[bias], stored[weight], offset
        ),
        moves,
        known.weighting,
    )


def verdict_on(problem: Problem, cut: Cut, norm: str, refused: dict[str, str]) -> Verdict:
    """Whether the norm is folded, with its edits, or kept, with the reason.

    ``refused`` has the reasons of norms that cannot be swapped at all.
    """
    if norm in refused:
        culprit = "" if refused[norm] == ASKED_TO_KEEP else norm
        return Verdict(norm, "stays_layernorm", reason=refused[norm], culprit=culprit)
    if norm not in cut.folded:
        obstacle = explain.obstacle(problem, cut, norm)
        return Verdict(
            norm,
            "stays_layernorm",
            reason=obstacle.reason,
            culprit=obstacle.culprit,
            path=obstacle.path,
        )
    support = cut.folded[norm]
    needs = tuple(dict.fromkeys(writer.name for writer in support.writers))
    ops = tuple(dict.fromkeys(op.module for op in support.ops))
    mlps = tuple(mlp.second for mlp in support.mlps)
    return Verdict(
        norm, "with_subtraction" if ops else "in_weights", subtractions=ops, needs=needs, mlps=mlps
    )


def writers_of(problem: Problem, cut: Cut, reference: StoredClass) -> tuple[CentredWeight, ...]:
    """One writer for each stored tensor of each centred parameter, in the model's order."""
    centred = {p for support in cut.folded.values() for p in support.writers}
    tensors = _stored_tensors(problem, reference, dict.fromkeys(centred, True))
    writers = [writer for writers in tensors.values() for writer in writers]
    for writer in tuple(writers):
        if writer.baked:  # its bias is zeros, and must not get another mean
            bias, features = writer.baked.bias, writer.shape[writer.axis.dim :][:1]
            writers.append(
                CentredWeight(bias.parameter, feature_axis(features), features, bias.tensor)
            )
    return _in_order(reference, writers)


def rotated_tensors(
    problem: Problem, reference: StoredClass, group: FoundGroup
) -> tuple[RotatedTensor, ...]:
    """One entry for each stored tensor of each rotated parameter, in the model's order."""
    scaled = {p: bool(group.fused and uses.writes) for p, uses in group.parameters.items()}
    rotated = [
        RotatedTensor(**vars(tensor), **group.parameters[parameter]._asdict())
        for parameter, tensors in _stored_tensors(problem, reference, scaled).items()
        for tensor in tensors
    ]
    return _in_order(reference, rotated)


def _stored_tensors(
    problem: Problem, reference: StoredClass, parameters: Mapping[Parameter, bool]
) -> dict[Parameter, list[CentredWeight]]:
    """The stored tensors of ``parameters``, which say whether a scale is fused into them."""
    names = stored_in_groups(reference, problem.groups)
    weights = stored_weights(reference.model)
    tensors_of: dict[Parameter, list[CentredWeight]] = {parameter: [] for parameter in parameters}
    for parameter, name in ((p, name) for p in parameters for name in names[p.name]):
        made = tensors_of[parameter]
        axis, shape = parameter.axis, tuple(weights[name].shape)
        by = problem.scales.get(parameter.name) if parameters[parameter] else None
        scale = NamedParameter(by, reference.stored[by][0]) if by else None
        baked = _baked(problem, reference, parameter.name)
        tensors = reference.stored.get(name, ())
        made += [
            CentredWeight(name, axis, shape, tensor, scale=scale, baked=baked) for tensor in tensors
        ]
        if name in reference.converted:
            made += _converted_writers(reference.converted[name], name, axis)
    return tensors_of


def _in_order(reference: StoredClass, tensors: Iterable[Edited]) -> tuple[Edited, ...]:
    order = {name: position for position, name in enumerate(stored_weights(reference.model))}
    return tuple(sorted(tensors, key=lambda t: (order[t.parameter], t.tensor, t.axis)))


def _baked(problem: Problem, reference: StoredClass, table: str) -> BakedNorm | None:
    """The norm that is baked into a table, by the names of its stored tensors."""
    norm = problem.baked.get(table)
    if norm is None:
        return None
    weight, bias = (
        NamedParameter(name, reference.stored[name][0]) for name in (norm.weight, norm.bias)
    )
    return BakedNorm(weight, bias, norm.eps)


def _converted_writers(layout: Conversion, name: str, axis: Axis) -> list[CentredWeight]:
    stored = layout.stored(name, axis)
    pairs = () if isinstance(stored, Opaque) else stored
    return [
        CentredWeight(name, on_disk, layout.sources[tensor], tensor, axis)
        for tensor, on_disk in pairs
    ]


def ops_of(problem: Problem, cut: Cut) -> tuple[MeanSubtraction, ...]:
    """Every centring operation once, except of inputs, which are centred on entry."""
    carriers = dict.fromkeys(op for support in cut.folded.values() for op in support.ops)
    return tuple(
        MeanSubtraction(c.module, c.place, c.axis, explain.own_mean(problem, c))
        for c in carriers
        if c.place != "entry"
    )
