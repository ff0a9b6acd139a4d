"""Describe an example input by ``InputSpec``, and read sizes for it from a model's config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

SIDE = 64
"""Height and width of an image in pixels, if the config does not give it."""


@dataclass(frozen=True)
class InputSpec:
    """One input: its shape and its values."""

    shape: tuple[int, ...]
    below: int | None = None
    """Elements are integers ``0 <= i < below``; ``None`` for floats."""
    leading: tuple[int, ...] = ()
    """The first values of each row (last dimension), which occur nowhere else: sizes, or
    placeholder tokens."""
    last: int | None = None
    """The last value of each row, which occurs nowhere else: the end-of-text token."""
    truth: bool = False
    """Whether the dtype is bool."""


Inputs = dict[str, InputSpec]


def vocabulary(config: Any) -> int:
    """Number of token ids."""
    return int(getattr(config.get_text_config(), "vocab_size", 0) or 2)


def hidden_size(config: Any) -> int:
    """Features of a token."""
    text = config.get_text_config()
    return int(getattr(text, "hidden_size", 0) or getattr(text, "d_model", 0) or 1)


def whole_numbers(spec: InputSpec, generator: torch.Generator | None = None) -> torch.Tensor:
    """An int64 (or bool) tensor with the shape and values of ``spec``, drawn from ``generator``."""
    generator = generator or torch.Generator().manual_seed(0)
    below = spec.below or 2
    drawn = torch.randint(0, below, spec.shape, generator=generator)
    placed = {*spec.leading, spec.last} - {None}
    if free := [value for value in range(min(below, len(placed) + 1)) if value not in placed]:
        for value in placed:
            drawn[drawn == value] = free[0]
    if spec.last is not None:
        drawn[..., -1] = spec.last
    if spec.leading:
        drawn[..., : len(spec.leading)] = torch.tensor(spec.leading)
    return drawn.bool() if spec.truth else drawn


def ones(*shape: int) -> InputSpec:
    """A mask of ones, which masks nothing."""
    return InputSpec(shape, 2, (1,) * shape[-1])


def special_tokens(config: Any) -> list[int]:
    """The token ids with a special meaning in the config, such as the end of a text."""
    named = (item for part in with_parts([config]) for item in vars(part).items())
    ends = ("_token_id", "_token_index")
    return [value for name, value in named if name.endswith(ends) and isinstance(value, int)]


def positions(rows: int, tokens: int) -> InputSpec:
    """Position ids 0, 1, 2, ... for each row."""
    return InputSpec((rows, tokens), tokens, tuple(range(tokens)))


def image_size(config: Any) -> tuple[int, int]:
    """Height and width of a model's images in pixels."""
    for part in vision_configs(config):
        side = getattr(part, "image_size", None) or getattr(part, "max_img_size", None)
        if side or (hasattr(part, "patch_size") and (side := getattr(part, "input_size", None))):
            return pair(side)
    if ratios := getattr(config, "scaled_images_ratios", None):  # the smallest is one patch
        return pair(int(config.patch_size / min(ratios)))
    return pair(SIDE)


def patch_size(config: Any) -> tuple[int, int]:
    """Height and width of a patch in pixels; 1 if a model has no patches."""
    return pair(
        next((c.patch_size for c in vision_configs(config) if getattr(c, "patch_size", None)), 1)
    )


def vision_configs(config: Any) -> list[Any]:
    """The config, and its sub-configs that may describe images, most relevant first."""
    names = (
        "vision_config", "image_config", "backbone_config", "encoder_config", "vq_config",
        "vit_config", "encoder",
    )  # fmt: skip
    parts = [part for name in names if hasattr(part := getattr(config, name, None), "to_dict")]
    return [config, *with_parts(parts)]


def with_parts(configs: list[Any]) -> list[Any]:
    """These configs, and the sub-configs in them."""
    inner = (value for config in configs for value in vars(config).values())
    return [*configs, *(value for value in inner if hasattr(value, "to_dict"))]


def pair(value: int | Sequence[int]) -> tuple[int, int]:
    """Height and width, from one number for both or a sequence that ends with the two."""
    if isinstance(value, int):
        return value, value
    return (int(value[0]), int(value[0])) if len(value) == 1 else (int(value[-2]), int(value[-1]))
