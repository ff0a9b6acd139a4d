"""Weights that are centred while training: ``V = P W`` and RMSNorm, in training mode too.

The model computes with ``V = P W`` where a plan centres a tensor ``W`` (Enjoy-LN, Definition 2:
column-based weight centring, CBWC). ``W`` is what the optimizer sees. Its gradient is ``P`` times
the gradient of ``V``. Together with RMSNorm this is the training of the LayerNorm model, step by
step and under any optimizer (Proposition 2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from enjoyln_cli.calls.calls import ExampleCalls
from enjoyln_cli.edits.linear_steps import CentreAxis
from enjoyln_cli.edits.planned_edits import edits_of
from enjoyln_cli.errors import EnjoyLNError, NotCentred, NothingToFold, UnsupportedModel
from enjoyln_cli.models.classes import locate
from enjoyln_cli.models.extents import identity_of
from enjoyln_cli.models.load import values_of
from enjoyln_cli.plan.axis import Axis, centre
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.editable import require_editable
from enjoyln_cli.rewrite.in_memory import require_fit
from enjoyln_cli.runtime.call_guards import call_guards, guard_of
from enjoyln_cli.runtime.install import fold_in_memory, install
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.runtime.structure import Fact, KeepStructure
from enjoyln_cli.train.training_plan import analyze_training, dropout_rates


class Centre(nn.Module):
    """``V = P W`` over ``axes``, one after the other; in float32 or wider, rounded once."""

    def __init__(self, axes: tuple[Axis, ...]) -> None:
        super().__init__()
        self.axes = axes

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` has any shape that contains the axes; the result has its shape and dtype."""
        wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
        for axis in self.axes:
            wide = centre(wide, axis)
        return wide.to(weight.dtype)


def reparametrize(
    model: nn.Module,
    plan: Plan | None = None,
    *,
    example: Any = None,
    example_calls: ExampleCalls = (),
) -> Plan:
    """Train ``model`` with centred weights and RMSNorm, in place, until ``merge`` is called.

    Parameters stay the same objects, so an optimizer and its state can be used as they are. Their
    names change (``weight`` becomes ``parametrizations.weight.original``): call ``merge`` before
    saving. Embeddings and the other parameters may be tied.

    * ``plan`` is a plan that an earlier call returned, or ``None`` to analyse the model for
      training mode and eval mode.
    * ``example`` are the inputs of one call, for a module that is not a transformers model: a
      tensor, a tuple of positional arguments, or a dictionary of keywords. ``example_calls`` are
      further calls, each as a pair ``(args, kwargs)``.

    A norm with a dropout between it and the weights stays LayerNorm.

    Returns the plan that was used. Raises ``NothingToFold`` if no norm can become RMSNorm,
    ``UnsupportedModel`` for a plan that is not proven for training mode, and as ``analyze`` and
    ``fold_in_memory`` do; nothing is changed then.
    """
    if plan is None:
        require_unconverted(model)
        args, kwargs = as_call(example)
        plan = analyze_training(model, args, kwargs, example_calls).plan
    _require_usable(model, plan)
    edits = _by_tensor(model, plan)
    install(model, plan)
    for module, name, axes in edits:
        parametrize.register_parametrization(module, name, Centre(axes))
        parametrisation: Any = module.parametrizations
        parametrisation.train(module.training)
    paths = {id(module): path for path, module in model.named_modules()}
    for module, guard in call_guards(model):
        guard.state.training_plan, guard.state.literal = plan, True
        path = paths[id(module)]
        guard.check = KeepParametrised(module, plan, f"{path}." if path else "")
    return plan


def merge(model: nn.Module) -> nn.Module:
    """Replace each ``W`` by ``P W`` and remove the parametrisations, in place.

    The result is an ordinary folded model: its norms compute RMSNorm in eval mode, and LayerNorm in
    training mode. Parameters stay the same objects, under their own names. Returns ``model``.
    Raises ``EnjoyLNError`` if ``reparametrize`` was not called for this model.
    """
    guard = guard_of(model)
    plan = guard.state.training_plan if guard is not None else None
    if guard is None or plan is None:
        raise EnjoyLNError(
            f"{type(model).__name__} has no centred parametrisation; pass the model that "
            "reparametrize was called with"
        )
    for module, name in list(_parametrised(model)):
        _own_class(module)
        parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    guard.state.training_plan, guard.state.literal, guard.state.was_proven = None, False, False
    return fold_in_memory(model, plan)


class KeepParametrised(KeepStructure):
    """The check at the start of a call: whether the model is still built as it was planned.

    It covers the rates of dropout, and the parametrisations, as parts of their modules' classes. If
    it fails, the norms compute LayerNorm.
    """

    trains = True

    def __init__(self, model: nn.Module, plan: Plan, prefix: str) -> None:
        """``prefix`` is the path of ``model`` in the model of the plan, with a dot at its end."""
        super().__init__(model)
        self.plan, self.prefix = plan, prefix

    def facts(self, model: nn.Module) -> Iterable[Fact]:
        """The rates of dropout."""
        return [(attributes, name, value) for _, attributes, name, value in dropout_rates(model)]

    def compare(self, model: nn.Module) -> None:
        """Raise ``NotCentred`` if the model was edited or has another rate of dropout."""
        super().compare(model)
        if rate := _other_rate(model, self.plan, self.prefix):
            raise NotCentred(
                f"{rate}; restore it, or call merge, and reparametrize a model that was loaded anew"
            )


def _other_rate(model: nn.Module, plan: Plan, prefix: str = "") -> str:
    """The first rate of dropout that differs from the plan, in words; empty if there is none."""
    proven = dict(plan.dropout_rates)
    for path, _, _, value in dropout_rates(model) if proven else ():
        before = proven.get(f"{prefix}{path}", value)
        if before != value:
            return f"{prefix}{path}: drops out {value}, but the proof is for {before}"
    return ""


def as_call(example: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Positional arguments and keywords of an example."""
    if example is None:
        return (), {}
    if isinstance(example, Mapping):
        return (), example
    return (tuple(example), {}) if isinstance(example, tuple | list) else ((example,), {})


def require_unconverted(model: nn.Module) -> None:
    """Raise ``UnsupportedModel`` for a model that computes RMSNorm already."""
    if call_guards(model):
        raise UnsupportedModel(
            f"{type(model).__name__} computes RMSNorm already; pass the plan that it was converted "
            "with, or load the checkpoint with transformers' own from_pretrained"
        )


def _require_usable(model: nn.Module, plan: Plan) -> None:
    """Raise an error for a plan that cannot be carried out while training."""
    name = type(model).__name__
    if not plan.folded:
        reasons = dict.fromkeys(f"{v.norm}: {v.reason} ({v.culprit})" for v in plan.kept)
        why = next(iter(reasons), "it has no LayerNorm")
        raise NothingToFold(f"{name}: every norm stays LayerNorm while training; {why}")
    if not plan.training:
        raise UnsupportedModel(
            f"{name}: the plan is proven for eval mode only; call reparametrize without a plan"
        )
    if rate := _other_rate(model, plan):
        raise UnsupportedModel(f"{rate}; call reparametrize without a plan")
    require_fit(model, plan)
    if (enter := guard_of(model)) is None:
        return
    folded = {path for path, module in model.named_modules() if isinstance(module, Folded)}
    planned = {locate(model, verdict.norm) for verdict in plan.folded}
    if isinstance(enter.check, KeepParametrised) or folded != planned:
        raise UnsupportedModel(
            f"{name} was converted by another plan, or is parametrised already; load the "
            "checkpoint with transformers' own from_pretrained"
        )


def _by_tensor(model: nn.Module, plan: Plan) -> list[tuple[nn.Module, str, tuple[Axis, ...]]]:
    """Where to put which parametrisation: each module that holds a centred tensor, its name there.

    If several modules share a tensor, each gets a parametrisation. Raises ``UnsupportedModel`` for
    a tensor that cannot be trained through it, or whose memory other weights share.
    """
    tensors, edits = values_of(model), edits_of(plan, in_memory=True)
    require_editable(model, edits)
    axes: dict[object, dict[Axis, None]] = {}
    for name, edit in edits.items():
        if not tensors[name].is_floating_point():
            raise UnsupportedModel(
                f"{name}: holds {tensors[name].dtype}, which cannot be centred while training; "
                "load the model in a floating dtype"
            )
        centred = [step.axis for step in edit.steps if isinstance(step, CentreAxis)]
        axes.setdefault(identity_of(tensors[name]), {}).update(dict.fromkeys(centred))
    places = []
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and identity_of(tensor) in axes:
                if getattr(module, "sparse", False):
                    raise UnsupportedModel(
                        f"{type(module).__name__}: its sparse gradients cannot be centred; create "
                        "it with sparse=False"
                    )
                places.append((module, name, tuple(axes[identity_of(tensor)])))
    return places


def _own_class(module: nn.Module) -> None:
    """Give a parametrised module a class of its own.

    torch makes one class for each such module and removes the property ``weight`` from it again.
    But a deep copy of the module has the same class, and still needs the property.
    """
    cls = type(module)
    body = {name: value for name, value in vars(cls).items() if name != "__weakref__"}
    module.__class__ = type(cls.__name__, cls.__bases__, body)


def _parametrised(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Every tensor with a ``Centre``, as its module and its name there."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name, stack in module.parametrizations.items():  # type: ignore
                if any(isinstance(step, Centre) for step in stack):
                    yield module, name
