"""Find the values that Python code reads from tensors as numbers, which no graph shows."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from enjoyln_cli.errors import TraceFailed

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
READS = {
    "__array__", "__bool__", "__complex__", "__dlpack__", "__float__", "__format__", "__index__",
    "__int__", "__reduce_ex__", "__repr__", "allclose", "data_ptr", "equal", "is_nonzero", "item",
    "numpy", "storage", "tolist", "untyped_storage",
}  # fmt: skip
"""Functions by which Python gets the values of a tensor, or access to them."""


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
        if getattr(func, "__name__", "") not in READS:
            return result
        self.read_values = True
        if any(isinstance(leaf, _NUMBERS) for leaf in pytree.tree_leaves(result)):
            given = pytree.tree_leaves((args, kwargs))
            self.read += [value for value in given if isinstance(value, torch.Tensor)]
        return result
