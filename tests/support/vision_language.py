"""A small vision-language model with its processor, and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
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

    The first one is ``width`` pixels wide; all are 40 pixels high.
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
