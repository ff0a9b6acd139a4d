"""Which scales of streams a checkpoint can carry, in its stock class.

Its norms need ``4^-k eps``. Where eps is an entry of the config, every norm that reads this entry
has to be on a stream of the same ``k``; whether the class does nothing else with the entry is
proven by tracing it again. Where eps is hard-coded it stays, which changes a row of variance ``v``
by ``eps (4^k - 1) / 2v`` of itself: that has to be less than a rounding of the stored dtype. A
folded model that is stored as another class may get an entry for eps, so that all norms follow it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from enjoyln_cli.analysis.analyze import Analysis
from enjoyln_cli.analysis.stored_names import StoredClass, stored_in_groups
from enjoyln_cli.checkpoint.config import set_entry
from enjoyln_cli.checkpoint.headers import DTYPES
from enjoyln_cli.checkpoint.reader import read_tensor
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.events import Event
from enjoyln_cli.graph.nodes import is_whole, packet
from enjoyln_cli.models.classes import build
from enjoyln_cli.models.load import stored_weights
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.plan.edited_tensors import NamedParameter, ScaledEps
from enjoyln_cli.plan.plan import Plan, Setting
from enjoyln_cli.proof.flow import Flow
from enjoyln_cli.proof.pullback import Opaque
from enjoyln_cli.rewrite.in_memory import eps_attribute
from enjoyln_cli.scaling.degrees import NORMS, eps_of
from enjoyln_cli.scaling.float16 import Float16Edits, TensorsOf, planned_scale, require_exact
from enjoyln_cli.scaling.scaled_streams import RETURNED, ScaledStream
from enjoyln_cli.text import dtype_name, listed_briefly
from enjoyln_cli.trace.trace import Trace

SMALLEST = 2.0**-24
"""The smallest number of float16 above zero."""
PROGRAMS = "`enjoyln export --fp16-safe` puts a multiplication in front of such a norm"


@dataclass(frozen=True, eq=False)
class StoredScales:
    """Streams with their shifts, and the config entries that follow them."""

    streams: Mapping[ScaledStream, int]
    fields: Mapping[str, frozenset[str]]
    """The entries of the config that change, each with the norms whose eps it is."""


def with_stored_scales(
    analysis: Analysis,
    plan: Plan,
    config: Any,
    edits: Float16Edits,
    analyze: Callable[[Any], Analysis],
    dtype: torch.dtype | None,
    event: Event,
    eps_entry: str = "",
) -> Plan:
    """``plan`` with the scales of ``edits``, for a checkpoint of ``analysis`` stored in ``dtype``.

    ``config`` is its transformers config, and ``analyze`` analyses the checkpoint with another. By
    default every tensor keeps its dtype. ``eps_entry`` is the entry with the eps of all norms in
    the config of the class that it is stored as, if its own has none. Raises
    ``UnsupportedModel`` if float16 would still overflow, or the class would compute another
    function than before, up to a rounding.
    """
    reference = analysis.family.reference
    if edits.norms:
        first = next(iter(edits.norms))
        raise UnsupportedModel(
            f"{first} overflows in float16, and the weights cannot hold its input at another "
            f"scale: {_obstacle(edits, first)}; {PROGRAMS}"
        )
    every_eps = {eps for stream in edits.found for _, eps in stream.norms.values()}
    fields = eps_fields(reference.model, config, every_eps)
    if eps_entry:
        fields = {eps_entry: frozenset(verdict.norm for verdict in plan.norms)}
    chosen = _together(edits, fields)
    in_target = chosen.fields.get(eps_entry, frozenset())
    names = _stored_names(reference, analysis.problem.groups)
    order = list(stored_weights(reference.model))
    scales = tuple(planned_scale(one, k, names, order) for one, k in chosen.streams.items())
    norms = {norm.norm: norm for scale in scales for norm in scale.norms}
    for tensor in (tensor for scale in scales for tensor in scale.tensors):
        if reference.checkpoint is not None:
            weight = read_tensor(reference.checkpoint, _source(plan, tensor.tensor))
            require_exact(tensor, weight.to(dtype or weight.dtype))
    for norm in (norm for norm in norms.values() if norm.norm not in in_target):
        eps_attribute(reference.model.get_submodule(norm.norm), norm)
    changed = {path for paths in chosen.fields.values() for path in paths}
    stored = dtype or _most_common(reference)
    for path in norms.keys() - changed:
        _require_no_effect(norms[path], edits, stored)
    settings = tuple(
        Setting(name, norms[next(iter(paths))].value) for name, paths in chosen.fields.items()
    )
    if settings and not in_target:
        scaled_config = copy.deepcopy(config)
        for setting in settings:
            set_entry(scaled_config, setting.name, setting.value)
        of_entries = {path: norm for path, norm in norms.items() if path in changed}
        _require_only_eps(analysis.problem.flow, analyze(scaled_config).problem.flow, of_entries)
    if small := [norm for norm in norms.values() if norm.value < SMALLEST]:
        event(
            "warning",
            f"eps of {listed_briefly([norm.norm for norm in small])} becomes {small[0].value:.1e}: "
            "an engine that keeps eps in float16 takes it for zero, and divides a constant row by "
            "zero",
        )
    if in_target:
        scales = tuple(replace(scale, norms=()) for scale in scales)
    inputs = (name for stream in chosen.streams for name in stream.inputs)
    return replace(
        plan,
        scaled=scales,
        settings=(*plan.settings, *settings),
        unproven=tuple(dict.fromkeys((*plan.unproven, *inputs))),
    )


def eps_fields(model: nn.Module, config: Any, values: set[float]) -> dict[str, frozenset[str]]:
    """The entries of ``config`` with one of ``values`` that norms of ``model`` read.

    Each has the paths of all modules with an attribute that follows it. A nested entry is named
    with dots.
    """
    before, found = _numbers(model), {}
    for name, value in _entries(config.to_dict()):
        if value in values:
            other = copy.deepcopy(config)
            set_entry(other, name, value / 4)
            after = _numbers(build(type(model), other))
            changed = {path for (path, key), old in before.items() if after.get((path, key)) != old}
            if changed:
                found[name] = frozenset(changed)
    return found


def _entries(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{key}.")
        elif type(value) is float:
            yield f"{prefix}{key}", value


def _numbers(model: nn.Module) -> dict[tuple[str, str], float]:
    return {
        (path, key): value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) is float
    }


def _together(edits: Float16Edits, fields: Mapping[str, frozenset[str]]) -> StoredScales:
    """The streams to scale. Streams whose norms read the same entry get the same shift."""
    stream_of = {norm: one for one in edits.found if one.is_scaled for norm in one.norms}
    usable = {name: norms for name, norms in fields.items() if norms <= stream_of.keys()}
    chosen = dict(edits.streams)
    while True:
        grown = dict(chosen)
        for norms in usable.values():
            together = {stream_of[norm] for norm in norms}
            shift = max((grown[stream] for stream in together & grown.keys()), default=0)
            grown |= dict.fromkeys(together, shift) if shift else {}
        if grown == chosen:
            norms_of_chosen = {norm for stream in chosen for norm in stream.norms}
            used = {name: norms for name, norms in usable.items() if norms <= norms_of_chosen}
            return StoredScales(chosen, used)
        chosen = grown


def _obstacle(edits: Float16Edits, norm: str) -> str:
    for stream in edits.found:
        if stream.obstacle and (norm == stream.norm or norm in stream.norms):
            where = f" (at {stream.obstacle.culprit})" if stream.obstacle.culprit else ""
            is_output = stream.obstacle.reason == RETURNED
            way = ", which --outputs may leave out" if is_output else ""
            return f"{stream.obstacle.reason}{where}{way}"
    return "its stream was not found"


def _stored_names(reference: StoredClass, groups: Mapping[str, str]) -> TensorsOf:
    """A function that names the stored tensors of a parameter, under all of its tied names."""
    names = stored_in_groups(reference, groups)
    weights = stored_weights(reference.model)

    def stored(parameter: str) -> list[NamedParameter]:
        found = []
        for name in names.get(groups.get(parameter, parameter), ()):
            found += [NamedParameter(name, tensor) for tensor in reference.stored.get(name, ())]
            if name in reference.converted:
                layout = reference.converted[name]
                parts = layout.stored(name, feature_axis(tuple(weights[name].shape), 0))
                is_apart = not isinstance(parts, Opaque) and all(
                    is_whole(axis, layout.sources[tensor]) for tensor, axis in parts
                )
                if isinstance(parts, Opaque) or not is_apart:
                    raise UnsupportedModel(
                        f"{name} is stored together with other weights, so it cannot be scaled"
                    )
                found += [NamedParameter(name, tensor) for tensor, _ in parts]
        return found

    return stored


def _source(plan: Plan, tensor: str) -> str:
    """The stored tensor that ``tensor`` is made from."""
    return next((one.stored for one in plan.untied if one.tensor == tensor), tensor)


def _most_common(reference: StoredClass) -> torch.dtype:
    held = reference.checkpoint
    stored = [] if held is None else [DTYPES[one.dtype] for one in held.tensors.values()]
    floating = [dtype for dtype in stored if dtype.is_floating_point]
    return max(floating, key=floating.count, default=torch.float32)


def _require_no_effect(norm: ScaledEps, edits: Float16Edits, dtype: torch.dtype) -> None:
    """Raise ``UnsupportedModel`` if ``eps``, left as it is, changes a row by a rounding or more."""
    met = edits.ranges.get(norm.norm)
    effect = (norm.eps - norm.value) / (2 * 2.0**norm.power * met.variance) if met else float("inf")
    if not effect <= torch.finfo(dtype).eps / 2:
        raise UnsupportedModel(
            f"{norm.norm} has its eps of {norm.eps:g} in its code, or in an entry of the config "
            "that norms at another scale read as well, so a stream held at 2^"
            f"{norm.power // 2} of its scale changes its rows by up to {effect:.1e} of themselves, "
            f"more than a rounding of {dtype_name(dtype)}; `enjoyln export --fp16-safe` writes the "
            "eps of each norm"
        )


def _require_only_eps(before: Flow, after: Flow, norms: Mapping[str, ScaledEps]) -> None:
    """Raise ``UnsupportedModel`` unless two proofs differ in nothing but the eps of ``norms``."""
    for old, new in zip(before.traces, after.traces, strict=True):
        for one, other in zip(_ops(old), _ops(new), strict=True):
            norm = norms.get(one.module)
            expected = [
                norm.value if norm and type(leaf) is float and leaf == norm.eps else leaf
                for leaf in one.operands
            ]
            if (one.target, expected) != (other.target, other.operands):
                raise UnsupportedModel(
                    "the class does more with eps in its config than to hand it to norms: "
                    f"{one.module or one.target} computes something else"
                )


class _Op(NamedTuple):
    module: str
    target: Any
    operands: list[Any]
    """Numbers, and the positions of nodes."""


def _ops(trace: Trace) -> Iterator[_Op]:
    order = {node: at for at, node in enumerate(trace.graph.nodes)}
    for node in trace.graph.nodes:
        if node.op != "placeholder":
            leaves = tree_leaves((node.args, node.kwargs))
            operands = [order[leaf] if isinstance(leaf, Node) else leaf for leaf in leaves]
            if packet(node) in NORMS:  # whose eps may be left out
                operands = [x for x in operands if type(x) is not float] + [eps_of(node)]
            yield _Op(trace.module_of(node), node.target, operands)
