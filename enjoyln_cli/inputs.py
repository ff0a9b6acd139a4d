"""The inputs on which two models are compared.

Decides what a model is run on: seeded token ids or pixels by default, the user's text or images
where given. Every floating input is rounded to the compute dtype first, so that the exact model and
the rounded one see the same numbers. Tokens come with padding in one row of each batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.errors import UnsupportedModel

Batch = dict[str, torch.Tensor]

TOKENS = 32
"""Length of the rows of seeded tokens."""
WINDOW = 256
"""Length of the rows that a text is cut into."""
ROWS_AT_ONCE = 8


def seeded(model: nn.Module, rows: int, seed: int, dtype: torch.dtype) -> list[Batch]:
    """``rows`` examples for a transformers model, in batches, the same for the same seed.

    ``input_ids`` are ``(batch, 32)`` int64 below the vocabulary's size, never the padding token,
    with ``attention_mask``, token types and decoder ids where ``forward`` takes them;
    ``pixel_values`` are normal, ``(batch, channels, height, width)`` in ``dtype``. Raises
    ``UnsupportedModel`` for any other main input.
    """
    generator = torch.Generator().manual_seed(seed)
    main = getattr(model, "main_input_name", "input_ids")
    step = _rows_at_once(model)
    sizes = [min(step, rows - first) for first in range(0, rows, step)]
    if main == "input_ids":
        return [_tokens(model, size, generator) for size in sizes]
    if main == "pixel_values":
        return [_pixels(model, size, generator, dtype) for size in sizes]
    raise UnsupportedModel(
        f"{type(model).__name__} takes {main}; only input_ids and pixel_values can be made up: "
        "compare it in Python with inputs of your own"
    )


def _rows_at_once(model: Any) -> int:
    """A sequence classifier without a padding token refuses more than one row."""
    unpadded = getattr(model.config, "pad_token_id", None) is None
    return 1 if unpadded and "SequenceClassification" in type(model).__name__ else ROWS_AT_ONCE


def _tokens(model: Any, rows: int, generator: torch.Generator) -> Batch:
    accepted = inspect.signature(model.forward).parameters
    config = model.config.get_text_config()
    length = min(TOKENS, _positions(config))
    ids = torch.randint(0, config.vocab_size, (rows, length), generator=generator)
    padding = getattr(config, "pad_token_id", None)
    if padding is not None and config.vocab_size > 1:
        ids = torch.where(ids == padding, (padding + 1) % config.vocab_size, ids)
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[-1, length - length // 4 :] = 0
        if padding is not None:
            ids = torch.where(mask == 0, padding, ids)
    types = int(getattr(config, "type_vocab_size", 0) or 0)
    batch = {"input_ids": ids, "attention_mask": mask}
    if types > 1:
        batch["token_type_ids"] = torch.randint(0, types, ids.shape, generator=generator)
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = ids.flip(1)
    return {n: value for n, value in batch.items() if n in accepted or n == "input_ids"}


def _positions(config: Any) -> int:
    """Tokens that the position table has room for, past the rows that some tables reserve."""
    limit = getattr(config, "max_position_embeddings", None)
    return max(1, int(limit) - 2) if limit else WINDOW


def _pixels(model: Any, rows: int, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    config = getattr(model.config, "vision_config", model.config)
    height, width = _pair(config.image_size)
    channels = getattr(config, "num_channels", 3)
    pixels = torch.randn(rows, channels, height, width, generator=generator)
    return {"pixel_values": pixels.to(dtype)}


def with_masked_patches(model: Any, batch: Batch, seed: int) -> Batch | None:
    """``batch`` with half of its patches masked; ``None`` where ``forward`` takes no such mask."""
    if "bool_masked_pos" not in inspect.signature(model.forward).parameters:
        return None
    generator = torch.Generator().manual_seed(seed)
    pixels = batch["pixel_values"]
    patch = _pair(getattr(model.config, "patch_size", 1))
    patches = (pixels.shape[-2] // patch[0]) * (pixels.shape[-1] // patch[1])
    masked = torch.rand(len(pixels), patches, generator=generator) < 0.5
    return {**batch, "bool_masked_pos": masked}


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def from_images(
    model: nn.Module, files: Sequence[str | Path], folder: Path, dtype: torch.dtype
) -> list[Batch]:
    """The images as the checkpoint's own processor prepares them, in ``dtype``.

    Raises ``UnsupportedModel`` for a model that takes no images, and where the directory holds no
    image processor or a file no image.
    """
    main = getattr(model, "main_input_name", "input_ids")
    if main != "pixel_values":
        raise UnsupportedModel(f"{type(model).__name__} takes {main}, so it cannot run on images")
    from transformers import AutoImageProcessor
    from transformers.image_utils import load_image

    try:
        processor = AutoImageProcessor.from_pretrained(folder)
        images = [load_image(str(file)) for file in files]
        pixels = processor(images=images, return_tensors="pt")["pixel_values"].to(dtype)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().split("\n")[0]
        raise UnsupportedModel(f"images cannot be prepared: {first}") from error
    return [{"pixel_values": part} for part in pixels.split(ROWS_AT_ONCE)]


def tokenizer_of(folder: Path, trust_remote_code: bool = False) -> Any:
    """The tokenizer saved in ``folder``; ``UnsupportedModel`` where there is none."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        first = str(error).strip().split("\n")[0]
        raise UnsupportedModel(f"--text needs the tokenizer of {folder}: {first}") from error
    if not tokenizer.vocab_size:  # what a class makes of a directory without tokenizer files
        raise UnsupportedModel(f"--text needs a tokenizer, and {folder} holds none")
    return tokenizer


def from_text(model: Any, tokenizer: Any, text: str, rows: int) -> list[Batch]:
    """The first ``rows`` windows of the text, at most 256 tokens each, without padding."""
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)[
        "input_ids"
    ][0]
    length = min(WINDOW, _positions(model.config.get_text_config()))
    whole = len(ids) // length
    if whole == 0:
        if len(ids) < 2:
            raise UnsupportedModel("the text holds fewer than two tokens: give a longer one")
        return [{"input_ids": ids[None]}]
    windows = ids[: whole * length].view(whole, length)[:rows]
    return [{"input_ids": part} for part in windows.split(_rows_at_once(model))]


def masked(batch: Batch, mask_token: int, seed: int) -> tuple[Batch, torch.Tensor]:
    """15 % of the tokens replaced by the mask token, at least one per row, and where they are.

    The mask is bool, shaped as ``input_ids``. Source: Devlin et al. 2019, section 3.1.
    """
    ids = batch["input_ids"]
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(ids.shape, generator=generator)
    chosen = (draws < 0.15) | (draws == draws.amin(1, keepdim=True))
    return {**batch, "input_ids": torch.where(chosen, mask_token, ids)}, chosen
