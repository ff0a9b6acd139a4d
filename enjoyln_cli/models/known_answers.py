"""Branches of training that a trace without values can decide.

* LayerDrop skips a layer if ``torch.rand([]) < rate``. A draw is in [0, 1), so with a rate of zero
  the comparison is false, whatever is drawn.
* Detection models clamp activations if ``not torch.isfinite(x).all()``. The trace assumes that all
  activations are finite: with others, training has failed already.

Any other reading of a value counts as a reading.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

_LESS = {torch.lt, torch.less, torch.Tensor.lt, torch.Tensor.less, torch.Tensor.__lt__}
_FINITE = {torch.isfinite, torch.Tensor.isfinite}
_ALL = {torch.all, torch.Tensor.all}


class KnownAnswers(TorchFunctionMode):
    """Inside the block, the answers above are Python's ``True`` and ``False``, not tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._origins: Any = WeakTensorKeyDictionary()
        """``"drawn"`` for a number that ``torch.rand`` drew, ``"finite"`` for a mask."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        origin = self._origin(args[0]) if args else None
        if origin == "drawn" and func in _LESS and len(args) == 2 and _is_zero(args[1]):
            return False
        if origin == "finite" and func in _ALL and len(args) == 1 and not kwargs:
            return True
        result = func(*args, **(kwargs or {}))
        if func in _FINITE:
            self._origins[result] = "finite"
        elif func is torch.rand and result.dim() == 0:
            self._origins[result] = "drawn"
        return result

    def _origin(self, value: Any) -> str | None:
        return self._origins.get(value) if isinstance(value, torch.Tensor) else None


def _is_zero(value: Any) -> bool:
    return type(value) in (int, float) and value == 0
