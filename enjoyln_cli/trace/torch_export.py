"""Capture the graph of a call with ``torch.export``.

Unlike a recording, it can handle in-place writes, operators with subgraphs, and state that a call
changes.

A parameter that a call only multiplies or divides by numbers, as RWKV does at its first call, can
still be centred: (P W) / c = P (W / c), so after any number of calls the centred parameter is the
centred one of what the original has become. So its new value does not count as an output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.fx import Node

from enjoyln_cli.errors import TraceFailed
from enjoyln_cli.graph.in_place import hides_sharing, mutating_ops, replace_private_writes
from enjoyln_cli.graph.insertion_points import settle
from enjoyln_cli.graph.nodes import aten
from enjoyln_cli.graph.subgraphs import graphs_of_higher_order_ops, put_back_regions, read_inside
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.models.meta_device import beside
from enjoyln_cli.trace.annotate import CallToTrace, annotate, fields_of
from enjoyln_cli.trace.trace import Trace, path_in_model

_SCALES = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar}
"""Products and quotients without rounding."""


def export_call(this: CallToTrace) -> Trace:
    """The exported graph of a call.

    Raises ``TraceFailed`` for writes that cannot be analysed, and any exception of
    ``torch.export``.
    """
    runner = this.runner()
    program = torch.export.export(runner, beside(this.model, this.call.steps), strict=False)
    put_back_regions(program.graph_module)
    settle(program.graph)
    if any(
        mutating_ops(inside.graph) for inside in graphs_of_higher_order_ops(program.graph_module)
    ):
        raise TraceFailed("a control flow operator writes in place, which cannot be analysed")
    replace_private_writes(program.graph)
    if mutating_ops(program.graph):
        if hides_sharing(program.graph):
            raise TraceFailed("an op may share memory that is written in place, and hides this")
        program = program.run_decompositions({})
    if left := mutating_ops(program.graph):
        raise TraceFailed(f"{left[0].target} writes in place, so the graph cannot be analysed")
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    named = stored_weights(this.model)
    parameters: dict[Node, torch.Tensor] = {}
    inputs: list[Node | None] = []
    constants: list[Any] = []
    for spec in program.graph_signature.input_specs:
        node = nodes.get(getattr(spec.arg, "name", ""))
        if spec.kind.name == "USER_INPUT":
            inputs.append(node)
        elif spec.kind.name in ("PARAMETER", "BUFFER") and node is not None:
            weight = named.get(path_in_model(spec.target))
            parameters |= {} if weight is None else {node: weight}
        elif spec.kind.name == "CONSTANT_TENSOR":
            constants.append(program.constants.get(spec.target))
    given_out = program.graph.output_node().args[0]
    outputs = list(zip(program.graph_signature.output_specs, given_out, strict=True))
    scaled = _scaled_parameters(this, outputs, parameters)
    scaled = {node: name for node, name in scaled.items() if name not in runner.replaced}
    returned = fields_of(
        [node for spec, node in outputs if spec.kind.name == "USER_OUTPUT"],
        program.call_spec.out_spec,
    )
    for spec, node in outputs:
        if spec.kind.name != "USER_OUTPUT":
            returned.pop(node, None)  # the value is also written to a buffer
    seen = (node for spec, node in outputs if not (_is_parameter(spec) and node in scaled))
    program.graph.output_node().args = (tuple(seen),)
    return annotate(
        this,
        program.graph,
        parameters=parameters,
        inputs=inputs,
        returned=returned,
        changed=runner.replaced | runner.written.difference(scaled.values()),
        scaled=scaled.values(),
        outside=[*constants, *read_inside(program.graph_module)],
    )


def _scaled_parameters(
    this: CallToTrace,
    outputs: Iterable[tuple[Any, Any]],
    parameters: Mapping[Node, torch.Tensor],
) -> dict[Node, str]:
    """The new values of parameters that the call multiplies or divides by numbers, with names.

    Parameters with several names are left out.
    """
    found: dict[Node, str] = {}
    named = dict(this.model.named_parameters(remove_duplicate=False))
    for spec, node in outputs:
        if not _is_parameter(spec):
            continue
        name, before = path_in_model(spec.target), node
        while before.target in _SCALES and type(before.args[1]) in (int, float):
            before = before.args[0]
        if parameters.get(before) is named[name] and len(this.weights.ties[name]) == 1:
            found[node] = name
    return found


def _is_parameter(spec: Any) -> bool:
    """Whether an output of an exported program is the new value of a parameter."""
    return spec.kind.name == "PARAMETER_MUTATION"
