"""Which layers get more bits than the scheme says, so that the outputs are near enough.

Each layer is rounded alone, and the others compute in float32 (simulated). More bits for a layer
save this cost, and take bytes. The layers that save most for each byte come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isinf
from typing import Any

from torch import nn

from enjoyln_cli.clock import Countdown, Progress
from enjoyln_cli.comparison.run import encoded_once, run
from enjoyln_cli.comparison.simulated_rounding import (
    Scheme,
    head_of,
    linear_layers,
    path_of_head,
    simulated,
)
from enjoyln_cli.quantisation.measure import ExactOutputs, differences
from enjoyln_cli.quantisers.integer_products import is_large
from enjoyln_cli.quantisers.onnxruntime_quantiser import GROUP
from enjoyln_cli.quantisers.schemes import (
    FLOAT_BITS,
    FORMATS,
    OPENVINO,
    QuantisationScheme,
    bits_at,
)
from enjoyln_cli.text import counted, matches

TRIED_ON = 2
"""Inputs that each layer is rounded on: the order of layers is clear with few."""


@dataclass(frozen=True)
class FinerLayer:
    """A layer that gets more bits than the scheme, or an earlier step, gives it."""

    layer: str
    """The path of the layer."""
    bits: int
    """Of its weight; with ``FLOAT_BITS``, its inputs are not rounded either."""
    cost: float
    """What rounding this layer alone, to fewer bits, costs (simulated): KL divergence or error."""
    size: int
    """Bytes that the bits add."""

    @property
    def what(self) -> str:
        """``8 bits`` or ``float``."""
        return "float" if self.bits == FLOAT_BITS else f"{self.bits} bits"


def finer_layers(
    model: Any,
    format_name: str,
    scheme: QuantisationScheme,
    kept: Sequence[str],
    exact: ExactOutputs,
    on_progress: Progress,
) -> list[FinerLayer]:
    """The steps from ``scheme`` to more bits for all layers of ``model``, the best first.

    ``kept`` are patterns of layers that the user has chosen the bits of. A layer gets 8 bits before
    it is left in floating point. The linear layer that costs least stays rounded after all steps.
    """
    few = replace(exact, examples=exact.examples[:TRIED_ON], outputs=exact.outputs[:TRIED_ON])
    paths = {module: path for path, module in model.named_modules()}
    layers = {
        path: readers
        for path, readers in _rounded_layers(model, format_name, scheme).items()
        if not any(matches(paths[reader], kept) for reader in readers)
    }
    head, levels = head_of(model), (scheme.weight_bits, *scheme.finer_bits)
    countdown = Countdown(len(layers) * (len(levels) - 1), on_progress)

    def cost(path: str, bits: int) -> float:
        if bits == FLOAT_BITS:
            return 0.0
        rounding = Scheme(
            bits,
            scheme.input_bits,
            per_token=False,
            group=GROUP if scheme.is_in_groups else None,
            rounds_results=scheme.rounds_results,
        )
        with simulated(model, rounding, only=layers[path]):
            found = differences(lambda batch: run(model, [batch])[0], few).cost
        countdown.count()
        return found

    def costs_of(paths: Iterable[str]) -> dict[str, list[float]]:
        return {path: [cost(path, level) for level in bits_by_layer[path]] for path in paths}

    bits_by_layer = {}
    for path, (layer, *_) in layers.items():
        first = 8 if (layer is head or _is_table(layer)) and 8 in levels else levels[0]
        bits_by_layer[path] = [level for level in levels if level >= first]
    in_encoder = _layers_in_encoder(model, layers)
    with encoded_once(model):
        costs_by_layer = costs_of(path for path in layers if path not in in_encoder)
    costs_by_layer |= costs_of(in_encoder)
    ranked = []
    for path, bits in bits_by_layer.items():
        costs = costs_by_layer[path]
        if not costs[0] and _is_table(layers[path][0]):
            continue  # no input looks it up
        worth, weights = inf, layers[path][0].weight.numel()
        for at in range(1, len(bits)):
            size = weights * (bits[at] - bits[at - 1]) // 8
            saved = inf if isinf(costs[at - 1]) else costs[at - 1] - costs[at]
            worth = min(worth, saved / size)
            ranked.append((-worth, FinerLayer(path, bits[at], costs[at - 1], size)))
    steps = [step for _, step in sorted(ranked, key=lambda each: each[0])]
    linear = [path for path, (layer, *_) in layers.items() if not _is_table(layer)]
    in_float = [step for step in steps if step.bits == FLOAT_BITS and step.layer in linear]
    if in_float and len(in_float) == len(linear):
        steps.remove(min(in_float, key=lambda step: step.cost))
    return steps


def _layers_in_encoder(model: Any, layers: Mapping[str, Sequence[Any]]) -> list[str]:
    """The paths of the layers in the encoder of a model that has an encoder beside a decoder."""
    if not getattr(model.config, "is_encoder_decoder", False):
        return []
    inside = set(model.get_encoder().modules())
    return [path for path, readers in layers.items() if not inside.isdisjoint(readers)]


def _rounded_layers(
    model: Any, format_name: str, scheme: QuantisationScheme
) -> dict[str, list[Any]]:
    """The layers that are rounded in a format, by path, each with all that read its weight."""
    layers: dict[str, Any] = dict(linear_layers(model))
    if not FORMATS[format_name].is_checkpoint:
        head = head_of(model)
        is_tied = head is not None and head.weight is model.get_input_embeddings().weight
        if not is_tied or scheme.rounds_tied_heads:
            layers |= dict.fromkeys(path_of_head(model), head)
        rounds_small = format_name == OPENVINO
        for path, module in model.named_modules():
            if _is_table(module) and (rounds_small or is_large(*module.weight.shape)):
                layers[path] = module
    found: dict[int, tuple[str, list[Any]]] = {}
    for path, layer in layers.items():
        found.setdefault(id(layer.weight), (path, [layer]))
    for module in model.modules():
        path, readers = found.get(id(getattr(module, "weight", None)), ("", []))
        if path and module not in readers:
            readers.append(module)
    return dict(found.values())


def _is_table(module: Any) -> bool:
    """Whether a module is an embedding, which programs round to 8 bits."""
    return isinstance(module, nn.Embedding)


def for_all_readers(model: Any, bits: Mapping[str, int]) -> dict[str, int]:
    """The ``bits`` of layers, by paths or patterns, with those of all layers that share a weight.

    A weight is stored once, so all its readers get the most bits that one of them has.
    """
    by_weight: dict[int, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(getattr(module, "weight", None), nn.Parameter):
            by_weight.setdefault(id(module.weight), []).append(path)
    found = dict(bits)
    for paths in by_weight.values():
        if most := max(bits_at(path, bits, 0) for path in paths):
            found |= dict.fromkeys(paths, most)
    return found


def fewest(count: int, is_enough: Callable[[int], bool], least: int = 1) -> int | None:
    """The smallest number from ``least`` to ``count`` that is enough, by doubling and halving.

    If a number is enough, all larger numbers count as enough. ``None`` if even ``count`` is not.
    """
    low, high = least - 1, least
    while high < count and not is_enough(high):
        low, high = high, min(2 * high, count)
    if high > count or (high == count and not is_enough(count)):
        return None
    return _between(low, high, is_enough)


def fewer(count: int, is_enough: Callable[[int], bool], least: int = 1) -> int:
    """The smallest number from ``least`` to ``count`` that is enough, searched from ``count`` down.

    ``count`` itself is known to be enough.
    """
    low, high, step = count, count, 1
    while high > least and is_enough(low := max(least, high - step)):
        high, step = low, 2 * step
    return _between(low if high > least else least - 1, high, is_enough)


def _between(low: int, high: int, is_enough: Callable[[int], bool]) -> int:
    """The smallest number that is enough, if ``low`` is not and ``high`` is."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def bits_of(steps: Sequence[FinerLayer]) -> dict[str, int]:
    """The bits of each layer after some steps."""
    return {step.layer: step.bits for step in steps}


def in_words(steps: Sequence[FinerLayer]) -> str:
    """``2 layers in 8 bits, 1 layer in float``."""
    last = [*{step.layer: step.what for step in steps}.values()]
    return ", ".join(
        f"{counted(last.count(what), 'layer')} in {what}"
        for what in ("8 bits", "float")
        if what in last
    )
