"""Small configurations of transformers, live models with random weights, and their calls."""

from __future__ import annotations

import copy
import inspect
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from live_models import CHECKPOINTS, moved
from torch import nn

from enjoyln_cli.models.outputs import tensors_in
from enjoyln_cli.plan.cache_argument import cache_argument, returned_cache
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.rewrite.in_memory import centre_parameters
from enjoyln_cli.runtime.install import fold_in_memory

TOKENS = {"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {**TOKENS, "n_layer": 2, "n_head": 3, "n_embd": 21, "n_positions": 31}
BERT = {
    **TOKENS,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_size": 21,
    "intermediate_size": 33,
    "max_position_embeddings": 31,
}
PHI = {**BERT, "num_attention_heads": 3, "hidden_size": 24, "partial_rotary_factor": 0.5}
VIT = {
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "hidden_size": 21,
    "intermediate_size": 33,
    "image_size": 15,
    "patch_size": 5,
    "encoder_stride": 5,
}
WHISPER = {
    **TOKENS, "d_model": 24, "encoder_layers": 2, "decoder_layers": 1, "encoder_ffn_dim": 33,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 33,
    "max_source_positions": 20, "max_target_positions": 31, "num_mel_bins": 8,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
    "tie_word_embeddings": False,
}  # fmt: skip


def live(model_class: str, config: Any, seed: int = 0) -> Any:
    """The class in float64 with every parameter moved off its initial value."""
    torch.manual_seed(seed)
    return moved(getattr(transformers, model_class)(config), None)


def calls(model: Any, seed: int = 1) -> list[dict[str, Any]]:
    """Inputs of every kind that the class takes, some of them padded."""
    torch.manual_seed(seed)
    accepted = inspect.signature(model.forward).parameters
    if model.main_input_name == "pixel_values":
        pixels = torch.randn(2, 3, 15, 15, dtype=torch.float64)
        found = [{"pixel_values": pixels}]
        if any(name.endswith("mask_token") for name, _ in model.named_parameters()):
            found.append({"pixel_values": pixels, "bool_masked_pos": torch.rand(2, 9) < 0.5})
        if "MaskedImage" not in type(model).__name__:  # it rebuilds the one size it was made for
            larger = torch.randn(2, 3, 20, 25, dtype=torch.float64)
            found.append({"pixel_values": larger, "interpolate_pos_encoding": True})
        return found
    ids = torch.randint(3, 37, (2, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    ids = torch.where(mask == 0, 0, ids)
    plain = {"input_ids": ids, "attention_mask": mask}
    width = model.get_input_embeddings().weight.shape[1]
    embeds = torch.randn(2, 7, width, dtype=torch.float64) + 0.5
    optional = {
        "token_type_ids": torch.randint(0, 2, (2, 7)),
        "position_ids": torch.randint(0, 11, (2, 7)),
    }
    given = {name: value for name, value in optional.items() if name in accepted}
    found = [plain, {**plain, **given}, {"attention_mask": mask, "inputs_embeds": embeds}]
    if "mc_token_ids" in accepted:
        found.append({**plain, "mc_token_ids": torch.tensor([2, 4])})
    return found


def main_call(model: Any) -> dict[str, torch.Tensor]:
    """The main inputs of the class, and ids for a decoder, without padding."""
    torch.manual_seed(3)
    ids = torch.randint(3, 37, (2, 7))
    if model.main_input_name == "pixel_values":
        return {"pixel_values": torch.randn(2, 3, 15, 15, dtype=torch.float64)}
    if model.main_input_name == "input_values":
        return {"input_values": torch.randn(2, 400, dtype=torch.float64)}
    if model.main_input_name == "input_features":
        sound = torch.randn(2, 8, 40, dtype=torch.float64)
        return {"input_features": sound, "decoder_input_ids": ids}
    both = {"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {}
    return {"input_ids": ids, **both}


def outputs(model: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """All that one call returns, and a decoding step after it where there is a cache."""
    with torch.no_grad():
        result = model(**given)
        found = tensors_in(result)
        cache = returned_cache(result)
        if cache is not None and set(given) == {"input_ids", "attention_mask"}:
            mask = torch.cat([given["attention_mask"], torch.ones(2, 1, dtype=torch.long)], 1)
            step = {"input_ids": torch.tensor([[5], [9]]), "attention_mask": mask}
            found = [t.clone() for t in found]
            found += tensors_in(model(**step, **{cache_argument(model.forward): cache}))
    return found


def error(model: Any, original: Any, given: dict[str, Any]) -> float:
    """The worst difference of any output, relative to its largest element; NaN if one holds it."""
    pairs = zip(outputs(model, given), outputs(original, given), strict=True)
    worst = [
        (a - b).abs().max() / b.abs().max().clamp_min(1e-300)
        for a, b in pairs
        if b.is_floating_point() and b.numel()
    ]
    return float(torch.stack(worst).max())


def converted(model: nn.Module, plan: Plan, guarded: bool = True) -> Any:
    """A folded copy; without guards, also calls that the plan does not cover compute RMSNorm."""
    if not guarded:
        plan = replace(plan, covered=None, unproven=())
    return fold_in_memory(copy.deepcopy(model), plan)


def rotated(model: nn.Module, plan: Plan) -> Any:
    """A copy with the weights that ``plan`` gives it; its norms compute the same as before."""
    result = copy.deepcopy(model)
    centre_parameters(result, plan)
    return result


def one_layer(folder: Path) -> Path:
    """The first layer of the trained Phi, with its tokenizer: what is exported in little time."""
    shutil.copytree(CHECKPOINTS / "phi", folder)
    model = transformers.PhiForCausalLM.from_pretrained(folder, num_hidden_layers=1)
    model.save_pretrained(folder)
    return folder
