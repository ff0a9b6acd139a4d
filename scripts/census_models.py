"""Small models of each class: a config that its model accepts, and random weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

from census_config import ABSENT, BEGUN, shrink

PATIENCE = 60
"""Seconds of CPU time after which no further size is tried for a model that accepts no inputs."""


def sketched(model_class: str, model_type: str) -> tuple[Any, Any, bool]:
    """A small config, its model without weights, and whether that accepts any inputs."""
    import transformers

    from enjoyln_cli.analysis.stored_names import saved_shapes
    from enjoyln_cli.calls.input_sets import main_inputs
    from enjoyln_cli.models.classes import build
    from enjoyln_cli.proof.layer_norms import layer_norms
    from enjoyln_cli.trace.capture import Recorder
    from enjoyln_cli.trace.traced_calls import accepted_calls

    failures: list[Exception] = []
    absent: dict[type, dict[str, Any]] = {}
    found: dict[bool, tuple[Any, Any, bool]] = {}
    factors = (16, 8, 4, 2, 1)
    sizes = [(factor, side, {}) for side in (224, 0, None) for factor in factors]
    sizes[1:1] = [(16, 0, {}), (16, 224, BEGUN)]
    sizes += [(factor, 224, BEGUN) for factor in factors[1:]]
    begin = time.process_time()
    for factor, side, more in sizes:
        if more and True in found or found and time.process_time() - begin > PATIENCE:
            break
        try:
            config = _default(getattr(transformers, model_class), model_type, absent, more)
            shrink(config, factor, side)
            sketch = build(getattr(transformers, model_class), config)
            saved_shapes(sketch)  # fails for sizes that build but cannot be stored
        except Exception as error:  # a wrong config may raise anything
            failures.append(error)
            cause = error.__cause__
            if isinstance(cause, AttributeError) and cause.name in ABSENT:
                absent.setdefault(type(cause.obj), {}).update(ABSENT[cause.name])
            continue
        if sum(p.numel() for p in sketch.parameters()) > 2e8:
            failures.append(MemoryError("the smallest config that builds is too large"))
            continue
        if not any(layer_norms(sketch)):
            return config, sketch, True
        wanted = next(iter(main_inputs(sketch, 1, 1)), {}).keys()
        calls = accepted_calls(Recorder(sketch))
        if calls and wanted <= calls[0].steps[0][1].keys():
            return config, sketch, True
        found.setdefault(calls is not None, (config, sketch, calls is not None))
    if not found:
        raise failures[-1]
    return found.get(True) or found[False]


def _default(
    model_class: Any,
    model_type: str,
    absent: Mapping[type, Mapping[str, Any]],
    more: Mapping[str, Any],
) -> Any:
    """The default config of a class, or of its part of a larger config, with missing attributes.

    ``more`` fills settings that the default leaves empty.
    """
    import transformers

    made = transformers.CONFIG_MAPPING[model_type]
    empty = {n for n, v in vars(made()).items() if not v and n in more} if more else set()
    try:
        config = made(**{name: more[name] for name in empty})
    except Exception:  # these settings fit only the shrunken config
        config = made()
    wanted = getattr(model_class, "config_class", None)
    parts = [part for part in vars(config).values() if hasattr(part, "to_dict")]
    if wanted and not isinstance(config, wanted):
        config = next((part for part in parts if isinstance(part, wanted)), config)
    for part in (config, *parts):
        for name, value in absent.get(type(part), {}).items():
            setattr(part, name, value)
        for name in [name for name, value in vars(part).items() if name in more and value is None]:
            setattr(part, name, more[name])
    return config


def built(model_class: str, model_type: str) -> tuple[Any, Any, bool]:
    """A small float64 model with random weights, its config, and whether inputs are known."""
    import torch
    import transformers

    from enjoyln_cli.models.classes import apply_experts

    config, _, accepted = sketched(model_class, model_type)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(copy.deepcopy(config)).eval()
    apply_experts(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                inputs = parameter.numel() // max(parameter.shape[:1], default=1)
                spread = 0.3 if parameter.dim() < 2 else max(inputs, 1) ** -0.5
                start = 1.0 if parameter.dim() < 2 else 0.3 * spread
                parameter.copy_(start + spread * torch.randn_like(parameter))
        stored = model.state_dict().keys()
        for name, buffer in model.named_buffers():  # codebooks that are zero before training
            table = name in stored and buffer.is_floating_point() and buffer.dim() > 1
            if table and not buffer.any():
                buffer.copy_(torch.randn_like(buffer))
    return model.double(), config, accepted
