"""From traced classes to the problem that the minimum cut solves.

A problem consists of the norms that could be swapped, the values that their inputs are computed
from, the possible edits, and the reasons against other edits. Parameters that are tied in any
graph count as one parameter. A parameter that the checkpoint stores in another layout can be
centred if that layout allows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from enjoyln_cli.analysis.config_size import resize_search
from enjoyln_cli.analysis.stored_names import StoredClass, stored_in_groups
from enjoyln_cli.errors import EnjoyLNError
from enjoyln_cli.graph.nodes import is_whole
from enjoyln_cli.models.classes import base_path
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.models.norm_probe import LayerNormSpec
from enjoyln_cli.models.outputs import match_names, require_named
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.plan.fold_options import Options
from enjoyln_cli.plan.plan import ASKED_TO_KEEP, NOT_ASKED
from enjoyln_cli.proof.flow import Flow
from enjoyln_cli.proof.identity_ops import BakedNorms, Scales, find_baked_norms, find_scales
from enjoyln_cli.proof.layer_norms import layer_norms, norm_calls
from enjoyln_cli.proof.min_cut import Parameter, Problem
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.proof.widening import Widenings, find_widenings
from enjoyln_cli.rotation.norm_fusion import StoredWeight
from enjoyln_cli.rotation.used_outputs import by_products
from enjoyln_cli.text import did_you_mean, listed_briefly
from enjoyln_cli.trace.trace import Trace
from enjoyln_cli.trace.traced_calls import ModelTraces


@dataclass(frozen=True, eq=False, kw_only=True)
class CheckpointTraces:
    """The traced classes of one checkpoint that a plan is made for."""

    reference: StoredClass
    """The class whose parameter and module names the plan uses."""
    model_type: str
    classes: tuple[str, ...]
    """Names of the classes that the plan is proven for, the reference first."""
    traced: tuple[ModelTraces, ...] = ()
    """Traces of the reference, and of the classes that are not part of it as its base model."""
    outputs: tuple[str, ...] = ()
    """Fields of the reference's output that must stay unchanged; empty for all fields."""
    training: bool = False
    """Whether the plan is for training: scales are not fused then."""

    @property
    def traces(self) -> tuple[Trace, ...]:
        return tuple(trace for one in self.traced for trace in one.traces)


@dataclass(frozen=True, eq=False, kw_only=True)
class Statement:
    """A problem, and facts from stating it that the description of the plan needs."""

    problem: Problem
    specs: Mapping[str, LayerNormSpec]
    """The spec of each LayerNorm of the reference, by module path."""
    refused: dict[str, str]
    """The norms that cannot be swapped, even with a zero-mean input, and why."""
    inputs_of_tables: Mapping[str, tuple[str, ...]]
    """For each table that a norm can be baked into: the inputs that take the place of its rows."""
    single: Callable[[str], bool]
    """Whether a parameter is untied and stored as one tensor with its own layout."""
    stored_weight: StoredWeight
    """The stored tensors of an untied parameter, whatever its layout."""


def state_problem(family: CheckpointTraces, options: Options) -> Statement:
    """State the problem.

    Raises ``EnjoyLNError`` if one of ``family.outputs`` or of ``options.keep_norms`` does not
    exist.
    """
    reference, traces = family.reference, family.traces
    groups = _groups(reference.model, traces)
    fixed = {groups.get(n, n): reason for trace in traces for n, reason in trace.locked.items()}
    scaled = {groups.get(name, name) for trace in traces for name in trace.scaled}
    single = _single(reference, groups, {*fixed, *scaled})
    scales = Scales() if family.training else find_scales(traces, groups, single)
    required = None
    if family.outputs:
        required = _required(traces, reference.name, family.outputs)
    elif options.rotate:
        required = _used(traces, bool(base_path(reference.model)))
    changes_table = (options.untie or options.rotate) and not family.training
    baked = find_baked_norms(traces, groups, single) if changes_table else BakedNorms()
    flow = Flow(
        traces=traces,
        required=required,
        identities=scales.identities | baked.identities,
        refused=scales.refused,
    )
    specs, other_specs = layer_norms(reference.model)
    norms, refused = norm_calls(flow, specs, other_specs)
    if not options.fold:
        norms, refused = {}, dict.fromkeys(norms, NOT_ASKED) | refused
    for path in _norms_to_keep(options.keep_norms, [*norms, *refused]):
        refused[path] = ASKED_TO_KEEP
        norms.pop(path, None)
    widenings = Widenings()
    if options.widen_mlp:
        calls = {trace.model_class: trace.call for trace in reversed(traces)}
        others = ((one.model, one.captures.naming) for one in family.traced[1:])
        search = resize_search([(reference.model, str), *others], calls, groups, options.widen_to)
        widenings = find_widenings(flow, groups, single, search)
    problem = Problem(
        flow=flow,
        norms=norms,
        locked=_locked(reference, groups, fixed),
        groups=groups,
        scales=scales.into,
        baked=baked.tables,
        widenings=widenings,
    )
    return Statement(
        problem=problem,
        specs=specs,
        refused=refused,
        inputs_of_tables=baked.inputs,
        single=single,
        stored_weight=_stored_weight(reference, groups, {*fixed, *scaled}),
    )


def _norms_to_keep(patterns: Iterable[str], norms: Collection[str]) -> set[str]:
    """The ``norms`` that a pattern matches. Raises ``EnjoyLNError`` if a pattern matches none."""
    kept: set[str] = set()
    for pattern in patterns:
        matches = {norm for norm in norms if fnmatchcase(norm, pattern)}
        if not matches:
            known = did_you_mean(pattern, norms) or f"it has {listed_briefly([*norms]) or 'none'}"
            raise EnjoyLNError(f"no LayerNorm of the model is called {pattern}; {known}")
        kept |= matches
    return kept


def _required(
    traces: Iterable[Trace], model_class: str, outputs: tuple[str, ...]
) -> frozenset[str]:
    """The fields that ``outputs`` name, and the fields that a later call may take (as a cache)."""
    fields = frozenset(f for t in traces for names in t.returned.values() for f in names)
    require_named(outputs, fields, model_class)
    return match_names(outputs, fields).union(*(trace.fed_back for trace in traces))


def _used(traces: Iterable[Trace], has_head: bool) -> frozenset[str] | None:
    """The fields that a class is used for, and the fields that a later call may take.

    ``None`` for all fields.
    """
    fields = frozenset(f for t in traces for names in t.returned.values() for f in names)
    fed_back = frozenset().union(*(trace.fed_back for trace in traces))
    unused = by_products((f for f in fields - fed_back if f != "loss"), has_head)
    return fields - unused if unused else None


def _groups(model: nn.Module, traces: Iterable[Trace]) -> dict[str, str]:
    """Map each weight's name to the first of its tied names, ties of all traces together."""
    order = {name: i for i, name in enumerate(stored_weights(model))}
    together: dict[str, set[str]] = {}
    for trace in traces:
        for names in trace.parameters.values():
            group = set(names).union(*(together.get(name, ()) for name in names))
            together.update(dict.fromkeys(group, group))
    for name in order:
        together.setdefault(name, {name})
    return {n: min(g, key=lambda m: (order.get(m, len(order)), m)) for n, g in together.items()}


def _locked(
    reference: StoredClass, groups: Mapping[str, str], fixed: Mapping[str, str]
) -> Callable[[Parameter], str | None]:
    """A function that says why a parameter's stored tensors cannot be centred, if they cannot.

    ``fixed`` maps tied groups that must not be edited at all to the reason.
    """
    names = stored_in_groups(reference, groups)

    def locked(parameter: Parameter) -> str | None:
        if parameter.name in fixed:
            return fixed[parameter.name]
        if parameter.name not in names:
            return "it is not stored"
        for name in names[parameter.name]:
            if name in reference.converted:
                where = reference.converted[name].stored(name, parameter.axis)
                if isinstance(where, Opaque):
                    return where.reason
        return None

    return locked


def _single(
    reference: StoredClass, groups: Mapping[str, str], fixed: Container[str]
) -> Callable[[str], bool]:
    """A function that says whether a parameter is untied and stored as one tensor as it is.

    Parameters in ``fixed`` are not.
    """
    tied = Counter(groups.values())

    def single(name: str) -> bool:
        return tied[name] == 1 and len(reference.stored.get(name, ())) == 1 and name not in fixed

    return single


def _stored_weight(
    reference: StoredClass, groups: Mapping[str, str], fixed: Container[str]
) -> StoredWeight:
    """A function that finds the stored tensors of an untied parameter that is not in ``fixed``."""
    tied, single = Counter(groups.values()), _single(reference, groups, fixed)
    shapes = {name: tuple(one.shape) for name, one in stored_weights(reference.model).items()}

    def stored_weight(name: str, dim: int) -> tuple[tuple[str, int], ...]:
        if single(name):
            return ((reference.stored[name][0], dim),)
        if tied[name] != 1 or name in fixed or name not in reference.converted:
            return ()
        layout = reference.converted[name]
        found = layout.stored(name, feature_axis(shapes[name], dim))
        if isinstance(found, Opaque):
            return ()
        whole = all(is_whole(axis, layout.sources[tensor]) for tensor, axis in found)
        return tuple((tensor, axis.dim) for tensor, axis in found) if whole else ()

    return stored_weight
