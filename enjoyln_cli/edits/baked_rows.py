"""Embedding tables that hold the results of the norm behind them.

The norm of a token's embedding is a function of the token alone. With the wanted rows

    v_t = P (g n(E_t) + b)          n(x) = (x - mean(x)) / sqrt(var(x) + eps)

and a level ``s`` above the rms of all of them, this table and norm give the same rows:

    E'_t = (v_t / s) sqrt(eps / (1 - rms(v_t)^2 / s^2)),        g' = s 1,       b' = 0

since then ``rms(E'_t)^2 + eps = eps / (1 - rms(v_t)^2 / s^2)``: what scales each row is ``eps``.
The rows ``v_t`` may be rotated first, by a matrix that keeps their zero mean. The new norm must
keep this weight and bias: with others, its results would have a mean again.

    NormRows      E <- v       the first step of a table
    EncodeRows    v <- E'      its last step
    FillLevel     g <- g'      of the norm's weight
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self

import torch

from enjoyln_cli.edits.linear_steps import NAN, in_rows
from enjoyln_cli.edits.step import ReadTensor, Shape, Step

MARGIN = 1.5
"""How far the level is above the largest rms of a row, at least; at most twice as far."""


def normed_rows(
    x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """``P (g n(x) + b)`` for each row of ``x``; all are of float64, ``gain`` of ``(features,)``."""
    centred = x - x.mean(-1, keepdim=True)
    rows = gain * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + bias
    return rows - rows.mean(-1, keepdim=True)


def level_of(
    table: Iterable[torch.Tensor], gain: torch.Tensor, bias: torch.Tensor, eps: float
) -> float:
    """The level ``s`` for a table that comes in slices of rows: a power of two, exact in any dtype.

    A table with NaN or infinity has a level of NaN.
    """
    parts = [
        normed_rows(rows.double(), gain, bias, eps).square().mean(-1).max()
        for rows in table
        if rows.numel()
    ]
    largest = float(torch.stack(parts).max().sqrt()) if parts else 0.0
    if not largest or not math.isfinite(largest):
        return 1.0 if largest == 0.0 else math.nan
    return 2.0 ** math.ceil(math.log2(MARGIN * largest))


def baked_rows(rows: torch.Tensor, level: float, eps: float) -> torch.Tensor:
    """The rows ``E'`` of the new table, for ``rows`` of zero mean (``v``), in float64."""
    share = rows / level
    return share * (eps / (1 - share.square().mean(-1, keepdim=True))).sqrt()


def size_of_normed_rows(
    x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """A bound for the norm of the terms of each row of ``normed_rows``, of shape ``(rows, 1)``."""
    spread = (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + eps
    return gain.abs().max() * x.norm(dim=-1, keepdim=True) / spread.sqrt() + bias.norm()


@dataclass(frozen=True)
class BakingStep(Step):
    """A step that needs an embedding table and the norm behind it, as they are before all edits."""

    table: str
    weight: str
    bias: str
    eps: float
    values: tuple[torch.Tensor, torch.Tensor] | None = field(
        default=None, compare=False, repr=False
    )
    """Of a loaded step: the weight and the bias of the norm, for each feature."""
    level: float = field(default=1.0, compare=False, repr=False)
    """Of a loaded step: the level of the table."""

    @property
    def needs(self) -> tuple[str, ...]:
        return (self.table, self.weight, self.bias)

    def loaded(self, read: ReadTensor) -> Self:
        gain, bias = (read(name).double().clone() for name in (self.weight, self.bias))
        level = level_of(in_rows(read(self.table)), gain, bias, self.eps)
        return replace(self, values=(gain, bias), level=level)

    def unusable(self, read: ReadTensor) -> str:
        names = [self.weight, self.bias, *([] if math.isfinite(self.level) else [self.table])]
        bad = (name for name in names if not read(name).isfinite().all())
        return next((f"{name} {NAN}" for name in bad), "")

    def fitted(self, name: str, shape: Shape, shapes: Mapping[str, Shape]) -> Shape:
        table = shapes[self.table]
        for norm in (self.weight, self.bias):
            if len(table) != 2 or shapes[norm] != table[1:]:
                raise ValueError(
                    f"{norm}: shape {list(shapes[norm])} is of no norm behind {self.table}"
                )
        return shape


@dataclass(frozen=True)
class NormRows(BakingStep):
    """The rows of a table, as the norm behind it returns them, without their mean."""

    order = 0

    @property
    def mixed_dims(self) -> tuple[int, ...]:
        return (1,)

    def loaded(self, read: ReadTensor) -> Self:
        """The step without the level, which it does not use."""
        gain, bias = (read(name).double().clone() for name in (self.weight, self.bias))
        return replace(self, values=(gain, bias))

    def unit(self, shape: Shape) -> Mapping[int, int]:
        return {1: shape[1]}

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        assert self.values is not None, "the step is not loaded"
        return normed_rows(x, *self.values, self.eps)

    def bound(self, size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert self.values is not None, "the step is not loaded"
        whole = size_of_normed_rows(x, *self.values, self.eps)
        return (whole / math.sqrt(x.shape[1])).expand(x.shape)  # the norm of a row is the bound

    def largest(self, largest: float) -> float:
        return math.inf


@dataclass(frozen=True)
class EncodeRows(BakingStep):
    """The rows from which the new norm computes the rows before the step."""

    order = 6

    @property
    def mixed_dims(self) -> tuple[int, ...]:
        return (1,)

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        return baked_rows(x, self.level, self.eps)

    def bound(self, size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The derivative is below this, as no row has more than two thirds of the level."""
        return 3 * math.sqrt(self.eps) / self.level * size


@dataclass(frozen=True)
class FillLevel(BakingStep):
    """Every element of the norm's weight becomes the level."""

    order = 7

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        return torch.full_like(x, self.level)

    def bound(self, size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, self.level)

    def largest(self, largest: float) -> float:
        return self.level
