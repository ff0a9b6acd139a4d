"""Find the values that leave a call of a model without being returned.

A module may keep a tensor as an attribute, or in a container or an object that is one, and Python
code may read the value of a tensor as a number. The graph shows neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.models.outputs import instance_attributes

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
READS = {
    "__array__", "__bool__", "__complex__", "__dlpack__", "__float__", "__format__", "__index__",
    "__int__", "__reduce_ex__", "__repr__", "allclose", "data_ptr", "equal", "is_nonzero", "item",
    "numpy", "storage", "tolist", "untyped_storage",
}  # fmt: skip
"""Functions by which Python gets the values of a tensor, or access to them."""
_DEPTH = 6
"""How many levels of nested objects in a module's attributes are compared."""


class WatchReads(TorchFunctionMode):
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
        if is_dynamo_compiling() or getattr(func, "__name__", "") not in READS:
            return result
        self.read_values = True
        if any(isinstance(leaf, _NUMBERS) for leaf in pytree.tree_leaves(result)):
            given = pytree.tree_leaves((args, kwargs))
            self.read += [value for value in given if isinstance(value, torch.Tensor)]
        return result


State = dict[tuple[str, str], Any]


def held_by_modules(model: nn.Module) -> tuple[State, list[torch.Tensor]]:
    """The attributes of each module by ``(path, name)``, in comparable form, and their tensors.

    Plain values are compared as such, tensors by dtype and number of dimensions, other objects by
    their kind and attributes. An object that several modules hold, such as a config, is described
    once.
    """
    state: State = {}
    tensors: list[torch.Tensor] = []
    known: dict[int, tuple[Any, Any]] = {}
    with torch._C.DisableTorchFunction():  # what is read here is not read by the model
        for path, module in model.named_modules():
            for name, value in vars(module).items():
                if id(value) not in known:
                    described = _described(value, _DEPTH, frozenset(), tensors)
                    known[id(value)] = value, described
                state[path, name] = known[id(value)][1]
    return state, tensors


def changed_attributes(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> list[Any]:
    """The attributes, as ``(path, name)``, whose descriptions differ."""
    names = dict.fromkeys((*before, *after))
    return [name for name in names if before.get(name) != after.get(name)]


_BY_VALUE = {bool, int, str, bytes, type(None), torch.dtype}


def _described(value: Any, depth: int, around: frozenset[int], tensors: list[torch.Tensor]) -> Any:
    """What two states compare of ``value``; its tensors are added to ``tensors``."""
    kind = type(value)
    if kind in _BY_VALUE:
        return kind, value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return "tensor", value.dim(), value.dtype
    if isinstance(value, (*_BY_VALUE, float, complex)):
        return kind, repr(value)  # NaN does not equal itself
    if isinstance(value, nn.Module):
        return "module", id(value)
    if depth == 0 or id(value) in around or callable(value):
        return kind
    inside = around | {id(value)}
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return kind, *[_described(part, depth - 1, inside, tensors) for part in list(value)]
    held = value if isinstance(value, Mapping) else instance_attributes(value)
    return kind, *[
        (repr(key), _described(part, depth - 1, inside, tensors))
        for key, part in list(held.items())
    ]
