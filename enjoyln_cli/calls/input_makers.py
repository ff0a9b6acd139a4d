"""Derive the inputs of a model from its config: one maker for each known input (``MAKERS``).

A maker derives names, shapes and ranges from the config alone. The config may leave some of these
open, so a maker yields alternatives, the most likely first. Each alternative is a set of inputs
that belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from enjoyln_cli.calls.input_spec import (
    Inputs,
    InputSpec,
    hidden_size,
    image_size,
    ones,
    pair,
    patch_size,
    positions,
    vision_configs,
    vocabulary,
    with_parts,
)

SAMPLES = 3600
"""Length of raw audio: about ten frames with the usual stride of 320 samples."""
FRAMES = 32
"""Number of frames of audio features, if the config does not give it."""
GRID = 4
"""Patches per side of an image, for models that take images as rows of patches."""


def _ids(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    end = getattr(config, "eos_token_id", None)
    # Encoder-decoder classifiers read the output at the end-of-text token of each row.
    last = end if isinstance(end, int) and getattr(config, "is_encoder_decoder", False) else None
    ids: Inputs = {"input_ids": InputSpec((rows, tokens), vocabulary(config), last=last)}
    if entities := int(getattr(config, "entity_vocab_size", 0) or 0):
        places = InputSpec((rows, GRID, 3), tokens)
        yield {
            **ids,
            "entity_ids": InputSpec((rows, GRID), entities),
            "entity_position_ids": places,
        }
    yield {**ids, "bbox": InputSpec((rows, tokens, 4), 1)}  # every token at the page's corner
    yield {**ids, "bbox": InputSpec((rows, tokens, 8))}
    yield {
        **ids,
        "visual_feats": InputSpec((rows, GRID, int(getattr(config, "visual_feat_dim", 1) or 1))),
        "visual_pos": InputSpec((rows, GRID, 4)),
    }
    yield ids
    if books := int(getattr(config, "num_codebooks", 0) or 0):  # a row for each of them
        codes = InputSpec((rows * books, tokens), vocabulary(config))
        yield {"input_ids": codes, "attention_mask": ones(rows, tokens)}
        below = int(getattr(config, "codebook_vocab_size", 0) or vocabulary(config))
        codes = InputSpec((rows, tokens, books + 1), min(below, vocabulary(config)))
        yield {"input_ids": codes, "attention_mask": ones(rows, tokens)}  # text and sound at once


def _number(config: Any, *names: str, default: int) -> int:
    """The first of these attributes that is a number in some vision config, else ``default``."""
    found = (getattr(c, name, None) for c in vision_configs(config) for name in names)
    return next((value for value in found if isinstance(value, int) and value), default)


def _channels(config: Any) -> int:
    return _number(config, "num_channels", "in_channels", "in_chans", default=3)


def _pixels(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    channels = _channels(config)
    height, width = image_size(config)
    image = (channels, height, width)
    sizes = InputSpec((rows, 2), height + 1, (height, width))
    yield {"pixel_values": InputSpec((rows, *image)), "image_sizes": sizes}
    yield {"pixel_values": InputSpec((rows, *image))}
    if frames := _number(config, "num_frames", default=0):
        yield {"pixel_values": InputSpec((rows, frames, *image))}
    yield from _patches(config, rows, channels)
    prompted = dict.fromkeys(("pixel_values", "prompt_pixel_values", "prompt_masks"))
    yield dict.fromkeys(
        prompted, InputSpec((rows, channels, height // 2, width))
    )  # stacked on another
    tile = InputSpec((rows, 1, *image))
    yield {"pixel_values": tile, "pixel_attention_mask": ones(rows, 1, *image[1:])}
    yield {"pixel_values": tile, "pixel_attention_mask": replace(ones(rows, 1), truth=True)}
    tiles = _number(config, "max_num_tiles", default=1)
    yield {
        "pixel_values": InputSpec((rows, 1, tiles, *image)),
        "aspect_ratio_ids": InputSpec((rows, 1), 2, (1,)),
        "aspect_ratio_mask": ones(rows, 1, tiles),
        "cross_attention_mask": ones(rows, tokens, 1, tiles),
    }
    for crops in (2, 3, 5, 7):
        yield {"pixel_values": InputSpec((rows, crops, *image)), "image_sizes": sizes}
    yield {
        "pixel_values": InputSpec((rows, 1, *image)),
        "image_attention_mask": ones(rows, tokens, 1),
    }
    yield {"pixel_values": InputSpec((rows, 2, *image))}


def _patches(config: Any, rows: int, channels: int) -> Iterator[Inputs]:
    """Images as rows of patches, of ``GRID x GRID`` patches each."""
    side = patch_size(config)[0]
    frames = _number(config, "temporal_patch_size", "patch_temporal", default=1)
    count, width = rows * GRID * GRID, channels * side * side
    grid = InputSpec((rows, 3), GRID + 1, (1, GRID, GRID))
    sides = InputSpec((rows, 2), GRID + 1, (GRID, GRID))
    merge = _number(config, "spatial_merge_size", default=2)
    for shape in (
        (count, width * frames), (count, channels, side, side), (1, count, width * frames),
        (count, channels, frames, side, side),
    ):  # fmt: skip
        for name in ("grid_thw", "image_grid_thw"):
            merges = InputSpec((rows,), merge + 1, (merge,) * rows)
            for sizes in ("merge_sizes", "image_merge_sizes"):
                yield {"pixel_values": InputSpec(shape), name: grid, sizes: merges}
            yield {"pixel_values": InputSpec(shape), name: grid}
    merged = (rows * GRID * GRID, merge * side, merge * side, channels)  # merged patches
    yield {"pixel_values": InputSpec(merged), "image_grid_thw": grid}
    yield {"pixel_values": InputSpec((count, width)), "image_grid_hw": sides}
    yield {"pixel_values": InputSpec((count, width))}
    for name in ("spatial_shapes", "image_grid_hw", "image_position_ids"):
        yield {
            "pixel_values": InputSpec((rows, GRID * GRID, width)),
            "pixel_attention_mask": ones(rows, GRID * GRID),
            name: sides,
        }
    places = _number(config, "num_position_embeddings", default=GRID * GRID)
    yield {  # several patches are pooled for each image token
        "pixel_values": InputSpec((rows, places, width)),
        "image_token_pooling": InputSpec((rows * GRID, GRID), rows * places),
        "image_grids": InputSpec((rows, 4), GRID + 1, (1, GRID, 0, 0)),
    }
    yield {  # each sample has an input image and an image to generate
        "pixel_values": InputSpec((count, width)),
        "image_grid_thw": InputSpec((2 * rows, 3), GRID + 1, (1, GRID, GRID)),
        "images_per_sample": InputSpec((rows,), 3, (2,) * rows),
        "position_ids": positions(rows, 1),
    }
    yield {  # one row of all patches of all images
        "pixel_values": InputSpec((1, channels, side, count * side)),
        "target_sizes": sides,
    }


def _crops(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """A downscaled copy and one crop of each image, with a mask over their patches."""
    channels = _channels(config)
    height, width = image_size(config)
    patch = patch_size(config)
    crop = _number(config, "crop_size", default=height)
    yield {
        "image_pixel_values": InputSpec((rows, 2, channels, height, width)),
        "image_sizes": InputSpec((rows, 2), crop + 1, (crop, crop)),
        "image_attention_mask": ones(rows, 2, height // patch[0], width // patch[1]),
    }


def _states(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Inputs for a vision tower whose argument for patches is called ``hidden_states``."""
    channels = _channels(config)
    for inputs in _patches(config, rows, channels):
        yield {"hidden_states" if name == "pixel_values" else name: s for name, s in inputs.items()}
    yield {"hidden_states": InputSpec((rows, tokens, hidden_size(config)))}


def _videos(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    channels = _channels(config)
    frames = _number(config, "num_frames", "frames_per_clip", default=4)
    yield {"pixel_values_videos": InputSpec((rows, frames, channels, *image_size(config)))}


def _boxes(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Box prompts for a segmentation; labels say whether a box is positive or negative."""
    boxes = {"input_boxes": InputSpec((rows, GRID, 4))}
    yield {**boxes, "input_boxes_labels": InputSpec((rows, GRID), 2)}
    yield boxes


def _masks(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """A mask prompt, with the size from the config or four times as fine as the patch grid."""
    for part in vision_configs(getattr(config, "prompt_encoder_config", config)):
        if isinstance(size := getattr(part, "mask_input_size", None), (list, tuple)):
            yield {"input_masks": InputSpec((rows, 1, *pair(size)))}
        if (side := getattr(part, "image_size", 0)) and (patch := getattr(part, "patch_size", 0)):
            sides = (4 * (length // patch) for length in pair(side))
            yield {"input_masks": InputSpec((rows, 1, *sides))}


def _tiles(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    yield {"tile_fine_mask": InputSpec((rows, 1), 2, (1,), truth=True)}


def _features(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Audio features, with masks or lengths; the order of channels and frames varies."""
    hop = getattr(getattr(config, "audio_config", config), "hop_length", None)
    for shape, frames in dict.fromkeys(_feature_shapes(config, rows)):
        if isinstance(hop, int):
            samples = InputSpec((rows,), hop * frames + 1, (hop * frames,) * rows)
            yield {"input_features": InputSpec(shape), "chunk_sample_lengths": samples}
        for mask in ("input_features_mask", "feature_attention_mask"):
            yield {"input_features": InputSpec(shape), mask: ones(rows, frames)}
        yield {"input_features": InputSpec(shape)}


def _feature_shapes(config: Any, rows: int) -> Iterator[tuple[tuple[int, ...], int]]:
    parts = (
        "audio_config", "encoder_config", "audio_encoder_config", "decoder_config",
        "semantic_model_config",
    )  # fmt: skip
    named = [part for n in parts if hasattr(part := getattr(config, n, None), "to_dict")]
    owners = with_parts(with_parts([config, *named]))
    for owner in owners:
        bins, places = (
            getattr(owner, name, None) for name in ("num_mel_bins", "max_source_positions")
        )
        if bins and places:
            yield (rows, int(bins), 2 * int(places)), 2 * int(places)
        window = getattr(owner, "n_window", None)
        if isinstance(bins, int) and isinstance(window, int):
            yield (rows, bins, 2 * window), 2 * window
    widths = (
        "num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim",
        "input_feat_size", "input_size", "n_mels", "feature_size",
    )  # fmt: skip
    for owner in owners:
        for width in (getattr(owner, name, None) for name in widths):
            if isinstance(width, int):
                yield (rows, FRAMES, width), FRAMES
                yield (rows, width, FRAMES), FRAMES
                yield (rows, 1, FRAMES, width), FRAMES
                yield (rows, 1, int(getattr(owner, "spec_size", FRAMES)), width), FRAMES
    for owner in owners:
        channels = getattr(owner, "subsampling_conv_channels", None)
        if isinstance(channels, (list, tuple)) and channels:  # as many mel bins as first channels
            yield (rows, FRAMES, int(channels[0])), FRAMES
        if bins := getattr(owner, "num_mel_bins", None):
            yield (rows, FRAMES, 4 * int(bins)), FRAMES  # four frames stacked
    if hop := getattr(config, "hop_length", None):  # for models that also take the raw audio
        frames = SAMPLES // int(hop)
        for width in (getattr(owner, "feature_projection_input_dim", None) for owner in owners):
            if isinstance(width, int):
                yield (rows, frames, width), frames


def _sound(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Audio features, with the number of tokens that each sample becomes."""
    sound = getattr(config, "audio_config", config)
    reduced = -(-FRAMES // int(getattr(sound, "time_reduction", 1)))
    yield {
        "audio_input_features": InputSpec(
            (rows, FRAMES, int(getattr(sound, "input_size", FRAMES)))
        ),
        "audio_embed_sizes": InputSpec((rows,), reduced + 1, (reduced,) * rows),
        "audio_attention_mask": ones(rows, FRAMES),
    }


def _samples(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    bins, length = getattr(config, "num_mel_bins", None), getattr(config, "max_length", None)
    if isinstance(bins, int) and isinstance(length, int):
        yield {"input_values": InputSpec((rows, length, bins))}
    yield {"input_values": InputSpec((rows, SAMPLES))}
    yield {"input_values": InputSpec((rows, 1, SAMPLES))}
    features = InputSpec((rows, tokens, hidden_size(config)))
    yield {"input_values": features, "decoder_input_values": features}
    yield {"input_values": features}


def _past_values(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Time series; the context is extended by the longest lag."""
    lags = getattr(config, "lags_sequence", None) or [0]
    length = int(getattr(config, "context_length", None) or tokens) + max(lags)
    channels = int(getattr(config, "num_input_channels", 0) or 0)
    shape = (rows, length, channels) if channels else (rows, length)
    times = int(getattr(config, "num_time_features", 0) or 0)
    ahead = int(getattr(config, "prediction_length", None) or tokens)
    past = {
        "past_values": InputSpec(shape),
        "past_time_features": InputSpec((rows, length, times)),
        "past_observed_mask": ones(*shape),
    }
    yield {
        **past,
        "future_values": InputSpec((rows, ahead, *shape[2:])),
        "future_time_features": InputSpec((rows, ahead, times)),
    }
    yield past
    patch = int(getattr(config, "patch_length", 0) or 1)
    series = InputSpec((rows, patch * GRID))
    padding = replace(series, below=1)
    yield {"past_values": series, "past_values_padding": padding, "freq": InputSpec((rows, 1), 2)}
    yield {"past_values": InputSpec(shape)}


def _latents(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Latents for a decoder, with channels before frames or after them."""
    for name in ("latent_dim", "hidden_size"):
        if width := getattr(config, name, None):
            yield {"latents": InputSpec((rows, int(width), tokens))}
            yield {"latents": InputSpec((rows, tokens, int(width)))}


def _trajectory(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    widths = {"states": "state_dim", "actions": "act_dim"}
    given = {
        n: InputSpec((rows, tokens, getattr(config, w)))
        for n, w in widths.items()
        if hasattr(config, w)
    }
    ones_wide = {name: InputSpec((rows, tokens, 1)) for name in ("rewards", "returns_to_go")}
    yield {**given, **ones_wide, "timesteps": InputSpec((rows, tokens), 2)}


def _hidden(name: str) -> Callable[..., Iterator[Inputs]]:
    def maker(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
        yield {name: InputSpec((rows, tokens, hidden_size(config)))}

    return maker


def _inputs(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    """Inputs for a model whose argument is ``inputs``: images, token ids, audio, or features."""
    yield from _pixels(config, rows, tokens)
    yield {"inputs": InputSpec((rows, tokens), vocabulary(config))}
    yield {"inputs": InputSpec((rows, SAMPLES))}
    yield {"inputs": InputSpec((rows, tokens, hidden_size(config)))}


def _queries(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
    width = int(getattr(config, "encoder_hidden_size", 0) or hidden_size(config))
    queries = InputSpec((rows, tokens, hidden_size(config)))
    yield {"query_embeds": queries, "encoder_hidden_states": InputSpec((rows, GRID, width))}


def _text_of(name: str, part: str) -> Callable[..., Iterator[Inputs]]:
    def maker(config: Any, rows: int, tokens: int) -> Iterator[Inputs]:
        length = int(getattr(config, "task_seq_len", tokens))
        yield {name: InputSpec((rows, length), vocabulary(getattr(config, part, config)))}

    return maker


MAKERS: dict[str, Callable[..., Iterator[Inputs]]] = {
    "input_ids": _ids,
    "pixel_values": _pixels,
    "pixel_values_videos": _videos,
    "image_pixel_values": _crops,
    "input_features": _features,
    "audio_input_features": _sound,
    "input_values": _samples,
    "hidden_states": _states,
    "past_values": _past_values,
    "latents": _latents,
    "input_boxes": _boxes,
    "input_masks": _masks,
    "tile_fine_mask": _tiles,
    "states": _trajectory,
    "inputs_embeds": _hidden("inputs_embeds"),
    "query_embeds": _queries,
    "inputs": _inputs,
    "qformer_input_ids": _text_of("qformer_input_ids", "qformer_config"),
    "task_inputs": _text_of("task_inputs", "text_config"),
}
"""For each known input, a function that yields alternatives, each with all inputs that belong to
it."""
