"""``Snapshot``: restore all state that the code of a model can reach after a trace.

A traced call computes with tensors without values. If the code stores one anywhere, the next real
call would use it. So before a trace, a snapshot records all state that the model's own code can
reach: modules and their contents, lists and other containers, objects with attributes or slots, the
classes of all these, the globals and closures of their functions, and attributes of tensors. Code
of torch, transformers, the standard library and other installed packages is not followed. After the
trace, the content of all these objects is restored in place.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn

_LIMIT = 100_000
"""Maximum number of objects that are visited."""
_LARGEST = 65_536
"""Tensors and arrays of up to this many bytes are copied, so that writes can be undone."""
_PLAIN = {
    type(None), bool, int, float, complex, str, bytes, range, slice, torch.dtype, torch.device,
    torch.Size, types.BuiltinFunctionType, types.CodeType,
}  # fmt: skip
_LIBRARIES = sys.stdlib_module_names | {"torch", "transformers", "enjoyln_cli"}
_OF_CLASSES = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__abstractmethods__",
    "_abc_impl",
}
_MISSING: Any = object()
_STATES: list[tuple[type, Any, Any]] = [
    (torch.Generator, torch.Generator.get_state, torch.Generator.set_state),
    (random.Random, random.Random.getstate, random.Random.setstate),
]
"""Classes with functions that read and write the state of their objects."""

Look = Callable[[Any], None]


class Snapshot:
    """The state that the code of ``model`` can reach; ``put_back`` restores it."""

    def __init__(self, model: nn.Module) -> None:
        self._dicts: list[tuple[dict[Any, Any], list[tuple[Any, Any]]]] = []
        self._lists: list[tuple[list[Any] | deque[Any], list[Any]]] = []
        self._sets: list[tuple[set[Any], set[Any]]] = []
        self._attributes: list[tuple[Any, str, Any]] = []
        """Attributes of tensors, cells and objects with slots."""
        self._globals: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Globals, and attributes of Python modules, that functions use."""
        self._classes: list[tuple[type, dict[str, Any]]] = []
        self._tensors: list[tuple[torch.Tensor, int, torch.Tensor | None]] = []
        self.memory: list[Any] = []
        """NumPy arrays, storages and memoryviews, which Python can read without torch."""
        self._arrays: list[tuple[Any, Any]] = []
        self._caches: list[Any] = []
        """Functions with an ``lru_cache`` that was empty."""
        self._states: list[tuple[Any, Any, Any]] = []
        self._iterators: list[tuple[Any, Any]] = []
        self._followed = _own_packages(model)
        self._looks: dict[type, Look] = {}
        visited: dict[int, Any] = {}
        self._waiting: deque[Any] = deque(model.modules())
        while self._waiting and len(visited) < _LIMIT:
            value = self._waiting.popleft()
            if id(value) in visited:
                continue
            visited[id(value)] = value
            look = self._looks.get(type(value)) or self._look_of(type(value))
            with suppress(Exception):  # custom objects may raise any exception
                look(value)
        del self._waiting, self._looks

    def _wait_for(self, values: Iterable[Any]) -> None:
        self._waiting.extend([value for value in values if type(value) not in _PLAIN])

    def _look_of(self, kind: type) -> Look:
        """The function that records objects of a class: their content, then their attributes."""
        first = next((look for base, look in self._by_class() if issubclass(kind, base)), None)
        names = slots(kind)
        attributes = kind.__dictoffset__ != 0 and kind is not OrderedDict
        attributes = attributes and not issubclass(kind, (type, types.ModuleType))
        states = [(read, write) for base, read, write in _STATES if issubclass(kind, base)]
        self._wait_for(cls for cls in kind.__mro__ if self._is_own(cls.__module__))

        def look(value: Any) -> None:
            if first is not None:
                first(value)
            if attributes:
                self._waiting.append(value.__dict__)
            for name in names:
                self._note(value, name, getattr(value, name, _MISSING))
            for read, write in states:
                self._states.append((value, write, read(value)))

        found = first if first and not (attributes or names or states) else look
        self._looks[kind] = found
        return found

    def _by_class(self) -> Iterator[tuple[Any, Look]]:
        yield dict, self._look_at_dict
        yield (list, deque), self._look_at_list
        yield set, self._look_at_set
        yield (tuple, frozenset), self._wait_for
        yield torch.Tensor, self._look_at_tensor
        yield (torch.UntypedStorage, torch.TypedStorage, memoryview), self.memory.append
        yield types.FunctionType, self._look_at_function
        yield type, self._look_at_class
        yield functools._lru_cache_wrapper, self._look_at_cache
        yield functools.partial, lambda f: self._wait_for([f.func, f.args, f.keywords])
        yield types.MethodType, lambda f: self._wait_for([f.__self__, f.__func__])
        yield (staticmethod, classmethod), lambda f: self._wait_for([f.__func__])
        yield property, lambda p: self._wait_for([p.fget, p.fset, p.fdel])
        yield weakref.ref, lambda reference: self._wait_for([reference()])
        yield types.MappingProxyType, lambda proxy: self._wait_for(proxy.values())
        yield types.ModuleType, lambda module: None  # functions record the names that they use
        yield types.GeneratorType, self._look_at_generator
        if numpy := sys.modules.get("numpy"):
            yield numpy.ndarray, self._look_at_array
        yield Iterator, lambda value: self._iterators.append((value, _position(value)))

    def _look_at_dict(self, value: dict[Any, Any]) -> None:
        pairs = _pairs(value) if value else []
        self._dicts.append((value, pairs))
        for pair in pairs:
            self._wait_for(pair)

    def _look_at_list(self, value: list[Any] | deque[Any]) -> None:
        self._lists.append((value, list(value)))
        self._wait_for(value)

    def _look_at_set(self, value: set[Any]) -> None:
        self._sets.append((value, set(value)))
        self._wait_for(value)

    def _look_at_cache(self, function: Any) -> None:
        self._caches += [] if function.cache_info().currsize else [function]
        self._wait_for([function.__wrapped__])

    def _look_at_generator(self, value: types.GeneratorType[Any, Any, Any]) -> None:
        self._iterators.append((value, _position(value)))
        self._wait_for(value.gi_frame.f_locals.values() if value.gi_frame else ())

    def _look_at_array(self, value: Any) -> None:
        self.memory.append(value)
        self._arrays += [(value, value.copy())] if value.nbytes <= _LARGEST else []

    def _look_at_tensor(self, value: torch.Tensor) -> None:
        if value.is_leaf:
            self._note(value, "grad", value.grad)
        if value.is_inference() or isinstance(value, nn.Parameter):
            return
        plain = type(value) is torch.Tensor and value.layout is torch.strided
        small = plain and not value.is_meta and value.nbytes <= _LARGEST
        before = value.detach().clone() if small else None
        self._tensors.append((value, value._version, before))

    def _look_at_function(self, function: types.FunctionType) -> None:
        """Record the closure of a function, its defaults, and the globals that its code uses."""
        for cell in function.__closure__ or ():
            self._note(cell, "cell_contents", getattr(cell, "cell_contents", _MISSING))
        self._wait_for([vars(function), function.__defaults__, function.__kwdefaults__])
        if not self._is_own(function.__globals__.get("__name__")):
            return
        names = {*_names(function.__code__)}
        spaces = [function.__globals__]
        found = [vars(value) for value in map(spaces[0].get, names) if self._is_own_module(value)]
        for space in spaces + found:
            values = {name: space.get(name, _MISSING) for name in names}
            self._globals.append((space, values))
            self._wait_for(values.values())

    def _look_at_class(self, cls: type) -> None:
        if self._is_own(cls.__module__):
            values = {k: v for k, v in vars(cls).items() if k not in _OF_CLASSES}
            self._classes.append((cls, values))
            self._wait_for(values.values())
            self._wait_for(cls.__mro__[1:])

    def _note(self, owner: Any, name: str, value: Any) -> None:
        self._attributes.append((owner, name, value))
        self._wait_for([value])

    def _is_own_module(self, value: Any) -> bool:
        return isinstance(value, types.ModuleType) and self._is_own(value.__name__)

    def _is_own(self, module: Any) -> bool:
        """Whether a Python module, given by name, belongs to the model and not to a library."""
        package = str(module).partition(".")[0]
        found = self._followed.get(package)
        if found is None:
            found = self._followed[package] = not _is_installed(package)
        return found

    def has(self, value: Any) -> bool:
        """Whether ``value`` is a tensor that the snapshot has recorded."""
        return any(value is tensor for tensor, _, _ in self._tensors)

    def put_back(self) -> list[str]:
        """Restore everything that has changed; returns words for what cannot be restored."""
        left: list[str] = []
        for value, undo in self._changes():
            try:
                undo()
            except Exception:  # custom objects may raise any exception
                left.append(f"a {type(value).__name__}")
        for value, position in self._iterators:
            if _position(value) != position:
                left.append(f"the position of a {type(value).__name__}")
        return left

    def _changes(self) -> Iterator[tuple[Any, Any]]:
        """Each object that has changed, with a function that restores it."""
        for held, pairs in self._dicts:
            now = _pairs(held)
            if len(now) != len(pairs) or any(map(_differ, _flat(now), _flat(pairs))):
                yield held, functools.partial(_fill_dict, held, pairs)
        for space, values in self._globals:
            for name, value in values.items():
                if space.get(name, _MISSING) is not value:
                    yield space, functools.partial(_set_item, space, name, value)
        for cls, values in self._classes:
            for name in {*values, *vars(cls)} - _OF_CLASSES:
                value = values.get(name, _MISSING)
                if vars(cls).get(name, _MISSING) is not value:
                    yield cls, functools.partial(_set_attribute, type, cls, name, value)
        for owner, name, value in self._attributes:
            if getattr(owner, name, _MISSING) is not value:
                base: Any = torch.Tensor if isinstance(owner, torch.Tensor) else object
                yield owner, functools.partial(_set_attribute, base, owner, name, value)
        for items, earlier in self._lists:
            if len(items) != len(earlier) or any(map(_differ, items, earlier)):
                yield items, functools.partial(_fill_list, items, earlier)
        for members, first in self._sets:
            if {*map(id, members)} != {*map(id, first)}:
                yield members, functools.partial(_fill_set, members, first)
        for tensor, version, before in self._tensors:
            if tensor._version != version:
                yield tensor, functools.partial(_fill_tensor, tensor, before)
        for array, copied in self._arrays:
            if array.tobytes() != copied.tobytes():
                yield array, functools.partial(array.__setitem__, ..., copied)
        for cache in self._caches:
            yield cache, cache.cache_clear
        for value, write, state in self._states:
            yield value, functools.partial(write, value, state)


def _own_packages(model: nn.Module) -> dict[str, bool]:
    """The packages of the model's classes; these are followed even if they are installed."""
    kinds = {*map(type, model.modules())}
    homes = {cls.__module__.partition(".")[0] for kind in kinds for cls in kind.__mro__}
    return dict.fromkeys(homes - _LIBRARIES, True)


def _is_installed(package: str) -> bool:
    home = str(getattr(sys.modules.get(package), "__file__", ""))
    return package in _LIBRARIES or "site-packages" in home or "dist-packages" in home


def _names(code: types.CodeType) -> Iterator[str]:
    """All names of globals and attributes in a function and its nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def slots(cls: type) -> list[str]:
    """The names of the slots of a class's objects."""
    found: list[str] = []
    for base in cls.__mro__:
        names = vars(base).get("__slots__", ())
        found += [names] if isinstance(names, str) else [n for n in names if isinstance(n, str)]
    return [name for name in found if not name.startswith("__")]


def _position(value: Any) -> Any:
    """A description of how far an iterator has come, as far as Python tells."""
    if isinstance(value, types.GeneratorType):
        frame = value.gi_frame
        return frame and (frame.f_lasti, *map(_identity, frame.f_locals.values()))
    shown = repr(value) if type(value).__module__ == "itertools" else ""
    return operator.length_hint(value, -1), shown


def _identity(value: Any) -> Any:
    return value if type(value) in _PLAIN else id(value)


def _pairs(value: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """The items of a dictionary, even if a subclass overrides ``items``."""
    kind = OrderedDict if isinstance(value, OrderedDict) else dict
    return list(kind.items(value))


def _flat(pairs: Iterable[tuple[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(pairs)


def _differ(one: Any, other: Any) -> bool:
    return one is not other


def _fill_dict(value: dict[Any, Any], pairs: list[tuple[Any, Any]]) -> None:
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
    kind.clear(value)
    for key, held in pairs:
        kind.__setitem__(value, key, held)


def _fill_list(value: list[Any] | deque[Any], items: list[Any]) -> None:
    kind: Any = list if isinstance(value, list) else deque
    kind.clear(value)
    kind.extend(value, items)


def _fill_set(value: set[Any], members: set[Any]) -> None:
    set.clear(value)
    set.update(value, members)


def _fill_tensor(value: torch.Tensor, before: torch.Tensor | None) -> None:
    if before is None or before.shape != value.shape:
        raise ValueError("a large tensor is not copied before the trace")
    with torch.no_grad():
        value.copy_(before)


def _set_item(space: dict[str, Any], name: str, value: Any) -> None:
    if value is _MISSING:
        del space[name]
    else:
        space[name] = value


def _set_attribute(kind: Any, owner: Any, name: str, value: Any) -> None:
    """Set or delete an attribute as ``kind`` does, even if the owner's class forbids it."""
    if value is _MISSING:
        kind.__delattr__(owner, name)
    else:
        kind.__setattr__(owner, name, value)
