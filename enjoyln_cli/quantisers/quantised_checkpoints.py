"""Checkpoints that transformers loads, quantised by torchao or by llm-compressor.

Both round the weights of ``nn.Linear`` only. All other weights, and the layer that computes the
logits, stay in the dtype of the original.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.comparison.run import run
from enjoyln_cli.comparison.simulated_rounding import linear_layers
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.onnx_export.exporting import quiet
from enjoyln_cli.onnx_export.runtimes import RunProgram
from enjoyln_cli.quantisers.gptq import BITS, RoundedWeight
from enjoyln_cli.quantisers.schemes import (
    COMPRESSED,
    FLOAT_BITS,
    TORCHAO,
    QuantisationScheme,
    bits_at,
)
from enjoyln_cli.runtime.adapters import quantisation_of

GROUPS = (128, 64, 32)
"""How many inputs share a scale in groups: the first of these that divides the width."""

MIDDLE = 2 ** (BITS - 1)
"""Integers of 4 bits in a checkpoint are signed."""

Groups = dict[tuple[int, int | None], list[str]]
"""The paths of layers by the bits of their weights, and by how many of their inputs share a scale;
``None``: all of them."""

LIBRARIES = ("llmcompressor", "compressed_tensors")
"""They write progress to loguru."""


@dataclass(frozen=True)
class WeightCount:
    """How many weights a model has, and how many of them were not rounded."""

    total: int
    in_float: int


def write(
    model: Any,
    format_name: str,
    scheme: QuantisationScheme,
    dtype: torch.dtype,
    bits: Mapping[str, int],
    rounded: Mapping[str, RoundedWeight],
    folder: Path,
    float_folder: Path | None,
) -> WeightCount:
    """Write ``model``, quantised, to ``folder``, and in float32 to ``float_folder`` if it is given.

    ``bits`` are of the weights of layers, by paths or patterns (see ``schemes.bits_at``), where
    they differ from the bits of ``scheme``. ``rounded`` has weights that are rounded already, in
    groups of ``group_of`` their width, by the paths of layers. What is not rounded is stored as
    ``dtype``. Raises ``UnsupportedModel`` if the model has no layer that would be rounded.
    """
    layers = _layers_to_round(model, format_name, bits)
    if format_name == TORCHAO:
        _require_input_embeddings(model)
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    skipped = [name for name in linear if name not in layers]
    groups = _groups(layers, format_name, scheme, bits)
    with TemporaryDirectory(dir=folder.parent) as scratch, quiet():
        source, model_class = float_folder or Path(scratch), type(model)
        model.save_pretrained(source)
        if format_name == TORCHAO:
            from transformers import TorchAoConfig

            config = TorchAoConfig(_torchao_config(scheme, groups), skipped)
            made = model_class.from_pretrained(source, dtype=dtype, quantization_config=config)
            for name, weight in rounded.items():
                _replace_integers(made.get_parameter(f"{name}.weight"), weight)
            made.save_pretrained(folder)
        else:
            made = model_class.from_pretrained(source, dtype=dtype)
            _oneshot(made, scheme, groups, skipped, rounded, folder)
    small = [name for name, module in made.named_modules() if _is_rounded(module)]
    total = sum(parameter.numel() for parameter in model.parameters())
    count = sum(model.get_parameter(f"{name}.weight").numel() for name in small)
    return WeightCount(total, total - count)


def _layers_to_round(
    model: Any, format_name: str, bits: Mapping[str, int]
) -> Mapping[str, nn.Linear]:
    """The layers that are rounded, by path."""
    layers = {
        name: layer
        for name, layer in linear_layers(model).items()
        if isinstance(layer, nn.Linear) and bits_at(name, bits, 0) != FLOAT_BITS
    }
    if layers:
        return layers
    raise UnsupportedModel(
        f"{format_name} rounds nn.Linear only, and {type(model).__name__} has none to round "
        "besides the layer that computes the logits; choose --format onnx or openvino"
    )


def _groups(
    layers: Mapping[str, nn.Linear],
    format_name: str,
    scheme: QuantisationScheme,
    bits: Mapping[str, int],
) -> Groups:
    """The layers by their bits, and by how many inputs share a scale.

    Weights of 4 bits are in groups, and in compressed-tensors all weights beside inputs in floating
    point, as its presets have them.
    """
    all_in_groups = format_name == COMPRESSED and scheme.input_bits is None
    found: Groups = {}
    for name, layer in layers.items():
        count = bits_at(name, bits, scheme.weight_bits)
        group = group_of(layer.in_features) if count == BITS or all_in_groups else None
        found.setdefault((count, group), []).append(name)
    return found


def group_of(width: int) -> int | None:
    """How many inputs of a weight in groups share a scale; ``None``: all of them."""
    return next((size for size in GROUPS if width % size == 0), None)


def _require_input_embeddings(model: Any) -> None:
    """Raise ``UnsupportedModel`` for a class that does not name the layer of its input embeddings.

    transformers asks for that layer with each weight that torchao rounds.
    """
    try:
        model.get_input_embeddings()
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"transformers cannot hand {type(model).__name__} to torchao, since the class has no "
            "get_input_embeddings; choose --format onnx or openvino"
        ) from error


def _torchao_config(scheme: QuantisationScheme, groups: Groups) -> Any:
    """The scheme as torchao writes it, for all linear layers or, if groups differ, for each."""
    from torchao.quantization import FqnToConfig

    if len(groups) == 1:
        return _config_of_layers(scheme, *next(iter(groups)))
    return FqnToConfig(
        OrderedDict(
            (f"{name}.weight", _config_of_layers(scheme, *kind))
            for kind, names in groups.items()
            for name in names
        )
    )


def _config_of_layers(scheme: QuantisationScheme, bits: int, group: int | None) -> Any:
    """The scheme for layers with the same ``bits`` and ``group``.

    ``None`` if each output has one scale.
    """
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerAxis,
        PerGroup,
    )

    if bits == 8:
        both = Int8DynamicActivationInt8WeightConfig
        return both() if scheme.input_bits else Int8WeightOnlyConfig()
    dtype = getattr(torch, f"int{bits}")
    scales: Any = PerGroup(group) if group else PerAxis(0)
    if scheme.input_bits:
        return Int8DynamicActivationIntxWeightConfig(dtype, scales)
    return IntxWeightOnlyConfig(dtype, scales)


def _replace_integers(weight: Any, rounded: RoundedWeight) -> None:
    """Let a weight of torchao, an ``IntxUnpackedToInt8Tensor``, have these integers and scales."""
    weight.qdata.copy_(rounded.integers.int() - MIDDLE)
    weight.scale.copy_(rounded.scales)
    weight.zero_point.copy_(rounded.zero_points.int() - MIDDLE)


def _oneshot(
    model: Any,
    scheme: QuantisationScheme,
    groups: Groups,
    skipped: list[str],
    rounded: Mapping[str, RoundedWeight],
    folder: Path,
) -> None:
    """Quantise ``model`` in place by llm-compressor, and save it."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from loguru import logger

    config_groups: dict[str, Any] = {}
    for at, ((bits, group), layers) in enumerate(groups.items()):
        name = f"W{bits}A{scheme.input_bits or 16}"
        preset: Any = preset_name_to_scheme(name, ["Linear"] if len(groups) == 1 else layers)
        scales: dict[str, Any] = {"group_size": group, "strategy": "group" if group else "channel"}
        scales["symmetric"] = not (rounded and bits == BITS)
        preset.weights = preset.weights.model_copy(update=scales)
        config_groups[f"group_{at}"] = preset
    modifier = QuantizationModifier(config_groups=config_groups, ignore=skipped)
    for library in LIBRARIES:
        logger.disable(library)
    try:
        oneshot(model=model, recipe=modifier)
        for name, weight in rounded.items():
            layer = model.get_submodule(name)
            with torch.no_grad():
                layer.weight.copy_(weight.matrix)
                layer.weight_scale.copy_(weight.scales)
                layer.weight_zero_point.copy_(weight.zero_points.int() - MIDDLE)
        model.save_pretrained(folder)  # ``oneshot`` would save a tokenizer of its own as well
    finally:
        for library in LIBRARIES:
            logger.enable(library)


def _is_rounded(module: nn.Module) -> bool:
    """Whether torchao or llm-compressor has quantised the weight of this layer."""
    by_llm_compressor = hasattr(module, "quantization_scheme")
    return by_llm_compressor or bool(quantisation_of(getattr(module, "weight", None)))


def load(folder: Path, model_class: Any) -> RunProgram:
    """What was written to ``folder``, as a function that transformers computes."""
    with quiet():
        model = model_class.from_pretrained(folder, local_files_only=True).eval()

    def compute(batch: Batch) -> dict[str, torch.Tensor]:
        with quiet():
            return {name: value.float() for name, value in run(model, [batch])[0].items()}

    return compute
