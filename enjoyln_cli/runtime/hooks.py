"""Hooks of a model that computes RMSNorm: they mark calls, centre inputs and guard inputs.

Inputs that enter the residual stream (``inputs_embeds``) are centred on entry. If a call passes an
input that the proof does not cover, the model computes LayerNorm. If LayerNorm would not compute
the original function either, the call is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from enjoyln_cli.errors import UnprovenCall
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.plan.cache_argument import in_plans
from enjoyln_cli.plan.covered_calls import CoveredCalls, ProvenCalls
from enjoyln_cli.runtime.modules import Folded, centre_value
from enjoyln_cli.runtime.scope import Enter, Fold, Leave, compute_layer_norm, is_nested, thread


def be_called(module: nn.Module, args: Any, output: Any) -> None:
    """A forward hook that changes nothing, but makes a parent call the module's ``forward``.

    Without any hook, ``nn.TransformerEncoderLayer`` takes a fast path where no gradient is needed:
    one fused op on its children's weights, without calling the children. No trace shows this path.
    """


@dataclass(frozen=True)
class CentreInputs:
    """A forward pre-hook that centres the named inputs over their last dimension, if passed."""

    names: tuple[str, ...]
    order: tuple[str, ...]
    """Names of the positional inputs of ``forward``."""
    alone: bool = False
    """Whether the hook acts only if its module is not called by the model around it.

    True for an encoder: the hook of the model around it has handled its inputs.
    """

    def __call__(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if thread.running.proven is None or (self.alone and is_nested()):
            return None
        if not _passed_inputs(self.names, self.order, args, kwargs):
            return None
        values = [
            _centre_last(value) if name in self.names else value
            for name, value in zip(self.order, args, strict=False)
        ]
        changed = {n: _centre_last(v) if n in self.names else v for n, v in kwargs.items()}
        return (*values, *args[len(values) :]), changed


@dataclass(frozen=True)
class GuardInputs:
    """A forward pre-hook: a call that passes one of the named inputs computes LayerNorm everywhere.

    Raises ``UnprovenCall`` where LayerNorm cannot restore the original function:

    * The affine of norms was ``merged`` into the layers after them. With the unproven input, other
      layers may read these norms.
    * ``proven`` is set (a model outside of transformers) and does not cover the call. A path that
      no trace took may read a value whose mean was removed by centring the weights.
    """

    names: tuple[str, ...]
    order: tuple[str, ...]
    merged: bool = False
    alone: bool = False
    proven: ProvenCalls | None = None
    """The calls that the proof covers. If set, they decide instead of ``names``."""

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if (self.alone or self.proven is not None) and is_nested():
            return
        if self.proven is not None:
            if found := self.proven.uncovered(args, kwargs):
                raise UnprovenCall(_uncovered_message(type(module).__name__, found))
            return
        found = _passed_inputs(self.names, self.order, args, kwargs)
        if found and self.merged:
            raise UnprovenCall(
                f"{type(module).__name__}: not proven for calls with {', '.join(found)}; LayerNorm "
                "cannot be used instead, since norm weights or biases were merged into other "
                "layers; leave that input out, or fold without --merge"
            )
        if found:
            compute_layer_norm()


def _uncovered_message(name: str, found: Sequence[str]) -> str:
    return (
        f"{name}: its proof covers no call with {', '.join(found)}; pass such a call in "
        "example_calls to analyze() or fold(), or use the original model for it"
    )


def _passed_inputs(
    names: Sequence[str], order: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> list[str]:
    """Those of the inputs ``names`` that a call passes, by keyword or by position in ``order``."""
    given = [*kwargs.items(), *zip(order, args, strict=False)]
    return [name for name, x in given if x is not None and in_plans(name) in names]


def _centre_last(x: Any) -> Any:
    return centre_value(x, feature_axis(tuple(x.shape))) if isinstance(x, torch.Tensor) else x


def encoder_of(model: nn.Module) -> nn.Module | None:
    """The encoder of an encoder-decoder model, which ``generate`` calls directly; else ``None``."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    found = model.get_encoder() if hasattr(model, "get_encoder") else None  # type: ignore
    return next((m for m in model.modules() if m is found and m is not model), None)


def add_hooks(
    model: nn.Module,
    entry_inputs: tuple[str, ...],
    unproven: tuple[str, ...],
    merged: bool,
    covered: CoveredCalls | None,
) -> Fold:
    """Registers the hooks on the model, and on its base model and encoder (callable on their own).

    Hooks that are registered already stay. Returns the ``Fold`` that all of them share.
    """
    models = {id(m): m for m in (model, getattr(model, "base_model", model))}
    encoders = [encoder_of(module) for module in models.values()]
    inner = {id(m): m for m in encoders if m is not None and id(m) not in models}
    hooked = {**models, **inner}
    present = [enter for module in hooked.values() if (enter := enter_of(module)) is not None]
    fold = present[0].fold if present else Fold()
    for module in hooked.values():
        alone, order = id(module) in inner, tuple(inspect.signature(module.forward).parameters)
        enter = Enter(fold)
        if _register_once(module, enter, module.register_forward_pre_hook):
            fold.entries.append(enter)
            module.register_forward_hook(Leave(enter), always_call=True)
        taken = {*map(in_plans, unproven)} & {*map(in_plans, order)}
        if taken or covered is not None:
            proven = None if covered is None else covered.calls_of(module)
            guard = GuardInputs(tuple(sorted(taken)), order, merged, alone, proven)
            _register_once(module, guard, module.register_forward_pre_hook, with_kwargs=True)
        if entry_inputs:
            centre = CentreInputs(entry_inputs, order, alone)
            _register_once(module, centre, module.register_forward_pre_hook, with_kwargs=True)
    return fold


def enter_of(module: nn.Module) -> Enter | None:
    """The hook that starts a call of ``module``, if one was installed."""
    found = (hook for hook in module._forward_pre_hooks.values() if isinstance(hook, Enter))
    return next(found, None)


def entries(model: nn.Module) -> list[tuple[nn.Module, Enter]]:
    """Every module of ``model`` that has an ``Enter`` hook, with that hook."""
    found = ((module, enter_of(module)) for module in model.modules())
    return [(module, enter) for module, enter in found if enter is not None]


def _register_once(module: nn.Module, hook: Any, register: Callable[..., Any], **how: bool) -> bool:
    """Registers a hook unless there is one of its class already; returns whether it did."""
    before = register == module.register_forward_pre_hook
    present = module._forward_pre_hooks if before else module._forward_hooks
    if type(hook) in map(type, present.values()):
        return False
    register(hook, **how)
    return True


@contextmanager
def input_means(model: nn.Module) -> Iterator[dict[str, float]]:
    """Within the block, measures the mean of every RMSNorm's input, relative to the input's rms.

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
