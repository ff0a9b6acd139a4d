"""What a call leaves behind: values that something still holds, and state that a module keeps.

A value leaves a call in any way that Python has: in an object of any class, on a module, in a list,
in a closure. A graph is told of none of these. But a tensor that nobody holds is gone when the call
returns, so what is still alive, and was computed in the call, is an output. Where a call leaves
something behind, the next one may compute with it, so a second one is traced in the same graph.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from enjoyln_cli.effects.mode_queries import OF_TENSORS, from_outside
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
"""How deep the objects are looked into that a module keeps."""


_WHOLE = {
    "__array__", "__dlpack__", "__format__", "__reduce_ex__", "__repr__", "numpy", "storage",
    "untyped_storage",
}  # fmt: skip
"""What else gives Python the values of a tensor."""


class WatchPython(TorchFunctionMode):
    """Collects the tensors whose values Python reads as numbers, and what is asked of tensors.

    Raises ``TraceFailed`` where a tensor is given other memory, which no graph shows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: list[torch.Tensor] = []
        self.read_values = False
        """Whether any value was read, be it of an input."""
        self.questions: dict[str, None] = {}
        """Those about gradients that code from outside asks."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            raise TraceFailed("forward assigns to the .data of a tensor, which no graph shows")
        if (question := _question(func, args)) and from_outside(sys._getframe(1)):
            self.questions[question] = None
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if is_dynamo_compiling() or name not in _READS | _WHOLE:
            return result
        self.read_values = True
        if any(isinstance(leaf, _NUMBERS) for leaf in pytree.tree_leaves(result)):
            given = pytree.tree_leaves((args, kwargs))
            self.read += [value for value in given if isinstance(value, torch.Tensor)]
        return result


def _question(func: Any, args: tuple[Any, ...]) -> str | None:
    """What ``func`` asks of a computed tensor about gradients, as a name; ``None`` for nothing."""
    attribute = getattr(func, "__self__", None)  # the descriptor whose method reads it
    names = {getattr(one, "__name__", "") for one in (func, attribute)} & OF_TENSORS
    if not names or not args or isinstance(args[0], nn.Parameter):
        return None
    return f"{names.pop()} of a tensor"


def require_finished(result: Any) -> None:
    """Raises ``TraceFailed`` where a call returned something that computes only later."""
    waiting, visited = [result], set()
    while waiting:
        value = waiting.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, _LATER):
            raise TraceFailed(
                f"forward returns a {type(value).__name__}, which computes when it is used, and "
                "not in the call"
            )
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, (list, tuple, set)):
            waiting += value


def versions(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """How often each was written in place, by identity."""
    return {id(tensor): version(tensor) for tensor in tensors}


def version(tensor: torch.Tensor) -> int:
    """How often the tensor was written in place, where torch counts that."""
    return -1 if tensor.is_inference() else tensor._version


def still_alive(returned: Iterable[torch.Tensor], given: Mapping[int, int]) -> list[torch.Tensor]:
    """The tensors of the call that is being traced that something holds, other than ``returned``.

    What was there before, with these versions, is not among them, unless it was written in place,
    and nothing without elements is.
    """
    mode: Any = get_proxy_mode()
    if mode is None:
        return []
    known = {id(tensor) for tensor in returned}
    in_graph = _in_graph(mode.tracer)
    if not _held_by_python(_tracked(mode.tracer, known, given), in_graph):
        return []
    gc.collect(0)  # everything since the trace began is in the youngest generation
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
    """Whether a value was there before the call, or is a number that its code writes."""
    while node.op == "call_function" and packet(node) in _COPIES and node.args:
        node = node.args[0]  # type: ignore[assignment]
    return node.op != "call_function"


def _in_graph(tracer: Any) -> Counter[int]:
    """How often the graph itself holds a tensor, as the example of a node, by identity."""
    values = (node.meta.get("val") for node in tracer.graph.nodes)
    return Counter(id(value) for value in values if isinstance(value, torch.Tensor))


def _held_by_python(tensors: list[torch.Tensor], in_graph: Counter[int]) -> list[torch.Tensor]:
    """Without those that live only because another tensor is a view of them, or in the graph."""
    counts = zip(tensors, _references(tensors), strict=True)
    return [tensor for tensor, count in counts if count != _UNHELD + in_graph[id(tensor)]]


def _references(tensors: list[torch.Tensor]) -> list[int]:
    """How many references Python has to each tensor of a list."""
    counted: list[tuple[Any, int]] = [(tensor, sys.getrefcount(tensor)) for tensor in tensors]
    # Other tensors, such as views of it, have one among them.
    return [count - (tensor._use_count() > _OWNERS) for tensor, count in counted]


def _references_of_unheld() -> int:
    """``_references`` of a tensor that only its list holds; -1 where that cannot be told."""
    alone, viewed, held = (torch.empty(1) for _ in range(3))
    tensors, _view = [alone, viewed, held], viewed[:]
    del alone, viewed
    counts = _references(tensors)
    return counts[0] if counts[0] == counts[1] == counts[2] - 1 else -1


_OWNERS: int = torch.empty(1)._use_count()  # type: ignore[attr-defined]
_UNHELD = _references_of_unheld()


def module_state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """What each module keeps, by module and attribute: numbers, and the kinds of everything else.

    Of a tensor the dtype and the number of dimensions count, not the values.
    """
    found: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            found[path, name] = _described(value, _DEPTH, {id(module)})
    return found


def changed_attributes(
    before: Mapping[Any, Any], after: Mapping[Any, Any]
) -> list[tuple[str, str]]:
    """The attributes that differ."""
    names = dict.fromkeys((*before, *after))
    return [name for name in names if before.get(name) != after.get(name)]


_EQUAL_BY_VALUE = {bool, int, str, bytes, type(None), torch.dtype}
_PLAIN = (*_EQUAL_BY_VALUE, float, complex)
"""Numbers with a point, and subclasses, are compared by their text: NaN does not equal itself."""
_CONTAINERS = {dict, OrderedDict, list, tuple, set}


def _described(value: Any, depth: int, around: set[int]) -> Any:
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
    """What holds those tensors of a trace that are still there, each in a few words."""
    if not any(ref() is not None for ref in tensors):
        return []
    gc.collect()
    if any(ref() is not None for ref in tensors):
        _empty_caches_of_models()
    return [_holder(ref) for ref in tensors if ref() is not None]


def _empty_caches_of_models() -> None:
    """Empty the caches of functions in transformers' model files: they compute a result again."""
    for value in gc.get_objects():
        is_cache = type(value) is functools._lru_cache_wrapper
        if is_cache and str(value.__module__).startswith("transformers.models."):
            value.cache_clear()


def _holder(ref: weakref.ref[torch.Tensor]) -> str:
    for holder in gc.get_referrers(ref()):
        if isinstance(holder, dict):
            name = next((key for key, value in holder.items() if value is ref()), "")
            return f"{name!r} of a dictionary or object"
        if not isinstance(holder, types.FrameType):
            return f"a value in a {type(holder).__name__}"
    return "an object that Python does not show"
