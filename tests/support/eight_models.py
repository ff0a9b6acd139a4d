"""Eight kinds of small models with weights on which nothing passes by luck, and their results."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from live_models import moved
from torch import nn

from enjoyln_cli import fold, from_pretrained
from enjoyln_cli.models.outputs import tensors_in

WIDE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
MLP = {"intermediate_size": 24}
CLIP = {**WIDE, **MLP, "projection_dim": 12}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}),
    "bert": ("BertModel", {**WIDE, **MLP, "max_position_embeddings": 16}),
    "opt": (
        "OPTForCausalLM",
        {**WIDE, "ffn_dim": 24, "word_embed_proj_dim": 16, "enable_bias": False,
         "max_position_embeddings": 16},
    ),
    "bloom": ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "phi": ("PhiForCausalLM", {**WIDE, **MLP, "max_position_embeddings": 16}),
    "vit": ("ViTForImageClassification", {**WIDE, **MLP, "image_size": 8, "patch_size": 4}),
    "clip": (
        "CLIPModel",
        {"text_config": {**CLIP, "vocab_size": 41, "max_position_embeddings": 16,
                         "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
         "vision_config": {**CLIP, "image_size": 8, "patch_size": 4}, "projection_dim": 12},
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2,
         "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
         "max_source_positions": 9, "max_target_positions": 16, "num_mel_bins": 5},
    ),
}  # fmt: skip
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 41}
"""Of all models but models whose config holds two others."""


def source(name: str) -> Any:
    """In float64."""
    cls, settings = KINDS[name]
    more = {} if name in ("clip", "vit") else TOKENS
    more = {**more, "decoder_start_token_id": 1} if name == "whisper" else more
    config = transformers.CONFIG_MAPPING[name](**settings, **more)
    return moved(getattr(transformers, cls)(config))


def given(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 41, (2, 6), generator=generator)
    if name == "whisper":
        features = torch.randn(2, 5, 18, generator=generator).double()
        return {"input_features": features, "decoder_input_ids": ids}
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator).double()}
    if name == "clip":
        pixels = torch.randn(2, 3, 8, 8, generator=generator).double()
        ids[:, -1] = 2
        return {"input_ids": ids, "pixel_values": pixels}
    return {"input_ids": ids}


def converted(name: str, folder: Path) -> Path:
    """``name`` in the folder, converted once. BERT folds where its MLPs are widened."""
    from enjoyln_cli.plan.fold_options import Options

    if not (folder / name).exists():
        source(name).save_pretrained(folder / f"{name}-source")
        options = Options(widen_mlp=name == "bert")
        fold(folder / f"{name}-source", folder / name, options=options, verify=False)
    return folder / name


def pair(name: str, folder: Path) -> tuple[Any, Any]:
    """The converted model as RMSNorm and as its stock class, in float64."""
    place = converted(name, folder)
    stock = getattr(transformers, KINDS[name][0]).from_pretrained(place, dtype=torch.float64)
    return from_pretrained(place, dtype=torch.float64), stock.eval()


def far(found: Any, expected: Any) -> float:
    """The largest distance of two outputs, relative to the expected output."""
    pairs = zip(tensors_in(found), tensors_in(expected), strict=True)
    return max(
        float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs if b.is_floating_point()
    )


def run(model: Any, inputs: dict[str, Any]) -> Any:
    with torch.no_grad():
        return model(**copy.deepcopy(inputs))


def calls_inside(model: Any, inputs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The arguments with which a call of the model calls each module in it first."""
    found: dict[str, tuple[Any, Any]] = {}
    handles = []
    for path, module in model.named_modules():

        def note(module: Any, args: Any, kwargs: Any, path: str = path) -> None:
            found.setdefault(path, copy.deepcopy((args, kwargs)))

        handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    run(model, inputs)
    for handle in handles:
        handle.remove()
    return found


class AddsNumbers(nn.Module):
    """In place of a dropout it adds a number to each feature, so that a mean comes back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[-1], dtype=x.dtype)


def replace_dropout(model: nn.Module) -> bool:
    """Replace each dropout, and say whether there is any."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, AddsNumbers().eval())
    return any(isinstance(m, AddsNumbers) for m in model.modules())
