"""Which modules of a model are LayerNorms, and which values they are called with.

A module is a LayerNorm if it computes LayerNorm (see ``models.norm_probe``) and each call does
nothing else (see ``norm_modules``). A LayerNorm that cannot be swapped for an RMSNorm is listed
with the reason.

A GroupNorm counts if it normalises each position alone, that is, if its input has the shape
``(rows, features)``. In the modelling code of transformers 5.23, every GroupNorm follows a
convolution and also normalises over positions, so none of them counts.
"""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.fx import Node

from enjoyln_cli.graph.nodes import aten, packet, shape_of
from enjoyln_cli.models.norm_modules import interference, runs_torchs_layer_norm
from enjoyln_cli.models.norm_probe import (
    Gain,
    Known,
    LayerNormSpec,
    computes_rms_norm,
    examine,
)
from enjoyln_cli.plan.axis import feature_axis
from enjoyln_cli.proof.flow import Flow, Value

_MORE = "it is called with more than one tensor"


def layer_norms(model: nn.Module) -> tuple[dict[str, LayerNormSpec], dict[str, str]]:
    """Each LayerNorm's spec by module path, and the reason for each that cannot be swapped."""
    found: dict[str, LayerNormSpec] = {}
    refused: dict[str, str] = {}
    known: Known = {}
    for path, module in model.named_modules():
        spec: LayerNormSpec | str | None
        if isinstance(module, nn.LayerNorm) and math.prod(module.normalized_shape[:-1]) != 1:
            spec = "it normalises over several dimensions at once"
        elif runs_torchs_layer_norm(module):
            norm: Any = module
            gain: Gain = "1" if norm.weight is None else "weight"
            spec = LayerNormSpec(-1, gain, norm.bias is not None, norm.eps)
        else:
            spec = examine(module, known)
        if spec is None and isinstance(module, nn.LayerNorm):
            spec = f"{type(module).__name__} does not compute a LayerNorm"
        if isinstance(spec, LayerNormSpec):
            spec = interference(module) or spec
        if isinstance(spec, str):
            refused[path] = spec
        elif spec is not None:
            found[path] = spec
    return found, refused


def norm_calls(
    flow: Flow, norms: dict[str, LayerNormSpec], refused: dict[str, str]
) -> tuple[dict[str, tuple[Value, ...]], dict[str, str]]:
    """The input of every call of each norm that can be swapped, and the others with the reason.

    A module may be a LayerNorm for inputs of some ranks only: ``nn.GroupNorm(1, d)`` is none for
    images. A module that is called only with other ranks is in neither result.
    """
    calls: dict[str, list[Value]] = {path: [] for path in norms}
    refused, elsewhere = dict(refused), {}
    for position, trace in enumerate(flow.traces):
        for path, entering in trace.entering(norms.keys()):
            shape = shape_of(entering[0]) if len(entering) == 1 else ()
            if shape is None:
                refused[path] = "the shape of its input depends on values"
            elif not shape:
                refused[path] = _MORE
            elif not norms[path].holds_for(len(shape)):
                rank = len(shape)
                elsewhere[path] = f"for inputs of {rank} dimensions it computes something else"
            else:
                axis = feature_axis(shape, norms[path].dim)
                calls[path].append(Value(position, entering[0], axis))
        refused |= dict.fromkeys(trace.called_with_more & norms.keys(), _MORE)
        inside = [(trace.module_of(node), why) for node in trace.graph.nodes if (why := _op(node))]
        for path, why in dict(inside).items():
            if path not in norms and path not in refused and not _is_foreign(path, flow):
                refused[path] = why
    for path in {path for trace in flow.traces for path in trace.leaving_unreturned(norms)}:
        refused.setdefault(path, "a value computed inside it is used outside")
    for path, values in calls.items():
        if not values and path not in elsewhere:
            refused.setdefault(path, "no traced call runs it")
    refused |= {path: why for path, why in elsewhere.items() if calls[path]}
    swapped = {path: tuple(v) for path, v in calls.items() if v and path not in refused}
    return swapped, refused


def _op(node: Node) -> str | None:
    """Why a LayerNorm that is a bare op outside a norm module stays; ``None`` for other ops."""
    if packet(node) is aten.layer_norm:
        return "layer_norm is called as a function inside this module"
    if packet(node) is aten.group_norm and len(shape_of(node) or ()) == 2:
        return "it normalises groups of features, for which there is no RMSNorm"
    return None


def _is_foreign(path: str, flow: Flow) -> bool:
    """Whether the reference class (whose trace comes first) does not have this module."""
    return all(flow.traces[0].module_of(node) != path for node in flow.traces[0].graph.nodes)


def rms_norms(model: nn.Module) -> dict[str, str]:
    """The name of the class of each module that computes RMSNorm already, by the module's path."""
    verdicts: dict[type, bool] = {}
    found = {}
    for path, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)):
            if type(module) not in verdicts:
                verdicts[type(module)] = computes_rms_norm(module)
            if verdicts[type(module)]:
                found[path] = type(module).__name__
    return found
