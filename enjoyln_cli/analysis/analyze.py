"""From a model to its plan: trace it, state the problem, solve it, and explain every verdict.

One plan holds for every traced class and call at once. Optional inputs and parameters that no trace
read are not proven, and the plan lists them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from enjoyln_cli.analysis import stored_names, untying
from enjoyln_cli.analysis.output_gains import OutputGain, gains
from enjoyln_cli.analysis.paper import algorithm_1
from enjoyln_cli.analysis.problem import CheckpointTraces, state_problem
from enjoyln_cli.analysis.same_ops import require_same
from enjoyln_cli.analysis.stored_class import (
    StoredTensors,
    class_of,
    require_known_class,
    tensors_of,
)
from enjoyln_cli.analysis.stored_names import StoredClass
from enjoyln_cli.analysis.untying import UntiedClasses
from enjoyln_cli.analysis.verdicts import plan_of
from enjoyln_cli.calls.calls import Call, ExampleCalls, calls_like
from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.errors import EnjoyLNError, TraceFailed, UnsupportedModel
from enjoyln_cli.garbage import no_collections
from enjoyln_cli.models import classes
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.models.meta_device import without_weights
from enjoyln_cli.models.outputs import config_returning
from enjoyln_cli.plan.fold_options import CENTRING_ONLY, Options
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.plan.trusted_code import is_stock
from enjoyln_cli.proof import explain
from enjoyln_cli.proof.explain import Tree
from enjoyln_cli.proof.layer_norms import layer_norms
from enjoyln_cli.proof.min_cut import Cut, Problem, solve
from enjoyln_cli.text import did_you_mean
from enjoyln_cli.trace.capture import Recorder
from enjoyln_cli.trace.failure_reasons import foreign_code
from enjoyln_cli.trace.size_range import in_two_rows
from enjoyln_cli.trace.traced_calls import (
    ModelTraces,
    coverage_is_known,
    likely_calls,
    trace_calls,
    with_signatures,
)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Analysis:
    """A plan and the proof behind it."""

    plan: Plan
    problem: Problem
    cut: Cut
    paper: tuple[str, ...]
    """Norms that the paper's Algorithm 1, as printed, calls foldable."""
    under: Callable[[Options], Analysis]
    """Analyse the same model with other options."""
    family: CheckpointTraces

    def __repr__(self) -> str:
        """A short summary; ``plan`` and ``why`` have the details."""
        plan = self.plan
        lines = [
            f"{plan.model_class}: {len(plan.folded)} of {len(plan.norms)} LayerNorms become RMSNorm"
        ]
        lines += [
            f"subtracts the mean from the {op.place} of {op.module}" for op in plan.subtractions
        ]
        reasons = Counter(verdict.reason for verdict in plan.kept)
        lines += [f"{count} stay LayerNorm: {reason}" for reason, count in reasons.items()]
        return "\n  ".join(lines)

    def why(self, norm: str) -> Tree:
        """Explain one norm's verdict by its zero-mean graph.

        Raises ``EnjoyLNError`` if there is no norm of this name.
        """
        verdict = next((v for v in self.plan.norms if v.norm == norm), None)
        if verdict is None:
            names = [v.norm for v in self.plan.norms]
            hint = did_you_mean(norm, names) or f"there is {', '.join(names[:3])}"
            raise EnjoyLNError(f"no LayerNorm is called {norm}; {hint}")
        if norm not in self.problem.norms:
            return Tree(f"{norm} stays LayerNorm: {verdict.reason}", False)
        tree = explain.tree(self.problem, self.cut, norm)
        handed_on = explain.fusion_in_words(self.plan, norm)
        return replace(tree, children=(*tree.children, handed_on)) if handed_on else tree

    def plan_under(self, options: Options) -> Plan | None:
        """The plan with other options; ``None`` if the model does not allow them."""
        try:
            return self.under(options).plan
        except EnjoyLNError:
            return None

    def gains(self) -> tuple[OutputGain, ...]:
        """How many more norms would fold if an output of ``plan.model_class`` could change."""
        return gains(self.problem, self.plan.model_class) if self.plan.kept else ()


@no_collections()
def analyze_config(
    config: Any,
    *,
    model_class: str | None = None,
    checkpoint: Checkpoint | None = None,
    outputs: Sequence[str] = (),
    options: Options = CENTRING_ONLY,
    example_calls: ExampleCalls = (),
) -> Analysis:
    """The plan for a transformers config, or for the checkpoint that it belongs to.

    The plan holds for every class that loads the checkpoint without missing weights, or only for
    ``model_class`` if that is given. Its reference class is the class that the config names, or
    the class that the stored tensors fill (see ``stored_class``). Without a checkpoint, the weights
    are the weights that the config's own class saves.

    ``example_calls`` are further calls of the first of these classes to prove, besides the calls
    that are derived from its config. ``outputs`` names the only output fields that must stay
    unchanged (patterns are allowed); the plan then holds only for the first class that has them.
    ``options`` allow further edits besides centring.

    Raises ``UnsupportedModel``, ``TraceFailed``, ``BadCheckpoint``, or ``EnjoyLNError`` if no class
    has such an output.
    """
    config = config_returning(config, outputs)
    if model_class is None:
        require_known_class(config, checkpoint)
    listed = [classes.class_named(model_class)] if model_class else classes.classes_for(config)
    if checkpoint:
        stored = tensors_of(config, checkpoint)
        first = class_of(listed, config, checkpoint)
    else:
        reference = classes.build(listed[0], config)
        stored = StoredTensors(config, stored_names.saved_shapes(reference))
        first = stored_names.candidate(reference, stored.shapes, None)
    # A base class returns the values that a rotation rotates.
    others = [cls for cls in listed if cls is not type(first.model) and not options.rotate]
    if not any(layer_norms(first.model)) and not options.rotate:
        untraced = CheckpointTraces(
            reference=first, model_type=config.model_type, classes=(first.name,)
        )
        return analyze_family(untraced, options)
    siblings = map(stored.loaded_by, others)
    candidates = chain([first], (candidate for candidate in siblings if candidate))
    more = calls_like(example_calls)
    if not options.untie:
        analysis = _analysis_of_classes(
            candidates, config.model_type, tuple(outputs), options, more
        )
        again = partial(
            analyze_config,
            config,
            model_class=model_class,
            checkpoint=checkpoint,
            outputs=outputs,
            example_calls=example_calls,
        )
        same = analysis.under
        return replace(
            analysis, under=lambda o: again(options=o) if o.untie or o.rotate else same(o)
        )
    tied = list(candidates)
    untied_classes = untying.find_untied_classes(config, tied, stored.shapes, checkpoint)
    after = untied_classes.after.values() if untied_classes else tied
    analysis = _analysis_of_classes(
        after, config.model_type, tuple(outputs), options, more, untied_classes
    )
    return analysis if untied_classes is None else _untied(analysis, untied_classes)


def _untied(analysis: Analysis, untied_classes: UntiedClasses) -> Analysis:
    """Add the copies of tied tensors to the plan, and to every plan that ``under`` makes."""

    def under(options: Options) -> Analysis:
        return _untied(analysis.under(options), untied_classes)

    return replace(analysis, plan=untying.untie(analysis.plan, untied_classes), under=under)


def _analysis_of_classes(
    loading: Iterable[StoredClass],
    model_type: str,
    outputs: tuple[str, ...],
    options: Options,
    more: Sequence[Call] = (),
    untied_classes: UntiedClasses | None = None,
) -> Analysis:
    """The plan for all classes that load a checkpoint; the first is the reference class.

    The first class has to accept the ``more`` calls; other classes prove calls that they accept.
    """
    if outputs:
        return _analysis_of_outputs(loading, model_type, outputs, options, more, untied_classes)
    first, *others = loading
    inner = classes.base_path(first.model)
    within = inner and is_stock(first.model)  # custom code may call its base model in other ways
    base = type(first.model.get_submodule(inner)) if within else None
    inner_classes = [other for other in others if type(other.model) is base]
    traced = [_trace_class(first, first, inner if inner_classes else None, untied_classes, more)]
    proven = [first.name, *(other.name for other in inner_classes)]
    optional = [replace(call, required=False) for call in more]
    for other in others:
        if other in inner_classes:
            continue
        try:
            traced.append(_trace_class(other, first, None, untied_classes, optional))
        except (TraceFailed, UnsupportedModel):
            continue
        proven.append(other.name)
    family = CheckpointTraces(
        reference=first, model_type=model_type, classes=tuple(proven), traced=tuple(traced)
    )
    return analyze_family(family, options)


def _analysis_of_outputs(
    candidates: Iterable[StoredClass],
    model_type: str,
    outputs: tuple[str, ...],
    options: Options,
    more: Sequence[Call],
    untied_classes: UntiedClasses | None,
) -> Analysis:
    """The plan for the first class that has all of ``outputs``, and for that class alone.

    Output names have a meaning for one class only. Other classes return other fields, and the base
    model inside this class returns values that may change here, so they are neither traced nor
    proven.
    """
    refused: EnjoyLNError | None = None
    for candidate in candidates:
        try:
            family = CheckpointTraces(
                reference=candidate,
                model_type=model_type,
                classes=(candidate.name,),
                traced=(_trace_class(candidate, candidate, None, untied_classes, more),),
                outputs=outputs,
            )
            return analyze_family(family, options)
        except EnjoyLNError as error:
            refused = refused or error
    raise refused or UnsupportedModel(f"no class is known for the model type {model_type}")


def analyze_module(
    model: nn.Module,
    *args: Any,
    outputs: Sequence[str] = (),
    options: Options = CENTRING_ONLY,
    example_calls: ExampleCalls = (),
    **kwargs: Any,
) -> Analysis:
    """The plan for any live module, proven for calls like ``model(*args, **kwargs)``.

    ``example_calls`` are further calls to prove. Only the shapes and dtypes of input tensors count.
    A transformers model needs no inputs: the calls are then derived from its config. Raises
    ``TraceFailed``, or ``EnjoyLNError`` if the module does not return one of ``outputs``.
    """
    with foreign_code(model):
        return analyze_calls(model, calls_of(model, args, kwargs, example_calls), outputs, options)


def calls_of(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], example_calls: ExampleCalls
) -> list[Call]:
    """The calls to prove of a live module; ``analyze_module`` explains the parameters."""
    further = calls_like(example_calls)
    if args or kwargs or not (further or hasattr(model, "config")):
        calls = [Call("example inputs", ((args, kwargs),))]
    elif hasattr(model, "config"):
        calls = likely_calls(Recorder(without_weights(model)))
    else:
        calls = []
    calls += further
    if is_stock(model):
        return calls  # a single row stands for any number of rows
    return [*calls, *(two for call in calls for two in in_two_rows(call))]


@no_collections()
def analyze_calls(
    model: nn.Module,
    calls: Iterable[Call],
    outputs: Sequence[str] = (),
    options: Options = CENTRING_ONLY,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Analysis:
    """The plan for any live module that holds in all of ``calls`` at once.

    ``weights`` are the values of its weights by name; by default the values in ``model``.

    Raises ``TraceFailed`` if a call that is ``required`` cannot be traced, and ``EnjoyLNError`` if
    no call returns one of ``outputs``, or if ``options`` ask for untying.
    """
    if options.untie:
        raise EnjoyLNError("a model in memory cannot be untied; pass its config or its checkpoint")
    with foreign_code(model):
        traced = (trace_calls(Recorder(model), calls),)
        family = family_in_memory(model, traced, tuple(outputs), weights=weights)
        return analyze_family(family, options)


def family_in_memory(
    model: nn.Module,
    traced: tuple[ModelTraces, ...],
    outputs: tuple[str, ...] = (),
    training: bool = False,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> CheckpointTraces:
    """The only class of a live module, whose tensors count as stored under their own names."""
    held = stored_weights(model)
    stored: dict[str, tuple[str, ...]] = {name: (name,) for name in held}
    reference = StoredClass(model, stored, {}, (), weights=held if weights is None else weights)
    return CheckpointTraces(
        reference=reference,
        model_type=getattr(getattr(model, "config", None), "model_type", type(model).__name__),
        classes=(reference.name,),
        traced=traced,
        outputs=outputs,
        training=training,
    )


def _trace_class(
    candidate: StoredClass,
    reference: StoredClass,
    inner: str | None,
    untied_classes: UntiedClasses | None,
    more: Sequence[Call],
) -> ModelTraces:
    """All graphs of one class.

    Raises ``UnsupportedModel`` if the class computes something else once its weights are untied.
    """
    model = candidate.model
    captures = Recorder(model, classes.naming_between(model, reference.model), inner)
    calls = likely_calls(captures)
    doubled = [] if captures.is_stock else [two for call in more for two in in_two_rows(call)]
    traced = trace_calls(captures, [*calls, *more, *doubled])
    if untied_classes is not None:
        require_same(untied_classes.before[candidate.name].model, model, calls[0])
    return traced


def analyze_family(family: CheckpointTraces, options: Options) -> Analysis:
    """State the problem, solve it, describe the result.

    If a norm is converted or a group rotated, the calls that the proof covers have to be known. If
    they are not yet, more calls are traced, and the analysis starts again with all traces.
    """
    statement = state_problem(family, options)
    cut = solve(statement.problem)
    plan = plan_of(family, statement, cut, options)
    if (plan.folded or plan.rotated) and not coverage_is_known(family.traced):
        return analyze_family(
            replace(family, traced=tuple(map(with_signatures, family.traced))), options
        )
    return Analysis(
        plan=plan,
        problem=statement.problem,
        cut=cut,
        paper=algorithm_1(family.traces[0]) if family.traces else (),
        under=partial(analyze_family, family),
        family=family,
    )
