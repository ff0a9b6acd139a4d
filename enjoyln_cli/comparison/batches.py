"""The generated inputs on which two models are compared: seeded token ids or pixels.

They are used where the user gives no inputs (``user_data``). Every floating input is rounded to the
compute dtype first, so that the float64 model and the compute-dtype model see the same numbers. One
row of each batch of tokens is padded. If there are several batches, one of them reaches the end of
the position table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls.calls import input_sets, main_call
from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.calls.input_spec import (
    Inputs,
    InputSpec,
    patch_size,
    special_tokens,
    whole_numbers,
)
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.classes import dtype_of
from enjoyln_cli.models.meta_device import without_weights
from enjoyln_cli.text import first_line
from enjoyln_cli.trace.capture import accepts

Batch = dict[str, torch.Tensor]

TOKENS = 32
"""Usual number of tokens in a seeded row."""
LONGEST_ROW = 512
"""Number of tokens in the longest row."""
MOST_RESERVED = 8
"""Rows that a position table may have besides the rows of positions (for padding)."""
WINDOW = 256
"""Number of tokens in the windows that a text is cut into."""
ROWS_AT_ONCE = 8
"""Number of rows in a batch."""


def length(batch: Batch) -> int:
    """Its number of inputs (rows). A tensor may have a row for each patch of the pictures."""
    return min(map(len, [batch["input_ids"]] if "input_ids" in batch else batch.values()))


def first_rows(batch: Batch, rows: int) -> Batch:
    """The first ``rows`` of a batch; all of it if its tensors do not have a row for each input."""
    if len({len(value) for value in batch.values()}) > 1:
        return batch
    return {name: value[:rows] for name, value in batch.items()}


def seeded_batches(
    model: nn.Module, rows: int, seed: int, dtype: torch.dtype, at_once: int = ROWS_AT_ONCE
) -> list[Batch]:
    """``rows`` examples for a transformers model, in batches, the same for the same seed.

    A batch has ``at_once`` rows, or one row if the model takes no more.

    ``input_ids`` have shape ``(batch, 32)``, dtype int64 and values below the vocabulary size. The
    padding token appears only in padding. ``attention_mask``, token types and decoder ids are added
    if ``forward`` takes them. ``pixel_values`` are normally distributed, of shape
    ``(batch, channels, height, width)``, in ``dtype``. Raises ``UnsupportedModel`` if the model
    accepts no inputs that can be generated.
    """
    generator = torch.Generator().manual_seed(seed)
    bare = without_weights(model)
    step, chosen = _accepted_form(model, bare, min(rows, at_once, rows_at_once(model)))
    sizes = [min(step, rows - first) for first in range(0, rows, step)]
    made = {n: next(islice(input_sets(bare, n, _length(model)), chosen, None)) for n in set(sizes)}
    return [_batch(model, made[n], generator, dtype) for n in sizes]


def at_last_positions(
    model: Any, batch: Batch, seed: int, dtype: torch.dtype, unproven: Sequence[str] = ()
) -> Iterator[Batch]:
    """Batches that read the last rows of the model's position table, the cheapest first.

    First ``batch`` with other ``position_ids``, unless that input is ``unproven``. Then longer rows
    of text, but fewer, so that the number of tokens is about the same. Not every batch fits every
    table: the caller has to try them. A model without a position table yields none: rotary and
    other computed positions are not stored, and rounding can grow with the position.
    """
    limit = most_tokens(model.config.get_text_config())
    if "input_ids" not in batch or limit is None or not _has_position_table(model, limit):
        return
    rows, length = batch["input_ids"].shape[:2]
    if limit <= length:
        return
    if "position_ids" in accepted_by(model) and "position_ids" not in unproven:
        yield {**batch, "position_ids": torch.arange(limit - length, limit).repeat(rows, 1)}
    generator, bare = torch.Generator().manual_seed(seed), without_weights(model)
    for length in (limit, limit - 2):
        if not 0 < length <= LONGEST_ROW:
            continue
        rows = max(1, min(rows, ROWS_AT_ONCE * TOKENS // length))
        for inputs in input_sets(bare, rows, length):
            yield _batch(model, inputs, generator, dtype)
            break


def _has_position_table(model: Any, limit: int) -> bool:
    """Whether the model has an embedding with one row for each position, and at most a few more."""
    words = []
    for find in (model.get_input_embeddings, model.get_output_embeddings):
        with suppress(NotImplementedError, AttributeError):
            words.append(find())
    return any(
        isinstance(module, nn.Embedding)
        and limit <= len(module.weight) <= limit + MOST_RESERVED
        and not any(module is word for word in words)
        for module in model.modules()
    )


def unpadded_batches(
    model: nn.Module, sizes: Sequence[tuple[int, int]], dtype: torch.dtype
) -> list[Batch]:
    """A seeded batch for each pair of ``sizes``: so many rows with so many tokens, no padding.

    There is no mask. Inputs other than text have the size that the config gives. Raises as
    ``seeded_batches`` does.
    """
    bare = without_weights(model)
    _, chosen = _accepted_form(model, bare, sizes[0][0])
    batches = []
    for rows, tokens in sizes:
        generator = torch.Generator().manual_seed(0)
        inputs = next(islice(input_sets(bare, rows, tokens), chosen, None))
        batches.append({name: _drawn(spec, generator, dtype) for name, spec in inputs.items()})
    return batches


def _accepted_form(model: Any, bare: nn.Module, rows: int) -> tuple[int, int]:
    """The number of rows that the model takes at once (``rows`` or 1), and an index.

    ``input_sets`` has at this index the first inputs that the model accepts.
    """
    tried: list[tuple[int, int, Inputs]] = []
    for n in dict.fromkeys((rows, 1)):
        found = list(input_sets(bare, n, _length(model)))
        for position, inputs in enumerate(found):
            if len(found) == 1 or accepts(bare, main_call(bare, inputs)):
                fuller = [one for one in tried if one[0] == n and one[2].keys() > inputs.keys()]
                return _first_that_runs(model, fuller) or (n, position)
            tried.append((n, position, inputs))
    errors: list[Exception] = []
    if chosen := _first_that_runs(model, tried, errors):
        return chosen
    first = f": {first_line(errors[0])}" if errors else ""
    raise UnsupportedModel(f"could not generate inputs that {type(model).__name__} accepts{first}")


def _first_that_runs(
    model: Any, tried: Sequence[tuple[int, int, Inputs]], errors: list[Exception] | None = None
) -> tuple[int, int] | None:
    """The number of rows and the index of the first inputs that ``model`` runs with.

    Inputs that depend on values, as the sizes of pictures, cannot be run without weights.
    """
    for n, position, inputs in tried:
        try:
            with torch.no_grad():
                model(**_batch(model, inputs, torch.Generator().manual_seed(0), dtype_of(model)))
        except Exception as error:  # with wrong inputs, a model may raise any exception
            if errors is not None:
                errors.append(error)
        else:
            return n, position
    return None


def _batch(model: Any, inputs: Inputs, generator: torch.Generator, dtype: torch.dtype) -> Batch:
    batch: Batch = {}
    for name, spec in inputs.items():
        if name == "input_ids":
            batch |= _tokens(model, spec, generator)
        elif (
            name == "decoder_input_ids" and "input_ids" in batch and not inputs["input_ids"].leading
        ):
            batch[name] = batch["input_ids"].flip(1)
        else:
            batch[name] = _drawn(spec, generator, dtype)
    return batch


def _drawn(spec: InputSpec, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    if spec.below is None:
        return torch.randn(spec.shape, generator=generator).to(dtype)
    return whole_numbers(spec, generator)


def rows_at_once(model: Any) -> int:
    """Rows of a batch: 8; a sequence classifier without padding token takes only 1."""
    unpadded = getattr(model.config, "pad_token_id", None) is None
    return 1 if unpadded and "SequenceClassification" in type(model).__name__ else ROWS_AT_ONCE


def _tokens(model: Any, spec: InputSpec, generator: torch.Generator) -> Batch:
    """Token ids with padding at the end of the last row, its mask, and token types."""
    accepted = accepted_by(model)
    rows, length, *books = spec.shape
    vocabulary = spec.below or 2
    padding = getattr(model.config.get_text_config(), "pad_token_id", None)
    if not (isinstance(padding, int) and 0 <= padding < vocabulary):
        padding = None  # a config may name a token that the embedding has no row for
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
    return min(TOKENS, positions(model.config.get_text_config()))


def positions(config: Any) -> int:
    """Number of tokens that fit the position table, without the two rows that some models reserve.

    256 if the config states no number of positions.
    """
    limit = most_tokens(config)
    return max(1, limit - 2) if limit else WINDOW


def most_tokens(config: Any) -> int | None:
    """The number of positions that a text config states; ``None`` if it states none."""
    names = ("max_position_embeddings", "max_target_positions")
    limits = [int(limit) for name in names if (limit := getattr(config, name, None))]
    return min(limits, default=None)


def complete_batch(model: Any, own: Batch, dtype: torch.dtype) -> Batch:
    """The user's batch ``own`` with generated values for the other inputs that the model needs.

    For example images for a text. Returns ``own`` if no inputs fit it.
    """
    rows = length(own)
    tokens = own["input_ids"].shape[1] if "input_ids" in own else _length(model)
    bare, generator = without_weights(model), torch.Generator().manual_seed(0)
    found = list(input_sets(bare, rows, tokens))
    if own.keys() - _TEXT:  # inputs that need nothing else come first
        found.sort(key=lambda inputs: bool(inputs.keys() - own.keys() - _TEXT))
    for inputs in found:
        fits = all(own[name].shape == spec.shape for name, spec in inputs.items() if name in own)
        if own.keys() & inputs.keys() and (fits or inputs.keys() - own.keys() <= _TEXT):
            made = _batch(model, inputs, generator, dtype)
            if "input_ids" in own and "attention_mask" in made:
                made["attention_mask"] = torch.ones_like(own["input_ids"])
            return {**made, **own}
    return own


_TEXT = frozenset({"input_ids", "attention_mask", "token_type_ids", "decoder_input_ids"})
"""Inputs that do not depend on the size of a picture."""


def with_masked_patches(model: Any, batch: Batch, seed: int) -> Batch | None:
    """``batch`` with half of its patches masked; ``None`` if ``forward`` takes no patch mask."""
    if "bool_masked_pos" not in accepted_by(model):
        return None
    generator = torch.Generator().manual_seed(seed)
    pixels = batch["pixel_values"]
    patch = patch_size(model.config)
    patches = (pixels.shape[-2] // patch[0]) * (pixels.shape[-1] // patch[1])
    masked = torch.rand(len(pixels), patches, generator=generator) < 0.5
    return {**batch, "bool_masked_pos": masked}


def mask_tokens(batch: Batch, mask_token: int, seed: int) -> tuple[Batch, torch.Tensor]:
    """Replace 15 % of the tokens by the mask token, at least one per row.

    Returns the new batch and a bool tensor, shaped as ``input_ids``, that is true at the replaced
    tokens. Source: Devlin et al. 2019, section 3.1.
    """
    ids = batch["input_ids"]
    generator = torch.Generator().manual_seed(seed)
    draws = torch.rand(ids.shape, generator=generator)
    chosen = (draws < 0.15) | (draws == draws.amin(1, keepdim=True))
    return {**batch, "input_ids": torch.where(chosen, mask_token, ids)}, chosen
