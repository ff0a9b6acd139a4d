"""The inputs that a transformers model takes, told from its ``forward`` and its config.

Decides names, shapes and ranges only. Whoever needs the tensors makes them: on the meta device to
trace a model, with seeded values to compare two. What is not known from the config is tried in the
order of likelihood, so ``main_inputs`` gives alternatives.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from enjoyln_cli.errors import UnsupportedModel

SAMPLES = 3600
"""Of raw audio: ten frames behind the usual strides of 320 samples."""
FRAMES = 30
"""Of audio features, where the config does not fix their number."""
SIDE = 64
"""Of an image, where the config does not fix it."""


@dataclass(frozen=True)
class Spec:
    """One input: its shape, and what its elements are."""

    shape: tuple[int, ...]
    below: int | None = None
    """Whole numbers from 0 up to, but not including, this one; ``None`` for real numbers."""


Inputs = dict[str, Spec]


def accepted_by(model: Any) -> frozenset[str]:
    """The names of the arguments of ``forward``."""
    return frozenset(inspect.signature(model.forward).parameters)


def main_inputs(model: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """What one call of ``model`` needs, the likeliest form first.

    The model's main input, the decoder's, and one of every other modality that its config has a
    sub-model for. Raises ``UnsupportedModel`` for a main input of no known kind.
    """
    accepted, main = accepted_by(model), getattr(model, "main_input_name", "input_ids")
    if main not in _MAKERS:
        raise UnsupportedModel(
            f"{type(model).__name__} takes {main}; only {', '.join(_MAKERS)} can be made up. "
            "Pass example inputs to analyze() in Python"
        )
    names = [name for name in _MAKERS if name == main or _has_part(model, name, accepted)]
    wanted = [names, [main]] if len(names) > 1 else [names]
    for chosen in wanted:
        for forms in product(*(_MAKERS[name](model.config, rows, tokens) for name in chosen)):
            given = dict(zip(chosen, forms, strict=True))
            if "decoder_input_ids" in accepted:
                given["decoder_input_ids"] = next(_ids(model.config, rows, tokens))
            if "bbox" in accepted and "input_ids" in given:  # every token at the page's corner
                given["bbox"] = Spec((rows, tokens, 4), 1)
            yield given


def _has_part(model: Any, name: str, accepted: frozenset[str]) -> bool:
    part = _PARTS.get(name)
    return name in accepted and part is not None and hasattr(model.config, part)


_PARTS = {
    "input_ids": "text_config",
    "pixel_values": "vision_config",
    "input_features": "audio_config",
}


def vocabulary(config: Any) -> int:
    """Number of token ids."""
    return int(getattr(config.get_text_config(), "vocab_size", 0) or 2)


def _ids(config: Any, rows: int, tokens: int) -> Iterator[Spec]:
    yield Spec((rows, tokens), vocabulary(config))


def image_size(config: Any) -> tuple[int, int]:
    """Height and width of the images that a model was made for."""
    found = next((c.image_size for c in _vision(config) if getattr(c, "image_size", None)), SIDE)
    return pair(found)


def patch_size(config: Any) -> tuple[int, int]:
    """Height and width of a patch; 1 where a model has none."""
    return pair(next((c.patch_size for c in _vision(config) if getattr(c, "patch_size", None)), 1))


def _vision(config: Any) -> list[Any]:
    parts = ("vision_config", "backbone_config", "encoder_config")
    return [config, *(part for name in parts if (part := getattr(config, name, None)) is not None)]


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """One number for both sides, or one each."""
    return (value, value) if isinstance(value, int) else (int(value[-2]), int(value[-1]))


def _pixels(config: Any, rows: int, tokens: int) -> Iterator[Spec]:
    found = (getattr(c, "num_channels", None) for c in _vision(config))
    channels = next((int(value) for value in found if isinstance(value, int)), 3)
    yield Spec((rows, channels, *image_size(config)))
    frames = getattr(config, "num_frames", None)
    if frames:
        yield Spec((rows, int(frames), channels, *image_size(config)))


def _features(config: Any, rows: int, tokens: int) -> Iterator[Spec]:
    """Channels before frames where the encoder's table fixes their number, else after."""
    owners = [
        config,
        getattr(config, "audio_config", config),
        getattr(config, "encoder_config", config),
    ]
    for owner in owners:
        bins, places = (
            getattr(owner, name, None) for name in ("num_mel_bins", "max_source_positions")
        )
        if bins and places:
            yield Spec((rows, int(bins), 2 * int(places)))
    widths = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim")
    for owner in owners:
        for width in (getattr(owner, name, None) for name in widths):
            if isinstance(width, int):
                yield Spec((rows, FRAMES, width))
                yield Spec((rows, 1, FRAMES, width))


def _samples(config: Any, rows: int, tokens: int) -> Iterator[Spec]:
    bins, length = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if isinstance(bins, int) and isinstance(length, int):
        yield Spec((rows, length, bins))
    yield Spec((rows, SAMPLES))
    yield Spec((rows, 1, SAMPLES))


_MAKERS = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _samples,
}
"""What can be a model's main input."""
