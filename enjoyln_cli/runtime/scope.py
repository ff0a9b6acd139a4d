"""Which call of a folded model is running in this thread, and may its norms compute RMSNorm?

They may inside a call of a model whose weights, modules and inputs were checked and match the proof
(see ``call_guards``). Everywhere else the model computes what its stock class computes, with
LayerNorm and without explicit centrings: in a block or tower that is called directly, in another
thread, in training mode. With centred weights that is the same function, since LayerNorm ignores a
shift of its input. Training mode is different for a model whose weights a parametrisation centres
(see ``FoldedModelState.training_plan``).

The state of a call belongs to its thread. Compiled code reads the same state: Dynamo reads, writes
and guards attributes of an object that is stored in a ``threading.local`` as Python does. (It does
not do so for attributes of the ``threading.local`` itself, which it reads once per graph.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch._dynamo.eval_frame import skip_code
from torch.compiler import is_exporting

from enjoyln_cli.errors import UnprovenCall
from enjoyln_cli.plan.axis import centre_value, feature_axis
from enjoyln_cli.plan.covered_calls import ProvenCalls
from enjoyln_cli.plan.plan import Plan

Function = TypeVar("Function", bound=Callable[..., Any])


def in_python(function: Function) -> Function:
    """``function``, which Dynamo leaves to Python; functions that it calls are still compiled."""
    skip_code(function.__code__)
    return function


class Check(Protocol):
    """A check of a model's modules and weights."""

    def holds(self, guard: CallGuard, model: nn.Module) -> bool:
        """Whether ``model`` is as the proof assumes. If not, ``guard.trouble`` gets the reason."""


@dataclass(frozen=True)
class InputRules:
    """What is done with the inputs of a call of a folded model, before it begins.

    A call inside another call of the model has no rules: the outer call has handled its inputs, and
    what the model passes on by itself, it passes in the traced calls as well.
    """

    order: tuple[str, ...]
    """Names of the positional inputs of ``forward``."""
    unproven: frozenset[str] = frozenset()
    """Names of inputs that make a call compute LayerNorm everywhere."""
    centred: frozenset[str] = frozenset()
    """Names of inputs that are centred over their last dimension."""
    fused: bool = False
    """Whether the affine of norms was fused into the layers after them, or a norm into a table."""
    proven: ProvenCalls | None = None
    """The calls that the proof covers. If set, they decide instead of ``unproven``."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of inputs that are as good as none, by name."""

    def concern(self, args: Any, kwargs: Any) -> bool:
        """Whether a call with these arguments may need ``guard`` or ``centre``."""
        names = {*self.order[: len(args)], *kwargs}
        known = self.unproven.isdisjoint(names) and self.centred.isdisjoint(names)
        return self.proven is not None or not known

    def guard(self, module: Any, args: Any, kwargs: Any) -> None:
        """Compute LayerNorm in this call if it passes an unproven input.

        Raises ``UnprovenCall`` where LayerNorm cannot restore the original function:

        * The affine of norms was ``fused``, or a norm into a table before it. With the unproven
          input, other layers may read these norms, or they other values.
        * ``proven`` is set (a model outside of transformers) and does not cover the call. A path
          that no trace took may read a value whose mean was removed by centring the weights.
        """
        name = type(module).__name__
        if self.proven is not None:
            if uncovered := self.proven.uncovered(args, kwargs):
                raise UnprovenCall(
                    f"{name}: its proof covers no call with {', '.join(uncovered)}; pass such a "
                    "call in example_calls to analyze() or fold(), or use the original model for it"
                )
            return
        passed = {**dict(zip(self.order, args, strict=False)), **kwargs}
        unproven = [
            name
            for name, value in passed.items()
            if name in self.unproven and value is not self.defaults.get(name) and value is not None
        ]
        if unproven and self.fused:
            raise UnprovenCall(
                f"{name}: not proven for calls with {', '.join(unproven)}; LayerNorm cannot be "
                "used instead, since norm weights or biases were fused into other layers, or "
                "streams were scaled; leave that input out, or fold without --merge, --untie and "
                "--fp16-safe"
            )
        if unproven:
            thread.running.proven = None

    def centre(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The inputs, centred where they have to be if norms compute RMSNorm in this call."""
        if not self.centred or thread.running.proven is None:
            return args, kwargs

        def changed(name: str, value: Any) -> Any:
            is_centred = name in self.centred and isinstance(value, torch.Tensor)
            return centre_value(value, feature_axis(tuple(value.shape))) if is_centred else value

        values = [changed(name, value) for name, value in zip(self.order, args, strict=False)]
        changed_kwargs = {name: changed(name, value) for name, value in kwargs.items()}
        return (*values, *args[len(values) :]), changed_kwargs


class CallGuard:
    """A module whose calls are calls of a folded model: the model, its base model or its encoder.

    A call inside another call of the same ``fold`` belongs to that call, and is not checked again.
    """

    def __init__(self, state: FoldedModelState, check: Check) -> None:
        self.state = state
        self.check = check
        self.inputs: InputRules | None = None
        self.trouble = ""
        """The reason why the norms have to compute LayerNorm; empty if there is none."""

    @in_python
    def proves(self, model: nn.Module) -> bool:
        """Whether the norms compute RMSNorm in a call of ``model`` that begins now.

        With gradients they compute LayerNorm, which gives weights the original's gradients. A
        parametrised model (``training_plan``) has the same gradients with RMSNorm.
        """
        parametrised = self.state.training_plan is not None
        if (model.training and not parametrised) or torch.jit.is_tracing():
            return False
        holds = self.check.holds(self, model)
        if parametrised:
            self.state.was_proven = holds
            return holds
        recorded = torch.is_grad_enabled() and not is_exporting()
        return holds and not recorded and self.state.checked == self.state.trained


class Running:
    """The innermost call of a folded model that is running in one thread."""

    def __init__(self) -> None:
        self.guard: CallGuard | None = None
        """The guard of the model."""
        self.proven: FoldedModelState | None = None
        """The state of the model, if its norms may compute RMSNorm now; otherwise ``None``."""


class Thread(threading.local):
    """Holds one ``Running`` for each thread."""

    def __init__(self) -> None:
        self.running = Running()


thread = Thread()


class FoldedModelState:
    """What the norms, the explicit centrings and the entries of one folded model share."""

    training_plan: Plan | None = None
    """The plan whose weights a parametrisation centres (see ``train.reparametrize``).

    If set, the weights are centred whatever an optimizer does, so that the norms compute RMSNorm in
    training mode, too.
    """
    literal = False
    """Whether norms never compute LayerNorm in place of RMSNorm, on any device.

    True in training on centred weights, and where an input with a mean has to show.
    """
    was_proven = False
    """With a ``training_plan``: whether the norms computed RMSNorm in the last call."""

    def __init__(self) -> None:
        self.call_guards: list[CallGuard] = []
        self.trained = 0
        """How often the model was put into training mode, in which its weights may change."""
        self.checked = 0
        """``trained`` when the weights were last checked."""


NOT_INSTALLED = FoldedModelState()
"""The ``FoldedModelState`` of a norm that is installed in no model: no call of it ever runs."""


def runs_proven(state: FoldedModelState) -> bool:
    """Whether norms and explicit centrings of ``fold`` compute now what the plan says.

    So they do in a proven call, and where gradient checkpointing computes a part of such a call
    again in the backward pass of a parametrised model.
    """
    if thread.running.proven is state:
        return True
    again = state.training_plan is not None and state.was_proven
    return again and torch._C._current_graph_task_id() != -1


def computes_layer_norm(state: FoldedModelState) -> bool:
    """Whether norms of ``fold`` compute LayerNorm in the call that runs in this thread.

    Outside of a call: whether the last checks found a reason for it, or no model was installed.
    """
    running = thread.running
    if running.guard is not None and running.guard.state is state:
        return running.proven is not state
    unchecked = state.training_plan is None and state.checked != state.trained
    return unchecked or not state.call_guards or any(guard.trouble for guard in state.call_guards)
