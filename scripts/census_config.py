"""Shrinks the default config of a model type until its model is small enough for the census.

The default configs have the size of a published model. If a model consists of several parts, the
defaults of two parts can disagree. The changes made here keep a model that its authors could have
trained: heads divide the features, and each part reads the size that another one writes.
"""

from __future__ import annotations

import math
import re
from typing import Any

LAYERS = re.compile(
    r"(?<!extract_)layers?$|^depths?$|num_blocks|_depth$|num_.*(?<!extract)_layers|n_layers?"
    r"|attends_per_block"
)
WIDTHS = re.compile(
    r"hidden|embed|dim|width|channels|inner|ffn|intermediate|d_model|d_ff|d_kv|n_embd|rank|proj|size"
    r"|channel_list|out_channel$|d_latents|filters$"
)
FIXED = re.compile(
    r"vocab|image|patch(?!_embeds_hidden)|kernel|window|position|pos_emb|num_channels|batch|pad|group|type|stride|tile|crop"
    r"|max_|token|dilation|pool_size|_id|scale|spec|bins|(?<!adapter_)input_size|in_channels|n_mels|(?<!down)sample"
    r"|feature_size"
)
WIDTH = ("hidden_size", "d_model", "embed_dim", "hidden_dim")
HEADS_OF = (
    "num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads",
    "attention_heads",
)  # fmt: skip
IMAGES = ("image_size", "max_img_size")
INDICES = re.compile(r"((?<!out_)indices|indexes|feature_layers?|cross_attention_layers)$")
DEPTHS = ("depth", "num_hidden_layers", "encoder_layers")
EXPERTS = re.compile(r"(num|routed)_experts$|expert_num$")
TEXT_IDS = re.compile(r"_(token|patch)_id$|_token_index$")
VOCABULARY = 131
SIDE = 128
"""Side of shrunken images: a power of two, so that patches can be merged."""
GIVEN = {
    "vocab_size": VOCABULARY, "image_token_id": 70, "image_token_index": 70, "pad_token_id": 1,
    "video_token_id": 71, "video_token_index": 71, "audio_token_id": 72, "audio_token_index": 72,
    "prediction_length": 6, "context_length": 12, "mlp_layer_types": ["dense", "sparse"],
    "attn_layer_indices": [1], "num_experts_per_tok": 2,
    "default_language": "en_XX", "vocabulary_map": {"<image>": 70} | {
        "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z": code % 64
        for code in range(8192)  # image tokens, named as in Chameleon's vocabulary
    },
}  # fmt: skip
"""Settings that a config leaves open although the model needs them."""
BEGUN = {
    "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
    "indexer_compress_ratio": 2, "indexer_budget": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1,
    "indexer_head_dim": 16, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "layer_types": ["conv", "full_attention"], "downsample_rate": "1/2",
    "deepstack_layer_map": [[-2, 0], [-1, 1]], "spatial_target_layers": [0, 1, 0, 1],
    "projector_scale_factors": [1.0], "is_decoder": True, "top_k_experts": 2,
}  # fmt: skip
"""Settings that a config leaves open or empty, for models that cannot run without them."""
ABSENT = {
    "rope_theta": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "num_key_value_heads": {"num_key_value_heads": 8},
    "dropout_rate": {"dropout_rate": 0.0},
}
"""From an attribute that some default configs lack although their models read it, to the settings
that such a config gets."""
CORRECTED = {
    "attn_layer_period": 2, "attn_layer_offset": 1,
    "mm_tokens_per_image": 4, "downsample_mode": "16x", "num_cross_attention_heads": 1,
    "projector_patch_to_query_dict": {n * n: n for n in range(65)},
}  # fmt: skip
"""Settings in which a default config contradicts its own default image size, and those that would
leave two layers without attention."""


def shrink(config: Any, factor: int, side: int | None = None) -> None:
    """Use fewer layers, all narrower by one factor, and a small vocabulary in every sub-config.

    Images larger than ``side`` get ``SIDE`` pixels or a few less, so that the number of patches
    along a side is a power of two.
    """
    if config.model_type == "timm_wrapper":
        return  # its architecture name fixes all other settings
    if vars(config).get("num_feature_levels", 1) > 3:
        factor = min(factor, 4)  # the fourth level is one pixel, normalised in 32 groups
    stages = vars(config).get("num_hidden_layers") if "stage_names" in vars(config) else None
    before = _depth(config)
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            shrink(value, factor, side)
        elif name in IMAGES and side is not None and _larger(value, side):
            patch = getattr(config, "patch_size", 1)
            patch = patch[0] if isinstance(patch, (list, tuple)) and patch else patch
            patch = patch if isinstance(patch, int) and 0 < patch <= SIDE else 1
            smaller = patch * 2 ** int(math.log2(SIDE // patch))
            if isinstance(value, int):
                setattr(config, name, smaller)
            else:  # two images, one above the other
                times = [length // min(value) for length in value]
                whole = all(length % min(value) == 0 for length in value)
                setattr(config, name, [smaller * n if whole else smaller for n in times])
            if "image_embedding_size" in vars(config):
                config.image_embedding_size = smaller // patch
        elif isinstance(value, dict) and (sections := value.get("mrope_section")):
            if all(section % factor == 0 for section in sections):
                value["mrope_section"] = [section // factor for section in sections]
        elif isinstance(value, bool) or name.startswith("_"):
            continue
        elif name in GIVEN and value is None or name in CORRECTED:
            setattr(config, name, GIVEN.get(name, CORRECTED.get(name)))
        elif isinstance(value, (int, list, tuple)) and (new := _smaller(name, value, factor)):
            try:
                setattr(config, name, new)
            except (AttributeError, TypeError, ValueError):
                continue
    kinds = vars(config).get("layer_types")
    if kinds and set(kinds) == {"linear_attention"} and "num_attention_heads" in vars(config):
        kinds = ["linear_attention", "full_attention"]  # the cache counts tokens by attention
    if isinstance(kinds, (list, tuple)) and kinds and isinstance(kinds[0], str):
        depth = max(2, *(1 + list(kinds).index(kind) for kind in kinds))
        config.layer_types, config.num_hidden_layers = list(kinds[:depth]), depth
        if vars(config).get("rope_parameters") == {}:
            rotary = {"rope_type": "default", "rope_theta": 10000.0}
            config.rope_parameters = {kind: dict(rotary) for kind in config.layer_types}
    _cut(config, before)
    if isinstance(stages, int) and max(config.out_indices or [0]) > config.num_hidden_layers:
        config.num_hidden_layers = stages  # later stages of this backbone are read
    if {"vision_config", "audio_config"} <= vars(config).keys():
        for name in {"vision_start_token_id", "audio_start_token_id"} - set(dir(config)):
            setattr(config, name, 73)
    if "mm_tokens_per_image" in vars(config):
        config.yes_token_index, config.no_token_index = 80, 81  # for the classifier of such images
    _link(config)
    _divide(config)
    _choose(config)
    _fit_rotary_sections(config)
    own = vars(config)
    if own.get("sliding_window", 0) is None and "sliding_attention" in (kinds or ()):
        config.sliding_window = BEGUN["sliding_window"]
    heads = own.get("num_attention_heads")
    if {"mamba_n_heads", "mamba_d_head", "mamba_expand"} <= own.keys():
        inner = own.get("mamba_d_ssm") or config.mamba_expand * config.hidden_size
        config.mamba_n_heads = inner // config.mamba_d_head
    if heads and vars(config).get("num_key_value_heads", heads) is None:
        config.num_key_value_heads = heads
    if heads and vars(config).get("head_dim", heads) is None and hasattr(config, "hidden_size"):
        config.head_dim = config.hidden_size // heads


def _cut(config: Any, before: int) -> None:
    """Leave out what the config says of layers that are gone; ``before`` is their old number."""
    own, depth = vars(config), _depth(config)
    for name, value in list(own.items()):  # lists with an entry for each layer, not for each stage
        listed = isinstance(value, (list, tuple)) and "depths" not in own
        if listed and 0 < depth < len(value) == before:
            setattr(config, name, type(value)(value[:depth]))
    overrides = getattr(own.get("_heterogeneity_spec"), "per_layer_overrides", {})
    for layer in [layer for layer in overrides if layer >= depth]:
        del overrides[layer]
    if own.get("num_kv_shared_layers"):
        config.num_kv_shared_layers = 0


def _depth(config: Any) -> int:
    """The number of layers, or zero."""
    own = vars(config)
    depth = next((own[n] for n in ("num_hidden_layers", "num_layers", "n_layer") if n in own), 0)
    return depth if isinstance(depth, int) else 0


def _larger(image: Any, side: int) -> bool:
    sides = image if isinstance(image, (list, tuple)) else [image]
    return all(isinstance(length, int) and length > side for length in sides) and bool(sides)


def _divide(config: Any) -> None:
    """Reduce the number of heads until it divides the narrower features into even head sizes."""
    own = vars(config)
    width = math.gcd(*(w for name in WIDTH if isinstance(w := own.get(name), int)))
    if (own.get("head_dim") or 0) % 2:  # too small for rotary embeddings, which rotate pairs
        config.head_dim = None
    for name in HEADS_OF:
        heads = own.get(name)
        if not isinstance(heads, int) or own.get("head_dim") or not width % (4 * max(heads, 1)):
            continue
        dividing = [n for n in range(1, heads + 1) if heads % n == 0]
        for multiple in (4, 2, 1):
            if fewer := [n for n in dividing if width % (multiple * n) == 0]:
                setattr(config, name, fewer[-1])
                break
        shared = own.get("num_key_value_heads")
        if name == "num_attention_heads" and isinstance(shared, int):
            config.num_key_value_heads = math.gcd(shared, own[name])
    for name in [name for name, value in own.items() if name.endswith("_groups") and value]:
        if width and isinstance(own[name], int):
            setattr(config, name, math.gcd(own[name], width))


def _link(config: Any) -> None:
    """Make each part read the size that another one writes, even if their defaults disagree."""
    parts = {name: part for name, part in vars(config).items() if hasattr(part, "to_dict")}
    widths = {
        name: next((w for n in WIDTH if isinstance(w := vars(part).get(n), int)), None)
        for name, part in parts.items()
    }
    towers = ("encoder_config", "audio_config", "vision_config")
    encoder = next((widths[name] for name in towers if widths.get(name)), None)
    for name, part in parts.items():
        own, read = vars(part), widths.get("text_config")
        written = {"out_hidden_size", "output_dim", "projection_dim"} & own.keys()
        if "projection_dim" in vars(parts.get("text_config", config)):
            written.discard("projection_dim")  # both towers are projected to one size
        if name == "vision_config" and {"embed_dim", "hidden_size"} <= own.keys():
            written.add("hidden_size")
        for output in written if read and name in towers else ():
            setattr(part, output, read)
        if read and "text_hidden_size" in own:
            part.text_hidden_size = read
        if encoder and name not in towers and "encoder_hidden_size" in vars(part):
            part.encoder_hidden_size = encoder
        if deep := own.get("deepstack_visual_indexes") or own.get("deepstack_layers"):
            _deepen(parts.get("text_config"), len(deep))  # one layer of the text for each
        if (ratio := own.get("pixel_shuffle_ratio")) and "intermediate_size" in own:
            part.intermediate_size = round(own["hidden_size"] / ratio**2)
        layers, tower = own.get("vision_feature_layer"), parts.get("vision_config")
        if isinstance(layers, list) and tower:
            part.vision_feature_layer = [min(n, tower.num_hidden_layers - 1) for n in layers]
        if {"vision_output_dim", "projector_output_dim"} <= own.keys():
            part.vision_output_dim = own["projector_output_dim"]
        if "downsample_channels" in own and (behind := getattr(config, "encoder_config", None)):
            behind.hidden_size = own["downsample_channels"][-1]
            _divide(behind)
    if "hidden_size" in vars(config) and widths.get("text_config"):
        config.hidden_size = widths["text_config"]
    vision = parts.get("vision_config", config)
    tile = vars(vision).get("image_size")
    if isinstance(vars(config).get("downsample_rate"), str):
        vision.patch_size = tile // 4  # so that windows of patches tile the image
    if isinstance(tile, int) and (grids := vars(config).get("image_grid_pinpoints")):
        one = min(min(grid) for grid in grids)
        config.image_grid_pinpoints = [[n // one * tile for n in grid] for grid in grids]
    prompts, levels = parts.get("prompt_encoder_config"), "backbone_feature_sizes"
    for part in parts.values() if prompts else ():
        if levels in vars(part):  # each level has twice the grid size of the next
            grid, count = prompts.image_size // prompts.patch_size, len(getattr(part, levels))
            setattr(part, levels, [[grid << level] * 2 for level in reversed(range(count))])


def _deepen(text: Any, layers: int) -> None:
    """Give the text model at least ``layers`` layers, each new layer of the last layer's kind."""
    own = vars(text) if text is not None else {}
    missing = layers - own.get("num_hidden_layers", layers)
    if missing > 0:
        if kinds := own.get("layer_types"):
            text.layer_types = [*kinds, *kinds[-1:] * missing]
        text.num_hidden_layers = layers


def _fit_rotary_sections(config: Any) -> None:
    """Fit the sections of a multimodal rotary embedding (time, height, width) to the head size."""
    from transformers import CONFIG_MAPPING

    whole = config.model_type.removesuffix("_text")
    if whole != config.model_type and whole in CONFIG_MAPPING:  # the text model of another model
        text, sees = config, "vision_config" in CONFIG_MAPPING[whole].sub_configs
    else:
        text, sees = getattr(config, "text_config", None), hasattr(config, "vision_config")
    rope = getattr(text, "rope_parameters", None) if sees else None
    if not isinstance(rope, dict) or "rope_type" not in rope:
        return
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    half = int(head * rope.get("partial_rotary_factor", 1.0)) // 2
    if sum(rope.get("mrope_section") or ()) != half:
        frame, side = half - 2 * (3 * half // 8), 3 * half // 8
        first = "moe_num_experts" in vars(text)  # their sections are in the other order
        rope["mrope_section"] = [side, side, frame] if first else [frame, side, side]


def _choose(config: Any) -> None:
    """Make every layer number in the config valid, and keep the order of the numbers."""
    own = vars(config)
    parts = [part for part in own.values() if hasattr(part, "to_dict")]
    owners = ((c, n) for c in (config, *parts) for n in DEPTHS if vars(c).get(n))
    owner, counted = next(owners, (config, ""))
    depth = vars(owner).get(counted, 0)
    for name, value in list(own.items()):
        if isinstance(value, int) and name.endswith("layer_id") and value >= depth > 0:
            setattr(config, name, depth - 1)
        numbers = isinstance(value, (list, tuple)) and all(isinstance(v, int) for v in value)
        if not (numbers and value and depth and INDICES.search(name)):
            continue
        if all(-depth <= number < depth for number in value):
            continue
        order = sorted(set(value), key=lambda number: (number < 0, number))
        places = {n: place - (n < 0) * len(order) for place, n in enumerate(order)}
        setattr(config, name, type(value)(places[number] for number in value))
        setattr(owner, counted, max(depth, len(order) + 1))


def _smaller(name: str, value: Any, factor: int, layers: int = 2) -> Any:
    if isinstance(value, (list, tuple)):
        least = [i + 1 if name == "depth" else 2 for i in range(len(value))]  # CvT needs more
        parts = (
            _smaller(name, part, factor, n) or part for n, part in zip(least, value, strict=True)
        )
        return type(value)(parts)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        return None
    if name == "vocab_size" or name.endswith("_vocab_size") and value > VOCABULARY:
        return min(value, VOCABULARY)
    if TEXT_IDS.search(name) and value >= VOCABULARY:
        return VOCABULARY - 1 - sum(name.encode()) % 64
    if name in ("num_queries", "num_select"):
        return min(value, 8)
    if name == "num_frames":
        return min(value, 16)
    if name == "num_embeddings":  # a codebook; in some models its codes are text tokens
        return min(value, VOCABULARY // 2)
    if name == "patch_size" and value > 2 * SIDE:  # a model whose patches are images
        return SIDE
    if EXPERTS.search(name) and value > 32:
        return 16
    if name == "moe_intermediate_size":
        return max(8, value // factor)
    if LAYERS.search(name):
        return min(value, max(layers, 2))
    if WIDTHS.search(name) and not FIXED.search(name) and value >= 4 * factor:
        return value // factor if value % factor == 0 else None
    return None
