"""The calls of a folded model: each one decides whether the norms inside compute RMSNorm.

A folded model gets a subclass of its class, with the same name, whose ``__call__`` decides that for
the time of the call, in this thread. It does so in plain Python, each time:

* ``torch.compile(model)`` and ``model.compile()`` compile what runs inside of ``__call__``.
* Code that was compiled around a call of the model contains that call, so nobody would notice a
  change of the weights. Such a call computes LayerNorm.
* ``torch.export`` runs ``__call__`` once. The weights are constants of the program, and they are
  checked then.

Inputs that enter the residual stream (``inputs_embeds``) are centred on entry. If a call passes an
input that the proof does not cover, the model computes LayerNorm. If LayerNorm would not compute
the original function either, the call is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from enjoyln_cli.models.norm_modules import become
from enjoyln_cli.plan.cache_argument import spellings
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.runtime.modules import Folded, make_class
from enjoyln_cli.runtime.scope import CallGuard, FoldedModelState, InputRules, in_python, thread
from enjoyln_cli.runtime.structure import KeepStructure


def guard_of(module: nn.Module) -> CallGuard | None:
    """The guard of ``module``, if its calls are calls of a folded model."""
    return vars(module).get("_enjoyln_guard")


def call_guards(model: nn.Module) -> list[tuple[nn.Module, CallGuard]]:
    """Every module of ``model`` that has a guard, with that guard."""
    pairs = ((module, guard_of(module)) for module in model.modules())
    return [(module, guard) for module, guard in pairs if guard is not None]


@cache
def guarded_class(base: Any) -> type:
    """A subclass of ``base`` with the same name, whose calls are calls of a folded model."""

    @in_python  # and what runs inside is compiled
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        guard, running = self._enjoyln_guard, thread.running
        around, proven = running.guard, running.proven
        if guard is None or (around is not None and around.state is guard.state):
            return base.__call__(self, *args, **kwargs)
        try:
            running.guard = guard
            proves = not is_dynamo_compiling() and guard.proves(self)
            running.proven = guard.state if proves else None
            rules = guard.inputs
            if rules is not None and rules.concern(args, kwargs):
                rules.guard(self, args, kwargs)
                args, kwargs = rules.centre(args, kwargs)
            return base.__call__(self, *args, **kwargs)
        finally:
            running.guard, running.proven = around, proven

    body = {"__call__": call, "__module__": base.__module__, "__qualname__": base.__qualname__}
    return make_class(base.__name__, (base,), guarded_class, base, _enjoyln_guard=None, **body)


@contextmanager
def as_in_a_call(model: nn.Module, inputs: dict[str, Any]) -> Iterator[None]:
    """Let a method of ``model`` run inside the block as in a call with these inputs."""
    guard, running = guard_of(model), thread.running
    before = running.guard, running.proven
    try:
        if guard is not None:
            running.guard = guard
            running.proven = guard.state if guard.proves(model) else None
            if guard.inputs is not None and guard.inputs.concern((), inputs):
                guard.inputs.guard(model, (), inputs)
        yield
    finally:
        running.guard, running.proven = before


def be_called(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that changes nothing, but makes a parent call the module's ``forward``.

    Without any hook, ``nn.TransformerEncoderLayer`` takes a fast path where no gradient is needed:
    one fused op on its children's weights, without calling the children. No trace shows this path.
    """


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder-decoder model, which ``generate`` calls directly; else ``None``."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    encoder = model.get_encoder() if hasattr(model, "get_encoder") else None  # type: ignore
    return next((m for m in model.modules() if m is encoder and m is not model), None)


def add_guards(model: nn.Module, plan: Plan) -> FoldedModelState:
    """Make calls of the model, its base model and its encoder calls of a folded model.

    Each gets a guard that checks its structure, and rules for its inputs. Rules that it has
    already stay. Returns the ``FoldedModelState`` that all of them share.
    """
    models = (model, getattr(model, "base_model", model))
    inner = [encoder for module in models if (encoder := encoder_of(module)) is not None]
    called = {id(module): module for module in (*models, *inner)}.values()
    present = [guard for module in called if (guard := guard_of(module)) is not None]
    state = present[0].state if present else FoldedModelState()
    unproven = frozenset(spelling for name in plan.unproven for spelling in spellings(name))
    fused = bool(plan.fused or plan.baked or plan.scaled)
    for module in called:
        check, guard = KeepStructure(module), guard_of(module)
        if guard is None:
            guard = CallGuard(state, check)
            cls: Any = type(module)
            become(module, guarded_class(cls))
            module._enjoyln_guard = guard  # type: ignore[assignment]
            state.call_guards.append(guard)
        guard.trouble, guard.check = "", check
        if guard.inputs is None:
            parameters = inspect.signature(module.forward).parameters
            defaults = {name: parameter.default for name, parameter in parameters.items()}
            proven = None if plan.covered is None else plan.covered.calls_of(module)
            centred = frozenset(plan.entry_inputs)
            guard.inputs = InputRules(tuple(parameters), unproven, centred, fused, proven, defaults)
    state.checked = state.trained
    return state


@contextmanager
def input_means(model: nn.Module) -> Iterator[dict[str, float]]:
    """Measure the mean of every RMSNorm's input inside the block, relative to the input's rms.

    Yields a dict from module path to the root mean square over tokens of ``mean(x) / rms(x)``, of
    the call with the largest value. It is complete when the block ends. 0 is correct; 1 means that
    the input is constant along the features.
    """
    seen: dict[str, float] = {}

    def hook_for(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            x = (args or tuple(kwargs.values()))[0].detach().to(torch.float64)
            dims = _normalised_dims(module)
            rms = x.square().mean(dims).sqrt()
            ratio = torch.where(rms > 0, x.mean(dims) / rms, torch.zeros_like(rms))
            value = float(ratio[torch.isfinite(ratio)].square().mean().nan_to_num().sqrt())
            seen[path] = max(seen.get(path, 0.0), value)

        return hook

    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook_for(path), with_kwargs=True)
        for path, module in model.named_modules()
        if isinstance(module, Folded)
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _normalised_dims(module: nn.Module) -> tuple[int, ...]:
    dim = int(module.dim)  # type: ignore[arg-type]
    return (dim,) if dim != -1 else tuple(range(-len(getattr(module, "normalized_shape", (1,))), 0))
