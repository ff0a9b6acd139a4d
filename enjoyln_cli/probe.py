"""What a norm module computes, found by running it: the name of its class decides nothing.

A module is a LayerNorm if a copy in float64 with random parameters computes

    y = gain * (x - mean(x)) / sqrt(var(x) + eps) + bias

for inputs of every magnitude from 1e-6 to 1e5, over the last dimension or over the channels
(dimension 1 of N, C, ...), with a gain of ``weight``, ``1 + weight`` or 1. A module may compute
something else for inputs of more or fewer dimensions, so it is a LayerNorm for those numbers of
dimensions that were tried. Classes that cast to float32 inside are as exact as that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

Gain = Literal["weight", "1 + weight", "1"]

RANKS = range(2, 6)
"""Numbers of dimensions that are tried."""
OTHERS = (3, 5, 2)
"""Lengths of the dimensions of an input that are neither its first one nor normalised."""
ROWS = (6, 64)
"""How often one input is normalised, at least and at most: a clamp shows in the largest of many."""
LARGEST = 1 << 16
"""Elements of a parameter above which a module is no norm, and is not copied to find out."""
TOLERANCE = 1e-5
"""Of the largest element: float32 inside passes; a root of a sum over d - 1 elements does not."""
MAGNITUDES = (1e-6, 1e-3, 1.0, 1e5)
SMALL = 1e-3
"""The magnitude that a constant of usual size inside the root shows at."""


@dataclass(frozen=True)
class LayerNormForm:
    """How a module computes LayerNorm."""

    dim: int
    """-1, or 1 for channels before positions."""
    gain: Gain
    biased: bool
    eps: float
    ranks: tuple[int, ...] | None = None
    """The numbers of dimensions of an input for which it does; ``None`` for any."""

    def holds_for(self, rank: int) -> bool:
        """Whether inputs of ``rank`` dimensions are normalised in this way."""
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True, eq=False)
class _Probe:
    """A copy of a module in float64 with random parameters, and what it normalises."""

    module: nn.Module
    shape: tuple[int, ...]
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def input(self, dim: int, rank: int) -> torch.Tensor:
        between = OTHERS[: rank - 1 - len(self.shape)]
        rows = max(ROWS[0], min(ROWS[1], LARGEST // math.prod(self.shape)))
        first = max(2, rows // math.prod(between))
        size = (first, *between, *self.shape) if dim == -1 else (first, *self.shape, *between)
        return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def ranks(self, dim: int) -> Iterator[int]:
        """Those that an input can have: rows of what is normalised, or channels of positions."""
        yield from (rank for rank in RANKS if rank > (2 if dim == 1 else len(self.shape)))

    def run(self, x: torch.Tensor) -> torch.Tensor | None:
        try:
            with torch.no_grad():
                y = self.module(x)
        except Exception:  # whatever a foreign module raises, it is no norm of this kind
            return None
        return y.double() if isinstance(y, torch.Tensor) and y.shape == x.shape else None

    def agrees(self, form: LayerNormForm, rank: int, magnitude: float) -> bool:
        x = magnitude * (self.input(form.dim, rank) + 0.7)
        y, expected = self.run(x), layer_norm(x, form, self.weight, self.bias)
        return y is not None and near(y, expected)


def near(y: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((y - expected).abs().max() <= TOLERANCE * expected.abs().max())


def layer_norm(
    x: torch.Tensor, form: LayerNormForm, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """LayerNorm of ``x`` by the formula, in the dtype of ``x``."""
    moved = x.movedim(form.dim, -1)
    centred = moved - moved.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + form.eps).sqrt()
    if weight is not None:
        y = y * (1 + weight if form.gain == "1 + weight" else weight)
    return (y if bias is None else y + bias).movedim(-1, form.dim)


def layer_norm_form(module: nn.Module) -> LayerNormForm | None:
    """How ``module`` computes LayerNorm; ``None`` if it does not. Its weights are not read."""
    shape = _normalised_shape(module)
    kind = _kind(module) if shape else None
    if shape is None or kind in _forms:
        return _forms.get(kind)
    found = _form(_probe(module, shape))
    if kind is not None:
        _forms[kind] = found
    return found


_forms: dict[Any, LayerNormForm | None] = {}
"""What was found, for each kind of module."""


_INTERNAL = vars(nn.Module()).keys()


def _kind(module: nn.Module) -> Any:
    """The same for modules that compute the same with the same weights; ``None`` if not known.

    These have one class, parameters of the same shapes, and otherwise nothing but plain values.
    """
    held = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
    hooked = any(value for name, value in vars(module).items() if name.endswith("_hooks"))
    plain = (int, float, str, tuple, type(None))
    if hooked or not all(isinstance(value, plain) for value in held.values()):
        return None
    shapes = tuple((name, tuple(p.shape)) for name, p in module.named_parameters())
    return type(module), shapes, repr(sorted(held.items()))


def _form(probe: _Probe) -> LayerNormForm | None:
    gains: tuple[Gain, ...] = ("1",) if probe.weight is None else ("weight", "1 + weight")
    for dim in (-1, 1) if len(probe.shape) == 1 else (-1,):
        for gain in gains:
            form = LayerNormForm(dim, gain, probe.bias is not None, 0.0)
            likely = [r for r in probe.ranks(dim) if probe.agrees(form, r, MAGNITUDES[-1])]
            for eps in _possible_eps(probe, form, likely[0]) if likely else ():
                found = replace(form, eps=eps)
                ranks = [r for r in likely if all(probe.agrees(found, r, m) for m in MAGNITUDES)]
                if ranks:
                    return replace(found, ranks=tuple(ranks))
    return None


def computes_rms_norm(module: nn.Module) -> bool:
    """Whether ``module`` computes ``x / rms(x)`` times its weight, or 1 + weight, without bias."""
    shape = _normalised_shape(module)
    if shape is None:
        return False
    probe = _probe(module, shape)
    if probe.weight is None or probe.bias is not None:
        return False
    x = probe.input(-1, len(probe.shape) + 2) + 1
    y, normed = probe.run(x), x / x.square().mean(-1, keepdim=True).sqrt()
    gains = (probe.weight, 1 + probe.weight)
    return y is not None and any(torch.allclose(y, normed * gain, rtol=1e-4) for gain in gains)


def _normalised_shape(module: nn.Module) -> tuple[int, ...] | None:
    """The shape of its parameters, or what it says; ``None`` for what cannot be a norm."""
    parameters = dict(module.named_parameters())
    held = any(module.children()) or any(True for _ in module.buffers())
    if held or not parameters.keys() <= {"weight", "bias"}:
        return None
    shapes = {tuple(parameter.shape) for parameter in parameters.values()}
    stated = getattr(module, "normalized_shape", None)
    if not shapes and isinstance(stated, (tuple, list)):
        shapes = {tuple(stated)}
    shape = next(iter(shapes), ())
    if len(shapes) != 1 or len(shape) not in (1, 2) or not 0 < math.prod(shape) <= LARGEST:
        return None
    return shape


def _probe(module: nn.Module, shape: tuple[int, ...]) -> _Probe:
    copied = copy.deepcopy(module).to_empty(device="cpu").double().eval().requires_grad_(False)
    for name in ("forward", "_old_forward", "_hf_hook"):
        copied.__dict__.pop(name, None)
    generator = torch.Generator().manual_seed(0)
    for parameter in copied.parameters():
        nn.init.normal_(parameter, 0.6, 0.5, generator=generator)
    found = dict(copied.named_parameters())
    return _Probe(copied, shape, found.get("weight"), found.get("bias"))


def _possible_eps(probe: _Probe, form: LayerNormForm, rank: int) -> Iterator[float]:
    """The numbers that the module holds, then what its answer to a small input says."""
    yield from (v for v in vars(probe.module).values() if isinstance(v, float) and 0 <= v < 1)
    x = probe.input(form.dim, rank)
    y, whole = probe.run(x * SMALL), layer_norm(x, form, probe.weight, None)
    if y is None:
        return
    scaled = y.movedim(form.dim, -1) - (0 if probe.bias is None else probe.bias)
    shrunk = float((scaled * whole.movedim(form.dim, -1)).sum() / whole.square().sum())
    variance = SMALL**2 * float(x.var(form.dim, correction=0).mean())
    if 0 < shrunk < 1:
        yield float(f"{variance * (1 / shrunk**2 - 1):.1g}")
