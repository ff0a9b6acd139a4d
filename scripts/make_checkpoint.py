"""Writes a random checkpoint of any architecture and size, shard by shard, for benchmarks.

    python scripts/make_checkpoint.py opt --params 2B --dtype bfloat16 --shards 8 -o DIR

Decides the size and the values. The architecture's default configuration is scaled in width and
depth until its parameter count is about ``--params``. Names and shapes come from the model class on
the meta device, and are those that ``save_pretrained`` would store. Values repeat a block of random
numbers: matrices have standard deviation 0.02 and a non-zero mean, gammas are near 1, and biases
near 0. Memory holds one shard at a time, twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import accumulate, count, groupby
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.models.auto import modeling_auto

HEADS = (
    "MASKED_LM",
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "CAUSAL_LM",
    "IMAGE_CLASSIFICATION",
)
"""Heads in order of preference; the model class is the first that exists, else the base model."""
LAYERS = ("num_hidden_layers", "encoder_layers", "decoder_layers")
ATTENTION_HEADS = (
    "num_attention_heads",
    "num_key_value_heads",
    "encoder_attention_heads",
    "decoder_attention_heads",
)
WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "word_embed_proj_dim",
    "embedding_size",
)
"""Settings that grow with the depth, and with the width (in heads of the default size)."""
ASPECT = 80
"""Least ratio of width to depth."""
BLOCK = 2**21 + 17
"""Elements of a random block; not a multiple of a usual width, so that rows differ."""


def count_of(text: str) -> int:
    """``20M``, ``2B`` or a plain number of parameters."""
    unit = {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1:].upper())
    try:
        count = round(float(text[:-1]) * unit) if unit else int(text)
    except ValueError:
        count = 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write for example 20M or 2B")
    return count


def class_of(model_type: str, name: str | None) -> type[PreTrainedModel]:
    """The model class of that name, or the first head that ``model_type`` has."""
    tables = [getattr(modeling_auto, f"MODEL_FOR_{head}_MAPPING_NAMES") for head in HEADS]
    for table in [*tables, modeling_auto.MODEL_MAPPING_NAMES]:
        if name is None and isinstance(table.get(model_type), str):
            name = table[model_type]
    found = getattr(transformers, name or "", None)
    if found is None:
        raise SystemExit(f"transformers has no model class {name!r} for {model_type!r}")
    return found


def scaled(model_type: str, heads: int, layers: int) -> PreTrainedConfig:
    """The default configuration with this depth, and with this number of heads of default size."""
    config = CONFIG_MAPPING[model_type]()
    before = getattr(config, "num_attention_heads", None)
    if not isinstance(before, int) or not isinstance(getattr(config, "hidden_size", None), int):
        raise SystemExit(f"the configuration of {model_type!r} has no single width to scale")
    values = {name: getattr(config, name, None) for name in ATTENTION_HEADS + WIDTHS}
    for name, value in values.items():  # read first, since one name may stand for another
        if isinstance(value, int):
            setattr(config, name, max(1, value * heads // before))
    for name in LAYERS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, layers)
    return config


def on_meta(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """The model without memory for its weights, with weights tied as in a loaded model."""
    with torch.device("meta"):
        model = model_class(config)
    model.tie_weights()
    return model


def nearest(model_type: str, model_class: type[PreTrainedModel], params: int) -> PreTrainedConfig:
    """The narrowest configuration of about ``params`` parameters whose depth suits its width."""
    for heads in count(1):
        configs = [scaled(model_type, heads, layers) for layers in (1, 2)]
        one, two = (on_meta(model_class, config).num_parameters() for config in configs)
        layers = max(1, 1 + round((params - one) / (two - one)))
        if configs[0].hidden_size >= ASPECT * layers:
            return scaled(model_type, heads, layers)
    raise AssertionError("width grows with the heads")


def stored_tensors(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What ``save_pretrained`` would store, on meta: no tied duplicates, names as on disk."""
    state: dict[str, torch.Tensor] = dict(model.named_parameters())
    kept = model.state_dict()
    state.update({name: b for name, b in model.named_buffers() if name in kept})
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    stored = revert_weight_conversion(model, state)
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in stored.items()}


def dealt(tensors: dict[str, torch.Tensor], shards: int) -> list[list[str]]:
    """The names in order, in about ``shards`` groups of about equal bytes."""
    ends = dict(zip(tensors, accumulate(t.nbytes for t in tensors.values()), strict=True))
    total = max(ends.values())

    def shard(name: str) -> int:
        return int(shards * (ends[name] - tensors[name].nbytes / 2) / total)

    return [list(names) for _, names in groupby(tensors, shard)]


def filled(name: str, tensor: torch.Tensor, block: torch.Tensor, start: int) -> torch.Tensor:
    """Values for one tensor: the block of standard normal numbers from ``start`` on, repeated."""
    size = tensor.numel()
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() > 1:
        block = 0.02 * block + 0.002
    elif name.endswith(("weight", "gamma", "running_var")):
        block = (1 + 0.2 * block).clamp(0.2, 1.8)
    else:
        block = 0.02 * block + 0.005
    turned = block.to(tensor.dtype).roll(-start)
    return turned.repeat(-(-size // BLOCK))[:size].view(tensor.shape)


def write(model: PreTrainedModel, into: Path, dtype: str, shards: int, seed: int) -> int:
    """Write config, shards and index into a new directory. Returns the bytes of the tensors."""
    tensors = stored_tensors(model, getattr(torch, dtype))
    groups = dealt(tensors, shards)
    into.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(into)
    if model.can_generate():
        model.generation_config.save_pretrained(into)
    block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed))
    starts = dict(zip(tensors, count(0, 7919), strict=False))
    files: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        many = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = many if len(groups) > 1 else "model.safetensors"
        values = {name: filled(name, tensors[name], block, starts[name]) for name in group}
        save_file(values, into / file, metadata={"format": "pt"})
        files |= dict.fromkeys(group, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    if len(groups) > 1:
        sizes = {"total_parameters": model.num_parameters(), "total_size": total}
        index = {"metadata": sizes, "weight_map": dict(sorted(files.items()))}
        (into / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a random checkpoint of any size.")
    parser.add_argument("model_type", metavar="MODEL_TYPE", help="for example gpt2 or opt")
    parser.add_argument("--params", type=count_of, required=True, help="for example 20M or 2B")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--shards", type=int, default=1, help="about so many files")
    parser.add_argument("-o", "--output", type=Path, required=True, help="a new directory")
    parser.add_argument("--model-class", help="default: the architecture's usual head")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    if args.model_type not in CONFIG_MAPPING:
        parser.error(f"transformers knows no architecture {args.model_type!r}")
    if args.shards < 1:
        parser.error("--shards counts files; write at least 1")
    if args.output.exists():
        parser.error(f"{args.output} exists; name a new directory")
    start = time.perf_counter()
    model_class = class_of(args.model_type, args.model_class)
    config = nearest(args.model_type, model_class, args.params)
    model = on_meta(model_class, config)
    total = write(model, args.output, args.dtype, args.shards, args.seed)
    print(
        f"{args.output}: {type(model).__name__}, {model.num_parameters():,} parameters "
        f"(width {config.hidden_size}, {config.num_hidden_layers} layers), {total:,} bytes, "
        f"{time.perf_counter() - start:.1f} s",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
