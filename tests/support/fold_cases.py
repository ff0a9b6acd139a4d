"""Checkpoints of all four kinds with odd shapes, edits for them, and what they should become."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from stored_files import opened

from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.linear_steps import CentreAxis
from enjoyln_cli.plan.axis import Axis, blocks, centre
from enjoyln_cli.plan.edited_tensors import CentredWeight
from enjoyln_cli.plan.plan import MeanSubtraction, Plan, Verdict
from enjoyln_cli.rewrite.directory import WriteOptions, fold_checkpoint

CONFIG = {"model_type": "gpt2", "n_embd": 24, "dtype": "float32", "zebra": [1, {"a": None}]}

SHAPES: dict[str, tuple[int, ...]] = {
    "wte.weight": (301, 24),
    "c_attn.weight": (24, 72),
    "c_attn.bias": (72,),
    "out.weight": (24, 96),
    "out.bias": (24,),
    "conv.weight": (24, 3, 5, 5),
    "big.weight": (521, 1031),
    "wide.weight": (3, 1100, 700),
    "tall.weight": (650, 1000),
    "qkv.weight": (750, 1000),
    "ln.weight": (24,),
    "scalar": (),
    "empty": (0, 24),
}
"""``big``, ``wide``, ``tall`` and ``qkv`` are larger than a block, at odd sizes."""

EDITS: dict[str, tuple[Axis, ...]] = {
    "wte.weight": (Axis(1, 0, 1, 24, 1),),
    "c_attn.weight": (Axis(1, 0, 4, 6, 1), Axis(1, 48, 2, 6, 2)),
    "c_attn.bias": (Axis(0, 48, 1, 24, 1),),
    "out.weight": (Axis(0, 0, 1, 24, 1),),
    "out.bias": (Axis(0, 0, 1, 24, 1),),
    "conv.weight": (Axis(0, 0, 1, 24, 1),),
    "big.weight": (Axis(0, 0, 1, 521, 1),),
    "wide.weight": (Axis(1, 100, 2, 450, 1),),
    "tall.weight": (Axis(0, 0, 5, 40, 1, 130), Axis(0, 50, 5, 20, 2, 130)),
    "qkv.weight": (Axis(0, 250, 5, 50, 1), Axis(0, 0, 1, 50, 5)),
}


def centring(axes: dict[str, tuple[Axis, ...]]) -> dict[str, Edit]:
    """Edits that centre, and nothing else."""
    return {
        name: Edit(tuple(CentreAxis(block) for axis in over for block in blocks(axis)))
        for name, over in axes.items()
    }


def state(dtype: torch.dtype, seed: int = 0) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in _state(dtype, seed).items()}


@cache
def _state(dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {
        **{n: (torch.randn(s, generator=made) * 0.4 + 0.3).to(dtype) for n, s in SHAPES.items()},
        "ids": torch.arange(31).reshape(31, 1),
        "mask": torch.tensor([True, False, True]),
    }


def centred(tensor: torch.Tensor, axes: tuple[Axis, ...]) -> torch.Tensor:
    """What the definition says: float64, then rounded once."""
    wide = tensor.double()
    for axis in axes:
        wide = centre(wide, axis)
    return wide.to(tensor.dtype)


def store(folder: Path, tensors: dict[str, torch.Tensor], kind: str) -> None:
    """One of the four ways in which a checkpoint is stored."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    suffix, stem = (".bin", "pytorch_model") if "bin" in kind else (".safetensors", "model")
    names = list(tensors)
    parts = [names] if "sharded" not in kind else [names[:3], names[3:8], names[8:]]
    weight_map = {}
    for i, part in enumerate(parts, 1):
        many = f"-{i:05d}-of-{len(parts):05d}" if len(parts) > 1 else ""
        file = folder / f"{stem}{many}{suffix}"
        held = {name: tensors[name] for name in part}
        if suffix == ".bin":
            torch.save(held, file)
        else:
            save_file(held, file, metadata={"format": "pt", "part": str(i)})
        weight_map |= dict.fromkeys(part, file.name)
    if len(parts) > 1:
        index = {"metadata": {"total_parameters": 7}, "weight_map": weight_map}
        (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(index, indent=1))


def written(folder: Path) -> dict[str, torch.Tensor]:
    """Everything in the safetensors files of ``folder``, read with the library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def sharded(tmp_path: Path) -> Path:
    """A sharded float32 checkpoint with other files beside the weights."""
    folder = tmp_path / "model"
    store(folder, state(torch.float32), "sharded")
    (folder / "tokenizer.json").write_text('{"a": "é"}')
    (folder / "README.md").write_text("# A model\n")
    (folder / "custom").mkdir()
    (folder / "custom" / "code.py").write_bytes(b"x = 1\r\n")
    return folder


def plan_for(tensors: dict[str, torch.Tensor], edits: dict[str, tuple[Axis, ...]]) -> Plan:
    writers = [
        CentredWeight(f"transformer.{name}", axis, tuple(tensors[name].shape), name)
        for name, axes in edits.items()
        for axis in axes
    ]
    norms = (
        Verdict("transformer.ln_1", "in_weights"),
        Verdict("transformer.ln_2", "with_subtraction", subtractions=("transformer.wte",)),
        Verdict(
            "transformer.ln_f", "stays_layernorm", reason="the head reads it", culprit="lm_head"
        ),
    )
    op = MeanSubtraction(
        "transformer.wte", "output", Axis(-1, 0, 1, 24, 1), "tied to lm_head.weight"
    )
    return Plan(
        "gpt2",
        "GPT2LMHeadModel",
        ("GPT2LMHeadModel", "GPT2Model"),
        norms,
        tuple(writers),
        (op,),
        ("inputs_embeds",),
        ("encoder_hidden_states",),
    )


def fold(source: Path, out: Path, edits: Any = None, **options: Any) -> Any:
    checkpoint = opened(source)
    tensors = {n: torch.empty(s.shape, device="meta") for n, s in checkpoint.tensors.items()}
    plan = plan_for(tensors, EDITS if edits is None else edits)
    return fold_checkpoint(checkpoint, plan, out, recipe_text="a: recipe\n", **gathered(options))


def gathered(options: dict[str, Any]) -> dict[str, Any]:
    """Keywords for ``fold_checkpoint``, with fields of ``WriteOptions`` joined into one object."""
    names = {field.name for field in fields(WriteOptions)} & options.keys()
    rest = {name: value for name, value in options.items() if name not in names}
    return {**rest, "options": WriteOptions(**{name: options[name] for name in names})}
