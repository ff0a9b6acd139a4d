"""How well a model can be quantised, before and after its rotation.

Measures what the linear layers that read a turned basis get as inputs, and the output error of the
model with simulated quantisation (``comparison.simulated_rounding``), relative to the exact
function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from enjoyln_cli.comparison.metrics import Distance, largest, pool_distances, relative
from enjoyln_cli.comparison.pace import Pace
from enjoyln_cli.comparison.simulated_rounding import (
    SCHEMES,
    InputSpread,
    input_dimension,
    input_spreads,
    simulated,
)
from enjoyln_cli.models.offload import reader_of
from enjoyln_cli.plan.plan import Basis, Plan

RUNS_OF_EACH = len(SCHEMES) + 1
"""How many runs of a check this needs, for each of the two models."""


@dataclass(frozen=True)
class Quantisability:
    """What was measured on one model."""

    errors: Mapping[str, float] = field(default_factory=dict)
    """For each scheme, the error of the worst output."""
    spreads: Mapping[str, InputSpread] = field(default_factory=dict)
    """For each basis with a reader that was called, by ``Basis.name``."""


def measure_quantisability(
    model: Any, plan: Plan, distances: Callable[[int], Mapping[str, Distance]], pace: Pace
) -> Quantisability:
    """Run ``model`` with each scheme; ``distances`` runs one batch and compares its outputs.

    Nothing is measured if weights are read from disk while the model runs.
    """
    if reader_of(model):
        for _ in range(RUNS_OF_EACH):
            pace.end_run()
        return Quantisability()
    groups = {basis.name: readers for basis in plan.turned if (readers := _readers(model, basis))}
    with input_spreads(model, groups) as spreads:
        pace.run(distances)
    errors = {}
    for name, scheme in SCHEMES.items():
        with simulated(model, scheme):
            errors[name] = largest(relative(pool_distances(pace.run(distances))))
    return Quantisability(
        errors, {name: spread for name, spread in spreads.items() if spread.tokens}
    )


def _readers(model: Any, basis: Basis) -> list[str]:
    """The linear layers that are turned over their inputs."""
    modules = dict(model.named_modules())
    paths: dict[str, None] = {}
    for tensor in basis.tensors:
        path, _, name = tensor.parameter.rpartition(".")
        axis = tensor.held or tensor.axis
        if name == "weight" and path in modules and input_dimension(modules[path]) == axis.dim:
            paths[path] = None
    return list(paths)


def schemes_compared(before: Quantisability, after: Quantisability) -> dict[str, dict[str, float]]:
    """The error of each scheme for the original and the converted model; empty if unknown."""
    return {
        name: {"original": before.errors[name], "converted": after.errors[name]}
        for name in before.errors
        if name in after.errors
    }


def readers_compared(
    plan: Plan, before: Quantisability, after: Quantisability
) -> list[dict[str, Any]]:
    """For each basis, what its readers get as inputs: of the original, and of the converted."""
    return [
        {
            "basis": basis.name,
            "kind": basis.kind,
            "size": basis.size,
            "largest": [before.spreads[basis.name].largest, after.spreads[basis.name].largest],
            "kurtosis": [before.spreads[basis.name].kurtosis, after.spreads[basis.name].kurtosis],
        }
        for basis in plan.turned
        if basis.name in before.spreads and basis.name in after.spreads
    ]
