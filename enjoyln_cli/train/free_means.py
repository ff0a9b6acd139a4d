"""Are the means of a plan's weights free in training mode, too?

A plan is proven in eval mode. In training mode the norms compute LayerNorm, so the loss does not
depend on the mean over the outputs of a centred weight, unless code that runs in training mode only
(an auxiliary loss, a further head) reads a residual stream without a norm. So the calls are traced
in training mode as well, and with labels if the model takes them. No operation may notice a shift
of a weight that the plan centres, neither in a value that the model returns (of a plan for some
``outputs``: in these and in losses) nor in one that it keeps.

All rates of dropout are zero in these traces. With dropout behind a centred weight, centring leads
to another run, as another seed does: dropout removes features of the mean. LayerDrop is as harmless
as stochastic depth: a layer that is skipped adds nothing to the stream, and no norm sees the mean
of what the other layers add. At a rate of zero every layer runs, whatever is drawn (see
``models.known_answers``). Code that runs only if a layer is skipped is not traced.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from enjoyln_cli.analysis.analyze import family_in_memory
from enjoyln_cli.analysis.problem import state_problem
from enjoyln_cli.calls.call_text import to_text
from enjoyln_cli.calls.covered_examples import covered_examples
from enjoyln_cli.calls.labels import calls_with_labels
from enjoyln_cli.checkpoint.marker import marker_of_plan
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.garbage import no_collections
from enjoyln_cli.graph.nodes import DROPOUTS, argument, aten, depends_on_values, packet
from enjoyln_cli.models import classes
from enjoyln_cli.models.meta_device import without_weights
from enjoyln_cli.models.outputs import config_returning
from enjoyln_cli.plan.covered_calls import CallForm
from enjoyln_cli.plan.plan import PLAIN, Plan
from enjoyln_cli.proof.min_cut import Parameter, Problem
from enjoyln_cli.runtime.loading import watched_weights
from enjoyln_cli.runtime.weight_check import with_adapters
from enjoyln_cli.trace.capture import Captures
from enjoyln_cli.trace.failure_reasons import foreign_code
from enjoyln_cli.trace.traced_calls import TracedModel, covered_calls, likely_calls, with_forms
from enjoyln_cli.train.training_plan import dropout_rates, trace_in_training

_OTHERWISE = "or train without enjoyln and fold the result"
_NO_NOISE = {*DROPOUTS, aten.scaled_dot_product_attention}
"""Ops that draw random numbers only if their rate of dropout is not zero."""


@no_collections()
def require_free_means(model: nn.Module, plan: Plan, config: Any) -> None:
    """Raise ``UnsupportedModel`` if centring the weights of ``plan`` may change a training step.

    A class of transformers is built from ``config``, without weights. Any other module is copied
    without its weights, and called as the plan says. Raises ``TraceFailed`` if a call cannot be
    traced in training mode.
    """
    name, is_custom = type(model).__name__, plan.covered is not None
    with torch.random.fork_rng(devices=[]), foreign_code(model):
        bare, examples = _without_dropout(model, plan, config), []
        if plan.covered is not None:
            examples = covered_examples(bare, plan.covered)
            calls = [call for _, call in examples]
        else:
            calls = likely_calls(Captures(bare))
            calls += calls_with_labels(bare, calls[0])
        traced = trace_in_training(bare, calls)
        for trace in traced.traces:
            if trace.by_values and (is_custom or _reads_draws(trace.graph)):
                raise UnsupportedModel(
                    f"{name}: in training mode, its code branches on values or random numbers "
                    f"({trace.label}), so nothing is proven; compute with tensors, {_OTHERWISE}"
                )
            _remove_dropout(trace.graph)
        outputs = (*plan.outputs, *_losses(traced)) if plan.outputs else ()
        family = family_in_memory(bare, (traced,), outputs)
        _require_unnoticed(state_problem(family, PLAIN).problem, bare, plan)
        if is_custom:
            _require_all_sizes(with_forms(traced), [form for form, _ in examples])


def _without_dropout(model: nn.Module, plan: Plan, config: Any) -> nn.Module:
    """The model without weights, in which every rate of dropout is zero."""
    if plan.covered is not None:
        bare = without_weights(model)
        bare = copy.deepcopy(bare) if bare is model else bare
    else:
        cls = classes.class_named(type(model).__name__)
        if type(model) is not cls:
            raise UnsupportedModel(
                f"{cls.__name__}: is not the class of this name in transformers; pass "
                "plan=analyze(model).plan"
            )
        bare = classes.build(cls, config_returning(config, plan.outputs))
    rates = [(values, name, value) for _, values, name, value in dropout_rates(bare)]
    held = (getattr(module, "config", None) for module in bare.modules())
    configs = (config for config in held if hasattr(config, "to_dict"))
    for _, part in chain.from_iterable(map(classes.nested_configs, configs)):
        entries: dict[str, Any] = vars(part)
        rates += [(entries, name, value) for name, value in entries.items() if "drop" in name]
    for values, name, value in rates:
        if type(value) is float and 0 < value <= 1:
            values[name] = 0.0
    return bare


def _losses(traced: TracedModel) -> list[str]:
    """The output fields that hold a loss, by their names."""
    returned = (names for trace in traced.traces for names in trace.returned.values())
    return sorted({name for names in returned for name in names if "loss" in name})


def _remove_dropout(graph: Graph) -> None:
    """Set the rates of dropout that are numbers in the code to zero."""
    for node in graph.nodes:
        if packet(node) in DROPOUTS:
            node.args = (argument(node, 0, "input"), 0.0, argument(node, 2, "train"))
            node.kwargs = {}


def _reads_draws(graph: Graph) -> bool:
    """Whether Python reads a random number, or a value that was computed from one."""
    drawn: set[Node] = set()
    for node in graph.nodes:
        tags = getattr(node.target, "tags", ())
        random = torch.Tag.nondeterministic_seeded in tags and packet(node) not in _NO_NOISE
        if random or not drawn.isdisjoint(node.all_input_nodes):
            drawn.add(node)
            if depends_on_values(node.target):
                return True
    return False


def _require_unnoticed(problem: Problem, model: nn.Module, plan: Plan) -> None:
    """Raise ``UnsupportedModel`` if anything notices a shift of a weight that ``plan`` centres."""
    watch = watched_weights(model, marker_of_plan(plan))
    for weight in with_adapters(model, watch).weights:
        parameter = Parameter(problem.groups[weight.parameter], weight.axis)
        reason, scale = problem.obstacle(parameter), problem.scales.get(parameter.name)
        if reason is None and scale != weight.scale:
            reason = f"{scale or weight.scale} multiplies its output, unlike in eval mode"
        if reason is not None:
            raise UnsupportedModel(
                f"{weight.parameter}: in training mode, {reason}, so the loss would change; put a "
                f"norm before that code, {_OTHERWISE}"
            )


def _require_all_sizes(traced: TracedModel, forms: Iterable[CallForm]) -> None:
    """Raise ``UnsupportedModel`` if a call of these forms may take another path in training."""
    covered = covered_calls((traced,), ())
    forms_in_training = covered.forms if covered else ()
    proven = {(form.owner, form.arguments): form for form in forms_in_training}
    for form in forms:
        like = proven.get((form.owner, form.arguments))
        if like is None or not {*form.conditions}.issuperset(like.conditions):
            raise UnsupportedModel(
                f"{form.owner}: in training mode, its code takes another path for some sizes of "
                f"{to_text(form)}, so nothing is proven; take one path, {_OTHERWISE}"
            )
