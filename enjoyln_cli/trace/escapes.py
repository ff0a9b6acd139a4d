"""Find the values that Python code reads from tensors, which no graph shows."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.trace.graph_builder import NotRecorded

READS = {
    "__array__", "__bool__", "__complex__", "__dlpack__", "__float__", "__format__", "__index__",
    "__int__", "__reduce_ex__", "__repr__", "allclose", "data_ptr", "equal", "is_nonzero", "item",
    "numpy", "storage", "tolist", "untyped_storage",
}  # fmt: skip
"""Functions by which Python gets the values of a tensor, or access to them."""


class PythonReads(TorchFunctionMode):
    """Notes what Python reads of tensors in a call, even if the model catches the exception.

    Raises ``TraceFailed`` if code assigns to ``.data`` of a tensor, which no graph shows.
    """

    def __init__(self, symbolic: bool) -> None:
        """``symbolic`` says whether tensors are without values, for all sizes or all values."""
        super().__init__()
        self.symbolic = symbolic
        self.read_values = False
        """Whether Python read the value of a tensor, so that other values may lead elsewhere."""
        self.failed = False
        """Whether reading one failed."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__ and (slices := _as_slices(args[1])) is not None:
            return func(args[0], slices).clone(memory_format=torch.contiguous_format)
        if func is torch.Tensor.__deepcopy__ and self.symbolic:
            self.failed = True
            raise NotRecorded("a deep copy of a tensor needs memory, which no symbol has")
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            self.failed = True
            raise TraceFailed("forward assigns to the .data of a tensor, which no graph shows")
        if getattr(func, "__name__", "") not in READS:
            return func(*args, **kwargs)
        try:
            result = func(*args, **kwargs)
        except BaseException:
            self.failed = True
            raise
        self.read_values = True
        return result


def _as_slices(index: Any) -> Any:
    """An index with a slice in place of its only list, of evenly spaced numbers; else ``None``.

    ``x[:, [2]]`` holds a copy of ``x[:, 2:3]``, and all recordings show a slice in the same way.
    """
    items = index if type(index) is tuple else (index,)
    lists = [item for item in items if type(item) is list]
    others = {int, slice, type(None), type(...), list}
    if len(lists) != 1 or not others.issuperset(map(type, items)):
        return None
    numbers = lists[0]
    if not numbers or any(type(number) is not int for number in numbers):
        return None
    first, last = numbers[0], numbers[-1]
    step = numbers[1] - first if len(numbers) > 1 else 1
    if step < 1 or (first < 0) != (last < 0) or numbers != list(range(first, last + 1, step)):
        return None
    taken = slice(first, last + 1 or None, step)
    return tuple(taken if item is numbers else item for item in items)
