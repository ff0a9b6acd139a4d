"""The hidden units that make an MLP subtract the mean of the ``d`` features that it reads.

    reads     s, -s, s, -s            of every feature, with no bias
    writes    -c, c, -c', c'          to every feature

so that for ``act(u) - act(-u) = u`` they add ``-(c + c') s sum(h)``. ``s`` is the largest power of
two of at most ``1 / d``: it is exact in every dtype, and ``s sum(h)`` is no larger than the largest
feature, so that it overflows nowhere. ``c + c' = 1 / (s d)`` lies between 1 and 2; ``c`` has the
few bits that every dtype holds, and ``c'`` is the rest, so that its rounding is the only one.

They stay what they are as long as nobody trains them. Then they are hidden units as all others, and
move on to the next free place, since the order of hidden units has no meaning.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

UNITS = 4
BITS = 7
"""Of ``c``, past its leading one: those of bfloat16."""


def read_by_units(features: int) -> tuple[float, ...]:
    """What each unit has for every feature in the first weight."""
    s = _scale(features)
    return (s, -s, s, -s)


def written_by_units(features: int) -> tuple[float, ...]:
    """What each unit has for every feature in the second weight."""
    whole = 1 / (_scale(features) * features)
    high = math.floor(whole * 2**BITS + 0.5) / 2**BITS
    low = whole - high
    return (-high, high, 0.0 - low, low)


def _scale(features: int) -> float:
    return 2.0 ** -(features - 1).bit_length()


@dataclass(frozen=True)
class Units:
    """Where in a model such units are, as paths of parameters."""

    first: str
    bias: str | None
    second: str
    dim: int
    """Of hidden units, in ``second``; ``1 - dim`` in ``first``."""
    start: int
    """The index of the first of them."""


@dataclass(frozen=True)
class Layers:
    """The parameters themselves: ``first`` and ``second`` of two dimensions, ``bias`` of one."""

    first: torch.Tensor
    bias: torch.Tensor | None
    second: torch.Tensor


def rows(layers: Layers, units: Units, after: int = 0) -> Layers:
    """The hidden units that come ``after`` others from the first one, as views."""
    at = units.start + after
    return Layers(
        layers.first.narrow(1 - units.dim, at, UNITS),
        None if layers.bias is None else layers.bias.narrow(0, at, UNITS),
        layers.second.narrow(units.dim, at, UNITS),
    )


def intact(layers: Layers, units: Units, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether the units hold their values, as one of ``dtypes`` rounds them."""
    held, exact = rows(layers, units), _exact(layers, units)
    if not torch.equal(held.first.double(), exact.first):
        return False
    if held.bias is not None and held.bias.any():
        return False
    off = (held.second.double() - exact.second).abs()
    for dtype in dtypes:
        info = torch.finfo(dtype)
        rounding = info.eps * (exact.second.abs() + info.smallest_normal)
        stored = torch.equal(held.second.to(dtype).to(held.second), held.second)
        if stored and bool((off <= rounding).all()):
            return not off.narrow(units.dim, 0, UNITS // 2).any()
    return False


def room(layers: Layers, units: Units) -> int | None:
    """How far behind the units as many others begin that write nothing; ``None`` without any."""
    behind = layers.second.shape[units.dim] - units.start - UNITS
    places = range(UNITS, behind + 1, UNITS)
    return next((at for at in places if not rows(layers, units, at).second.any()), None)


def copy_units(layers: Layers, units: Units, after: int) -> None:
    """Copy what the units have become to those that begin so far behind them."""
    held, free = rows(layers, units), rows(layers, units, after)
    free.first.copy_(held.first)
    free.second.copy_(held.second)
    if free.bias is not None and held.bias is not None:
        free.bias.copy_(held.bias)


def set_units(layers: Layers, units: Units) -> None:
    """Give the units their values, in place."""
    held, exact = rows(layers, units), _exact(layers, units)
    held.first.copy_(exact.first)
    held.second.copy_(exact.second)
    if held.bias is not None:
        held.bias.zero_()


def _exact(layers: Layers, units: Units) -> Layers:
    features = layers.second.shape[1 - units.dim]
    shape = (1, UNITS) if units.dim else (UNITS, 1)
    read = torch.tensor(read_by_units(features), dtype=torch.float64).view(shape[::-1])
    written = torch.tensor(written_by_units(features), dtype=torch.float64).view(shape)
    held = rows(layers, units)
    return Layers(read.expand(held.first.shape), None, written.expand(held.second.shape))
