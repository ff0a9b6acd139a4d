"""From a model to its plan: trace it, state the problem, cut, and put every verdict into words.

The plan holds in every traced class and call at once. What could not be traced is not proven, and
is listed.
"""

from __future__ import annotations

import difflib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from enjoyln_cli.analysis import stored_names, untying
from enjoyln_cli.analysis import verdicts as outcome
from enjoyln_cli.analysis.affine_merge import find_merges
from enjoyln_cli.analysis.config_size import Built, resizing, widenings_for
from enjoyln_cli.analysis.output_gains import Gain, gains
from enjoyln_cli.analysis.paper import algorithm_1
from enjoyln_cli.analysis.same_ops import require_same
from enjoyln_cli.analysis.stored_names import Candidate
from enjoyln_cli.analysis.untying import Apart
from enjoyln_cli.calls.argument_trials import further_calls
from enjoyln_cli.calls.calls import Call, ExampleCalls, calls_like, optional_inputs, ways_to_call
from enjoyln_cli.calls.generation import generated_calls
from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.effects.reachable import Remembered
from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError, TraceFailed, UnsupportedModel
from enjoyln_cli.models import classes
from enjoyln_cli.models.meta_device import without_weights
from enjoyln_cli.models.norm_probe import LayerNormForm
from enjoyln_cli.models.outputs import named_by, require_named, returning
from enjoyln_cli.plan.covered_calls import OTHER_CALLS, CallForm, Covered, attributes_of, is_stock
from enjoyln_cli.plan.plan import (
    PLAIN,
    Merge,
    Options,
    Plan,
    Setting,
    Unmerged,
    sized,
)
from enjoyln_cli.proof import explain
from enjoyln_cli.proof import min_cut as cuts
from enjoyln_cli.proof.explain import Tree
from enjoyln_cli.proof.flow import Flow
from enjoyln_cli.proof.layer_norms import layer_norms, norm_calls, rms_norms
from enjoyln_cli.proof.layer_scale import find_scales
from enjoyln_cli.proof.min_cut import Cut, Parameter, Problem
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.proof.widening import Widenings, find_widenings
from enjoyln_cli.trace.capture import Captures, Trace
from enjoyln_cli.trace.failure_reasons import say_why
from enjoyln_cli.trace.size_range import in_one_row, in_two_rows, traced_forms


@dataclass(frozen=True, eq=False)
class Read:
    """What the traces of one model were given."""

    captures: Captures
    inputs: frozenset[str] = frozenset()
    """Names of the inputs that were given in any call."""
    traces: tuple[Trace, ...] = ()
    forms: tuple[CallForm, ...] | None = None
    """The calls that are covered, where the traces are all that is known; ``None`` until they are
    asked for, which takes longer than the traces."""

    @property
    def model(self) -> nn.Module:
        return self.captures.model


@dataclass(frozen=True, eq=False, repr=False)
class Analysis:
    """A plan and the proof behind it."""

    plan: Plan
    problem: Problem
    cut: Cut
    paper: tuple[str, ...]
    """Norms that the paper's Algorithm 1 calls foldable, as printed."""
    under: Callable[[Options], Analysis]
    """The same graphs with other options."""

    def __repr__(self) -> str:
        """A line for each thing to know first; ``plan`` and ``why`` have the rest."""
        plan = self.plan
        lines = [
            f"{plan.model_class}: {len(plan.folded)} of {len(plan.norms)} LayerNorms become RMSNorm"
        ]
        lines += [f"subtracts the mean from the {op.place} of {op.module}" for op in plan.ops]
        reasons = Counter(verdict.reason for verdict in plan.kept)
        lines += [f"{count} stay LayerNorm: {reason}" for reason, count in reasons.items()]
        return "\n  ".join(lines)

    def why(self, norm: str) -> Tree:
        """The zero-mean graph of one norm; ``EnjoyLNError`` if there is no norm of this name."""
        verdict = next((v for v in self.plan.norms if v.norm == norm), None)
        if verdict is None:
            names = [v.norm for v in self.plan.norms]
            near = difflib.get_close_matches(norm, names, cutoff=0.4) or names[:3]
            raise EnjoyLNError(f"no LayerNorm is called {norm}; there is {', '.join(near)}")
        if norm not in self.problem.norms:
            return Tree(f"{norm} stays LayerNorm: {verdict.reason}", False)
        found = explain.tree(self.problem, self.cut, norm)
        handed_on = explain.handed_on(self.plan, norm)
        return replace(found, children=(*found.children, handed_on)) if handed_on else found

    def gains(self) -> tuple[Gain, ...]:
        """How many kept norms would fold if an output of ``plan.model_class`` might change."""
        return gains(self.problem, self.plan.model_class) if self.plan.kept else ()


def analyze_config(
    config: Any,
    *,
    model_class: str | None = None,
    checkpoint: Checkpoint | None = None,
    outputs: Sequence[str] = (),
    options: Options = PLAIN,
    example_calls: ExampleCalls = (),
) -> Analysis:
    """The plan for a transformers config, or for the checkpoint that it belongs to.

    It holds for every class that loads the checkpoint (without one: what the config's own class
    saves) with no weight missing, or for ``model_class`` alone. ``example_calls`` of the first of
    these classes are proven with those that its config tells. With ``outputs`` (fields of a
    class's output, or patterns of them) no other output has to stay the same, and it holds for the
    first of these classes that has such fields, alone. ``options`` allow more than centring.
    Raises ``UnsupportedModel``, ``TraceFailed``, ``BadCheckpoint``, or ``EnjoyLNError`` where an
    output is not known.
    """
    config = returning(config, outputs)
    listed = [classes.class_named(model_class)] if model_class else classes.classes_for(config)
    reference = classes.build(listed[0], config)
    if checkpoint:
        shapes = {name: stored.shape for name, stored in checkpoint.tensors.items()}
    else:
        shapes = stored_names.saved_shapes(reference)
    first = stored_names.candidate(reference, shapes, checkpoint)
    if not any(layer_norms(reference)):
        return _analysis(first, [], (first.name,), config.model_type, [], (), options)
    siblings = (_loading(other, config, shapes, checkpoint) for other in listed[1:])
    loading = chain([first], (found for found in siblings if found))
    more = calls_like(example_calls)
    if not options.untie:
        found = _analysis_of_classes(loading, config.model_type, tuple(outputs), options, more)
        again = partial(
            analyze_config,
            config,
            model_class=model_class,
            checkpoint=checkpoint,
            outputs=outputs,
            example_calls=example_calls,
        )
        same = found.under
        return replace(found, under=lambda o: again(options=o) if o.untie else same(o))
    tied = list(loading)
    apart = untying.apart(config, tied, shapes, checkpoint)
    after = apart.after.values() if apart else tied
    found = _analysis_of_classes(after, config.model_type, tuple(outputs), options, more, apart)
    return found if apart is None else _untied(found, apart)


def _untied(found: Analysis, apart: Apart) -> Analysis:
    """The plan of what was set ``apart``, with the copies that it takes, whatever the options."""

    def under(options: Options) -> Analysis:
        return _untied(found.under(options), apart)

    return replace(found, plan=untying.untied(found.plan, apart), under=under)


def _analysis_of_classes(
    loading: Iterable[Candidate],
    model_type: str,
    outputs: tuple[str, ...],
    options: Options,
    more: Sequence[Call] = (),
    apart: Apart | None = None,
) -> Analysis:
    """The plan for all classes that load a checkpoint, the one that it is named after first.

    That one has to take ``more`` calls; in the others they are proven where they take them.
    """
    if outputs:
        return _analysis_of_outputs(loading, model_type, outputs, options, more, apart)
    first, *others = loading
    inner = classes.base_path(first.model)
    within = inner and is_stock(first.model)  # other code may call its base in ways of its own
    held = [o for o in others if within and type(o.model) is _type_at(first.model, inner)]
    traces, given = _traces(first, first, inner if held else None, apart, more)
    read = [given]
    proven = [first.name, *(other.name for other in held)]
    beside: list[Built] = []
    for other in others:
        if other in held:
            continue
        try:
            others_traces, given = _traces(other, first, None, apart, _not_required(more))
        except (TraceFailed, UnsupportedModel):
            continue
        traces = traces + others_traces
        read.append(given)
        proven.append(other.name)
        beside.append((other.model, classes.naming_between(other.model, first.model)))
    return _analysis(first, traces, tuple(proven), model_type, read, (), options, beside)


def _analysis_of_outputs(
    candidates: Iterable[Candidate],
    model_type: str,
    outputs: tuple[str, ...],
    options: Options,
    more: Sequence[Call],
    apart: Apart | None,
) -> Analysis:
    """The plan for the first class that has all of ``outputs``, and for no other.

    A name of an output means something for one class only. Its siblings return other things, and
    the base model inside of it gives out what may change here, so neither is traced nor proven.
    """
    refused: EnjoyLNError | None = None
    for found in candidates:
        try:
            traces, given = _traces(found, found, None, apart, more)
            return _analysis(found, traces, (found.name,), model_type, [given], outputs, options)
        except EnjoyLNError as error:
            refused = refused or error
    raise refused or UnsupportedModel(f"no class is known for the model type {model_type}")


@contextmanager
def _foreign_code(model: nn.Module) -> Iterator[None]:
    """The boundary to the code of any live module: what it raises becomes a refusal.

    So does what torch raises when it captures that code, of whatever class it is. What the code can
    reach is afterwards what it was. What torch has compiled meanwhile, as for ``torch.cond``, is
    dropped, since a function may have only a few compiled forms; the next call compiles it again.
    """
    remembered, compiled = Remembered(model), _graphs_compiled()
    try:
        yield
    except EnjoyLNError:
        raise
    except Exception as error:
        raise TraceFailed(
            f"{type(model).__name__} could not be analysed: {say_why(error)}"
        ) from error
    finally:
        remembered.put_back()
        if _graphs_compiled() != compiled:
            torch.compiler.reset()


def _graphs_compiled() -> int:
    """How many graphs ``torch.compile`` has captured in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


def analyze_module(
    model: nn.Module,
    *args: Any,
    outputs: Sequence[str] = (),
    options: Options = PLAIN,
    example_calls: ExampleCalls = (),
    **kwargs: Any,
) -> Analysis:
    """The plan for any live module, proven for calls like ``model(*args, **kwargs)``.

    It also holds for those like ``example_calls``. Tensors among the inputs give shapes and dtypes.
    A transformers model needs none: it is proven for the calls that its config tells. Raises
    ``TraceFailed``, or ``EnjoyLNError`` where the module does not return one of ``outputs``.
    """
    with _foreign_code(model):
        further = calls_like(example_calls)
        if args or kwargs or not (further or hasattr(model, "config")):
            calls = [Call("example inputs", ((args, kwargs),))]
        elif hasattr(model, "config"):
            calls = _likely_calls(Captures(without_weights(model)))
        else:
            calls = []
        calls += further
        doubled = [two for call in calls for two in in_two_rows(model, call)]
        return analyze_calls(model, [*calls, *doubled], outputs, options)


def analyze_calls(
    model: nn.Module,
    calls: Iterable[Call],
    outputs: Sequence[str] = (),
    options: Options = PLAIN,
) -> Analysis:
    """The plan for any live module that holds in all of ``calls`` at once.

    Raises ``TraceFailed`` where a call that is ``required`` cannot be traced, ``EnjoyLNError``
    where none returns one of ``outputs``, or where it is to be untied.
    """
    if options.untie:
        raise EnjoyLNError("a model in memory cannot be untied; pass its config or its checkpoint")
    with _foreign_code(model):
        tensors = dict(model.named_parameters(remove_duplicate=False))
        own = Candidate(model, {name: (name,) for name in tensors}, {}, ())
        kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        traces, given = _captured(Captures(model), calls)
        return _analysis(own, traces, (own.name,), kind, [given], tuple(outputs), options)


def _loading(
    model_class: type,
    config: Any,
    shapes: dict[str, stored_names.Shape],
    checkpoint: Checkpoint | None,
) -> Candidate | None:
    """The class, if it loads the stored tensors with no weight missing or of another shape.

    A class that needs more of the config than this one says loads nothing.
    """
    try:
        found = stored_names.candidate(classes.build(model_class, config), shapes, checkpoint)
    except (BadCheckpoint, UnsupportedModel):
        return None
    return None if found.missing else found


def _type_at(model: nn.Module, path: str) -> type:
    return type(model.get_submodule(path))


def _not_required(calls: Iterable[Call]) -> list[Call]:
    return [replace(call, required=False) for call in calls]


def _traces(
    found: Candidate,
    reference: Candidate,
    inner: str | None,
    apart: Apart | None,
    more: Sequence[Call],
) -> tuple[list[Trace], Read]:
    """All graphs of one class, and what they are given.

    Raises ``UnsupportedModel`` where it computes something else since it was set ``apart``.
    """
    model = found.model
    captures = Captures(model, classes.naming_between(model, reference.model), inner)
    calls = _likely_calls(captures)
    doubled = [two for call in more for two in in_two_rows(model, call)]
    traces, given = _captured(captures, [*calls, *more, *doubled])
    if apart is not None:
        require_same(apart.before[found.name].model, model, calls[0])
    return traces, given


def _likely_calls(captures: Captures) -> list[Call]:
    """The calls to trace: in a form that the model accepts, or the likeliest if it accepts none."""
    model = captures.model
    calls = _accepted_calls(captures) or next(iter(ways_to_call(model)), None)
    if calls is None:
        raise UnsupportedModel(f"no inputs can be made up for {type(model).__name__}")
    return [*calls, *further_calls(model, calls[0]), *generated_calls(model)]


def accepted_calls(model: nn.Module) -> list[Call] | None:
    """The calls in the first form that the model accepts; ``None`` if it accepts none."""
    return _accepted_calls(Captures(model))


def _accepted_calls(captures: Captures) -> list[Call] | None:
    ways = ways_to_call(captures.model)
    return next((calls for calls in ways if captures.accepts(calls[0])), None)


def _unproven(read: Sequence[Read]) -> list[str]:
    """Optional inputs that no trace covers, of classes with what their traces were given.

    A class hands keywords that it does not know on to its base model. What that makes of them is
    proven where any class has been given them.
    """
    if not _are_stock(read):
        return [OTHER_CALLS] if _have_forms(read) else []
    left: set[str] = set()
    reached: set[str] = set()
    for one in read:
        left |= set(optional_inputs(one.model)) - one.inputs
        if inner := classes.base_path(one.model):
            reached |= set(optional_inputs(one.model.get_submodule(inner)))
    return sorted(left | reached.difference(*(one.inputs for one in read)))


def _are_stock(read: Sequence[Read]) -> bool:
    return all(is_stock(one.model) for one in read)


def _have_forms(read: Sequence[Read]) -> bool:
    return all(one.forms is not None for one in read)


def _covered(read: Sequence[Read], settings: Iterable[Setting] = ()) -> Covered | None:
    """The calls that were traced; ``None`` where the conventions of transformers say it.

    So it is where no norm changes. What ``settings`` of the config change is no longer as it was
    traced.
    """
    if _are_stock(read) or not _have_forms(read):
        return None
    changed = {setting.name.rpartition(".")[2] for setting in settings}
    attributes = (entry for one in read for entry in attributes_of(one.model))
    return Covered(
        tuple(dict.fromkeys(form for one in read for form in one.forms or ())),
        tuple(
            (owner, name, value)
            for owner, name, value in attributes
            if not changed or (name.rpartition(".")[2] not in changed and type(value) is not int)
        ),
    )


def _captured(captures: Captures, calls: Iterable[Call]) -> tuple[list[Trace], Read]:
    """The graphs of the calls that can be traced, and what these give.

    A call of several steps that keeps its cache gives it to the next one. Of those with one label
    that are not required, the first that the model accepts is traced.
    """
    traces, given, traced = [], set(), set()
    accepted = inspect.signature(captures.model.forward).parameters
    for call in calls:
        if not call.required and (call.label in traced or not captures.accepts(call)):
            continue
        try:
            traces.append(captures.capture(call))
        except TraceFailed:
            if call.required:
                raise
            continue
        traced.add(call.label)
        for args, inputs in call.steps:
            named = {**dict(zip(accepted, args, strict=False)), **inputs}
            given |= {name for name, value in named.items() if value is not None}
        if len(call.steps) > 1 and (call.cache is not None or call.flags.get("use_cache")):
            given.add("past_key_values")
    return traces, Read(captures, frozenset(given), tuple(traces))


def _with_forms(read: Read) -> Read:
    """``read`` with the forms of its calls, and traces of a single row where these do not hold."""
    traces = list(read.traces)
    forms: list[CallForm] = []
    for trace in read.traces:
        found = traced_forms(read.model, trace)
        forms += found
        if not trace.by_example:
            alone = in_one_row(read.model, trace.call, found)
            more, _ = _captured(read.captures, alone)
            traces += more
            forms += [form for one in more for form in traced_forms(read.model, one)]
    return replace(read, traces=tuple(traces), forms=tuple(forms))


def _analysis(
    found: Candidate,
    traces: Iterable[Trace],
    proven: tuple[str, ...],
    model_type: str,
    read: Sequence[Read],
    outputs: tuple[str, ...] = (),
    options: Options = PLAIN,
    beside: Sequence[Built] = (),
) -> Analysis:
    traces = tuple(traces)
    groups = _groups(found.model, traces)
    fixed = _fixed(groups, traces)
    single = _single(found, groups, fixed)
    scales = find_scales(traces, groups, single)
    required = _required(traces, found.name, outputs) if outputs else None
    flow = Flow(traces, required, scales.products, scales.refused)
    forms, other_forms = layer_norms(found.model)
    norms, refused = norm_calls(flow, forms, other_forms)
    widenings = Widenings()
    if options.widen_mlp:
        calls = {trace.model_class: trace.call for trace in reversed(traces)}
        search = resizing([(found.model, str), *beside], calls, groups, options.widen_to)
        widenings = find_widenings(flow, groups, single, search)
    problem = Problem(flow, norms, _locked(found, groups, fixed), groups, scales.into, widenings)
    cut = cuts.solve(problem)
    places = [path for path, _ in found.model.named_modules() if path in norms or path in refused]
    verdicts = [outcome.verdict_on(problem, cut, path, refused) for path in places]
    changes = any(verdict.status != "kept" for verdict in verdicts)
    if changes and not (_are_stock(read) or _have_forms(read)):
        read = [_with_forms(one) for one in read]
        traces = tuple(trace for one in read for trace in one.traces)
        return _analysis(found, traces, proven, model_type, read, outputs, options, beside)
    used = (names for t in flow.traces for node, names in t.parameters.items() if node.users)
    reached = {name for names in used for name in names}
    held = [name for name in (*found.stored, *found.converted) if name in groups]
    unread = [name for name in held if flow.traces and name not in reached]
    subtracting = {mlp for support in cut.folded.values() for mlp in support.mlps}
    widened = widenings_for(subtracting, widenings.resizes, found.stored)
    merged, unmerged = _merges(problem, cut, found, forms, single, options)
    plan = Plan(
        model_type=model_type,
        model_class=found.name,
        classes=proven,
        norms=tuple(verdicts),
        writers=outcome.writers_of(problem, cut, found),
        ops=outcome.ops_of(problem, cut),
        entry_inputs=tuple(dict.fromkeys(e for s in cut.folded.values() for e in s.entries)),
        unproven=(*_unproven(read), *unread),
        other_norms=rms_norms(found.model),
        outputs=outputs,
        by_example=tuple(dict.fromkeys(t.label for t in traces if t.by_example)),
        widened=widened,
        merged=merged,
        unmerged=unmerged,
        settings=sized(widened),
        covered=_covered(read, sized(widened)),
    )
    paper = algorithm_1(flow.traces[0]) if flow.traces else ()
    under = partial(_analysis, found, traces, proven, model_type, read, outputs, beside=beside)
    return Analysis(plan, problem, cut, paper, lambda other: under(options=other))


def _merges(
    problem: Problem,
    cut: Cut,
    found: Candidate,
    forms: Mapping[str, LayerNormForm],
    single: Callable[[str], bool],
    options: Options,
) -> tuple[tuple[Merge, ...], tuple[Unmerged, ...]]:
    if options.merge is None:
        return (), ()
    folded = {norm: form for norm, form in forms.items() if norm in cut.folded}
    stored = {name: tensors[0] for name, tensors in found.stored.items() if single(name)}
    ops = {op for support in cut.folded.values() for op in support.ops if op.place != "entry"}
    centred = {node for op in ops for _, node in problem.carried(op)}
    affine = options.merge == "affine"
    return find_merges(problem.flow, folded, problem.groups, stored, centred, affine)


def _required(
    traces: Iterable[Trace], model_class: str, outputs: tuple[str, ...]
) -> frozenset[str]:
    """The fields that ``outputs`` name, and those that a later call may be given."""
    fields = frozenset(f for t in traces for names in t.returned.values() for f in names)
    require_named(outputs, fields, model_class)
    return named_by(outputs, fields).union(*(trace.fed_back for trace in traces))


def _groups(model: nn.Module, traces: Iterable[Trace]) -> dict[str, str]:
    """Parameter names to the first name of everything tied to them, in any of the traces."""
    order = {name: i for i, (name, _) in enumerate(model.named_parameters(remove_duplicate=False))}
    together: dict[str, set[str]] = {}
    for trace in traces:
        for names in trace.parameters.values():
            group = set(names).union(*(together.get(name, ()) for name in names))
            together.update(dict.fromkeys(group, group))
    for name in order:
        together.setdefault(name, {name})
    return {n: min(g, key=lambda m: (order.get(m, len(order)), m)) for n, g in together.items()}


def _fixed(groups: dict[str, str], traces: Iterable[Trace]) -> dict[str, str]:
    """The first name of each tied group that may not be edited at all, and why."""
    return {groups.get(n, n): reason for trace in traces for n, reason in trace.locked.items()}


def _locked(
    found: Candidate, groups: dict[str, str], fixed: Mapping[str, str]
) -> Callable[[Parameter], str | None]:
    """Tells why the stored tensors behind a parameter cannot be centred, where they cannot."""
    names = outcome.stored_names(found, groups)

    def locked(parameter: Parameter) -> str | None:
        if parameter.name in fixed:
            return fixed[parameter.name]
        if parameter.name not in names:
            return "it is not stored"
        for name in names[parameter.name]:
            if name in found.converted:
                where = found.converted[name].stored(name, parameter.axis)
                if isinstance(where, Opaque):
                    return where.reason
        return None

    return locked


def _single(
    found: Candidate, groups: dict[str, str], fixed: Mapping[str, str]
) -> Callable[[str], bool]:
    """Tells whether a parameter is tied to no other, and is one stored tensor of its own layout."""
    tied = Counter(groups.values())

    def single(name: str) -> bool:
        return tied[name] == 1 and len(found.stored.get(name, ())) == 1 and name not in fixed

    return single
