"""Small vision-language models, one of them with its processor, and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from live_models import CHECKPOINTS, shaken
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

CHAT = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content %}"
    "{% if c.type == 'image' %}<image>{% else %}{{ c.text }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
PATCHES = 16
"""Placeholders for each picture."""
SIZES = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 36,
}  # fmt: skip


def pictures(folder: Path, count: int = 8, widen: int = 0, width: int = 48) -> Path:
    """A new directory of pictures of noise, each ``widen`` pixels wider than the last.

    The first picture is ``width`` pixels wide; all are 40 pixels high.
    """
    from PIL import Image

    folder.mkdir()
    for at in range(count):
        noise = Image.effect_noise((width + widen * at, 40), 80)
        noise.convert("RGB").save(folder / f"{at}.png")
    return folder


def vision_language_model(folder: Path) -> Any:
    """LLaVA with random parameters, saved to ``folder`` with its processor and chat template."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / "gpt2")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    tokenizer.pad_token = tokenizer.eos_token
    image = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**SIZES, image_size=32, patch_size=8),
        text_config=LlamaConfig(
            **SIZES, vocab_size=len(tokenizer), max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id,
        ),
        image_token_index=image,
    )  # fmt: skip
    model = shaken(LlavaForConditionalGeneration(config), 0.05)
    model.save_pretrained(folder)
    pixels = {"height": 32, "width": 32}
    LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=pixels),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    ).save_pretrained(folder)
    return model


TEXT = {**SIZES, "vocab_size": 60, "max_position_embeddings": 128, "pad_token_id": 0}
IMAGE = 50
"""The image token of the models of ``small``."""


def small(name: str) -> Any:
    """A model of pictures and text with random parameters: LLaVA, SmolVLM, Idefics3 or Qwen2-VL."""
    torch.manual_seed(0)
    pictures = {**SIZES, "image_size": 32, "patch_size": 8}
    config: dict[str, Any]
    if name == "LLaVA":
        kind, vision = "Llava", CLIPVisionConfig(**pictures)
        config = {"text_config": LlamaConfig(**TEXT), "image_token_index": IMAGE}
    elif name == "Qwen2-VL":
        kind, vision = "Qwen2VL", {"depth": 2, "embed_dim": 24, "hidden_size": 24, "num_heads": 2}
        vision |= {"patch_size": 4, "mlp_ratio": 2}
        rotary = {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4}
        text = {**TEXT, "hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
        special = {"bos_token_id": 1, "eos_token_id": 2, "rope_parameters": rotary}
        config = {"text_config": {**text, **special}, "image_token_id": IMAGE}
        config |= {"video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
    else:
        kind, vision = name, pictures
        text = LlamaConfig(**TEXT)
        config = {"text_config": text, "image_token_id": IMAGE, "scale_factor": 2}
        config["pad_token_id"] = 0
    made = getattr(transformers, f"{kind}Config")(vision_config=vision, **config)
    model = shaken(getattr(transformers, f"{kind}ForConditionalGeneration")(made), 0.2)
    model.config.architectures = [type(model).__name__]
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def two_rows(name: str) -> dict[str, torch.Tensor]:
    """Inputs for a model of ``small``: two rows of different pictures, the second one padded.

    SmolVLM and Idefics3 have two pictures in the first row, one of them smaller than its frame.
    Pictures of Qwen2-VL have different sizes.
    """
    torch.manual_seed(1)
    if name == "LLaVA":
        counts, given = (PATCHES, PATCHES), {"pixel_values": torch.randn(2, 3, 32, 32)}
    elif name == "Qwen2-VL":
        grid = torch.tensor([[1, 4, 6], [1, 8, 4]])
        counts, patches = (6, 8), int(grid.prod(1).sum())
        given = {"pixel_values": torch.randn(patches, 96), "image_grid_thw": grid}
    else:
        counts, given = (8, 4), {"pixel_values": torch.randn(2, 2, 3, 32, 32)}
        given["pixel_values"][1, 1] = 0
        mask = torch.ones(2, 2, 32, 32, dtype=torch.int64)
        mask[0, 0, 16:] = 0
        given["pixel_attention_mask"] = mask
    length = 26
    ids, mask = torch.zeros(2, length, dtype=torch.int64), torch.zeros(2, length, dtype=torch.int64)
    for row, count in enumerate(counts):
        size = length - 3 * row
        text = torch.randint(5, 45, (size,))
        text[1 : 3 + count] = torch.tensor([52, *[IMAGE] * count, 53])
        ids[row, -size:], mask[row, -size:] = text, 1
    given |= {"input_ids": ids, "attention_mask": mask}
    if name == "Qwen2-VL":
        given["mm_token_type_ids"] = (ids == IMAGE).long()
    return given


def first_row(name: str) -> dict[str, torch.Tensor]:
    """The first row of ``two_rows``, which has no padding."""
    rows = two_rows(name)
    found = {name: value[:1] for name, value in rows.items()}
    if "image_grid_thw" in rows:
        found["pixel_values"] = rows["pixel_values"][: int(rows["image_grid_thw"][0].prod())]
    return found
