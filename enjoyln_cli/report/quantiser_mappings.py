"""Which layers read each norm, as recipes of llm-compressor name them, and as JSON for other tools.

    W (g * x + v) = (W diag(s)) ((g / s) * x + v / s)

SmoothQuant and AWQ scale the features of a norm by such ``s``. SpinQuant takes ``s = g``, which is
right only for a norm without a bias. All three need to know every layer that reads the norm, and a
plan with fused norms has proven this.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from enjoyln_cli.plan import schema
from enjoyln_cli.plan.plan import NormFusion, Plan
from enjoyln_cli.recipe.yaml_text import dump
from enjoyln_cli.report.layer_names import compact

HEADER = "# The linear layers that read each norm of {name}, for recipes of llm-compressor.\n"
NONE = "# No mapping is proven. A class with a head may have some: --model-class.\n"


@dataclass(frozen=True)
class NormMapping:
    """A norm, or several that differ in layer numbers, and the linear layers that read them.

    Each name is a path, or ``re:`` and a regular expression that matches these paths and no others.
    """

    norm: str
    layers: tuple[str, ...]
    has_bias: bool
    reads_head: bool
    """Whether one of the layers computes the logits, or has a tied weight."""


def norm_mappings(plan: Plan, model: Any) -> list[NormMapping]:
    """The mappings of all norms whose readers are ``nn.Linear``.

    ``plan`` fuses all norms that can be fused, and ``model`` is its class, with or without
    weights.
    """
    modules = dict(model.named_modules())
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied = {name for copy in plan.untied for name in (copy.parameter, copy.source)}
    alike: dict[tuple[str, tuple[str, ...], bool, bool], list[NormFusion]] = {}
    for fusion in plan.fused:
        if _why_none(fusion, model):
            continue
        layers = _layers(fusion)
        weights = {reader.weight.parameter for reader in fusion.readers}
        reads_head = any(modules[layer] is head for layer in layers) or bool(weights & tied)
        patterns = tuple(dict.fromkeys(map(_pattern, layers)))
        key = _pattern(fusion.norm), patterns, bool(fusion.bias or fusion.divided), reads_head
        alike.setdefault(key, []).append(fusion)
    mappings = []
    for (norm, patterns, has_bias, reads_head), fusions in alike.items():
        proven = {path for fusion in fusions for path in (fusion.norm, *_layers(fusion))}
        matched = {path for path in modules if _pattern(path) in (norm, *patterns)}
        if matched == proven and all(map(_is_inside, fusions)):
            expressions = tuple(map(_expression, patterns))
            mappings.append(NormMapping(_expression(norm), expressions, has_bias, reads_head))
            continue
        mappings += [
            NormMapping(fusion.norm, tuple(_layers(fusion)), has_bias, reads_head)
            for fusion in fusions
        ]
    return mappings


def _layers(fusion: NormFusion) -> list[str]:
    """The paths of the layers that read the norm."""
    return [reader.weight.parameter.rpartition(".")[0] for reader in fusion.readers]


def _numbers(path: str) -> list[str]:
    """The layer numbers in a path, outermost first."""
    return [word for word in path.split(".") if word.isdigit()]


def _is_inside(fusion: NormFusion) -> bool:
    """Whether all layers have the layer numbers of the norm, and perhaps more."""
    numbers = _numbers(fusion.norm)
    return all(_numbers(layer)[: len(numbers)] == numbers for layer in _layers(fusion))


def _pattern(path: str) -> str:
    """``h.3.ln_1`` as ``h.*.ln_1``."""
    return ".".join("*" if word.isdigit() else word for word in path.split("."))


def _expression(pattern: str) -> str:
    """The pattern as a regular expression; a path without a layer number as it is."""
    parts = [re.escape(part) for part in pattern.split("*")]
    return pattern if len(parts) == 1 else "re:" + r"\d+".join(parts) + "$"


def llm_compressor_text(plan: Plan, model: Any) -> str:
    """The mappings as YAML, by the name of the modifier that takes them."""
    mappings = norm_mappings(plan, model)
    smoothed = [mapping for mapping in mappings if not mapping.reads_head]
    fused = [mapping for mapping in mappings if not mapping.has_bias]
    sections: dict[str, Mapping[str, Any]] = {
        "SmoothQuantModifier": {"mappings": [[list(m.layers), m.norm] for m in smoothed]},
        "AWQModifier": {
            "mappings": [
                {"smooth_layer": m.norm, "balance_layers": list(m.layers)} for m in smoothed
            ]
        },
        "SpinQuantModifier": {
            "norm_mappings": [{"norm": m.norm, "linears": list(m.layers)} for m in fused]
        },
    }
    taken = {name: section for name, section in sections.items() if any(section.values())}
    left = _left_out(plan, model)
    return HEADER.format(name=plan.model_class) + left + (dump(taken) if taken else NONE)


def mappings_json(plan: Plan) -> str:
    """One JSON object: what reads each norm, and what writes and reads each stream and all values.

    It has keys of a plan; ``plan`` is as for ``norm_mappings``.
    """
    names = ("model_class", "fused", "unfused", "rotation_groups", "untied")
    fields = {name: getattr(plan, name) for name in names}
    return json.dumps(schema.plain(fields, {"given"})) + "\n"


def _left_out(plan: Plan, model: Any) -> str:
    """A comment for each reason why norms have no mapping."""
    reasons: dict[str, list[str]] = {}
    for norm in plan.unfused:
        reasons.setdefault(norm.reason, []).append(norm.norm)
    for fusion in plan.fused:
        if reason := _why_none(fusion, model):
            reasons.setdefault(reason, []).append(fusion.norm)
    return "".join(
        f"# without a mapping, since {reason}: {', '.join(compact(norms))}\n"
        for reason, norms in reasons.items()
    )


def _why_none(fusion: NormFusion, model: Any) -> str:
    """Why a norm has no mapping although it could be fused; empty if it has a mapping."""
    for reader in fusion.readers:
        layer = model.get_submodule(reader.weight.parameter.rpartition(".")[0])
        if not isinstance(layer, nn.Linear):
            return f"it is read by {type(layer).__name__}, which is no nn.Linear"
        if reader.outer * reader.inner > 1:
            return "a layer reads its result for several tokens at once"
        if reader.outputs:
            return "only some outputs of a layer read its result"
    return ""
