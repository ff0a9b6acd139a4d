"""``Axis``: which elements of a tensor a mean is taken over, and how views change it.

An axis lies on one dimension of a tensor. Its elements ``start .. start + outer * size * inner``
of that dimension are seen as ``(outer, size, inner)``; each mean is taken over ``size``. Examples:

* the features of a ``(batch, tokens, d)`` tensor: ``Axis(2, 0, 1, d, 1)``;
* the heads of a query projection: ``Axis(2, 0, heads, head_dim, 1)``;
* the values in a fused projection of queries, keys and values: an axis that starts at ``2 * d``;
* the same, where the fused projection stores query, key and value of each head side by side: the
  groups begin ``step = 3 * head_dim`` apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch

from enjoyln_cli.plan.option_field import InRange

Count = Annotated[int, InRange(1)]


@dataclass(frozen=True, order=True)
class Axis:
    """``size`` consecutive (or ``inner``-strided) elements of ``dim``, repeated ``outer`` times.

    Blocks of ``size * inner`` elements begin ``step`` apart; with ``step == 0`` they are adjacent.
    """

    dim: Annotated[int, InRange(-8, 7)]
    start: Annotated[int, InRange(0)]
    outer: Count
    size: Count
    inner: Count
    step: Annotated[int, InRange(0)] = 0

    @property
    def length(self) -> int:
        """Number of elements of ``dim`` that the axis covers."""
        return self.outer * self.size * self.inner

    @property
    def stop(self) -> int:
        """One after the last element of ``dim`` that the axis covers."""
        block = self.size * self.inner
        return self.start + (self.outer - 1) * (self.step or block) + block


def blocks(axis: Axis) -> tuple[Axis, ...]:
    """The axis split into axes without a ``step``, an axis for each block; or the axis itself."""
    if not axis.step:
        return (axis,)
    starts = range(axis.start, axis.stop, axis.step)
    return tuple(replace(axis, start=start, outer=1, step=0) for start in starts)


def feature_axis(shape: tuple[int, ...], dim: int = -1) -> Axis:
    """The plain axis over all of ``dim``."""
    dim %= len(shape)
    return Axis(dim, 0, 1, int(shape[dim]), 1)


def group_means(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The mean of every group, over ``size``.

    ``x`` has any shape; the result has ``axis.dim`` split into ``(outer, 1, inner)``.
    """
    if axis.step:
        return torch.cat([group_means(x, block) for block in blocks(axis)], axis.dim)
    part = x.narrow(axis.dim, axis.start, axis.length)
    return part.unflatten(axis.dim, (axis.outer, axis.size, axis.inner)).mean(
        axis.dim + 1, keepdim=True
    )


def centre(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """``P x``: ``x`` minus the mean of each group of ``axis``. Other elements stay as they are."""
    if axis.step:
        for block in blocks(axis):
            x = centre(x, block)
        return x
    part = x.narrow(axis.dim, axis.start, axis.length)
    groups = part.unflatten(axis.dim, (axis.outer, axis.size, axis.inner))
    centred = (groups - groups.mean(axis.dim + 1, keepdim=True)).flatten(axis.dim, axis.dim + 2)
    if axis.length == x.shape[axis.dim]:
        return centred
    out = x.clone()
    out.narrow(axis.dim, axis.start, axis.length).copy_(centred)
    return out


def centre_value(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """``centre`` in float32 or wider, rounded once to the dtype of ``x``; as fast as it can be."""
    if x.is_nested:  # nn.TransformerEncoder turns padded rows into a nested tensor
        return torch.nested.as_nested_tensor([centre_value(row, axis) for row in x.unbind()])
    wide = torch.promote_types(x.dtype, torch.float32)
    if axis.outer == axis.inner == 1 and axis.size == x.shape[axis.dim]:
        return (x - x.mean(axis.dim, keepdim=True, dtype=wide)).to(x.dtype)
    return centre(x.to(wide), on_dimension(axis, axis.dim % x.ndim)).to(x.dtype)


def centre_in_place(x: torch.Tensor, axis: Axis) -> None:
    """``centre``, in the memory of ``x``."""
    for block in blocks(axis):
        part = x.narrow(block.dim, block.start, block.length)
        groups = part.unflatten(block.dim, (block.outer, block.size, block.inner))
        groups.sub_(groups.mean(block.dim + 1, keepdim=True))


def scale_along(x: torch.Tensor, by: torch.Tensor, dim: int) -> torch.Tensor:
    """``diag(by) x``: slice ``i`` of ``x`` along ``dim`` times ``by[i]``."""
    return x * by.reshape(-1, *(1,) * (x.ndim - 1 - dim))


def on_dimension(axis: Axis, dim: int) -> Axis:
    """The same group structure on another dimension."""
    return replace(axis, dim=dim)
