"""Find what a call of a model leaves behind: tensors that are still referenced, and module state.

Python code can store a tensor anywhere: in any object, on a module, in a list, in a closure. The
graph shows none of this. But a tensor without references is freed when the call returns. So every
tensor that was computed in the call and is still alive counts as an output. If a call leaves
something behind, the next call may use it, so a second call is traced in the same graph.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from enjoyln_cli.effects.reachable import slots
from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.nodes import packet

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_READS = {"item", "tolist", "is_nonzero", "equal", "allclose"} | {
    f"__{name}__" for name in ("bool", "int", "float", "index", "complex")
}
_COPIES = {torch.ops.aten.detach_, torch.ops.aten.lift_fresh_copy}
_LATER = (
    types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FunctionType,
    types.MethodType, functools.partial, map, filter, zip,
)  # fmt: skip
_DEPTH = 6
"""How many levels of nested objects in a module's attributes are compared."""


_WHOLE = {
    "__array__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "numpy", "storage",
    "untyped_storage",
}  # fmt: skip
"""Other methods by which Python gets the values of a tensor."""
_OPENED = _READS | _WHOLE


class WatchPython(TorchFunctionMode):
    """Records tensors whose values Python reads as numbers.

    Raises ``TraceFailed`` if code assigns to ``.data`` of a tensor, which no graph shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[torch.Tensor] = []
        self.read_values = False
        """Whether any value was read, even that of an input."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise TraceFailed("forward assigns to the .data of a tensor, which no graph shows")
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if is_dynamo_compiling() or name not in _OPENED:
            return result
        self.read_values = True
        if any(isinstance(leaf, _NUMBERS) for leaf in pytree.tree_leaves(result)):
            given = pytree.tree_leaves((args, kwargs))
            self.read += [value for value in given if isinstance(value, torch.Tensor)]
        return result


def require_finished(result: Any) -> None:
    """Raise ``TraceFailed`` if a call returned something that computes later (a generator ...)."""
    waiting, visited = [result], set()
    while waiting:
        value = waiting.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, _LATER):
            raise TraceFailed(
                f"forward returns a {type(value).__name__}, which computes its values after the "
                "call"
            )
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value


def versions(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """The version counter of each tensor, by ``id``."""
    with torch._C.DisableTorchFunction():  # the model does not read them
        return {id(tensor): version(tensor) for tensor in tensors}


def version(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place; -1 for inference tensors, which do not count."""
    return -1 if tensor.is_inference() else tensor._version


def still_alive(returned: Iterable[torch.Tensor], given: Mapping[int, int]) -> list[torch.Tensor]:
    """Tensors of the traced call that are still referenced, other than ``returned``.

    Tensors that existed before (``given``: their versions by ``id``) only count if they were
    written in place. Empty tensors never count.
    """
    mode: Any = get_proxy_mode()
    if mode is None:
        return []
    known = {id(tensor) for tensor in returned}
    in_graph = _in_graph(mode.tracer)
    if not _held_by_python(_tracked(mode.tracer, known, given), in_graph):
        return []
    gc.collect(0)  # all objects since the start of the trace are in the youngest generation
    return _held_by_python(_tracked(mode.tracer, known, given), in_graph)


def _tracked(tracer: Any, known: set[int], given: Mapping[int, int]) -> list[torch.Tensor]:
    return [
        tensor
        for tensor, proxy in tracer.tensor_tracker.items()
        if id(tensor) not in known and not _is_constant(proxy.proxy.node)
        if given.get(id(tensor)) != version(tensor)
        if not any(isinstance(size, int) and size == 0 for size in tensor.shape)
    ]


def _is_constant(node: Node) -> bool:
    """Whether a value existed before the call, or is a constant in the code."""
    while node.op == "call_function" and packet(node) in _COPIES and node.args:
        node = node.args[0]  # type: ignore[assignment]
    return node.op != "call_function"


def _in_graph(tracer: Any) -> Counter[int]:
    """How many nodes of the graph hold each tensor as their example value, by ``id``."""
    values = (node.meta.get("val") for node in tracer.graph.nodes)
    return Counter(id(value) for value in values if isinstance(value, torch.Tensor))


def _held_by_python(tensors: list[torch.Tensor], in_graph: Counter[int]) -> list[torch.Tensor]:
    """The tensors without those that are alive only by views of them, or by the graph."""
    counts = zip(tensors, _references(tensors), strict=True)
    return [tensor for tensor, count in counts if count != _UNHELD + in_graph[id(tensor)]]


def _references(tensors: list[torch.Tensor]) -> list[int]:
    """How many Python references each tensor of a list has."""
    counted: list[tuple[Any, int]] = [(tensor, sys.getrefcount(tensor)) for tensor in tensors]
    # Views and other tensors that own a tensor account for one reference together.
    return [count - (tensor._use_count() > _OWNERS) for tensor, count in counted]


def _references_of_unheld() -> int:
    """``_references`` of a tensor that is only in its list; -1 if this Python's counts differ."""
    alone, viewed, held = (torch.empty(1) for _ in range(3))
    tensors, _view = [alone, viewed, held], viewed[:]
    del alone, viewed
    counts = _references(tensors)
    return counts[0] if counts[0] == counts[1] == counts[2] - 1 else -1


_OWNERS: int = torch.empty(1)._use_count()  # type: ignore[attr-defined]
_UNHELD = _references_of_unheld()


def module_state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """The attributes of each module by ``(path, name)``: plain values, and kinds of other objects.

    Tensors are described by dtype and number of dimensions, not by their values. An object that
    several modules hold, such as a config, is described once.
    """
    found: dict[tuple[str, str], Any] = {}
    known: dict[int, tuple[Any, Any]] = {}
    with torch._C.DisableTorchFunction():  # what is read here is not read by the model
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if id(value) not in known:
                    known[id(value)] = value, _described(value, _DEPTH, frozenset())
                found[path, name] = known[id(value)][1]
    return found


def changed_attributes(
    before: Mapping[Any, Any], after: Mapping[Any, Any]
) -> list[tuple[str, str]]:
    """The attributes, as ``(path, name)``, whose descriptions differ."""
    if before == after:
        return []
    names = dict.fromkeys((*before, *after))
    return [name for name in names if before.get(name) != after.get(name)]


_EQUAL_BY_VALUE = {bool, int, str, bytes, type(None), torch.dtype}
_PLAIN = (*_EQUAL_BY_VALUE, float, complex)
"""Floats, complex numbers and subclasses are compared as text, since NaN does not equal itself."""
_CONTAINERS = {dict, OrderedDict, list, tuple, set}


def _described(value: Any, depth: int, around: frozenset[int]) -> Any:
    exactly = type(value)
    if exactly in _EQUAL_BY_VALUE:
        return (exactly, value)
    if exactly in _CONTAINERS and not value:
        return exactly
    if isinstance(value, torch.Tensor):
        return ("tensor", value.dim(), value.dtype)
    if isinstance(value, _PLAIN):
        return (exactly, repr(value))
    if isinstance(value, nn.Module):
        return ("module", id(value))
    kind = exactly.__name__
    if depth == 0 or id(value) in around:
        return kind
    inside = around | {id(value)}
    if isinstance(value, Mapping):
        pairs = [(repr(k), _described(v, depth - 1, inside)) for k, v in list(value.items())]
        return (kind, tuple(pairs))
    if isinstance(value, (list, tuple, set, frozenset)):
        return (kind, tuple(_described(v, depth - 1, inside) for v in list(value)))
    if callable(value) or isinstance(value, type):
        return kind
    parts = {name: getattr(value, name, None) for name in slots(type(value))}
    parts |= getattr(value, "__dict__", {})
    return (kind, tuple((n, _described(v, depth - 1, inside)) for n, v in parts.items()))


def what_holds(tensors: Iterable[weakref.ref[torch.Tensor]]) -> list[str]:
    """For each tensor of a trace that is still alive: what refers to it, in a few words."""
    if not any(ref() is not None for ref in tensors):
        return []
    gc.collect()
    if any(ref() is not None for ref in tensors):
        _empty_caches_of_models()
    return [_holder(ref) for ref in tensors if ref() is not None]


def _empty_caches_of_models() -> None:
    """Clear the ``lru_cache`` of functions in transformers' models, which is always safe.

    They are found by name: Python's collector does not list objects that somebody has frozen.
    """
    for name, module in list(sys.modules.items()):
        if not name.startswith("transformers.models."):
            continue
        held = [value for value in vars(module).values() if _home(value) == name]
        held += [v for cls in held if isinstance(cls, type) for v in vars(cls).values()]
        for cache in chain.from_iterable(map(_caches_of, held)):
            cache.cache_clear()


def _home(value: Any) -> Any:
    """The name of the Python module in which a class or function is defined."""
    return getattr(value, "__module__", None) if callable(value) else None


def _caches_of(value: Any) -> list[Any]:
    """A function with an ``lru_cache``, or those that another function wraps."""
    function = getattr(value, "__func__", value)  # of a static method or a class method
    closure = function.__closure__ if isinstance(function, types.FunctionType) else None
    inside = [getattr(cell, "cell_contents", None) for cell in closure or ()]
    return [one for one in (function, *inside) if isinstance(one, functools._lru_cache_wrapper)]


def _holder(ref: weakref.ref[torch.Tensor]) -> str:
    for holder in gc.get_referrers(ref()):
        if isinstance(holder, dict):
            name = next((key for key, value in holder.items() if value is ref()), "")
            return f"{name!r} of a dictionary or object"
        if not isinstance(holder, types.FrameType):
            return f"a value in a {type(holder).__name__}"
    return "an object that Python does not show"
