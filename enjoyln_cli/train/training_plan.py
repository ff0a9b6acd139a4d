"""A plan that holds in training mode as well as in eval mode.

Every call is traced in both modes, and one plan has to hold for all graphs. Training mode differs
by what the graphs show:

* Dropout with p > 0 zeroes single features, so its output has no zero mean. A norm behind it stays
  LayerNorm.
* Dropout of attention probabilities and stochastic depth multiply all features of a token by one
  random number. They keep a zero mean.
* A scale (LayerScale) is trained by itself, so it is not fused into another layer.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from enjoyln_cli.analysis.analyze import Analysis, analyze_family, calls_of, family_in_memory
from enjoyln_cli.calls.calls import Call, ExampleCalls
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.garbage import no_collections
from enjoyln_cli.models.norm_modules import runs_torchs_layer_norm
from enjoyln_cli.plan.fold_options import CENTRING_ONLY, Options
from enjoyln_cli.trace.capture import Recorder
from enjoyln_cli.trace.failure_reasons import foreign_code
from enjoyln_cli.trace.traced_calls import ModelTraces, trace_calls


@no_collections()
def analyze_training(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    example_calls: ExampleCalls = (),
    options: Options = CENTRING_ONLY,
) -> Analysis:
    """The plan for a live module that holds in training mode and in eval mode.

    The calls are like ``model(*args, **kwargs)``, or derived from the config of a transformers
    model.

    Raises ``TraceFailed`` if a call cannot be traced in both modes, and ``UnsupportedModel`` if
    code branches on random numbers in training mode, or a norm computes something else there.
    """
    with foreign_code(model):
        calls = calls_of(model, tuple(args), dict(kwargs or {}), example_calls)
        traced = trace_calls(Recorder(model), calls), trace_in_training(model, calls)
        if any(trace.by_values for trace in traced[1].traces):
            raise UnsupportedModel(
                f"{type(model).__name__}: in training mode, its code branches on values or on "
                "random numbers (as LayerDrop does), so no plan is proven; set its rate to 0"
            )
        analysis = analyze_family(family_in_memory(model, traced, training=True), options)
    rates = tuple((name, value) for name, _, _, value in dropout_rates(model))
    analysis = replace(analysis, plan=replace(analysis.plan, dropout_rates=rates))
    for verdict in analysis.plan.folded:
        _require_same_in_training(verdict.norm, model.get_submodule(verdict.norm))
    return analysis


def trace_in_training(model: nn.Module, calls: Iterable[Call]) -> ModelTraces:
    """Trace ``calls`` in training mode. Raises as ``trace_calls`` does."""
    trained = [
        replace(call, label=f"{call.label}, in training mode", training=True) for call in calls
    ]
    return trace_calls(Recorder(model), trained)


def dropout_rates(model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str, float]]:
    """Every attribute of a module that may be a rate of dropout.

    Yields its path in the model, the dictionary that holds it, its name there, and its value.
    """
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            of_dropout = name == "p" and "drop" in type(module).__name__.lower()
            if type(value) in (int, float) and (of_dropout or "drop" in name):
                yield (f"{path}.{name}" if path else name), vars(module), name, value


def _require_same_in_training(path: str, norm: nn.Module) -> None:
    """Raise ``UnsupportedModel`` if code of a norm's own gives other results in training mode.

    A norm is proven to be a LayerNorm in eval mode (see ``models.norm_probe``).
    """
    if runs_torchs_layer_norm(norm):
        return
    copied = copy.deepcopy(norm)
    size = max((p.numel() for p in norm.parameters()), default=1)
    for shape in ((2, 3, size), (2, size, 3, 3), (2, size)):
        x = torch.randn(shape)
        try:
            with torch.no_grad():
                results = [copied.float().train(mode)(x) for mode in (False, True)]
        except Exception:  # a shape that this norm does not take
            continue
        if not torch.equal(*results):
            raise UnsupportedModel(
                f"{path}: {type(norm).__name__} computes something else in training mode, so it "
                "cannot become RMSNorm there; keep it as it is"
            )
