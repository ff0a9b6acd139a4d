"""Is a model still built as it was when its norms were folded?

The proof was about the whole model. What can be changed without anybody being told is compared
with what was there: modules and their classes, ``forward`` on instances and classes, hooks,
parameters that are there or not, training mode. What differs has no proof, and is named. Two kinds
of places may change as they like, since no fold rests on what comes out of them: linear layers
whose weights were not centred (adapters and quantised layers there go on), and hooks behind a norm
that multiplies by weights. Hooks of transformers only record. Plain attributes of a module are not
looked at.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from enjoyln_cli import kernels
from enjoyln_cli.errors import EnjoyLNError, NotCentred, UnsupportedModel
from enjoyln_cli.runtime.adapters import about_replaced
from enjoyln_cli.runtime.scope import Enter
from enjoyln_cli.text import first_line

SAME_IN_TRAINING = {nn.Linear, nn.Embedding, nn.LayerNorm, nn.Identity, nn.ModuleList}
"""Classes whose ``forward`` is the same in training mode: a new layer often is in it."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Classes that may call children which they did not have."""
RECORDING = ("transformers.", "enjoyln_cli.", "torch.utils.")
"""Where hooks come from that change nothing."""

_OR = "or go on with LayerNorm"
_one_at_a_time = threading.RLock()
_forwards: dict[type, Any] = {}
"""The ``forward`` that each class had when a model with it was first folded."""
_FORWARD = attrgetter("forward")


@dataclass(frozen=True)
class Part:
    """What a module was."""

    kind: type
    parameters: frozenset[str]
    """Names of its own parameters that were not ``None``."""
    hooks: frozenset[int]
    """Keys of hooks that were there, and belong to the model that was proven."""
    replaced: bool
    """Whether the instance had another ``forward`` than its class."""


class Structure:
    """How ``model`` is built, but for the linear layers at the paths ``loose``.

    Where there is no ``reference``, of the same class and config, all that is there has been seen
    by the proof, hooks and replaced ``forward`` included. Where there is one, nobody has edited it.
    """

    def __init__(
        self, model: nn.Module, loose: Collection[str] = (), reference: nn.Module | None = None
    ) -> None:
        self.loose = frozenset(loose)
        self.parts: dict[str, Part] = {}
        original = dict(_tree(reference or model, self.loose))
        for path, module in _tree(model, self.loose):
            if path not in original:
                continue
            seen = reference is None
            keys = {*module._forward_pre_hooks, *module._forward_hooks} if seen else ()
            kind = _without_ours(type(original[path]))
            for cls in (kind, type(module)):
                _forwards.setdefault(cls, _FORWARD(cls))
            self.parts[path] = Part(
                kind,
                frozenset(_present(module)),
                frozenset(keys),
                seen and "forward" in vars(module),
            )

    def compare(self, model: nn.Module) -> None:
        """Raises ``NotCentred`` for the first difference."""
        found = dict(_tree(model, self.loose))
        for path, module in found.items():
            part = self.parts.get(path)
            if part is None:
                raise NotCentred(
                    f"{path}: is a {type(module).__name__} that was not there when norms were "
                    "folded; convert the model as it is now, or go on with LayerNorm"
                )
            _check_part(path or type(module).__name__, module, part, root=not path)
        gone = next((path for path in self.parts if path not in found), None)
        if gone is not None:
            raise NotCentred(f"{gone}: is gone; convert the model as it is now, {_OR}")
        _check_hooks("every module", _global_hooks())


def _check_part(path: str, module: nn.Module, part: Part, root: bool) -> None:
    kind, cls = part.kind, type(module)
    if _without_ours(cls) is not kind:
        raise NotCentred(about_replaced(path, module, kind))
    if _forwards.setdefault(cls, _FORWARD(cls)) is not _FORWARD(cls):
        raise NotCentred(f"{path}: forward of {cls.__name__} was replaced; restore it, {_OR}")
    if "forward" in vars(module) and not (part.replaced or _is_accelerates(module)):
        raise NotCentred(f"{path}: forward was replaced on the instance; restore it, {_OR}")
    if module.training and _without_ours(cls) not in SAME_IN_TRAINING:
        raise NotCentred(f"{path}: is in training mode; call eval() of the model, {_OR}")
    new = next((name for name in _present(module) if name not in part.parameters), None)
    if new is not None:
        raise NotCentred(
            f"{path}: has a {new} that it did not have when norms were folded; convert the model "
            f"as it is now, {_OR}"
        )
    pre = {key: hook for key, hook in module._forward_pre_hooks.items() if key not in part.hooks}
    post = {key: hook for key, hook in module._forward_hooks.items() if key not in part.hooks}
    if root:  # before the call begins and after it has ended
        entered = [isinstance(hook, Enter) for hook in pre.values()]
        behind = entered.index(True) if True in entered else 0
        pre, post = dict(list(pre.items())[behind:]), {}
    elif isinstance(module, nn.LayerNorm) and module.weight is not None:
        post = {}
    _check_hooks(path, [*pre.values(), *post.values()])


def _without_ours(cls: type) -> type:
    """The class that the module had before norms were folded."""
    while cls.__module__.startswith("enjoyln_cli."):
        cls = cls.__bases__[-1]
    return cls


def _check_hooks(path: str, hooks: list[Any]) -> None:
    homes = (str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in hooks)
    if not all(home.startswith(RECORDING) for home in homes):
        raise NotCentred(
            f"{path}: has a forward hook that was not there, which may change what it writes; "
            f"remove it, {_OR}"
        )


def _is_accelerates(module: nn.Module) -> bool:
    """Whether accelerate has wrapped the class's ``forward``, with hooks that only move tensors."""
    new, hook = vars(module)["forward"], vars(module).get("_hf_hook")
    hooks = (hook, *getattr(hook, "hooks", ()))
    return all(
        str(getattr(home, "__module__", "")).startswith("accelerate.")
        for home in (new.func if isinstance(new, partial) else new, *map(type, hooks))
    )


def _global_hooks() -> list[Any]:
    """Forward hooks of torch that are called with every module."""
    before, after = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    return [*before.values(), *after.values()] if before or after else []


def _present(module: nn.Module) -> list[str]:
    return [name for name, tensor in module._parameters.items() if tensor is not None]


def _tree(model: nn.Module, loose: Collection[str]) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its first path, without what is at and below the paths ``loose``."""
    seen: set[int] = set()

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if path in loose or id(module) in seen:
            return
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(f"{path}.{name}" if path else name, child)

    return walk("", model)


Fact = tuple[dict[str, Any], str, Any]
"""A dictionary, a key, and the value that it has there."""


class Snapshot:
    """How a model is built at one time, and what ``facts`` there are, to be compared with now.

    That is done at every call, so it takes some ten microseconds.
    """

    def __init__(
        self, model: nn.Module, loose: Collection[str], facts: Iterable[Fact] = ()
    ) -> None:
        self.modules = [module for _, module in _tree(model, loose)]
        self.kinds = [*map(type, self.modules)]
        self.classes = list(dict.fromkeys(self.kinds))
        self.class_forwards = [*map(_FORWARD, self.classes)]
        self.everywhere = _global_hooks()
        facts = [*facts]
        self.dicts: list[Any] = []
        """Those whose sizes say whether anything was added or taken away."""
        self.hooked: list[Any] = []
        for module, kind in zip(self.modules, self.kinds, strict=True):
            own = vars(module)
            if _without_ours(kind) not in SAME_IN_TRAINING:
                facts.append((own, "training", module.training))
            facts.append((own, "forward", own.get("forward")))
            for group in (module._modules, module._parameters):
                facts += [(group, name, held) for name, held in group.items() if _is_fixed(held)]
            if module._modules or issubclass(kind, CONTAINERS):
                facts.append((own, "_modules", module._modules))
                self.dicts.append(module._modules)
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                self.dicts.append(hooks)
                self.hooked += [hooks] if hooks else []
        self.owners, self.names, self.values = ([*column] for column in zip(*facts, strict=True))
        self.sizes = [*map(len, self.dicts)]
        self.keys = [*chain.from_iterable(self.hooked)]

    def unchanged(self) -> bool:
        """Whether ``Structure.compare`` would see what it saw then."""
        facts, sizes = (self.owners, self.names, self.values), (self.dicts, self.sizes)
        same = kernels.native.entry.same(*facts, *sizes, self.modules, self.kinds)
        if same is NotImplemented:
            same = (
                all(map(is_, map(dict.get, self.owners, self.names), self.values))
                and [*map(len, self.dicts)] == self.sizes
                and [*map(type, self.modules)] == self.kinds
            )
        return (
            same
            and [*chain.from_iterable(self.hooked)] == self.keys
            and [*map(_FORWARD, self.classes)] == self.class_forwards
            and _global_hooks() == self.everywhere
        )


def _is_fixed(held: Any) -> bool:
    """Of what a module holds, parameters may be other ones at any time: their names count."""
    return held is None or isinstance(held, nn.Module)


class KeepStructure:
    """Looks, when a call begins, whether a model is built as the proof knows it."""

    def __init__(
        self, model: nn.Module, loose: Collection[str] = (), reference: nn.Module | None = None
    ) -> None:
        self.built = Structure(model, loose, reference)
        self.snapshot: Snapshot | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "snapshot": None}

    @torch.compiler.disable  # beside a compiled call it runs as it is
    def look(self, entry: Enter, model: nn.Module) -> None:
        """Sets the entry's ``trouble``, and warns of it where it is new."""
        if self.unchanged():
            return
        with _one_at_a_time:
            if not self.unchanged():
                self._look(entry, model)

    def unchanged(self) -> bool:
        """Whether all is as it was at the last look."""
        return self.snapshot is not None and self.snapshot.unchanged()

    def _look(self, entry: Enter, model: nn.Module) -> None:
        snapshot = Snapshot(model, self.built.loose)
        set_trouble(entry, trouble_with(self.built.compare, model))
        self.snapshot = snapshot


def trouble_with(check: Callable[[nn.Module], None], model: nn.Module) -> str:
    """The first line of what ``check`` raises. ``UnsupportedModel`` refuses the call."""
    try:
        check(model)
    except UnsupportedModel:
        raise
    except (EnjoyLNError, AttributeError, RuntimeError, TypeError) as error:
        return first_line(error)
    return ""


def set_trouble(entry: Enter, trouble: str, told: bool = False) -> None:
    """Warns of new trouble, unless somebody else has ``told`` of it."""
    if trouble and not entry.trouble and not told:
        warnings.warn(f"computing LayerNorm: {trouble}", stacklevel=2)
    entry.trouble = trouble
