"""Find the values that leave a call of a model without being returned.

A module may keep a tensor as an attribute, or in a container or an object that is one, and Python
code may read the value of a tensor as a number. The graph shows neither.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.models.outputs import tensors_in

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
READS = {
    "__array__", "__bool__", "__complex__", "__dlpack__", "__float__", "__format__", "__index__",
    "__int__", "__reduce_ex__", "__repr__", "allclose", "data_ptr", "equal", "is_nonzero", "item",
    "numpy", "storage", "tolist", "untyped_storage",
}  # fmt: skip
"""Functions by which Python gets the values of a tensor, or access to them."""
_COMPARED = (bool, int, str, type(None))
"""Types of attributes that show whether the next call may take another path."""


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


def held_by_modules(model: nn.Module) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """The plain attributes of all modules by path, and every tensor that an attribute leads to."""
    with torch._C.DisableTorchFunction():  # what is read here is not read by the model
        plain = {
            f"{path}.{name}" if path else name: value
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if type(value) in _COMPARED
        }
        return plain, tensors_in(model)
