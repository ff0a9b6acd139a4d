"""Which linear layers cost most when they alone are rounded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.simulated_rounding import Scheme, linear_layers, simulated
from enjoyln_cli.events import Event
from enjoyln_cli.quantisation.measure import ExactOutputs, differences
from enjoyln_cli.quantisation.schemes import QuantisationScheme

EXAMPLES = 2
"""Inputs that each layer is tried on: their order is clear with few."""
STAGES = 10
"""How often the progress is told."""


def costly_layers(
    model: Any, scheme: QuantisationScheme, exact: ExactOutputs, event: Event
) -> list[str]:
    """The linear layers of ``model`` by path, the costliest first.

    Each is rounded alone (simulated: one scale for each output of a weight, and for all inputs).
    """
    rounding = Scheme(scheme.weight_bits, scheme.input_bits, per_token=False)
    few = replace(exact, examples=exact.examples[:EXAMPLES], outputs=exact.outputs[:EXAMPLES])
    layers, costs = list(linear_layers(model)), {}
    for done, layer in enumerate(layers):
        if done % max(1, len(layers) // STAGES) == 0:
            event("stage", f"finding the layers that cost most: {done} of {len(layers)} tried")
        with simulated(model, rounding, only=layer):
            costs[layer] = differences(lambda batch: run(model, [batch])[0], few).cost
    return sorted(costs, key=lambda layer: -costs[layer])
