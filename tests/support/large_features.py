"""Small models whose residual stream overflows in float16 when it is squared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as T
from tiny_models import live

from enjoyln_cli.comparison.data_files import UserData

LARGE = 450.0
TOKENS = UserData(tokens=((3, 5, 7, 11, 13, 2), (17, 19, 23, 29, 31, 30)))
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
TEXT = {**SIZES, "intermediate_size": 48, "tie_word_embeddings": False}
CONFIGS: dict[str, Any] = {
    "PhiForCausalLM": T.PhiConfig(**TEXT, resid_pdrop=0.0),
    "OlmoForCausalLM": T.OlmoConfig(
        **{**TEXT, "hidden_size": 33, "num_attention_heads": 1}, head_dim=8),
    "LlamaForCausalLM": T.LlamaConfig(**TEXT),
    "Gemma3ForCausalLM": T.Gemma3TextConfig(**TEXT, head_dim=8),
    "GPT2LMHeadModel": T.GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=99, n_positions=64, bos_token_id=1,
        eos_token_id=2),
    "OPTForCausalLM": T.OPTConfig(
        **SIZES, ffn_dim=48, word_embed_proj_dim=32, tie_word_embeddings=False),
}  # fmt: skip


def with_large_features(
    name: str, folder: Path, large: float = LARGE, dtype: Any = None, tokens: Any = slice(None)
) -> Path:
    """A model whose residual stream has two large features for all tokens, or some of them."""
    model = live(name, CONFIGS[name]).float()
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        if hasattr(model, "transformer"):
            table = model.transformer.wpe.weight
        for parameter in model.parameters():
            parameter.mul_(1.0 if large else 0.1)
        table[tokens, 3] += large
        table[tokens, 5] -= large
    model.to(dtype or torch.float32).save_pretrained(folder)
    return folder
