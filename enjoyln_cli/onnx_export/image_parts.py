"""A model of pictures and text in the parts that transformers.js reads.

* ``vision_encoder`` computes ``image_features`` from pictures, a row for each image token;
* ``embed_tokens`` computes ``inputs_embeds`` from tokens;
* ``decoder_model_merged`` reads ``inputs_embeds``, in which the features have taken the place of
  the embeddings of image tokens, after what is in its cache.

No class is known by name. The features are what ``get_image_features`` returns; the encoder ends
with the module that returns them. All parts are run once in torch: if their logits are not the
whole model's, its pictures have another way into it, and it is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from enjoyln_cli.calls.generation import generated_positions
from enjoyln_cli.calls.processed_inputs import image_token
from enjoyln_cli.comparison.batches import Batch
from enjoyln_cli.errors import UnsupportedModel
from enjoyln_cli.models.load import refusing, silent
from enjoyln_cli.models.outputs import tensors_in
from enjoyln_cli.onnx_export.cached_calls import (
    MERGED,
    NEW,
    POSITIONS,
    cached_call,
    needs_positions,
)
from enjoyln_cli.onnx_export.call import BATCH, IDS, LENGTH, MASK, Axes, ProgramCall
from enjoyln_cli.runtime.call_guards import as_in_a_call

VISION, EMBED = "vision_encoder", "embed_tokens"
"""The names of programs, and so of files."""
PIXELS, FEATURES, EMBEDS, GRID = "pixel_values", "image_features", "inputs_embeds", "image_grid_thw"
IMAGE_TOKEN = "image_token_id"
"""The metadata of ``vision_encoder`` with the token whose embeddings the features replace."""
GRIDS = {"qwen2_vl": "grid_thw"}
"""What transformers.js calls ``image_grid_thw``, for model types with another name."""
_NO_PARTS = "cannot be exported in parts, as pictures and text"
PICTURES = 3
"""Pictures of a row in the traced call."""
SEGMENTS = "flash_attention_in_segments"
"""The name of ``_in_segments`` for transformers, which hands the bounds of sequences to attentions
that have ``flash`` in their names."""


def reads_pictures(batch: Batch) -> bool:
    """Whether the inputs of a model are pictures and text."""
    return {IDS, PIXELS} <= batch.keys()


def part_calls(model: Any, batch: Batch, axes: Axes) -> dict[str, ProgramCall]:
    """The calls to trace, by the names of their programs.

    ``batch`` are inputs of ``model``, with their dynamic ``axes``. Raises ``UnsupportedModel`` if
    pictures do more than to replace the embeddings of image tokens, or if there is no cache.
    """
    kind, token = type(model).__name__, image_token(model.config)
    method = getattr(model, "get_image_features", None)
    given = inspect.signature(method).parameters if method else {}
    read = {name: batch[name] for name in given if name in batch}
    if token is None or PIXELS not in read:
        raise _no_parts(kind, "pictures do not take the place of tokens in its text")
    ids = batch[IDS]
    words = f"{kind} {_NO_PARTS}: running them failed"
    with torch.no_grad(), silent(), refusing(UnsupportedModel, words):
        encoder = ImageEncoder(model, tuple(read), *_source_of_features(model, read))
        embeddings = Embedding(model)
        (found,) = encoder(*read.values())
        (embedded,) = embeddings(ids)
        merged = with_features(embedded, ids == token, found)
        positions = generated_positions(model, batch)
        told = {MASK: batch.get(MASK, torch.ones_like(ids))}
        told |= {POSITIONS: positions} if positions.ndim > 2 else {}
        logits = model(**{EMBEDS: merged, **told}).logits
        exact = model(**batch).logits
    if not _nearly_equal(logits, exact):
        raise _no_parts(kind, "its pictures change more than the embeddings of image tokens")
    width = {EMBEDS: {0: BATCH, 1: LENGTH}}
    places = told.get(POSITIONS)
    if places is None and needs_positions(model, ids[:, -NEW:]):
        places = positions
    return {
        VISION: _image_call(model, encoder, read, axes, len(ids), token),
        EMBED: ProgramCall(embeddings, {IDS: ids}, (EMBEDS,), {IDS: width[EMBEDS]}),
        MERGED: cached_call(model, {EMBEDS: embedded}, width, places),
    }


def with_features(
    embedded: torch.Tensor, is_image: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """``embedded``, of shape ``(rows, tokens, width)``, with features where ``is_image`` is true.

    ``features``, of shape ``(..., width)``, are taken in the order of rows and tokens. Raises
    ``UnsupportedModel`` if there are not as many as image tokens.
    """
    features = features.reshape(-1, features.shape[-1])
    if int(is_image.sum()) != len(features):
        raise UnsupportedModel(
            f"the text has {int(is_image.sum())} image tokens, and the pictures {len(features)}"
        )
    return embedded.masked_scatter(is_image[..., None], features.to(embedded.dtype))


def image_inputs(names: Iterable[str], given: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The inputs of ``vision_encoder`` among ``given``, by transformers' names."""
    found = {name: given.get(name, given.get(f"image_{name}")) for name in names}
    return {name: as_read(name, value) for name, value in found.items() if value is not None}


def as_read(name: str, value: torch.Tensor) -> torch.Tensor:
    """An input as clients pass it: masks of pixels are true or false in transformers.js."""
    return value.bool() if name.endswith("mask") else value


class Embedding(nn.Module):
    """The token embeddings of a model."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The embeddings, of shape ``(rows, tokens, width)``."""
        return (self.model.get_input_embeddings()(*args),)


class ImageEncoder(nn.Module):
    """What a model computes from its pictures, by position, up to the features of image tokens.

    What ``get_image_features`` does with them afterwards, such as giving each picture its own,
    depends on their values and cannot be traced.
    """

    def __init__(self, model: Any, names: tuple[str, ...], path: str, at: int) -> None:
        super().__init__()
        self.model, self.names, self.path, self.at = model, names, path, at
        self.eval()

    def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The features, of shape ``(tokens, width)``."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        given: dict[str, Any] = dict(zip(self.names, args, strict=True))
        tower = self.model.get_encoder(modality="image").config
        before = tower._attn_implementation
        if GRID in given:
            given |= _precomputed(self.model, given[GRID], given[PIXELS].shape[0])
            ALL_ATTENTION_FUNCTIONS.register(SEGMENTS, _in_segments)
            tower._attn_implementation = SEGMENTS
        module, found = self.model.get_submodule(self.path), []
        kind = type(module)

        def compute(this: nn.Module, *inputs: Any, **others: Any) -> Any:
            found.append(tensors_in(kind.__call__(this, *inputs, **others))[self.at])
            raise _Found

        module.__class__ = type(kind.__name__, (kind,), {"__call__": compute})
        try:
            with as_in_a_call(self.model, dict.fromkeys(self.names, 0)):
                self.model.get_image_features(**given)
        except _Found:
            pass
        finally:
            module.__class__ = kind
            tower._attn_implementation = before
        return (found[0].reshape(-1, found[0].shape[-1]),)


class _Found(Exception):
    """The features are computed."""


def _source_of_features(model: Any, given: Batch) -> tuple[str, int]:
    """The outermost module that returns the features, and which of its outputs they are."""
    seen: list[tuple[str, int, torch.Tensor]] = []

    def note(path: str) -> Any:
        def hook(module: nn.Module, inputs: Any, result: Any) -> None:
            seen.extend((path, at, value) for at, value in enumerate(tensors_in(result)))

        return hook

    hooks = [module.register_forward_hook(note(path)) for path, module in model.named_modules()]
    try:
        result = model.get_image_features(**given)
    finally:
        for hook in hooks:
            hook.remove()
    pooled = getattr(result, "pooler_output", None)
    parts = tensors_in(result if pooled is None else pooled)
    exact = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    for path, at, value in reversed(seen):
        fits = value.numel() == exact.numel() and value.shape[-1] == exact.shape[-1]
        if fits and torch.equal(value.reshape(exact.shape), exact):
            return path, at
    raise _no_parts(type(model).__name__, "no module returns the features of its pictures")


def _image_call(
    model: Any, encoder: ImageEncoder, read: Batch, axes: Axes, rows: int, token: int
) -> ProgramCall:
    """The call of ``encoder``, in which the numbers of rows and pictures are dynamic."""
    tiled = read[PIXELS].ndim > 4  # several pictures in a row
    named: Axes = {}
    for name, value in read.items():
        is_of_row = len(value) == rows
        named[name] = {0: BATCH if is_of_row else "num_patches"} if axes.get(name) else {}
        if tiled and name.startswith("pixel_"):
            read = {**read, name: torch.cat([value] * PICTURES, 1)}
            named[name][1] = "num_images"
    client = {GRID: GRIDS.get(model.config.model_type, GRID)}
    return ProgramCall(
        encoder,
        {client.get(name, name): as_read(name, value) for name, value in read.items()},
        (FEATURES,),
        {client.get(name, name): dims for name, dims in named.items()},
        metadata={IMAGE_TOKEN: str(token)},
    )


def _precomputed(model: Any, grid: torch.Tensor, patches: int) -> dict[str, Any]:
    """What transformers would compute from the values of ``grid`` in Python.

    ``grid``, of shape ``(pictures, 3)``, has their numbers of patches in time, height and width.
    The rows of ``image_position_ids`` are the height and width of each patch; patches that become
    one token stand together.
    """
    merges = (getattr(module, "spatial_merge_size", None) for module in model.modules())
    merge = next((size for size in merges if isinstance(size, int)), 1)
    ends = grid.prod(1).cumsum(0)
    at = torch.arange(patches, device=grid.device)
    picture = (at[:, None] >= ends).sum(1)
    _, height, width = grid[picture].unbind(1)
    at = (at - (ends - grid.prod(1))[picture]) % (height * width)
    token, inside = at // merge**2, at % merge**2
    per_line = width // merge
    top, left = token // per_line * merge, token % per_line * merge
    places = torch.stack([top + inside // merge, left + inside % merge], 1)
    return {"image_position_ids": places, "image_max_seqlen": 1}


def _in_segments(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    *,
    scaling: float,
    cu_seq_lens_q: torch.Tensor,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention within the sequences that end at the ``cu_seq_lens_q``, which follow each other.

    The shapes are as for all attentions in transformers: ``(1, heads, length, features)``.
    """
    at = torch.arange(query.shape[2], device=query.device)
    sequence = (at[:, None] >= cu_seq_lens_q[1:]).sum(1)
    scores = query @ key.transpose(2, 3) * scaling
    apart = sequence[:, None] != sequence
    scores = scores.masked_fill(apart, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2), None


def _nearly_equal(found: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether two results are the same up to rounding."""
    allowed = torch.finfo(exact.dtype).eps ** 0.5
    return float((found - exact).float().norm()) <= allowed * float(exact.float().norm())


def _no_parts(kind: str, why: str) -> UnsupportedModel:
    return UnsupportedModel(f"{kind} {_NO_PARTS}: {why}")
