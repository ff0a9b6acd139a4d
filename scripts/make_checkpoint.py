"""Writes a random checkpoint of any architecture and size, tensor by tensor, for benchmarks.

    python scripts/make_checkpoint.py opt --params 2B --dtype bfloat16 --shards 8 -o DIR

Decides the size and the values. The architecture's default configuration is scaled in width and
depth until its parameter count is nearest to ``--params``. Names and shapes come from the model
class on the meta device, and are those that ``save_pretrained`` would store. Values are cut from
three random blocks: matrices with standard deviation 0.02 and a non-zero mean, gamma near 1, and
biases near 0. Only the blocks are in memory.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import transformers
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
DEPTHS = range(1, 129)
NEAR = 0.03
ASPECT = 80.0
"""Preferred ratio of width to depth, among sizes within ``NEAR`` of the requested one."""
DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
INTEGERS = {torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"}
BLOCK = 2**21 + 17
"""Elements of a random block; not a multiple of a usual width, so that rows differ."""


@dataclass(frozen=True)
class Stored:
    """One tensor of the result."""

    name: str
    shape: tuple[int, ...]
    kind: str
    """Name of the dtype in a safetensors header."""
    nbytes: int


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
    for name in ATTENTION_HEADS + WIDTHS:
        value = getattr(config, name, None)
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
    """The configuration with about ``params`` parameters.

    The parameter count is a quadratic in the number of heads, plus the depth times another such
    quadratic. So the counts for three widths at two depths give the count for every size.
    """
    widths = (2, 4, 6)
    counts = [
        [on_meta(model_class, scaled(model_type, h, n)).num_parameters() for h in widths]
        for n in (1, 2)
    ]
    per_layer = [two - one for one, two in zip(*counts, strict=True)]
    fixed = [one - each for one, each in zip(counts[0], per_layer, strict=True)]
    head_dim = scaled(model_type, 2, 1).hidden_size / 2
    best: tuple[float, float, int, int] | None = None
    for heads in range(1, 257):
        base, each = (_parabola(widths, values, heads) for values in (fixed, per_layer))
        for layers in DEPTHS:
            off = abs(math.log(max(base + layers * each, 1.0) / params))
            aspect = abs(math.log(heads * head_dim / layers / ASPECT))
            score = (max(off - NEAR, 0.0), aspect, heads, layers)
            if best is None or score < best:
                best = score
    assert best is not None
    return scaled(model_type, best[2], best[3])


def _parabola(xs: tuple[int, ...], ys: list[int], x: int) -> float:
    """The value at ``x`` of the parabola through three points (Lagrange's form)."""
    a, b, c = xs
    return (
        ys[0] * (x - b) * (x - c) / ((a - b) * (a - c))
        + ys[1] * (x - a) * (x - c) / ((b - a) * (b - c))
        + ys[2] * (x - a) * (x - b) / ((c - a) * (c - b))
    )


def stored_tensors(model: PreTrainedModel, dtype: str) -> list[Stored]:
    """The tensors that ``save_pretrained`` would store: no tied duplicates, names as on disk."""
    state: dict[str, torch.Tensor] = dict(model.named_parameters())
    kept = model.state_dict()
    state.update({name: b for name, b in model.named_buffers() if name in kept})
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    rows = []
    for name, tensor in revert_weight_conversion(model, state).items():
        kind = DTYPES[dtype] if tensor.is_floating_point() else INTEGERS[tensor.dtype]
        width = getattr(torch, dtype).itemsize if tensor.is_floating_point() else tensor.itemsize
        rows.append(Stored(name, tuple(tensor.shape), kind, tensor.numel() * width))
    return rows


def dealt(tensors: list[Stored], shards: int) -> list[list[Stored]]:
    """The tensors in order, in ``shards`` groups of about equal bytes, none of them empty."""
    if shards > len(tensors):
        raise SystemExit(f"{len(tensors)} tensors do not fill {shards} shards; ask for fewer")
    groups: list[list[Stored]] = [[]]
    left = sum(t.nbytes for t in tensors)
    quota = left / shards
    for i, tensor in enumerate(tensors):
        more = shards - len(groups)
        full = sum(t.nbytes for t in groups[-1]) + tensor.nbytes / 2 > quota
        if groups[-1] and more and (full or len(tensors) - i == more):
            quota = left / more
            groups.append([])
        groups[-1].append(tensor)
        left -= tensor.nbytes
    return groups


def blocks(dtype: str, seed: int) -> Mapping[str, memoryview]:
    """Random bytes for matrices, for gamma and for biases."""
    noise = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed))
    values = {
        "matrix": 0.02 * noise + 0.002,
        "gamma": (1 + 0.2 * noise).clamp(0.2, 1.8),
        "bias": 0.02 * noise + 0.005,
    }
    return {
        kind: memoryview(bytearray(v.to(getattr(torch, dtype)).view(torch.uint8).numpy()))
        for kind, v in values.items()
    }


def cuts(tensor: Stored, source: Mapping[str, memoryview], start: int) -> Iterator[memoryview]:
    """The bytes of one tensor: a block, repeated, from element ``start`` on."""
    if tensor.kind not in DTYPES.values():
        yield memoryview(bytes(tensor.nbytes))
        return
    gamma = tensor.name.endswith(("weight", "gamma", "running_var"))
    kind = "matrix" if len(tensor.shape) > 1 else "gamma" if gamma else "bias"
    block, left = source[kind], tensor.nbytes
    position = start % BLOCK * (len(block) // BLOCK)
    while left:
        part = block[position : position + left]
        yield part
        left -= len(part)
        position = 0


def header_of(tensors: list[Stored]) -> bytes:
    """A safetensors header: 8 bytes of length, then JSON padded with spaces to a multiple of 8."""
    ends = list(accumulate(t.nbytes for t in tensors))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor, end in zip(tensors, ends, strict=True):
        entries[tensor.name] = {
            "dtype": tensor.kind,
            "shape": list(tensor.shape),
            "data_offsets": [end - tensor.nbytes, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write(model: PreTrainedModel, into: Path, dtype: str, shards: int, seed: int) -> int:
    """Write config, shards and index into a new directory. Returns the bytes of the tensors."""
    groups = dealt(stored_tensors(model, dtype), shards)
    into.mkdir(parents=True)
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(into)
    if model.can_generate():
        model.generation_config.save_pretrained(into)
    source, start = blocks(dtype, seed), 0
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        many = f"model-{number:05d}-of-{shards:05d}.safetensors"
        name = many if shards > 1 else "model.safetensors"
        with (into / name).open("wb") as file:
            file.write(header_of(group))
            for tensor in group:
                start += 7919
                for part in cuts(tensor, source, start):
                    file.write(part)
        places.update(dict.fromkeys((t.name for t in group), name))
    total = sum(t.nbytes for group in groups for t in group)
    if shards > 1:
        sizes = {"total_parameters": model.num_parameters(), "total_size": total}
        index = {"metadata": sizes, "weight_map": dict(sorted(places.items()))}
        (into / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    return total


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write a random checkpoint of any size.")
    parser.add_argument("model_type", metavar="MODEL_TYPE", help="for example gpt2 or opt")
    parser.add_argument("--params", type=count_of, required=True, help="for example 20M or 2B")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--shards", type=int, default=1)
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{args.output}: {type(model).__name__}, {model.num_parameters():,} parameters "
        f"(width {config.hidden_size}, {config.num_hidden_layers} layers), {total:,} bytes, "
        f"{time.perf_counter() - start:.1f} s, {peak:.0f} MB at most in memory",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()
