"""Is what an edit makes of a tensor finite in the dtype that stores it?

The largest element answers this for nearly every tensor, without computing the edit:

    g W       max |g| max |W|              b + W v       max |b| + max |W v|
    P W       2 max |W|                    Q W           sqrt(n) max |W|, with n features
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.plan.edits import Edit, EditInputs, apply_edit

NAN = "NaN or Inf"
Read = Callable[[str], torch.Tensor]


def unusable_input(edit: Edit, values: EditInputs, read: Read) -> str:
    """The first tensor from which ``edit`` takes a number that is not finite, and why it does.

    ``values`` are what it takes from the tensors that ``read`` returns by name. Empty if all is
    finite.
    """
    taken = [*zip(edit.times, values.times, strict=True), (edit.scale, values.scale)]
    for vector, numbers in taken:
        if vector is not None and numbers is not None and not numbers.isfinite().all():
            held = read(vector.tensor).isfinite().all()
            return f"{vector.tensor} holds {'a number too small to divide by' if held else NAN}"
    names: list[str] = []
    if values.plus is not None and not values.plus.isfinite().all():
        names = [name for product in edit.plus for name in (product.by, product.matrix)]
    if baked := edit.bake or edit.level:
        names = [baked.weight, baked.bias, *([] if math.isfinite(values.level) else [baked.table])]
    bad = (name for name in names if not read(name).isfinite().all())
    return next((f"{name} holds {NAN}" for name in bad), "")


def require_finite(name: str, x: torch.Tensor, edit: Edit, values: EditInputs, read: Read) -> None:
    """Raise ``BadCheckpoint`` unless ``x`` after ``edit`` is finite in the dtype of ``x``.

    ``name`` is the tensor's name in messages. ``values`` are what the edit takes from other
    tensors, which ``read`` returns by name.
    """
    if unusable := unusable_input(edit, values, read):
        raise BadCheckpoint(f"{unusable}, which the edit of {name} would spread; repair it first")
    largest = _largest_after(edit, values, _largest(x))
    if not largest <= torch.finfo(x.dtype).max:
        rounded(name, x, edit, values)


def rounded(name: str, x: torch.Tensor, edit: Edit, values: EditInputs) -> torch.Tensor:
    """``x`` after ``edit``, computed in float64 and rounded once to the dtype of ``x``.

    Raises ``BadCheckpoint`` that names the tensor if a number is not finite.
    """
    return in_dtype(name, apply_edit(x.double(), edit, values), x.dtype)


def in_dtype(name: str, wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float64 tensor ``wide`` in ``dtype``. Raises as ``rounded`` does."""
    result = wide.to(dtype)
    if not wide.isfinite().all():
        raise BadCheckpoint(f"{name} holds {NAN}, which the edit would spread; repair it first")
    if not result.isfinite().all():
        raise BadCheckpoint(
            f"{name}: its values after the edit are beyond the range of {dtype}; convert it to a "
            "wider dtype first, such as float32"
        )
    return result


def _largest(x: torch.Tensor) -> float:
    """The largest absolute value of ``x``; NaN if it holds one."""
    if not x.numel():
        return 0.0
    low, high = (float(number) for number in torch.aminmax(x.detach()))
    return max(-low, high) if low <= high else math.nan


def _largest_after(edit: Edit, values: EditInputs, largest: float) -> float:
    """A bound for the absolute values after ``edit`` of elements up to ``largest``."""
    if edit.fill is not None:
        return abs(edit.fill)
    if edit.level is not None:
        return values.level
    if edit.bake is not None:
        return math.inf
    for vector, factors in zip(edit.times, values.times, strict=True):
        factor = _largest(factors)
        largest *= factor if vector.outputs is None else max(factor, 1.0)
    if values.plus is not None:
        largest += _largest(values.plus)
    if values.scale is not None:
        largest *= _largest(values.scale)
    largest *= 2.0 ** len(edit.axes)
    for turn in edit.turns:
        largest *= max(1.0, math.sqrt(turn.axis.size))
    return max(largest, *map(abs, edit.append.values)) if edit.append else largest
