"""Is what an edit makes of a tensor finite in the dtype that stores it?

The largest element answers this for nearly every tensor, without computing the edit:

    g W       max |g| max |W|              b + W v       max |b| + max |W v|
    P W       2 max |W|                    Q W           sqrt(n) max |W|, with n features
"""

from __future__ import annotations

import torch

from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import NAN, largest_of
from enjoyln_cli.edits.step import ReadTensor
from enjoyln_cli.errors import BadCheckpoint


def unusable_input(edit: Edit, read: ReadTensor) -> str:
    """The first tensor from which the loaded ``edit`` takes a number that is not finite, and why.

    ``read`` returns other tensors by name. Empty if all is finite.
    """
    return next(filter(None, (step.unusable(read) for step in edit.steps)), "")


def require_finite(name: str, x: torch.Tensor, edit: Edit, read: ReadTensor) -> None:
    """Raise ``BadCheckpoint`` unless ``x`` after the loaded ``edit`` is finite in its dtype.

    ``name`` is the tensor's name in messages, and ``read`` returns other tensors by name.
    """
    if unusable := unusable_input(edit, read):
        raise BadCheckpoint(f"{unusable}, which the edit of {name} would spread; repair it first")
    if not edit.largest(largest_of(x)) <= torch.finfo(x.dtype).max:
        rounded(name, x, edit)


def rounded(name: str, x: torch.Tensor, edit: Edit) -> torch.Tensor:
    """``x`` after the loaded ``edit``, computed in float64 and rounded once to its dtype.

    Raises ``BadCheckpoint`` that names the tensor if a number is not finite.
    """
    return in_dtype(name, edit.apply(x.double()), x.dtype)


def in_dtype(name: str, wide: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The float64 tensor ``wide`` in ``dtype``. Raises as ``rounded`` does."""
    result = wide.to(dtype)
    if not wide.isfinite().all():
        raise BadCheckpoint(f"{name} {NAN}, which the edit would spread; repair it first")
    if not result.isfinite().all():
        raise BadCheckpoint(
            f"{name}: its values after the edit are beyond the range of {dtype}; convert it to a "
            "wider dtype first, such as float32"
        )
    return result
