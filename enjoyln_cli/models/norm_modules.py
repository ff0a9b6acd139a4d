"""Check that a call of a norm module runs its class's ``forward`` on one tensor, and nothing else.

To convert a norm of a live model, its class is replaced by one with another ``forward``. That is
safe only if nothing comes between a call of the module and ``forward``, and if the proof covers
every run of ``forward``:

* ``interference`` inspects the module: hooks, parametrisations, replaced methods. It is called
  before a norm is proven, and again before a plan is installed;
* ``NormRuns`` observes every run of ``forward`` while a model is traced.
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

PLAIN = (torch.Tensor, nn.Parameter)


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
        if tensor is not None and type(tensor) not in PLAIN:
            return f"its {name} is a {type(tensor).__name__}, not a plain tensor"
    return None


def forward_hooks(module: nn.Module) -> tuple[Any, ...]:
    """All forward hooks of ``module``, including torch's global ones."""
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


def may_be_norm(module: nn.Module) -> bool:
    """Whether a module has so few tensors that it may be a norm; it is not run to find out."""
    if isinstance(module, (nn.LayerNorm, nn.GroupNorm)):
        return True
    if type(module).__module__.startswith("torch.nn.modules.") or any(module.children()):
        return False
    held = len([*module.parameters(), *module.buffers()])
    return held <= 2 and (held > 0 or hasattr(module, "normalized_shape"))


def first_names(model: nn.Module) -> dict[str, str]:
    """For modules that are registered under several names: each other name, and the first name."""
    first = {module: name for name, module in model.named_modules()}
    every = model.named_modules(remove_duplicate=False)
    return {name: first[module] for name, module in every if name != first[module]}


class NormRuns:
    """Observes how the norms of a model run while it is traced, and records unusual runs.

    Each norm gets a new class with another ``forward``, in the same way as when a plan is
    installed. So a call that runs this ``forward`` will run the ``forward`` of ``RMSNorm`` later.
    """

    def __init__(self) -> None:
        self.unseen: dict[str, str] = {}
        """By path of the norm: why the traced graph does not show all of its runs."""
        self._called: list[str] = []

    def called(self, path: str, call: Callable[[], Any]) -> Any:
        """Run ``call``, which calls the module at ``path``, and return its result."""
        self._called.append(path)
        depth = len(self._called)
        try:
            return call()
        finally:
            del self._called[depth - 1 :]

    def ran(self, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> None:
        """Note a run of the ``forward`` of the norm at ``path`` with these arguments."""
        if not self._called or self._called.pop() != path:
            self.unseen.setdefault(path, "its forward runs without a call of the module")
        elif only_input(args, kwargs, name) is None:
            self.unseen.setdefault(path, "it is called with more than one tensor")


def watch_norms(model: nn.Module) -> NormRuns:
    """From now on, every run of a norm of ``model``, a copy made for a trace, is observed."""
    runs = NormRuns()
    for path, module in model.named_modules():
        if may_be_norm(module) and interference(module) is None:
            become(module, _watching(type(module), path, runs))
    return runs


def _watching(base: Any, path: str, runs: NormRuns) -> type:
    """A subclass of ``base`` that computes the same and reports each run to ``runs``."""
    name = first_input(base.forward)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return runs.called(path, lambda: super(cls, self).__call__(*args, **kwargs))

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.ran(path, args, kwargs, name)
        return base.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(base.forward)  # type: ignore[attr-defined]
    about = {"__module__": base.__module__, "__qualname__": base.__qualname__}
    cls: Any = type(base.__name__, (base,), {**about, "__call__": call, "forward": forward})
    return cls  # type: ignore[no-any-return]
