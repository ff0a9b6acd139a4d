"""Norms that are written out, and a module around a norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

WIDTH = 13
Formula = Callable[..., torch.Tensor]


class Spelled(nn.Module):
    """A norm that computes a formula of itself and of its input."""

    def __init__(self, formula: Formula, eps: float = 1e-6) -> None:
        super().__init__()
        self.formula, self.tiny = formula, eps
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.formula(self, x)


def same(value: torch.Tensor) -> torch.Tensor:
    return value


def normed(m: Any, x: torch.Tensor, dim: int = -1, variance: Any = same) -> torch.Tensor:
    centred = x - x.mean(dim, keepdim=True)
    return centred / (variance(centred.pow(2).mean(dim, keepdim=True)) + m.tiny).sqrt()


def plain(
    m: Any, x: torch.Tensor, variance: Any = same, weight: Any = same, bias: Any = same
) -> torch.Tensor:
    """LayerNorm; other functions of its variance, weight and bias make it something else."""
    return weight(m.weight) * normed(m, x, variance=variance) + bias(m.bias)


def eps_outside(m: Any, x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return m.weight * centred / (centred.pow(2).mean(-1, keepdim=True).sqrt() + eps) + m.bias


class Block(nn.Module):
    """A writer, a norm and a reader, with features last, or with channels before positions."""

    def __init__(self, norm: nn.Module, positions: int = 0) -> None:
        super().__init__()
        kind: Any = (nn.Linear, nn.Conv1d, nn.Conv2d)[positions]
        more = (1,) if positions else ()
        self.norm = norm
        self.write, self.read = kind(WIDTH, WIDTH, *more), kind(WIDTH, WIDTH, *more)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self.norm(self.write(x)))
