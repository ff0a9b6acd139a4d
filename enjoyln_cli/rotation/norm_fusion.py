"""Which norms can have their weight ``g`` and bias ``v`` fused into the next linear layers.

    W (g * x + v) + b = (W diag(g)) x + (b + W v)

If every reader of the norm is such a layer, the norm computes ``x`` alone, with a weight of ones
and a bias of zeros. This is exact under two conditions:

* Ops between the norm and the layers only select, move, repeat or average values of the same
  feature, so that they do the same to ``g * x + v`` as to ``x``.
* Nothing else reads the parameters of the layers, in any trace: neither layers that read another
  norm, nor an embedding. If layers share one parameter, as in ``nn.MultiheadAttention``, each has
  outputs of its own, and only the layers that read the norm change.

A norm that something else reads keeps its parameters. If one of the layers has no bias, the norm
keeps a bias of its own, divided by the weight, which must not have zeros or be too small:

    W (g * x + v) = (W diag(g)) (x + v / g)

This rounds more coarsely, by a factor ``A`` for each norm (``lost_by_division``). Roundings of
``N`` norms add up as squares, so the root of the mean of ``A^2`` counts. With random norms in every
layer, ``verify`` refused GPT-J, CodeGen, StarCoder2 and StableLM in float32 from 8.4, 8.4, 9.4 and
5.7 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import Node

from enjoyln_cli.graph.nodes import is_covered, op_name, packet, shape_of, slice_bounds
from enjoyln_cli.models.norm_probe import LayerNormSpec
from enjoyln_cli.plan.axis import Axis, feature_axis, on_dimension
from enjoyln_cli.plan.edited_tensors import NamedParameter
from enjoyln_cli.plan.plan import NextLinear, NormFusion, UnfusedNorm
from enjoyln_cli.proof.flow import Flow, Value
from enjoyln_cli.proof.linear_layers import WHOLE_FEATURE_OPS, linear_layer, parameter_nodes
from enjoyln_cli.rotation.found_group import LayerObstacle
from enjoyln_cli.rotation.norm_readers import ToEdit, Use, find_readers, nodes_that_read
from enjoyln_cli.trace.trace import uncast

StoredWeight = Callable[[str, int], tuple[tuple[str, int], ...]]
"""From a parameter and a dimension of it to the stored tensors that it consists of.

Each has its own dimension, whose elements belong to the same features. Empty if the parameter
cannot be edited.
"""


MOST_LOST = 4.0
"""The largest root mean square of what norms lose by divisions."""


@dataclass(frozen=True, eq=False, kw_only=True)
class _FusionSearch:
    flow: Flow
    named: tuple[Mapping[Node, str], ...]
    """For each trace, the name of each parameter node: the first of its tied names."""
    readers: Mapping[str, set[tuple[int, Node]]]
    """The readers of each parameter, each with the index of its trace."""
    stored: Mapping[str, str]
    stored_weight: StoredWeight
    centred: AbstractSet[Node]
    lost: Mapping[str, float]
    """What each norm loses if its bias is divided by its weight."""
    most_lost: float
    """The largest of these losses that all norms with smaller ones leave room for."""
    results: Mapping[str, Sequence[tuple[int, Node]]]
    """For each norm, the results of its calls, with the index of the trace."""


def find_fusions(
    flow: Flow,
    norms: Mapping[str, LayerNormSpec],
    groups: Mapping[str, str],
    stored: Mapping[str, str],
    stored_weight: StoredWeight,
    centred: AbstractSet[Node],
    lost_by_division: Callable[[str, str, float], float],
    moves: Mapping[str, Move],
    weighting: Mapping[str, Sequence[tuple[int, Node]]],
) -> tuple[tuple[NormFusion, ...], tuple[UnfusedNorm, ...]]:
    """Which of ``norms`` can be fused into their readers, and why the others cannot.

    Nothing outside of a norm reads a value that was computed inside, besides its result.
    ``groups`` maps any parameter name to the first of its tied names. ``stored`` maps each
    parameter that is untied and stored as one tensor with its own layout to that tensor;
    ``stored_weight`` also knows parameters of another layout.
    ``centred`` are the values that an explicit operation acts on. ``lost_by_division`` says how
    much coarser a norm is rounded if its bias is divided by its weight plus a number. ``moves``
    says what moves out of each norm. ``weighting`` are the ops that multiply by the weight, with
    the index of their trace, if they are known. Norms without such parameters are in neither
    result.
    """
    named, nodes = parameter_nodes(flow.traces, groups)
    readers = {
        name: {(position, user) for position, node in found for user in nodes_that_read(node)}
        for name, found in nodes.items()
    }
    lost = {
        norm: lost_by_division(f"{norm}.bias", f"{norm}.weight", _offset(spec))
        for norm, spec in norms.items()
        if spec.biased and moves[norm] != "bias" and _has_usual_names(norm, spec, stored)
    }
    search = _FusionSearch(
        flow=flow,
        named=tuple(named),
        readers=readers,
        stored=stored,
        stored_weight=stored_weight,
        centred=centred,
        lost=lost,
        most_lost=_most_lost(lost.values(), MOST_LOST**2 * len(norms)),
        results={**_results(flow, norms), **weighting},
    )
    fused, unfused = [], []
    for norm, spec in norms.items():
        gain, biased, move = spec.gain != "1", spec.biased, moves[norm]
        if not (gain and move != "bias") and not (biased and move != "weight"):
            continue
        if (spec.weight, spec.bias) != ("weight", "bias"):
            reason = "its parameters have other names than weight and bias"
            unfused.append(UnfusedNorm(norm, reason, norm))
            continue
        ways: tuple[Move, ...] = _WAYS[move] if gain else ("bias",)
        obstacles: dict[Move, LayerObstacle] = {}
        for way in ways:
            found = _fusion(search, norm, spec, way)
            if isinstance(found, NormFusion):
                fused.append(found)
                break
            obstacles[way] = found
        else:
            obstacle = obstacles["weight" if "weight" in ways else "bias"]
            unfused.append(UnfusedNorm(norm, obstacle.reason, obstacle.culprit))
    return tuple(fused), tuple(unfused)


Move = Literal["bias", "affine", "weight"]
"""What moves out of a norm: its bias; weight and bias, as far as possible; its weight, and its bias
only if the bias cannot be divided by the weight."""
_WAYS: Mapping[Move, tuple[Move, ...]] = {
    "bias": ("bias",), "affine": ("affine", "weight"), "weight": ("weight", "affine"),
}  # fmt: skip


def _offset(spec: LayerNormSpec) -> float:
    """The number that is added to the norm's weight before it multiplies."""
    return 1.0 if spec.gain == "1 + weight" else 0.0


def _has_usual_names(norm: str, spec: LayerNormSpec, stored: Mapping[str, str]) -> bool:
    names = (spec.weight, spec.bias)
    return names == ("weight", "bias") and all(f"{norm}.{name}" in stored for name in names)


def _most_lost(losses: Iterable[float], room: float) -> float:
    """The largest of ``losses`` for which the squares of all up to it have ``room``."""
    most = 0.0
    for loss in sorted(losses):
        room -= loss * loss
        if room < 0:
            break
        most = loss
    return most


def _too_small(search: _FusionSearch, norm: str, weight: str) -> LayerObstacle | None:
    """The obstacle if the norm's bias divided by its weight would be rounded too coarsely."""
    lost = search.lost[norm]
    if math.isinf(lost):
        why = "its bias divided by it has no finite value"
        return LayerObstacle(f"its weight has a zero or is too small: {why}", weight)
    if lost <= search.most_lost:
        return None
    why = f"its bias divided by it would be rounded {lost:.0f} times as coarsely as now"
    return LayerObstacle(f"its weight is too small: {why}", weight)


def _fusion(
    search: _FusionSearch, norm: str, spec: LayerNormSpec, way: Move
) -> NormFusion | LayerObstacle:
    """The fusion of one norm; with ``way == "weight"``, a bias stays, divided by the weight."""
    weight, bias, stored = f"{norm}.weight", f"{norm}.bias", search.stored
    own = [weight] * (way != "bias") + [bias] * spec.biased
    found = _own_obstacle(search, norm, own)
    offset = _offset(spec)
    if found is None and way == "weight" and spec.biased:
        found = _too_small(search, norm, weight)
    if found is not None:
        return found
    moves_bias = spec.biased and way != "weight"
    layers = _layers(search, norm, replace(spec, biased=moves_bias), alone=way == "weight")
    if isinstance(layers, LayerObstacle):
        return layers
    readers = tuple(
        NextLinear(
            weight=NamedParameter(weight_name, tensor),
            dim=dim,
            bias=NamedParameter(bias_name, stored[bias_name]) if bias_name else None,
            module_dim=None if weight_name in stored else module_dim,
            outer=outer,
            inner=inner,
            outputs=outputs,
        )
        for (weight_name, module_dim, bias_name, outputs), (outer, inner) in layers.items()
        for tensor, dim in search.stored_weight(weight_name, module_dim)
    )
    moved = stored[weight] if way != "bias" else ""
    kept = stored[bias] if spec.biased and way == "weight" else ""
    return NormFusion(
        norm, moved, stored[bias] if moves_bias else "", readers, offset if moved else 0.0, kept
    )


def _results(flow: Flow, norms: Iterable[str]) -> dict[str, list[tuple[int, Node]]]:
    results: dict[str, list[tuple[int, Node]]] = {norm: [] for norm in norms}
    for position, trace in enumerate(flow.traces):
        for node, (path, where) in trace.places.items():
            if where == "output" and path in results:
                results[path].append((position, node))
    return results


def _own_obstacle(search: _FusionSearch, norm: str, moving: Iterable[str]) -> LayerObstacle | None:
    """Why the parameters of a norm cannot change; ``None`` if they can."""
    for name in moving:
        if name not in search.stored:
            return LayerObstacle("its parameters are tied, or stored in another layout", name)
        waiting = list(search.readers.get(name, ()))
        while waiting:
            position, node = waiting.pop()
            if norm not in dict(search.flow.traces[position].calls_of(node)).values():
                return LayerObstacle(f"its parameters are also read by {op_name(node)}", name)
            if uncast(node) is not node:
                waiting += [(position, reader) for reader in nodes_that_read(node)]
    return None


_Layers = Mapping[ToEdit, tuple[int, int]]
"""For each layer to edit: how the norm's features repeat along its inputs, as
``NextLinear.outer`` and ``NextLinear.inner``."""


def _layers(
    search: _FusionSearch, norm: str, spec: LayerNormSpec, *, alone: bool
) -> _Layers | LayerObstacle:
    """The linear layers that read a norm in all calls, or the first other reader.

    ``alone`` says that no bias moves, so that more ops may stand in between.
    """
    uses: list[Use] = []
    sizes = set()
    for position, node in search.results[norm]:
        shape = shape_of(node)
        if shape is None:
            return LayerObstacle("the shape of its result depends on values", norm)
        sizes.add((shape[spec.dim],))
        start = Value(position, node, feature_axis(shape, spec.dim))
        found = find_readers(
            search.flow, search.named[position], search.centred, start, alone=alone
        )
        if isinstance(found, LayerObstacle):
            return found  # a norm without bias leaves the biases of the layers as they are
        uses += found if spec.biased else [replace(use, bias=None) for use in found]
    if not uses:
        return LayerObstacle("no traced call reads its result", norm)
    for named in search.named:
        for node, name in named.items():
            if name in (f"{norm}.weight", f"{norm}.bias") and {shape_of(node)} != sizes:
                return LayerObstacle("its parameters do not hold one number for each feature", norm)
    return _layers_obstacle(search, uses, spec.biased) or _repetitions(uses)


def _repetitions(uses: list[Use]) -> _Layers | LayerObstacle:
    """How the norm's features repeat along the inputs of each layer, in all of its calls alike."""
    calls: dict[tuple[int, Node], list[Use]] = {}
    for use in uses:
        calls.setdefault((use.trace, use.layer), []).append(use)
    layers: dict[ToEdit, tuple[int, int]] = {}
    for first, *others in calls.values():
        shape = shape_of(first.weight.node) or ()
        found = _repetition([first.axis, *(use.axis for use in others)], shape[first.axis.dim])
        if found is None or layers.setdefault(first.to_edit, found) != found:
            reason = "a linear layer that reads it also reads other features"
            return LayerObstacle(reason, first.weight.name)
    return layers


def _repetition(axes: list[Axis], length: int) -> tuple[int, int] | None:
    """``(outer, inner)`` if the axes cover ``length`` inputs with whole repetitions of a norm."""
    first = axes[0]
    if len(axes) == 1:
        return (first.outer, first.inner) if is_covered(on_dimension(first, 0), (length,)) else None
    starts = sorted(axis.start for axis in axes)
    side_by_side = all(axis == replace(first, start=axis.start) for axis in axes)
    if not side_by_side or first.step or first.inner != 1:
        return None
    if starts != list(range(0, length, first.length)) or length % first.length:
        return None
    return length // first.size, 1


def _reads_given_value(search: _FusionSearch, position: int, reader: Node) -> bool:
    """Whether a linear layer reads an optional input of the model instead of the norm's result.

    The input (``encoder_outputs``) then stands for that result, and has to be given as it is now.
    """
    trace = search.flow.traces[position]
    layer = linear_layer(reader, search.named[position])
    if trace.required or layer is None:
        return False
    given = layer.x
    while packet(given) in WHOLE_FEATURE_OPS:
        given = given.args[0]  # type: ignore[assignment]
    return given in trace.inputs


def _layers_obstacle(search: _FusionSearch, uses: list[Use], biased: bool) -> LayerObstacle | None:
    """Why the parameters of the linear layers cannot change; ``None`` if they can."""
    own: dict[str, set[tuple[int, Node]]] = {}
    known = {pair for use in uses for pair in use.between}
    for use in uses:
        for node, _ in use.between:
            others = [reader for reader in nodes_that_read(node) if (node, reader) not in known]
            if others:
                return LayerObstacle(_also_read(others), use.weight.name)
        for parameter in use.parameters:
            own.setdefault(parameter.name, set()).add((use.trace, parameter.reader))
    for use in uses:
        weight, dim, bias, outputs = layer = use.to_edit
        if biased and bias is None:
            reason = "a linear layer that reads it has no bias to fuse its bias into"
            return LayerObstacle(reason, weight)
        for name in filter(None, (weight, bias)):
            of_outputs = 0 if name == bias else 1 - dim
            elsewhere = [
                reader[1]
                for reader in search.readers[name] - own[name]
                if layer.overlaps(_outputs_read(reader[1], of_outputs))
                and not _reads_given_value(search, *reader)
            ]
            if elsewhere:
                return LayerObstacle(_also_read(elsewhere), name)
            # what a bias adds is computed from one stored matrix, and so are parts of a weight
            as_one = name == bias or biased or outputs is not None
            if name not in search.stored and (as_one or not search.stored_weight(name, dim)):
                reason = "a linear layer that reads it has a tied or differently stored parameter"
                return LayerObstacle(reason, name)
    edits = [
        (name, layer)
        for layer in dict.fromkeys(use.to_edit for use in uses)
        for name in (layer.weight, layer.bias)
        if name
    ]
    for at, (name, layer) in enumerate(edits):
        if any(name == n and layer.overlaps(earlier.outputs) for n, earlier in edits[:at]):
            return LayerObstacle("linear layers that read it share a parameter", name)
    return None


def _also_read(others: Iterable[Node]) -> str:
    """The obstacle of a parameter that ``others`` read as well."""
    return (
        f"a parameter of a linear layer after it is also read by {min(map(op_name, others))} "
        "(--untie separates tied weights)"
    )


def _outputs_read(reader: Node, dim: int) -> tuple[int, int] | None:
    """The range of outputs, along ``dim``, that a reader of a parameter takes; ``None`` for all."""
    taken = slice_bounds(reader)
    return taken[1:] if taken and taken[0] == dim else None
