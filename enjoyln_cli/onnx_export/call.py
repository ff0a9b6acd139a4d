"""The call of a model that an ONNX file computes: its inputs, outputs and dynamic axes.

It has the inputs that the model needs, with an attention mask and token types if the model takes
them. The outputs are the floating tensors that it returns by default, without the cache. An axis is
dynamic if its size follows the number of rows (``batch_size``) or of tokens (``sequence_length``,
and ``decoder_sequence_length`` for a decoder's inputs). Other sizes, such as the sizes of an image,
are fixed by the config.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls.input_sets import accepted_by
from enjoyln_cli.comparison.batches import (
    LONGEST_ROW,
    Batch,
    complete_batch,
    positions,
    unpadded_batches,
)
from enjoyln_cli.comparison.run import choose_outputs, tensors
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.arithmetic import Float64
from enjoyln_cli.models.load import refusing, silent
from enjoyln_cli.text import dtype_name

ROWS, TOKENS = 2, 7
"""Sizes of the traced call."""
OTHER_ROWS, OTHER_TOKENS = 3, 11
"""Sizes of other calls, which show the dynamic axes."""
SHORTER = 2
"""Number of tokens that a decoder gets less, so that its length is not taken for the encoder's."""
IDS, MASK, DECODER = "input_ids", "attention_mask", "decoder_"
BATCH, LENGTH = "batch_size", "sequence_length"
"""Names of dynamic axes. Clients know them (transformers.js, optimum)."""

Axes = dict[str, dict[int, str]]
"""For each input, the names of its dynamic axes by their numbers."""


@dataclass(frozen=True)
class ExportedCall:
    """One call of a model without a cache."""

    batch: Batch
    """The inputs by name, in the order of ``forward``."""
    outputs: tuple[str, ...]
    axes: Axes


@dataclass(frozen=True)
class ProgramCall:
    """The call of a module that becomes one program."""

    module: nn.Module
    """Takes tensors by position and returns a tuple of them. Its ``model`` has the parameters."""
    batch: Batch
    """The inputs by name, in the order of their positions."""
    outputs: tuple[str, ...]
    """The names of what ``module`` returns."""
    axes: Axes
    cross: tuple[str, ...] = ()
    """The outputs that are keys and values of a cross attention (see ``cross_cache``)."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What the file says of itself besides."""

    def __call__(self) -> tuple[torch.Tensor, ...]:
        """Run the call once, in torch."""
        found: tuple[torch.Tensor, ...] = self.module(*self.batch.values())
        return found


def call_to_export(model: Any, outputs: Sequence[str], dtype: torch.dtype) -> ExportedCall:
    """The call to export. ``outputs`` are names or patterns of outputs; if empty, all are exported.

    Runs the model once. Raises ``UnsupportedModel`` if no inputs can be made for it, if it does not
    run in ``dtype``, or if none of its outputs is named.
    """
    tokens = min(OTHER_TOKENS, positions(model.config.get_text_config()))
    few = max(1, min(TOKENS, tokens - 1))
    sizes = ((ROWS, few), (OTHER_ROWS, few), (ROWS, tokens))
    batch, of_other_rows, of_other_length = batches_of(model, sizes, dtype)
    other = {BATCH: of_other_rows, LENGTH: of_other_length}
    axes = {
        name: {
            at: f"{DECODER}{axis}" if axis == LENGTH and name.startswith(DECODER) else axis
            for axis, changed in other.items()
            for at, size in enumerate(value.shape)
            if size != changed[name].shape[at]
        }
        for name, value in batch.items()
    }
    exact = Float64() if dtype == torch.float64 else nullcontext()
    words = f"{type(model).__name__} does not run in {dtype_name(dtype)}"
    with torch.no_grad(), silent(), exact, refusing(UnsupportedModel, words):
        found = dict(tensors(model(**batch, **without_cache(model))))
    return ExportedCall(batch, tuple(choose_outputs([found], outputs)[0]), axes)


def batches_of(model: Any, sizes: Sequence[tuple[int, int]], dtype: torch.dtype) -> list[Batch]:
    """Inputs without padding, in the order of ``forward``; floating inputs in ``dtype``.

    Each pair of ``sizes`` is a number of rows and of tokens. A decoder gets shorter inputs than its
    encoder.
    """
    batches = []
    for (_, tokens), batch in zip(sizes, unpadded_batches(model, sizes, dtype), strict=True):
        found = complete_batch(model, batch, dtype)
        for name, value in found.items():
            if name.startswith(DECODER) and value.shape[1:2] == (tokens,):
                found[name] = value[:, : max(1, tokens - SHORTER)]
        order = [name for name in inspect.signature(model.forward).parameters if name in found]
        batches.append({name: found[name] for name in dict.fromkeys((*order, *found))})
    return batches


def without_cache(model: Any) -> dict[str, Any]:
    """Arguments that turn the cache off, if ``forward`` takes any.

    Otherwise ``use_cache`` would be passed on to the model inside, in a call that the
    proof does not cover.
    """
    return {"use_cache": False} if "use_cache" in accepted_by(model) else {}


class Positional(nn.Module):
    """A model that takes its inputs by position, and returns the chosen outputs as a tuple."""

    def __init__(self, model: nn.Module, call: ExportedCall) -> None:
        super().__init__()
        self.model = model
        self.call = call
        self.eval()

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip(self.call.batch, args, strict=True))
        found = dict(tensors(self.model(**given, **without_cache(self.model))))
        return tuple(found[name] for name in self.call.outputs)


def batches_of_other_sizes(model: Any, call: ExportedCall, dtype: torch.dtype) -> Iterator[Batch]:
    """Batches of sizes that were not traced: one row, one token, the longest row, and padding.

    The rows of the last batch are padded on the left by different numbers of tokens.
    """
    named = {axis for axes in call.axes.values() for axis in axes.values()}
    if not any(axis.endswith(LENGTH) for axis in named):
        yield from batches_of(model, ((1, TOKENS),), dtype)
        return
    longest = min(LONGEST_ROW, positions(model.config.get_text_config()))
    sizes = ((1, 1), (1, longest), (5, min(13, longest)))
    found = batches_of(model, sizes, dtype)
    yield from found
    if MASK in found[-1]:
        mask = found[-1][MASK].clone()
        for row in range(1, len(mask)):
            mask[row, : row * mask.shape[1] // (len(mask) + 1)] = 0
        yield {**found[-1], MASK: mask}
