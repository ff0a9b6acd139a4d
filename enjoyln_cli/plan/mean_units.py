"""Four hidden units that make an MLP subtract the mean of its ``d`` input features.

    weights in the first layer      s, -s, s, -s      the same for every feature, no bias
    weights in the second layer     -c, c, -c', c'    the same for every feature

With an activation for which ``act(u) - act(-u) = u``, they add ``-(c + c') s sum(h)`` to every
output feature. ``s`` is the largest power of two of at most ``1 / d``: it is exact in every dtype,
and ``s sum(h)`` is no larger than the largest feature, so it cannot overflow.
``c + c' = 1 / (s d)`` lies between 1 and 2. ``c`` has so few bits that every dtype holds it
exactly, and ``c'`` is the rest, so only ``c'`` is rounded.

Training changes these units like any others. After training, they are copied to unused hidden
units (the order of hidden units has no meaning), and new mean-subtracting units take their place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from enjoyln_cli.plan.axis import Count
from enjoyln_cli.plan.edited_tensors import GrownParameter

UNITS = 4
BITS = 7
"""Mantissa bits of ``c`` after the leading one, as many as bfloat16 has."""


def read_by_units(features: int) -> tuple[float, ...]:
    """The weight of each unit in the first layer, the same for all ``features`` inputs."""
    s = _scale(features)
    return (s, -s, s, -s)


def written_by_units(features: int) -> tuple[float, ...]:
    """The weight of each unit in the second layer, the same for all ``features`` outputs."""
    whole = 1 / (_scale(features) * features)
    high = math.floor(whole * 2**BITS + 0.5) / 2**BITS
    low = whole - high
    return (-high, high, 0.0 - low, low)


def _scale(features: int) -> float:
    return 2.0 ** -(features - 1).bit_length()


@dataclass(frozen=True)
class Widening:
    """An MLP that gets more hidden units: units that subtract a mean, then units of zeros."""

    first: GrownParameter
    """The weight of the layer that computes the hidden units."""
    bias: GrownParameter | None
    """The bias of that layer, if it has one."""
    second: GrownParameter
    """The weight of the layer that reads the hidden units."""
    size: Count
    """How many hidden units there were before, and so the index of the first new unit."""
    to: Count
    """How many hidden units there are afterwards."""
    features: Count
    """The number of input and output features of the MLP."""
    attribute: str
    """The config entry for the number of hidden units, written as in ``Setting.name``."""
    subtracts: bool
    """Whether the new units subtract the mean of the input; otherwise all of them are zeros."""

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if the sizes or dimensions do not fit together."""
        if self.to < self.size + UNITS:
            raise ValueError(f"to is {self.to}, but must be at least {self.size + UNITS}")
        if self.first.dim == self.second.dim or (self.bias and self.bias.dim):
            raise ValueError("dim of first is 1 minus dim of second, and dim of bias is 0")

    @property
    def parts(self) -> tuple[GrownParameter, ...]:
        """All parameters that grow."""
        return tuple(part for part in (self.first, self.bias, self.second) if part)


@dataclass(frozen=True)
class Layers:
    """The parameters of the MLP: the weights of both layers, and the bias of the first."""

    first: torch.Tensor
    bias: torch.Tensor | None
    second: torch.Tensor


def rows(layers: Layers, mlp: Widening, after: int = 0) -> Layers:
    """Views of ``UNITS`` hidden units, ``after`` places behind the first of ``mlp``."""
    at = mlp.size + after
    return Layers(
        layers.first.narrow(1 - mlp.second.dim, at, UNITS),
        None if layers.bias is None else layers.bias.narrow(0, at, UNITS),
        layers.second.narrow(mlp.second.dim, at, UNITS),
    )


def intact(layers: Layers, mlp: Widening, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether the units still have their exact values, rounded to one of ``dtypes``."""
    now, exact = rows(layers, mlp), _exact(layers, mlp)
    if not torch.equal(now.first.double(), exact.first):
        return False
    if now.bias is not None and now.bias.any():
        return False
    off = (now.second.double() - exact.second).abs()
    for dtype in dtypes:
        info = torch.finfo(dtype)
        rounding = info.eps * (exact.second.abs() + info.smallest_normal)
        stored = torch.equal(now.second.to(dtype).to(now.second), now.second)
        if stored and bool((off <= rounding).all()):
            return not off.narrow(mlp.second.dim, 0, UNITS // 2).any()
    return False


def spare_units(layers: Layers, mlp: Widening) -> int | None:
    """How far behind the units the next unused units begin; ``None`` if there are none.

    A hidden unit is unused if its weights in the second layer are zeros.
    """
    behind = layers.second.shape[mlp.second.dim] - mlp.size - UNITS
    places = range(UNITS, behind + 1, UNITS)
    return next((at for at in places if not rows(layers, mlp, at).second.any()), None)


def copy_units(layers: Layers, mlp: Widening, after: int) -> None:
    """Copy the present values of the units to the units ``after`` places behind them."""
    now, free = rows(layers, mlp), rows(layers, mlp, after)
    free.first.copy_(now.first)
    free.second.copy_(now.second)
    if free.bias is not None and now.bias is not None:
        free.bias.copy_(now.bias)


def set_units(layers: Layers, mlp: Widening) -> None:
    """Set the units to their exact values, in place."""
    now, exact = rows(layers, mlp), _exact(layers, mlp)
    now.first.copy_(exact.first)
    now.second.copy_(exact.second)
    if now.bias is not None:
        now.bias.zero_()


def _exact(layers: Layers, mlp: Widening) -> Layers:
    features = layers.second.shape[1 - mlp.second.dim]
    shape = (1, UNITS) if mlp.second.dim else (UNITS, 1)
    read = torch.tensor(read_by_units(features), dtype=torch.float64).view(shape[::-1])
    written = torch.tensor(written_by_units(features), dtype=torch.float64).view(shape)
    now = rows(layers, mlp)
    return Layers(read.expand(now.first.shape), None, written.expand(now.second.shape))
