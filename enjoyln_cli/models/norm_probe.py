"""Find out whether a module computes LayerNorm, by running it. Its class name does not matter.

A module is a LayerNorm if a copy in float64 with random parameters computes

    y = gain * (x - mean(x)) / sqrt(var(x) + eps) + bias

over the last dimension or over the channels (dimension 1 of N, C, ...). The gain is a parameter,
1 + a parameter, or 1. Three steps:

1. The module is run on inputs of many magnitudes.
2. Its ops are examined (see ``arithmetic``). It must not branch on its input, and must consist of
   ops with one formula for all values.
3. So a few inputs decide whether that formula is LayerNorm: rows of zeros and of one value, and
   magnitudes around the root of eps, with parameters that are zero and negative.

A module may compute something else for inputs with another number of dimensions, so the result
holds for the tested numbers of dimensions only.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from enjoyln_cli.models.arithmetic import Float64, Operations, decision
from enjoyln_cli.text import dtype_name

Gain = Literal["weight", "1 + weight", "1"]

RANKS = range(2, 6)
"""Numbers of dimensions of test inputs."""
OTHERS = (3, 5, 2)
"""Sizes of the dimensions of a test input that are neither the first nor normalised."""
LARGEST = 1 << 16
"""A module with larger parameters (in elements) is not a norm, and is not copied for a test."""
TOLERANCE = 1e-5
"""Error relative to the largest element of a row. It allows float32 computation inside the module,
but not a variance with d - 1 in the denominator."""
MAGNITUDES = (1e-6, 1e-3, 1.0, 1e5)
SMALL, LARGE = MAGNITUDES[1], MAGNITUDES[-1]
"""Magnitudes of inputs for which an eps of usual size is noticeable, and for which it is not."""
EXACTLY = 1e-7
"""Error relative to the largest element of a row, if everything is computed in float64. It allows
constants that are stored in float32."""
EXTREMES = (1e-12, 1e-6, 1.0, 1e5, 1e12)
AROUND = (1e-2, 0.3, 1.0, 1e2)
"""Magnitudes relative to the root of eps."""
NARROW = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Tolerances for other dtypes, for which a module may have other code."""


@dataclass(frozen=True)
class LayerNormSpec:
    """How a module computes LayerNorm."""

    dim: int
    """The normalised dimension: -1, or 1 for channels before positions."""
    gain: Gain
    biased: bool
    eps: float
    ranks: tuple[int, ...] | None = None
    """The numbers of input dimensions for which it does; ``None`` for any."""
    weight: str = "weight"
    """Name of the tensor that the gain is computed from; it may have dimensions of size 1."""
    bias: str = "bias"
    """Name of the bias; it may have dimensions of size 1."""
    takes_other_dtypes: bool = False
    """Whether it also normalises inputs of other dtypes than its parameters have, and returns
    the inputs' dtype."""

    def holds_for(self, rank: int) -> bool:
        """Whether inputs with ``rank`` dimensions are normalised in this way."""
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True)
class _Roles:
    """A guess: which tensors of a module are weight and bias, and the shape that it normalises."""

    shape: tuple[int, ...]
    weight: str | None
    bias: str | None


@dataclass(frozen=True, eq=False)
class _Probe:
    """A float64 copy of a module with random parameters, and the shape that it normalises."""

    module: nn.Module
    shape: tuple[int, ...]
    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def input(
        self, dim: int, rank: int, scales: Sequence[float], alone: bool = False
    ) -> torch.Tensor:
        """Random values, times one of ``scales`` for each index of the first dimension.

        If ``alone``, other dimensions that are not normalised have the size 1.
        """
        between = OTHERS[: rank - 1 - len(self.shape)]
        between = (1,) * len(between) if alone else between
        sizes = (*between, *self.shape) if dim == -1 else (*self.shape, *between)
        factors = torch.tensor(scales, dtype=torch.float64).view(-1, *[1] * len(sizes))
        return factors * (_normal((len(scales), *sizes)) + 0.7)

    def fixed(self, dim: int, rank: int) -> set[int]:
        """The dimensions of an input whose sizes are given by the module's parameters."""
        return {1} if dim == 1 else set(range(rank - len(self.shape), rank))

    def run(self, x: torch.Tensor) -> torch.Tensor | None:
        """Run the module; ``None`` if it fails, or if its result has another shape than ``x``."""
        wide = Float64() if x.dtype == torch.float64 else nullcontext()
        try:
            with torch.no_grad(), wide:
                y = self.module(x.clone())
        except Exception:  # a module that fails on these inputs is not a norm of this kind
            return None
        return y if isinstance(y, torch.Tensor) and y.shape == x.shape else None

    def agrees(self, spec: LayerNormSpec, x: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
        """Whether the module computes LayerNorm of each row of ``x``, in float64."""
        if (y := self.run(x)) is None:
            return False
        expected = layer_norm(x, spec, self.weight, self.bias).movedim(spec.dim, -1)
        y = y.double().movedim(spec.dim, -1)
        close = (y - expected).abs() <= tolerance * expected.abs().amax(-1, keepdim=True)
        return bool((close | (y.isnan() & expected.isnan())).all())

    def agrees_at(self, spec: LayerNormSpec, rank: int, *magnitudes: float) -> bool:
        """Whether it does so for an input of each magnitude (see ``input``)."""
        inputs = (self.input(spec.dim, rank, [scale]) for scale in magnitudes)
        return all(self.agrees(spec, x) for x in inputs)


@functools.lru_cache(maxsize=8)
def _normal(size: tuple[int, ...]) -> torch.Tensor:
    """Normally distributed values; shared, so do not write to them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def layer_norm(
    x: torch.Tensor, spec: LayerNormSpec, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """LayerNorm of ``x`` by the formula, in the dtype of ``x``."""
    moved = x.movedim(spec.dim, -1)
    centred = moved - moved.mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + spec.eps).sqrt()
    if weight is not None:
        weight = per_feature(weight)
        y = y * (1 + weight if spec.gain == "1 + weight" else weight)
    return (y if bias is None else y + per_feature(bias)).movedim(-1, spec.dim)


def per_feature(parameter: torch.Tensor) -> torch.Tensor:
    """A weight or bias of a norm, without dimensions that only broadcast it to an input."""
    return parameter.squeeze() if parameter.ndim > 1 and parameter.numel() > 1 else parameter


Known = dict[Any, LayerNormSpec | str | None]
"""Results for each kind of module; valid as long as no code changes."""


def examine(module: nn.Module, known: Known) -> LayerNormSpec | str | None:
    """Find out how ``module`` computes LayerNorm.

    Returns the spec; or, as text, why the module computes LayerNorm for many inputs but perhaps not
    for all; or ``None`` if it is not a LayerNorm. Results for modules of the same kind are taken
    from ``known``, and new results are added to it.
    """
    if not (roles := _roles(module)):
        return None
    kind = _kind(module)
    if kind is not None and kind in known:
        return known[kind]
    try:
        spec = _examined(module, roles)
    except Exception:  # copying a custom module may raise any exception
        spec = None
    if kind is not None:
        known[kind] = spec
    return spec


_INTERNAL = vars(nn.Module()).keys()


def _kind(module: nn.Module) -> Any:
    """A key that is equal for modules which compute the same, given the same weights.

    Such modules have the same class, parameters of the same shapes and dtypes, and equal plain
    attributes. ``None`` if a module has other attributes.
    """
    held = {name: value for name, value in vars(module).items() if name not in _INTERNAL}
    if not all(map(_is_plain, held.values())):
        return None
    tensors = (*module.named_parameters(), *module.named_buffers())
    shapes = tuple((name, type(t), t.dtype, tuple(t.shape)) for name, t in tensors)
    forward = inspect.getattr_static(type(module), "forward", None)
    return type(module), forward, shapes, repr(sorted(held.items()))


def _is_plain(value: Any) -> bool:
    plain = type(value) in (int, float, bool, str, type(None))
    return plain or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _examined(module: nn.Module, roles: list[_Roles]) -> LayerNormSpec | str | None:
    for one in roles:
        probe = _probe(module, one)
        found = _spec(probe, one)
        if found is not None:
            in_its_own = (_objection_in(d, d, module, one, found) for d in NARROW)
            if objection := _objection(probe, found) or next(filter(None, in_its_own), None):
                return objection
            other = (_objection_in(d, torch.float32, module, one, found, "fails") for d in NARROW)
            return replace(found, takes_other_dtypes=not any(other))
    return None


def _spec(probe: _Probe, roles: _Roles) -> LayerNormSpec | None:
    gains: tuple[Gain, ...] = ("1",) if probe.weight is None else ("weight", "1 + weight")
    weight, bias = roles.weight or "weight", roles.bias or "bias"
    for dim in (-1, 1) if len(probe.shape) == 1 else (-1,):
        least = 3 if dim == 1 else len(probe.shape) + 1
        ranks = [rank for rank in RANKS if rank >= least]
        rows = [probe.input(dim, rank, [LARGE], alone=True) for rank in ranks]
        rows = [x for x in rows if probe.run(x) is not None]
        for gain in gains:
            spec = LayerNormSpec(dim, gain, probe.bias is not None, 0.0, None, weight, bias)
            if not any(probe.agrees(spec, x) for x in rows):
                continue  # as for embeddings and projections
            likely = [rank for rank in ranks if probe.agrees_at(spec, rank, LARGE)]
            for eps in _possible_eps(probe, spec, likely[0]) if likely else ():
                found = replace(spec, eps=eps)
                right = tuple(r for r in likely if probe.agrees_at(found, r, *MAGNITUDES))
                if right:
                    return replace(found, ranks=right)
    return None


def _objection(probe: _Probe, spec: LayerNormSpec) -> str | None:
    """Why a module that passed the first test may not compute LayerNorm for all inputs.

    Parameters of ``probe`` are changed.
    """
    for rank in spec.ranks or ():
        size = tuple(probe.input(spec.dim, rank, [1.0] * 3).shape)
        found = decision(probe.module, size, probe.fixed(spec.dim, rank))
        if found is not None:
            return found
    for what, weight, bias in _parameters(probe):
        for part, values in ((probe.weight, weight), (probe.bias, bias)):
            if part is not None:
                part.copy_(values.reshape(part.shape))
        inputs = (_every_row(probe, spec, rank) for rank in spec.ranks or ())
        if not all(probe.agrees(spec, x, EXACTLY) for x in inputs):
            return f"it does not compute LayerNorm of rows that are tiny, huge or constant{what}"
    return None


def _objection_in(
    dtype: torch.dtype,
    held: torch.dtype,
    module: nn.Module,
    roles: _Roles,
    spec: LayerNormSpec,
    unsupported: str | None = None,
) -> str | None:
    """Why a module with parameters in ``held`` may not compute LayerNorm of inputs in ``dtype``.

    ``unsupported`` is the answer for a module that raises an error with such parameters.
    """
    probe = _probe(module, roles)
    probe.module.to(held)
    x = probe.input(spec.dim, (spec.ranks or (3,))[0], (1.0,) * 16).to(dtype)
    weight, bias = (getattr(probe.module, n or "", None) for n in (roles.weight, roles.bias))
    wide = (None if part is None else part.double() for part in (weight, bias))
    with Operations() as operations:
        y = probe.run(x)
    if y is None:
        return unsupported
    if operations.objection:
        return operations.objection
    expected = layer_norm(x.double(), spec, *wide)
    if not (y.double() - expected).abs().max() <= NARROW[dtype] * expected.abs().max():
        return f"it does not compute LayerNorm in {dtype_name(dtype)}"
    if y.dtype != dtype:
        return "its result has another dtype than its input"
    return None


def _parameters(probe: _Probe) -> Iterator[tuple[str, Any, Any]]:
    """Weights and biases to test, each pair with words for the error message."""
    generator = torch.Generator().manual_seed(2)
    like = next((p for p in (probe.weight, probe.bias) if p is not None), torch.ones(probe.shape))
    one, two = (torch.randn(like.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    yield "", one, two
    if probe.weight is not probe.bias:  # both are None
        yield " where its parameters are negative", -one.abs() - 0.1, -two.abs() - 0.1
        yield " where its parameters are zero", torch.zeros_like(one), torch.zeros_like(two)


def _every_row(probe: _Probe, spec: LayerNormSpec, rank: int) -> torch.Tensor:
    """An input with rows of many magnitudes, a row of zeros, and a row of one value."""
    around = (math.sqrt(spec.eps) * part for part in AROUND if spec.eps)
    x = probe.input(spec.dim, rank, (*EXTREMES, *around, 0.0))
    # without eps, the result for a constant row is 0 / 0, up to rounding
    return torch.cat([x, torch.full_like(x[:1], 0.5)]) if spec.eps else x


def computes_rms_norm(module: nn.Module) -> bool:
    """Whether ``module`` computes ``x / rms(x)`` times its weight or 1 + its weight, no bias."""
    for roles in _roles(module):
        if roles.weight is None or roles.bias is not None:
            continue
        probe = _probe(module, roles)
        x = probe.input(-1, len(probe.shape) + 2, (1.0,) * 2)
        if (y := probe.run(x)) is None:
            continue
        normed = x / x.square().mean(-1, keepdim=True).sqrt()
        weight = per_feature(probe.weight)  # type: ignore[arg-type]
        gains = (weight, 1 + weight)
        if any(torch.allclose(y.double(), normed * gain, rtol=1e-4) for gain in gains):
            return True
    return False


def _roles(module: nn.Module) -> list[_Roles]:
    """The possible roles of a module's tensors if it is a norm, the most likely first."""
    if any(module.children()):
        return []
    tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers())
    if len(tensors) > 2 or not all(tensor.is_floating_point() for tensor in tensors.values()):
        return []
    whole = {tuple(tensor.shape) for tensor in tensors.values()}
    stated = getattr(module, "normalized_shape", None)
    if not whole and isinstance(stated, (tuple, list)):
        whole = {tuple(stated)}
    kept = {tuple(size for size in shape if size != 1) for shape in whole}
    shapes = [next(iter(found)) for found in (kept, whole) if len(found) == 1]
    usual = "weight" if "weight" in tensors else None, "bias" if "bias" in tensors else None
    if tensors.keys() <= {"weight", "bias"}:
        named: list[tuple[str | None, str | None]] = [usual]
    else:
        one, two = (*tensors, None)[:2]
        named = [(one, two), (two, one)]
    return [
        _Roles(shape, *names)
        for shape in dict.fromkeys(shapes)
        for names in named
        if len(shape) in (1, 2) and 0 < math.prod(shape) <= LARGEST
    ]


def _bare(module: nn.Module) -> nn.Module:
    """A copy of ``module`` in eval mode without hooks; its parameters need no gradients."""
    bare = object.__new__(type(module))
    bare.__dict__.update(vars(module))
    for name, value in vars(module).items():
        if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
            bare.__dict__[name] = type(value)()
    for name in ("forward", "_old_forward", "_hf_hook"):
        bare.__dict__.pop(name, None)
    return copy.deepcopy(bare).eval().requires_grad_(False)


def _probe(module: nn.Module, roles: _Roles) -> _Probe:
    copied = _bare(module)
    copied.to_empty(device="cpu").double()
    generator = torch.Generator().manual_seed(0)
    found = dict(copied.named_parameters()) | dict(copied.named_buffers())
    for tensor in found.values():
        nn.init.normal_(tensor, 0.6, 0.5, generator=generator)
    weight, bias = (found.get(name or "") for name in (roles.weight, roles.bias))
    return _Probe(copied, roles.shape, weight, bias)


def _possible_eps(probe: _Probe, spec: LayerNormSpec, rank: int) -> Iterator[float]:
    """Candidates for eps: float attributes of the module, then a fit to its output."""
    yield from (v for v in vars(probe.module).values() if isinstance(v, float) and 0 <= v < 1)
    x = probe.input(spec.dim, rank, [SMALL], alone=True)
    if (y := probe.run(x)) is None:
        return
    whole = layer_norm(x, spec, probe.weight, None).movedim(spec.dim, -1)
    scaled = y.movedim(spec.dim, -1) - (0 if probe.bias is None else per_feature(probe.bias))
    shrunk = (scaled * whole).sum(-1) / whole.square().sum(-1)
    eps = float((x.var(spec.dim, correction=0) * (1 / shrunk**2 - 1)).median())
    if 0 < eps < 1:
        yield float(f"{eps:.1g}")
