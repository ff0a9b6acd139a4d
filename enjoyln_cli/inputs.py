"""The inputs on which two models are compared.

Decides what a model is run on: seeded token ids or pixels by default, the user's text or images
where given. Every floating input is rounded to the compute dtype first, so that the exact model and
the rounded one see the same numbers. Tokens come with padding in one row of each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls import dtype_of, forms, main_call
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.examples import accepted_by
from enjoyln_cli.specs import Inputs, Spec, patch_size, special_tokens, whole_numbers
from enjoyln_cli.trace import accepts
from enjoyln_cli.weightless import without_weights

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
    bare = without_weights(model)
    step, chosen = _accepted_form(model, bare, min(rows, _rows_at_once(model)))
    sizes = [min(step, rows - first) for first in range(0, rows, step)]
    made = {n: next(islice(forms(bare, n, _length(model)), chosen, None)) for n in set(sizes)}
    return [_batch(model, made[n], generator, dtype) for n in sizes]


def unpadded(model: nn.Module, rows: int, tokens: int, dtype: torch.dtype) -> Batch:
    """One seeded example of ``rows`` rows with ``tokens`` tokens of text each, and no mask.

    Inputs other than text have the size that the config says. Raises as ``seeded`` does.
    """
    bare, generator = without_weights(model), torch.Generator().manual_seed(0)
    _, chosen = _accepted_form(model, bare, rows)
    form = next(islice(forms(bare, rows, tokens), chosen, None))
    return {
        name: torch.randn(spec.shape, generator=generator).to(dtype)
        if spec.below is None
        else whole_numbers(spec, generator)
        for name, spec in form.items()
    }


def _accepted_form(model: Any, bare: nn.Module, rows: int) -> tuple[int, int]:
    """How many rows, ``rows`` or one, the model takes at once, and in which form of its inputs."""
    tried: list[tuple[int, int, Inputs]] = []
    for n in dict.fromkeys((rows, 1)):
        found = list(forms(bare, n, _length(model)))
        for position, form in enumerate(found):
            if len(found) == 1 or accepts(bare, main_call(bare, form)):
                return n, position
            tried.append((n, position, form))
    errors: list[Exception] = []
    dtype = dtype_of(model)
    for n, position, form in tried:
        try:
            with torch.no_grad():
                model(**_batch(model, form, torch.Generator().manual_seed(0), dtype))
        except Exception as error:
            errors.append(error)
        else:
            return n, position
    first = f": {str(errors[0]).strip()}".split("\n")[0] if errors else ""
    raise UnsupportedModel(f"no inputs can be made up that {type(model).__name__} accepts{first}")


def _batch(model: Any, form: Inputs, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    batch: Batch = {}
    for name, spec in form.items():
        if name == "input_ids":
            batch |= _tokens(model, spec, generator)
        elif name == "decoder_input_ids" and "input_ids" in batch and not form["input_ids"].leading:
            batch[name] = batch["input_ids"].flip(1)
        elif spec.below is None:
            batch[name] = torch.randn(spec.shape, generator=generator).to(dtype)
        else:
            batch[name] = whole_numbers(spec, generator)
    return batch


def _rows_at_once(model: Any) -> int:
    """A sequence classifier without a padding token refuses more than one row."""
    unpadded = getattr(model.config, "pad_token_id", None) is None
    return 1 if unpadded and "SequenceClassification" in type(model).__name__ else ROWS_AT_ONCE


def _tokens(model: Any, spec: Spec, generator: torch.Generator) -> Batch:
    """Token ids with padding at the end of the last row, its mask, and token types."""
    accepted, (rows, length, *books) = accepted_by(model), spec.shape
    vocabulary = spec.below or 2
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    ids = whole_numbers(replace(spec, leading=()), generator)
    special = [padding, *spec.leading, spec.last, *special_tokens(model.config)]
    reserved = torch.tensor([t for t in special if t is not None])
    free = next((t for t in range(vocabulary) if t not in reserved), 0)
    ids[torch.isin(ids, reserved)] = free
    ids[:, : len(spec.leading)] = whole_numbers(spec)[:, : len(spec.leading)]
    mask = torch.ones(rows, length, dtype=torch.int64)
    if rows > 1 and not books:
        mask[-1, length - (length - len(spec.leading)) // 4 :] = 0
        if padding is not None:
            ids = torch.where(mask == 0, padding, ids)
    if spec.last is not None:
        ids[torch.arange(rows), mask.sum(1) - 1] = spec.last
    types = int(getattr(model.config.get_text_config(), "type_vocab_size", 0) or 0)
    batch = {"input_ids": ids, "attention_mask": mask}
    if types > 1:
        batch["token_type_ids"] = torch.randint(0, types, ids.shape, generator=generator)
    return {name: value for name, value in batch.items() if name in accepted or name == "input_ids"}


def _length(model: Any) -> int:
    return min(TOKENS, _positions(model.config.get_text_config()))


def _positions(config: Any) -> int:
    """Tokens that the position table has room for, past the rows that some tables reserve."""
    limit = most_tokens(config)
    return max(1, limit - 2) if limit else WINDOW


def most_tokens(config: Any) -> int | None:
    """How many positions a text config names; ``None`` where it does not say."""
    names = ("max_position_embeddings", "max_target_positions")
    limits = [int(limit) for name in names if (limit := getattr(config, name, None))]
    return min(limits, default=None)


def with_masked_patches(model: Any, batch: Batch, seed: int) -> Batch | None:
    """``batch`` with half of its patches masked; ``None`` where ``forward`` takes no such mask."""
    if "bool_masked_pos" not in accepted_by(model):
        return None
    generator = torch.Generator().manual_seed(seed)
    pixels = batch["pixel_values"]
    patch = patch_size(model.config)
    patches = (pixels.shape[-2] // patch[0]) * (pixels.shape[-1] // patch[1])
    masked = torch.rand(len(pixels), patches, generator=generator) < 0.5
    return {**batch, "bool_masked_pos": masked}


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


def text_of(file: str | Path) -> str:
    """What a text file holds; ``UnsupportedModel`` where it is not UTF-8."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnsupportedModel(
            f"{file} is not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8 text"
        ) from error


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
