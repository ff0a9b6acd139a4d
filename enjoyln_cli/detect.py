"""Which modules of a model are LayerNorms, and which values they are called with.

Decided by what a module computes (see ``probe``). A norm that cannot be swapped is listed with the
reason.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from enjoyln_cli.axis import feature_axis
from enjoyln_cli.flow import Flow, Value
from enjoyln_cli.nodes import aten, packet, shape_of
from enjoyln_cli.probe import computes_rms_norm, layer_norm_form


def layer_norms(model: nn.Module) -> tuple[dict[str, int], dict[str, str]]:
    """The dimension that each LayerNorm module normalises; those not to be swapped, with why."""
    found: dict[str, int] = {}
    refused: dict[str, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != 1:
            refused[path] = "it normalises over several dimensions at once"
        elif type(module).forward is nn.LayerNorm.forward:
            found[path] = -1
        elif form := layer_norm_form(module):
            found[path] = form.dim
        elif isinstance(module, nn.LayerNorm):
            refused[path] = f"{type(module).__name__} computes something else than a LayerNorm"
    return found, refused


def norm_calls(
    flow: Flow, norms: dict[str, int], refused: dict[str, str]
) -> tuple[dict[str, tuple[Value, ...]], dict[str, str]]:
    """The input of every call of each norm that can be swapped; the others with the reason."""
    calls: dict[str, list[Value]] = {path: [] for path in norms}
    refused = dict(refused)
    for position, trace in enumerate(flow.traces):
        for path, entering in trace.entering(norms.keys()):
            shape = shape_of(entering[0]) if len(entering) == 1 else None
            if shape is None:
                refused[path] = "it takes more than one tensor"
                continue
            calls[path].append(Value(position, entering[0], feature_axis(shape, norms[path])))
        called = [node for node in trace.graph.nodes if packet(node) is aten.layer_norm]
        for path in {trace.module_of(node) for node in called} - norms.keys() - refused.keys():
            if not _foreign(path, flow):
                refused[path] = "layer_norm is called as a function, inside of a module"
    for path, values in calls.items():
        if not values:
            refused.setdefault(path, "no traced call runs it")
    return {path: tuple(v) for path, v in calls.items() if path not in refused}, refused


def _foreign(path: str, flow: Flow) -> bool:
    """Whether the reference class (whose trace comes first) does not have this module."""
    return all(flow.traces[0].module_of(node) != path for node in flow.traces[0].graph.nodes)


def rms_norms(model: nn.Module) -> tuple[tuple[str, int], ...]:
    """Modules that compute RMSNorm already, by class."""
    counts: Counter[str] = Counter()
    verdicts: dict[type, bool] = {}
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            if type(module) not in verdicts:
                verdicts[type(module)] = computes_rms_norm(module)
            counts[type(module).__name__] += verdicts[type(module)]
    return tuple((name, count) for name, count in sorted(counts.items()) if count)
