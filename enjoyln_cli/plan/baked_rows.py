"""Embedding tables that hold the results of the norm behind them.

The norm of a token's embedding is a function of the token alone. With the wanted rows

    v_t = P (g n(E_t) + b)          n(x) = (x - mean(x)) / sqrt(var(x) + eps)

and a level ``s`` above the rms of all of them, this table and norm give the same rows:

    E'_t = (v_t / s) sqrt(eps / (1 - rms(v_t)^2 / s^2)),        g' = s 1,       b' = 0

since then ``rms(E'_t)^2 + eps = eps / (1 - rms(v_t)^2 / s^2)``: what scales each row is ``eps``.
The rows ``v_t`` may be turned first, by a matrix that keeps their zero mean. The new norm must keep
this weight and bias: with others, its results would have a mean again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

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


def size_of_baked_rows(
    x: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, level: float, eps: float
) -> torch.Tensor:
    """A bound for the terms that each element of a new row is a sum of, for bounds of rounding.

    Of shape ``(rows, 1)``. The derivative of ``baked_rows`` is below ``3 sqrt(eps) / level``, as no
    row has more than two thirds of the level.
    """
    spread = (x - x.mean(-1, keepdim=True)).square().mean(-1, keepdim=True) + eps
    terms = gain.abs().max() * x.norm(dim=-1, keepdim=True) / spread.sqrt() + bias.norm()
    return 3 * math.sqrt(eps) / level * terms
