"""What a norm module computes, found by running it: the name of its class decides nothing.

A module is a LayerNorm if a copy in float64 with random parameters computes

    y = gain * (x - mean(x)) / sqrt(var(x) + eps) + bias

for inputs of every magnitude from 1e-6 to 1e5, over the last dimension or over the channels
(dimension 1 of N, C, ...), with a gain of ``weight``, ``1 + weight`` or 1. Classes that cast to
float32 inside are as exact as that.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

Gain = Literal["weight", "1 + weight", "1"]

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


@dataclass(frozen=True, eq=False)
class _Probe:
    """A copy of a module in float64 with random parameters, and what it normalises."""

    module: nn.Module
    shape: tuple[int, ...]
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def input(self, dim: int) -> torch.Tensor:
        size = (2, 3, *self.shape) if dim == -1 else (2, *self.shape, 3, 5)
        return torch.randn(size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def run(self, x: torch.Tensor) -> torch.Tensor | None:
        try:
            with torch.no_grad():
                y = self.module(x)
        except Exception:  # whatever a foreign module raises, it is no norm of this kind
            return None
        return y.double() if isinstance(y, torch.Tensor) and y.shape == x.shape else None

    def agrees(self, form: LayerNormForm, magnitude: float) -> bool:
        x = magnitude * (self.input(form.dim) + 0.7)
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
    probe = _probe(module)
    if probe is None:
        return None
    gains: tuple[Gain, ...] = ("1",) if probe.weight is None else ("weight", "1 + weight")
    for dim in (-1, 1) if len(probe.shape) == 1 else (-1,):
        for gain in gains:
            form = LayerNormForm(dim, gain, probe.bias is not None, 0.0)
            if not probe.agrees(form, MAGNITUDES[-1]):
                continue
            for eps in _possible_eps(probe, form):
                found = replace(form, eps=eps)
                if all(probe.agrees(found, magnitude) for magnitude in MAGNITUDES):
                    return found
    return None


def computes_rms_norm(module: nn.Module) -> bool:
    """Whether ``module`` computes ``x / rms(x)`` times its weight, or 1 + weight, without bias."""
    probe = _probe(module)
    if probe is None or probe.weight is None or probe.bias is not None:
        return False
    x = probe.input(-1) + 1
    y, normed = probe.run(x), x / x.square().mean(-1, keepdim=True).sqrt()
    gains = (probe.weight, 1 + probe.weight)
    return y is not None and any(torch.allclose(y, normed * gain, rtol=1e-4) for gain in gains)


def _probe(module: nn.Module) -> _Probe | None:
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
    copied = copy.deepcopy(module).to_empty(device="cpu").double().eval().requires_grad_(False)
    for name in ("forward", "_old_forward", "_hf_hook"):
        copied.__dict__.pop(name, None)
    generator = torch.Generator().manual_seed(0)
    for parameter in copied.parameters():
        nn.init.normal_(parameter, 0.6, 0.5, generator=generator)
    found = dict(copied.named_parameters())
    return _Probe(copied, shape, found.get("weight"), found.get("bias"))


def _possible_eps(probe: _Probe, form: LayerNormForm) -> Iterator[float]:
    """The numbers that the module holds, then what its answer to a small input says."""
    yield from (v for v in vars(probe.module).values() if isinstance(v, float) and 0 <= v < 1)
    x = probe.input(form.dim)
    y, whole = probe.run(x * SMALL), layer_norm(x, form, probe.weight, None)
    if y is None:
        return
    scaled = y.movedim(form.dim, -1) - (0 if probe.bias is None else probe.bias)
    shrunk = float((scaled * whole.movedim(form.dim, -1)).sum() / whole.square().sum())
    variance = SMALL**2 * float(x.var(form.dim, correction=0).mean())
    if 0 < shrunk < 1:
        yield float(f"{variance * (1 / shrunk**2 - 1):.1g}")
