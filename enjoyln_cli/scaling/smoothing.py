"""Move large features of what norms return into the linear layers that read it (SmoothQuant).

Xiao et al. (2022), arXiv 2211.10438. For a norm with weight ``g`` and bias ``v`` whose readers are
all linear layers, and any positive numbers ``s``, one for each feature:

    W (g x + v) = (W diag(s)) (g / s x + v / s)            s_j = max |x_j|^a / max |W_j|^(1 - a)

The model keeps its class, and computes the same function. A large feature no longer sets the step
to which all features of an input are rounded, and the weights that read it become larger instead.
Each norm has the exponent ``a`` with the least rounding error that the numbers of bits let expect.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.run import run
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import Scale, repeated
from enjoyln_cli.models.load import values_of
from enjoyln_cli.plan.plan import NextLinear, NormFusion, Plan

EXPONENTS = (0.25, 0.5, 0.75)
SEEN_ON = 4
"""Inputs that the features are measured on."""
WORTH_TRYING = 0.5
"""Smoothing is tried if the expected rounding error of all norms' readers falls to this fraction
(geometric mean): on real data the error falls by much less than expected."""


@dataclass(frozen=True, eq=False)
class SmoothedNorm:
    """A norm, and the numbers that its features are divided by: float64, on the CPU."""

    norm: NormFusion
    factors: torch.Tensor


@dataclass(eq=False)
class _Features:
    """The largest absolute value and the sum of squares of each feature."""

    largest: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    squares: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))
    rows: int = 0

    def include(self, x: torch.Tensor) -> None:
        """Take account of a tensor of shape ``(..., features)``."""
        rows = x.detach().flatten(0, -2).double()
        self.largest = torch.maximum(self.largest, rows.abs().amax(0))
        self.squares = self.squares + rows.square().sum(0)
        self.rows += len(rows)


def smoothable(fusions: Iterable[NormFusion], plan: Plan) -> tuple[NormFusion, ...]:
    """The norms that can be smoothed in the original: a norm has a weight, and nothing is tied.

    ``fusions`` are the norms that linear layers alone read, once ``plan`` has untied weights.
    """
    tied = {name for copy in plan.untied for name in (copy.parameter, copy.source)}
    return tuple(
        norm
        for norm in fusions
        if norm.weight and not tied & {named.parameter for named in norm.names}
    )


def smoothing(
    model: Any, norms: Sequence[NormFusion], batches: Sequence[Batch]
) -> tuple[SmoothedNorm, ...]:
    """The norms of ``model`` to smooth, and by which factors; empty if that is not worth trying.

    ``batches`` are calibration data.
    """
    features = {norm.norm: _Features() for norm in norms}
    with ExitStack() as stack:
        for path, found in features.items():
            module = model.get_submodule(path)
            hook = module.register_forward_hook(lambda _, args, x, at=found: at.include(x))
            stack.callback(hook.remove)
        run(model, batches[:SEEN_ON])
    weights, smoothed, logs = values_of(model), [], [0.0]
    for norm in norms:
        seen = features[norm.norm]
        if seen.largest.shape != weights[f"{norm.norm}.weight"].shape:
            continue  # no batch reaches it, or its features are not in the last dimension
        readers = [_rows(weights[reader.weight.parameter], reader) for reader in norm.readers]
        width = torch.stack([rows.abs().amax((0, 1, 3)) for rows in readers]).amax(0)
        least = torch.finfo(torch.float32).tiny
        width, largest = width.clamp(min=least), seen.largest.clamp(min=least)
        options = [largest**a / width ** (1 - a) for a in EXPONENTS]
        before, *after = (_error(seen, readers, s) for s in (torch.ones_like(width), *options))
        best = min(range(len(after)), key=after.__getitem__)
        if after[best] < before:
            smoothed.append(SmoothedNorm(norm, options[best]))
            logs.append(math.log(after[best] / before))
    mean = sum(logs) / max(1, len(norms))
    return tuple(smoothed) if mean <= math.log(WORTH_TRYING) else ()


def _dim(reader: NextLinear) -> int:
    """The dimension of inputs in the parameter of a layer."""
    return reader.dim if reader.module_dim is None else reader.module_dim


def _rows(weight: torch.Tensor, reader: NextLinear) -> torch.Tensor:
    """The weights that read a norm: float64, of shape ``(outputs, outer, features, inner)``."""
    dim = _dim(reader)
    if reader.outputs is not None:
        first, stop = reader.outputs
        weight = weight.narrow(1 - dim, first, stop - first)
    rows = weight.detach().double().movedim(dim, -1)
    features = rows.shape[-1] // (reader.outer * reader.inner)
    return rows.reshape(-1, reader.outer, features, reader.inner)


def _error(seen: _Features, readers: Sequence[torch.Tensor], factors: torch.Tensor) -> float:
    """How large the squares of the rounding errors in the readers' outputs are, for each input.

    All inputs share a step, and so do all weights of an output. Both have 8 bits, so that a step is
    the same fraction of the largest number.
    """
    step = (seen.largest / factors).max()
    inputs = (seen.squares / factors.square()).sum() / seen.rows
    total = torch.zeros((), dtype=torch.float64)
    for rows in readers:
        scaled = rows * factors[:, None]
        repeats = rows.shape[1] * rows.shape[3]
        total += step.square() * scaled.square().sum()
        total += scaled.abs().amax((1, 2, 3)).square().sum() * inputs * repeats
    return float(total)


def smooth(model: Any, norms: Iterable[SmoothedNorm]) -> None:
    """Divide the features of ``norms`` in place, and multiply the weights that read them.

    Each is computed in float64, and rounded once to its dtype.
    """
    tensors, edits = values_of(model), dict[str, Edit]()
    with torch.no_grad():
        for smoothed in norms:
            norm, factors = smoothed.norm, smoothed.factors
            for reader in norm.readers:
                where = _dim(reader), 0.0, False, reader.outer, reader.inner, reader.outputs
                step = Scale(norm.norm, *where, repeated(factors, reader.outer, reader.inner))
                name = reader.weight.parameter
                edits[name] = edits.get(name, Edit()).adding(step)
            weight = tensors[f"{norm.norm}.weight"]
            weight.copy_((weight.double() + norm.offset) / factors - norm.offset)
            if norm.bias or norm.divided:
                bias = tensors[f"{norm.norm}.bias"]
                bias.copy_(bias.double() / factors)
        for name, edit in edits.items():
            tensors[name].copy_(edit.apply(tensors[name].double()))
