"""Is a model still built as it was when its norms were folded?

The proof is about the whole model, so every edit that could change its function counts: other
modules, hooks, ``forward`` on an instance, other parameters, and training mode. The first
difference is reported by name. Allowed are hooks of ``plan.trusted_code``, and hooks after the
model itself or after a norm with a weight, since no converted norm depends on these outputs. Plain
attributes of a module, and the code of classes, are not compared.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from enjoyln_cli.errors import EnjoyLNError, NotCentred
from enjoyln_cli.models.norm_modules import has_replaced_forward, stock_class
from enjoyln_cli.plan.trusted_code import foreign_hooks
from enjoyln_cli.runtime.adapters import added_weights, replaced_message
from enjoyln_cli.runtime.modules import Folded
from enjoyln_cli.runtime.scope import CallGuard, in_python
from enjoyln_cli.text import first_line

SAME_IN_TRAINING = {nn.Linear, nn.Embedding, nn.LayerNorm, nn.Identity, nn.ModuleList}
"""Classes whose ``forward`` is the same in training mode, in which new layers often are.

The classes of ``transformers.activations`` also count, and transformers' ``Conv1D``.
"""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Classes that may call a child that is added later."""
_OR = "or keep LayerNorm"
_TRAINING = itemgetter("training")
_VERSION = attrgetter("_version")
_ADDRESS = Tensor.data_ptr
_REQUIRES_GRAD = attrgetter("requires_grad")
check_lock = threading.RLock()
"""Held while a model is compared."""


@dataclass(frozen=True)
class ModuleRecord:
    """One module as it was when its model was folded."""

    kind: type
    """Its class before norms were folded."""
    parameters: frozenset[str]
    """Names of its own parameters."""
    hooks: frozenset[int]
    """Keys of the hooks that were part of the proven model."""
    replaced: bool
    """Whether the proven instance had another ``forward`` than its class."""


def _check_module(
    path: str, module: nn.Module, record: ModuleRecord, root: bool, mode: bool | None
) -> None:
    """``mode``: whether the module has to be in training mode; ``None`` for any mode."""
    if stock_class(type(module)) is not record.kind:
        raise NotCentred(replaced_message(path, module, record.kind))
    autocast = "_original_forward" in vars(module)  # by accelerate
    if has_replaced_forward(module) and not (record.replaced or autocast):
        raise NotCentred(f"{path}: its forward was replaced on the instance; restore it, {_OR}")
    if mode not in (None, module.training) and not _same_in_training(module):
        name, call = ("training", "eval()") if module.training else ("eval", "train()")
        raise NotCentred(f"{path}: is in {name} mode; call {call} on the model, {_OR}")
    if changed := _present(module) ^ record.parameters:
        raise NotCentred(
            f"{path}: gained or lost its {min(changed)} since norms were converted; convert the "
            f"model as it is now, {_OR}"
        )
    pre = [hook for key, hook in module._forward_pre_hooks.items() if key not in record.hooks]
    post = [hook for key, hook in module._forward_hooks.items() if key not in record.hooks]
    behind_norm = isinstance(module, nn.LayerNorm | Folded) and _present(module)
    _check_hooks(path, pre if root or behind_norm else (*pre, *post))


def _same_in_training(module: nn.Module) -> bool:
    cls = stock_class(type(module))
    home = ("transformers.activations", "transformers.pytorch_utils")
    return cls in SAME_IN_TRAINING or cls.__module__ in home


def _check_hooks(path: str, hooks: Iterable[Any]) -> None:
    if foreign_hooks(hooks):
        raise NotCentred(
            f"{path}: has a forward hook that was not there at conversion and may change its "
            f"output; remove it, {_OR}"
        )


def _present(module: nn.Module) -> frozenset[str]:
    """Names of the module's own parameters that are not ``None``."""
    return frozenset(name for name, tensor in module._parameters.items() if tensor is not None)


Fact = tuple[dict[str, Any], str, Any]
"""A dictionary, a key, and the object that was its value. Compared by identity."""


class Tensors:
    """Tensors at one time, to be compared with the present."""

    def __init__(self, facts: Collection[Fact] = ()) -> None:
        """Raise ``RuntimeError`` for a tensor of ``torch.func``, which has no address."""
        self.owners, self.names, self.values = _columns(facts)
        self.counted = [tensor for tensor in self.values if not tensor.is_inference()]
        """The tensors whose changes torch counts."""
        self.versions = [*map(_VERSION, self.counted)]
        self.addresses = [*map(_ADDRESS, self.counted)]
        self.trained = [*map(_REQUIRES_GRAD, self.counted)]
        """Whether they take gradients: PEFT freezes weights before it merges adapters into them."""

    @in_python
    def unchanged(self, same: Callable[[Any, Any], bool] = is_) -> bool:
        """Whether the tensors are the same, in the same memory and without a change that torch has
        counted. ``same(now, then)`` compares two of them.
        """
        return (
            [*map(_VERSION, self.counted)] == self.versions
            and [*map(_ADDRESS, self.counted)] == self.addresses
            and [*map(_REQUIRES_GRAD, self.counted)] == self.trained
            and all(map(same, map(dict.get, self.owners, self.names), self.values))
        )


class Snapshot:
    """Modules of a model and some of its values at one time, to be compared with the present.

    The comparison runs at every call of the model. For 160 modules it takes about ten microseconds
    in a loop, and several times as long in real calls, whose work replaces all of it in the caches.
    """

    def __init__(
        self,
        modules: Collection[nn.Module],
        facts: Iterable[Fact] = (),
        tensors: Collection[Fact] = (),
    ) -> None:
        """Raise ``RuntimeError`` as ``Tensors`` does."""
        self.tensors = Tensors(tensors)
        absent = (
            (module._parameters, name, None)
            for module in modules
            for name, tensor in module._parameters.items()
            if tensor is None
        )
        self.owners, self.names, self.values = _columns([*facts, *absent])
        self.moded = [vars(module) for module in modules if not _same_in_training(module)]
        self.modes = [*map(_TRAINING, self.moded)]
        self.children = [
            module._modules
            for module in modules
            if module._modules or isinstance(module, CONTAINERS)
        ]
        self.children_then = [*map(dict, self.children)]
        hooks: list[Any] = [torch_module._global_forward_pre_hooks]
        hooks += [torch_module._global_forward_hooks]
        hooks += [h for m in modules for h in (m._forward_pre_hooks, m._forward_hooks)]
        self.handles = RemovableHandle.next_id
        """How many hooks this process has registered so far: later, there may be new ones."""
        self.unhooked = [by_key for by_key in hooks if not by_key]
        self.hooked = [by_key for by_key in hooks if by_key]
        self.keys = [*chain.from_iterable(self.hooked)]

    @in_python
    def unchanged(self) -> bool:
        """Whether the modules are built as then, and the tensors are unchanged."""
        return (
            self.tensors.unchanged()
            and all(map(is_, map(dict.get, self.owners, self.names), self.values))
            and self.children == self.children_then
            and (self.handles == RemovableHandle.next_id or not any(self.unhooked))
            and [*chain.from_iterable(self.hooked)] == self.keys
            and [*map(_TRAINING, self.moded)] == self.modes
        )


def _columns(facts: Collection[Fact]) -> Iterable[list[Any]]:
    """The dictionaries, the keys and the values of facts."""
    return [[*column] for column in zip(*facts, strict=True)] if facts else ([], [], [])


class KeepStructure:
    """The check at the start of a call: whether the model is still built as it was when proven.

    ``reference`` is an unedited model of the same class and config. If it is given, all that
    ``model`` has and ``reference`` has not counts as an edit, except LoRA adapters around linear
    layers. If not, ``model`` itself was proven, with its hooks and replaced ``forward`` methods.
    """

    trains = False
    """Whether training mode is proven, too; then all modules have to be in the same mode."""

    def __init__(self, model: nn.Module, reference: nn.Module | None = None) -> None:
        self.records: dict[str, ModuleRecord] = {}
        proven = reference is None
        adapters: tuple[str, ...] = ()
        original = dict((reference or model).named_modules())
        for path, module in model.named_modules():
            if path in original and added_weights(module, type(original[path])) is not None:
                adapters += (f"{path}.",)
            adapter = f"{path}.".startswith(adapters)
            if adapter or path in original:
                hooks = {*module._forward_pre_hooks, *module._forward_hooks} if proven else ()
                self.records[path] = ModuleRecord(
                    stock_class(type(module if adapter else original[path])),
                    _present(module),
                    frozenset(hooks),
                    proven and has_replaced_forward(module),
                )
        self.snapshot: Snapshot | None = None
        self.trained = -1
        """``trained`` of the state at the last check: after training, the model is checked anew."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "snapshot": None}

    @in_python
    def holds(self, guard: CallGuard, model: nn.Module) -> bool:
        """Whether ``model`` is as the proof assumes. If not, ``guard.trouble`` gets the reason.

        If the model has changed since the last check, it is compared. Warns if the trouble is new.
        """
        return (self.unchanged(guard) or self._look_again(guard, model)) and not guard.trouble

    @torch.compiler.disable
    def _look_again(self, guard: CallGuard, model: nn.Module) -> bool:
        """Set ``guard.trouble``; false if the model cannot be checked in this call."""
        with check_lock:
            return self.unchanged(guard) or self._look(guard, model)

    @in_python
    def unchanged(self, guard: CallGuard) -> bool:
        """Whether modules, tensors and their values are the same as at the last check."""
        snapshot = self.snapshot  # another thread may set it
        trained = self.trained == guard.state.trained
        return trained and snapshot is not None and snapshot.unchanged()

    def facts(self, model: nn.Module) -> Iterable[Fact]:
        """What else must stay the same as at the last check."""
        return ()

    def compare(self, model: nn.Module) -> None:
        """Raise ``NotCentred`` if the norms of ``model`` may not compute RMSNorm."""
        self.require_structure(model, self.trains and model.training)

    def require_structure(self, model: nn.Module, mode: bool | None = None) -> None:
        """Raise ``NotCentred`` for the first difference, also to the training ``mode``."""
        modules = dict(model.named_modules())
        for path, module in modules.items():
            record = self.records.get(path)
            if record is None:
                raise NotCentred(
                    f"{path}: is a {type(module).__name__} that was not there when norms were "
                    "converted; for an adapter call enjoyln_cli.refold, otherwise convert the "
                    f"model as it is now, {_OR}"
                )
            _check_module(path or type(module).__name__, module, record, not path, mode)
        for path in self.records:
            if path not in modules:
                raise NotCentred(f"{path}: is gone; convert the model as it is now, {_OR}")
        before, after = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
        _check_hooks("every module", (*before.values(), *after.values()))

    def _look(self, guard: CallGuard, model: nn.Module) -> bool:
        """Set ``guard.trouble``; false if the model cannot be checked in this call."""
        trained = guard.state.trained
        snapshot = Snapshot([*model.modules()], self.facts(model))
        set_trouble(guard, trouble_with(self.compare, model))
        self.trained, self.snapshot = trained, snapshot
        return True


def trouble_with(check: Callable[[nn.Module], None], model: nn.Module) -> str:
    """The first line of the error that ``check(model)`` raises; empty if it raises none."""
    try:
        check(model)
    except (EnjoyLNError, AttributeError, RuntimeError, TypeError) as error:
        return first_line(error)
    return ""


def set_trouble(guard: CallGuard, trouble: str) -> None:
    """Set ``guard.trouble``, and warn if it is new."""
    if trouble and not guard.trouble:
        warnings.warn(f"computing LayerNorm: {trouble}", stacklevel=2)
    guard.trouble = trouble
