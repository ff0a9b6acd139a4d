"""The steps that put numbers in: slices that are appended, and tensors that are filled.

Append    W <- [W, c 1, c' 1, ...]    the last step, so means are taken without the new slices
Fill      every element becomes one number, which may be multiplied by a power of two
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from enjoyln_cli.edits.step import Shape, Step


@dataclass(frozen=True)
class Append(Step):
    """New slices at the end of dimension ``dim``, each filled with one number of ``values``."""

    order = 9
    dim: int
    values: tuple[float, ...]

    @property
    def mixed_dims(self) -> tuple[int, ...]:
        return (self.dim,)

    def shape(self, shape: Shape) -> Shape:
        at = self.dim
        return (*shape[:at], shape[at] + len(self.values), *shape[at + 1 :])

    def along(self, dim: int, to: int) -> Step | None:
        """Zeros: a factor adds nothing to the new slices."""
        return Append(to, (0.0,) * len(self.values)) if self.dim == dim else None

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        return torch.cat([x, self.slices(tuple(x.shape))], self.dim)

    def slices(self, shape: Shape) -> torch.Tensor:
        """The new slices for a tensor of ``shape``, in float64."""
        values = torch.tensor(self.values, dtype=torch.float64)
        many = (*shape[: self.dim], len(values), *shape[self.dim + 1 :])
        return values.view(-1, *(1,) * (len(shape) - 1 - self.dim)).expand(many)

    def largest(self, largest: float) -> float:
        return max(largest, *map(abs, self.values))


@dataclass(frozen=True)
class Fill(Step):
    """Every element becomes one number."""

    order = 7
    number: float

    def apply(self, x: torch.Tensor, in_place: bool = False) -> torch.Tensor:
        return torch.full_like(x, self.number)

    def bound(self, size: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(size)

    def largest(self, largest: float) -> float:
        return abs(self.number)
