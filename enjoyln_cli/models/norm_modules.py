"""Check that a call of a norm module runs its class's ``forward``, and nothing else.

A norm of a live model is converted by giving it a class with another ``forward``. That is
safe only if nothing comes between a call of the module and ``forward``. ``interference`` looks for
hooks, parametrisations and replaced methods: before a norm is proven, and again before a plan is
installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as hooks_of_all

from enjoyln_cli.plan.trusted_code import foreign_hooks

PLAIN_TENSORS = (torch.Tensor, nn.Parameter)
"""Classes of tensors that a module usually holds, and that torch's operations return."""


def interference(module: nn.Module) -> str | None:
    """Why a call of ``module`` may compute something else than its class's ``forward``, or
    ``None``."""
    cls = type(module)
    before = (*module._forward_pre_hooks.values(), *hooks_of_all._global_forward_pre_hooks.values())
    if foreign_hooks((*before, *forward_hooks(module))):
        return "a forward hook may change its input or output"
    if has_replaced_forward(module):
        return "its forward was replaced on the instance"
    bases = (base for base in cls.__mro__ if issubclass(base, nn.Module))
    plain = next(base for base in bases if "made_by" not in vars(base))  # without ours
    if plain.__call__ is not nn.Module.__call__:
        return "its class replaces __call__"
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "it was compiled separately, by its own compile method"
    tensors = {**module._parameters, **module._buffers}
    for name in dict.fromkeys((*tensors, "weight", "bias", "eps", "normalized_shape")):
        if hasattr(inspect.getattr_static(cls, name, None), "__get__"):
            return f"its {name} is computed (by a parametrisation, or a property)"
    for name, tensor in tensors.items():
        if tensor is not None and type(tensor) not in PLAIN_TENSORS:
            return f"its {name} is a {type(tensor).__name__}, not a plain tensor"
    return None


def forward_hooks(module: nn.Module) -> tuple[Any, ...]:
    """All forward hooks of ``module``, including torch's global hooks."""
    return *module._forward_hooks.values(), *hooks_of_all._global_forward_hooks.values()


def has_replaced_forward(module: nn.Module) -> bool:
    """Whether the instance has a ``forward`` that does not call the ``forward`` of its class.

    Accelerate's wrapper is no replacement: it stores the ``forward`` that it calls in
    ``_old_forward``.
    """
    if "forward" not in vars(module):
        return False
    old = vars(module).get("_old_forward")
    return getattr(old, "__func__", None) is not type(module).forward


def stock_class(cls: type) -> type:
    """The class that a module had before norms were folded and weights parametrised.

    ``torch.nn.utils.parametrize`` makes a class of its own for each module.
    """
    while "made_by" in vars(cls) or cls.__module__.startswith(
        ("enjoyln_cli.", "torch.nn.utils.parametrize")
    ):
        cls = cls.__bases__[-1]
    return cls


def become(module: nn.Module, cls: type) -> None:
    """Set the class of ``module`` to ``cls``, also for the ``forward`` that accelerate calls."""
    module.__class__ = cls
    if "_old_forward" in module.__dict__:
        module._old_forward = MethodType(cls.forward, module)  # type: ignore


def first_input(forward: Callable[..., Any]) -> str:
    """The name of the first argument of a ``forward`` after ``self``; empty if it has none."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = [*inspect.signature(forward).parameters.values()][1:]
    return parameters[0].name if parameters and parameters[0].kind in named else ""


def only_input(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> torch.Tensor | None:
    """The tensor that is passed by position or as ``name``, if it is the only argument."""
    if kwargs:
        value = kwargs.get(name) if len(kwargs) == 1 and not args else None
    else:
        value = args[0] if len(args) == 1 else None
    return value if isinstance(value, torch.Tensor) else None


def runs_torchs_layer_norm(module: nn.Module) -> bool:
    """Whether a module uses the ``forward`` of ``nn.LayerNorm`` as torch defines it, unpatched."""
    forward = inspect.getattr_static(type(module), "forward", None)
    own = (forward, "torch.nn.modules.normalization"), (F.layer_norm, "torch.nn.functional")
    unpatched = all(getattr(one, "__module__", None) == home for one, home in own)
    return unpatched and forward is nn.LayerNorm.forward


def first_names(model: nn.Module) -> dict[str, str]:
    """The first name of each module with several names, by each of its other names."""
    first = {module: name for name, module in model.named_modules()}
    every = model.named_modules(remove_duplicate=False)
    return {name: first[module] for name, module in every if name != first[module]}
