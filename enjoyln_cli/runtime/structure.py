"""Is a model still built as it was when its norms were folded?

The proof is about the whole model, so every edit that could change its function is detected. The
comparison covers modules and their classes, ``forward`` on instances and classes, hooks, which
parameters exist, and training mode. The first difference is reported by name. Two kinds of places
may change freely, since no converted norm depends on their output: linear layers whose weights were
not centred (so adapters and quantisation work there), and hooks after a norm with a weight. Hooks
of transformers are allowed too: they only record. Plain attributes of a module are not compared.
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
from enjoyln_cli.runtime.adapters import replaced_message
from enjoyln_cli.runtime.modules import stock_class
from enjoyln_cli.runtime.scope import Enter
from enjoyln_cli.text import first_line

SAME_IN_TRAINING = {nn.Linear, nn.Embedding, nn.LayerNorm, nn.Identity, nn.ModuleList}
"""Classes whose ``forward`` is the same in training mode; a newly created layer often is in it."""
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Classes that may call a child that is added later."""
RECORDING = ("transformers.", "enjoyln_cli.", "torch.utils.", "torch.distributed.fsdp.")
"""Prefixes of modules whose hooks change no value, or gather split weights (FSDP)."""

_OR = "or keep LayerNorm"
_check_lock = threading.RLock()
_forwards: dict[type, Any] = {}
"""The ``forward`` that each class had when a model with it was first folded."""
_FORWARD = attrgetter("forward")


@dataclass(frozen=True)
class Part:
    """One module as it was when its model was folded."""

    kind: type
    """Its class before norms were folded."""
    parameters: frozenset[str]
    """Names of its own parameters that were not ``None``."""
    hooks: frozenset[int]
    """Keys of the hooks that were part of the proven model."""
    replaced: bool
    """Whether the instance had another ``forward`` than its class."""


class Structure:
    """How ``model`` was built, without the linear layers at the paths ``loose``.

    ``reference`` is an unedited model of the same class and config. If it is given, hooks and
    replaced ``forward`` methods of ``model`` count as edits. If not, ``model`` itself was proven,
    with its hooks and replaced ``forward`` methods. At the paths ``adapted``, an adapter stands
    around the layer that is meant.
    """

    def __init__(
        self,
        model: nn.Module,
        loose: Collection[str] = (),
        reference: nn.Module | None = None,
        adapted: Collection[str] = (),
    ) -> None:
        self.loose = frozenset(loose)
        self.trains = False
        """Whether training mode is proven, too; then all modules have to be in the same mode."""
        self.parts: dict[str, Part] = {}
        original = dict(_tree(reference or model, self.loose))
        for path, module in _tree(model, self.loose, adapted):
            if path not in original:
                continue
            seen = reference is None
            keys = {*module._forward_pre_hooks, *module._forward_hooks} if seen else ()
            kind = stock_class(type(original[path]))
            for cls in (kind, type(module)):
                _forwards.setdefault(cls, _FORWARD(cls))
            self.parts[path] = Part(
                kind,
                frozenset(_present(module)),
                frozenset(keys),
                seen and "forward" in vars(module),
            )

    def compare(
        self, model: nn.Module, adapted: Collection[str] = (), in_any_mode: bool = False
    ) -> None:
        """Raises ``NotCentred`` for the first difference; the mode is none with ``in_any_mode``."""
        found = dict(_tree(model, self.loose, adapted))
        mode = None if in_any_mode else self.trains and model.training
        for path, module in found.items():
            part = self.parts.get(path)
            if part is None:
                raise NotCentred(
                    f"{path}: is a {type(module).__name__} that was not there when norms were "
                    f"converted; convert the model as it is now, {_OR}"
                )
            _check_part(path or type(module).__name__, module, part, not path, mode)
        gone = next((path for path in self.parts if path not in found), None)
        if gone is not None:
            raise NotCentred(f"{gone}: is gone; convert the model as it is now, {_OR}")
        _check_hooks("every module", _global_hooks())


def _check_part(path: str, module: nn.Module, part: Part, root: bool, mode: bool | None) -> None:
    """``mode``: whether the module has to be in training mode; ``None`` for any mode."""
    kind, cls = part.kind, type(module)
    if stock_class(cls) is not kind:
        raise NotCentred(replaced_message(path, module, kind))
    if _forwards.setdefault(cls, _FORWARD(cls)) is not _FORWARD(cls):
        raise NotCentred(f"{path}: the forward of {cls.__name__} was replaced; restore it, {_OR}")
    if "forward" in vars(module) and not (part.replaced or _is_accelerates(module)):
        raise NotCentred(f"{path}: its forward was replaced on the instance; restore it, {_OR}")
    if mode not in (None, module.training) and stock_class(cls) not in SAME_IN_TRAINING:
        name, call = ("training", "eval()") if module.training else ("eval", "train()")
        raise NotCentred(f"{path}: is in {name} mode; call {call} on the model, {_OR}")
    new = next((name for name in _present(module) if name not in part.parameters), None)
    if new is not None:
        raise NotCentred(
            f"{path}: has a {new} that it did not have when norms were converted; convert the "
            f"model as it is now, {_OR}"
        )
    pre = {key: hook for key, hook in module._forward_pre_hooks.items() if key not in part.hooks}
    post = {key: hook for key, hook in module._forward_hooks.items() if key not in part.hooks}
    if root:  # hooks that run before ``Enter`` or after the model's forward may do anything
        entered = [isinstance(hook, Enter) for hook in pre.values()]
        behind = entered.index(True) if True in entered else 0
        pre, post = dict(list(pre.items())[behind:]), {}
    elif isinstance(module, nn.LayerNorm) and module.weight is not None:
        post = {}
    _check_hooks(path, [*pre.values(), *post.values()])


def _check_hooks(path: str, hooks: list[Any]) -> None:
    homes = (str(getattr(getattr(hook, "func", hook), "__module__", "")) for hook in hooks)
    if not all(home.startswith(RECORDING) for home in homes):
        raise NotCentred(
            f"{path}: has a forward hook that was not there at conversion and may change its "
            f"output; remove it, {_OR}"
        )


def _is_accelerates(module: nn.Module) -> bool:
    """Whether the instance's ``forward`` is accelerate's: it moves tensors, or runs in autocast."""
    new, hook = vars(module)["forward"], vars(module).get("_hf_hook")
    if hook is None and "_original_forward" in vars(module):
        inner: Any = getattr(getattr(new, "__wrapped__", None), "model_forward", None)
        home = str(getattr(inner, "__globals__", {}).get("__name__", ""))
        return home.startswith("torch.") and inner.__wrapped__ is type(module).forward
    hooks = (hook, *getattr(hook, "hooks", ()))
    return all(
        str(getattr(home, "__module__", "")).startswith("accelerate.")
        for home in (new.func if isinstance(new, partial) else new, *map(type, hooks))
    )


def _global_hooks() -> list[Any]:
    """Global forward hooks, which torch calls for every module."""
    before, after = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    return [*before.values(), *after.values()] if before or after else []


def _present(module: nn.Module) -> list[str]:
    return [name for name, tensor in module._parameters.items() if tensor is not None]


def _tree(
    model: nn.Module, loose: Collection[str], adapted: Collection[str] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, with its first path, except those at or below the paths ``loose``.

    At the paths ``adapted``, the layer inside the adapter takes the place of the adapter.
    """
    seen: set[int] = set()

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if path in adapted:
            module = module.base_layer  # type: ignore[assignment]
        if path in loose or id(module) in seen:
            return
        seen.add(id(module))
        yield path, module
        for name, child in module._modules.items():
            if child is not None:
                yield from walk(f"{path}.{name}" if path else name, child)

    return walk("", model)


Fact = tuple[dict[str, Any], str, Any]
"""A dictionary, a key, and the object that was its value. Compared by identity."""


class Snapshot:
    """The structure of a model and some ``facts`` at one time, to be compared with the present.

    The comparison runs at every call of the model, so it takes only about ten microseconds.
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
        """Dictionaries whose sizes show whether an entry was added or removed."""
        self.hooked: list[Any] = []
        for module, kind in zip(self.modules, self.kinds, strict=True):
            own = vars(module)
            if stock_class(kind) not in SAME_IN_TRAINING:
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
        """Whether ``Structure.compare`` would give the same result as then."""
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
    """Whether a module's entry has to stay the same object; a parameter may be replaced."""
    return held is None or isinstance(held, nn.Module)


class KeepStructure:
    """The check at the start of a call: whether the model is still built as it was when proven."""

    def __init__(
        self,
        model: nn.Module,
        loose: Collection[str] = (),
        reference: nn.Module | None = None,
        adapted: Collection[str] = (),
    ) -> None:
        self.built = Structure(model, loose, reference, adapted)
        self.snapshot: Snapshot | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "snapshot": None}

    @torch.compiler.disable  # runs in plain Python next to a compiled call
    def look(self, entry: Enter, model: nn.Module) -> None:
        """Check ``model`` if it has changed since the last check, and set ``entry.trouble``.

        Warns if the trouble is new. Raises ``UnsupportedModel`` if LayerNorm would be wrong too.
        """
        if self.unchanged():
            return
        with _check_lock:
            if not self.unchanged():
                self._look(entry, model)

    def unchanged(self) -> bool:
        """Whether nothing has changed since the last check."""
        return self.snapshot is not None and self.snapshot.unchanged()

    def _look(self, entry: Enter, model: nn.Module) -> None:
        snapshot = Snapshot(model, self.built.loose)
        set_trouble(entry, trouble_with(self.built.compare, model))
        self.snapshot = snapshot


def trouble_with(check: Callable[[nn.Module], None], model: nn.Module) -> str:
    """The first line of the error that ``check(model)`` raises; empty if it raises none.

    Does not catch ``UnsupportedModel``: then the call is refused.
    """
    try:
        check(model)
    except UnsupportedModel:
        raise
    except (EnjoyLNError, AttributeError, RuntimeError, TypeError) as error:
        return first_line(error)
    return ""


def set_trouble(entry: Enter, trouble: str, told: bool = False) -> None:
    """Set ``entry.trouble``, and warn if it is new, unless another entry has ``told`` of it."""
    if trouble and not entry.trouble and not told:
        warnings.warn(f"computing LayerNorm: {trouble}", stacklevel=2)
    entry.trouble = trouble
