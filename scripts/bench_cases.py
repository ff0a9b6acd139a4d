"""The models that ``bench.py`` measures, with random weights."""

from __future__ import annotations

import ctypes
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import transformers

import enjoyln_cli

Settings = dict[str, Any]
OPT_125M = {
    "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "word_embed_proj_dim": 768,
}  # fmt: skip
MODELS: dict[str, tuple[str, str, Settings]] = {
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "bert": ("bert", "BertModel", {}),
    "opt-125m": ("opt", "OPTForCausalLM", OPT_125M),
    "bloom-560m": ("bloom", "BloomForCausalLM", {
        "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250880}),
    "vit": ("vit", "ViTForImageClassification", {}),
    "minilm": ("bert", "BertModel", {
        "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
        "intermediate_size": 1536}),
    "tiny": ("gpt2", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
}  # fmt: skip
"""From a name to the model type, the class and the settings that differ from its defaults."""


def random_model(
    model_type: str, model_class: str, settings: Settings, dtype: torch.dtype
) -> transformers.PreTrainedModel:
    """A model in evaluation mode with random weights, biases and norms."""
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[model_type](**settings)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.001)
    return model.to(dtype)


def benchmarked(
    kind: tuple[str, str, Settings],
    folder: Path,
    asked: enjoyln_cli.BenchOptions,
    dtype: str,
    device: str,
) -> dict[str, Any]:
    """Fold a model with random weights, and return what ``enjoyln bench --json`` would print of it.

    ``fold_seconds`` is the time to fold, with reading and writing. ``folder`` is a new directory,
    which is removed afterwards.
    """
    try:
        random_model(*kind, getattr(torch, dtype)).save_pretrained(folder / "original")
        begin = time.perf_counter()
        enjoyln_cli.fold(folder / "original", folder / "folded", verify=False)
        fold_seconds = time.perf_counter() - begin
        result = enjoyln_cli.bench(folder / "folded", options=asked, dtype=dtype, device=device)
        described = result.to_json()
        del described["source"]  # in ``folder``
        return {"fold_seconds": fold_seconds, **described}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep_pages() -> None:
    """Tell the C library to keep freed memory; otherwise large results sometimes need new pages."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            library.mallopt(option, 1 << 25)
