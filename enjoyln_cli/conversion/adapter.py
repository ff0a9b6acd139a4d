"""Edit a LoRA adapter so that it goes on working when its base model is folded.

The adapter adds ``s B A`` to a weight ``W`` (outputs times inputs). An edit of a plan is linear in
``W`` and acts on its outputs or on its inputs, so it acts on ``B`` or on ``A`` alike:

    W <- P W, W <- P diag(s) W     B <- P B, B <- P diag(s) B
    W <- W diag(g), W <- W Q'      A <- A diag(g), A <- A Q'
    new hidden units               zeros: the adapter does nothing to them

Where the bias ``v`` of a norm moves into a layer, ``b <- b + W v``, the adapter gets a bias of its
own, ``B A v`` (PEFT's ``lora_bias``). Trained prompts (PEFT's prompt tuning) take the place of rows
of the embedding table, and are edited as these are. Anything else is refused; the error names it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from enjoyln_cli.checkpoint.file_roles import read_json
from enjoyln_cli.checkpoint.reader import read_tensor
from enjoyln_cli.checkpoint.result_files import ADAPTER_CONFIG
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.finite import in_dtype, rounded
from enjoyln_cli.edits.linear_steps import repeated
from enjoyln_cli.edits.planned_edits import edits_of
from enjoyln_cli.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from enjoyln_cli.models.classes import build, locate
from enjoyln_cli.rewrite.opened_model import OpenedModel
from enjoyln_cli.runtime.weight_check import tensor_at

if TYPE_CHECKING:
    from enjoyln_cli.plan.plan import Plan

WEIGHTS_FILE = "adapter_model.safetensors"
PROMPT = "PROMPT_TUNING"

PREFIX = "base_model.model."
KEY = re.compile(r"(?P<path>.+)\.(?P<part>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB])")
HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights",
    "layers_pattern", "layers_to_transform", "lora_alpha", "lora_bias", "lora_dropout",
    "megatron_core", "modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Settings of PEFT's LoRA that do not change what the adapter adds to a weight, up to a factor."""
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` with which loading the adapter does not change the base model."""


@dataclass(frozen=True)
class Adapter:
    """The two files of an adapter, edited for the folded base model."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def write(self, folder: Path, base: str) -> None:
        """Write it to ``folder``; it names ``base`` as its base model."""
        folder.mkdir(exist_ok=True)
        config = {**self.config, "base_model_name_or_path": base, "revision": None}
        text = json.dumps(config, indent=2, sort_keys=True)
        (folder / ADAPTER_CONFIG).write_text(f"{text}\n", encoding="utf-8")
        save_file(self.tensors, folder / WEIGHTS_FILE, {"format": "pt"})


def edit_adapter(folder: str | Path, plan: Plan, original: OpenedModel) -> Adapter:
    """The LoRA adapter or prompt in ``folder`` for the result of ``plan`` on ``original``.

    The edits are computed in float64, and rounded once to the dtype of the adapter. Raises
    ``UnsupportedModel`` for an adapter that cannot be edited, or that may do more than add to
    weights; ``BadCheckpoint`` if it does not fit the base model; ``ModelNotFound`` if there is
    none.
    """
    folder = Path(folder).expanduser()
    settings = _read_settings(folder)
    tensors = _read_tensors(folder)
    base = EditedBase(plan, original)
    if settings["peft_type"] == PROMPT:
        return Adapter(settings, _edited_prompt(folder, tensors, base))
    layers, others = _sort(tensors)
    edited = dict(tensors)
    shifts: dict[str, torch.Tensor] = {}
    for path, parts in layers.items():
        where = base.path_of(path)
        edit = base.edits.get(f"{where}.weight", Edit())
        by = base.biases.get(where)
        if not edit.steps and by is None:
            continue
        out = base.output_dim(where)
        if "lora_A.weight" not in parts or "lora_B.weight" not in parts or out is None:
            raise UnsupportedModel(
                f"{path}: the fold edits this layer, and the adapter does not treat it as a linear "
                "layer; merge the adapter into the original and fold the result"
            )
        a, b = (tensors[parts[f"lora_{name}.weight"]] for name in "AB")
        base.require_fit(where, out, a, b)
        rows, columns = edit.along(out, 0), edit.along(1 - out, 1)

        def change(name: str, x: torch.Tensor, along: Edit) -> torch.Tensor:
            return rounded(name, x, along.loaded(base.read))

        for part, value, along in (("lora_B.weight", b, rows), ("lora_A.weight", a, columns)):
            edited[parts[part]] = change(parts[part], value, along)
        if by is not None:
            bias, reader = by
            vector = repeated(base.read(bias).double().flatten(), reader.outer, reader.inner)
            shift = b.double() @ (a.double() @ vector)
            shifts[path] = change(path, shift, rows)
        if name := parts.get("lora_B.bias"):
            edited[name] = change(name, tensors[name], rows)
    if shifts:
        settings = {**settings, "lora_bias": True}
        edited |= _biases(layers, edited, shifts)
    for key, name in others.items():
        edited[key] = base.edit_whole(name, tensors[key])
    return Adapter(settings, edited)


def _edited_prompt(
    folder: Path, tensors: Mapping[str, torch.Tensor], base: EditedBase
) -> dict[str, torch.Tensor]:
    """The vectors of a trained prompt, edited as the rows of the embedding table."""
    name = base.table
    shape = tensor_at(base.model, name).shape
    edit, prompt = base.edits.get(name, Edit()), tensors.get("prompt_embeddings")
    if prompt is None or tensors.keys() != {"prompt_embeddings"}:
        raise UnsupportedModel(f"{folder}: holds other tensors than the vectors of a prompt")
    if prompt.ndim != 2 or prompt.shape[1] != shape[1]:
        raise BadCheckpoint(
            f"{folder}: has vectors of shape {list(prompt.shape)}, which do not fit {name} of "
            f"{list(shape)}; pass the prompt that was trained on the original"
        )
    if not edit.is_linear_map or edit.mixed_dims - {1}:
        raise UnsupportedModel(
            f"{folder}: the fold edits {name} not row by row, so a prompt cannot be edited alike; "
            "train the prompt on the result"
        )
    return {"prompt_embeddings": rounded("prompt_embeddings", prompt, edit)}


def _read_settings(folder: Path) -> dict[str, Any]:
    """The adapter's config. Raises ``UnsupportedModel`` if the adapter does more than add."""
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        raise ModelNotFound(
            f"{folder} has no {ADAPTER_CONFIG}; pass the directory of a PEFT adapter"
        )
    settings = read_json(path)
    kind = settings.get("peft_type") if isinstance(settings, dict) else None
    merge_it = "merge it into the original (merge_and_unload) and fold the result"
    if kind == PROMPT:
        if settings.get("num_transformer_submodules", 1) not in (1, None):
            raise UnsupportedModel(f"{folder}: has prompts for an encoder and a decoder")
        return dict(settings)
    if kind != "LORA":
        raise UnsupportedModel(
            f"{folder}: only LoRA and prompts can be edited, not {kind}; {merge_it}"
        )
    start = settings.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise UnsupportedModel(
            f"{folder}: init_lora_weights is {start!r}, with which loading the adapter changes the "
            f"base model; save it as a plain LoRA first, or {merge_it}"
        )
    for name, value in settings.items():
        if value and name not in HARMLESS:
            raise UnsupportedModel(
                f"{folder}: {name} is {str(value):.40}, so the adapter is not known to add only to "
                f"the weights of linear layers; {merge_it}"
            )
    return dict(settings)


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise ModelNotFound(f"{folder} has no {WEIGHTS_FILE}; save the adapter as safetensors")
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise BadCheckpoint(f"{path} cannot be read ({error}); save the adapter again") from error


def _sort(tensors: Mapping[str, Any]) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """The keys of each layer by part, and the names of all other tensors by key."""
    layers: dict[str, dict[str, str]] = {}
    others: dict[str, str] = {}
    for key in tensors:
        if not key.startswith(PREFIX):
            raise BadCheckpoint(f"{key}: is no tensor of an adapter that PEFT saved")
        name = key.removeprefix(PREFIX)
        if match := KEY.fullmatch(name):
            layers.setdefault(match["path"], {})[match["part"]] = key
        elif "lora_" in name:
            raise UnsupportedModel(f"{name}: is a part of the adapter that is not known")
        else:
            others[key] = name.replace(".base_layer.", ".").replace(".modules_to_save.", ".")
    return layers, others


def _biases(
    layers: Mapping[str, dict[str, str]],
    edited: Mapping[str, torch.Tensor],
    shifts: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """A bias for every layer of the adapter: its own plus the shift, zeros where there is none."""
    biases = {}
    for path, parts in layers.items():
        if "lora_B.weight" not in parts:
            raise UnsupportedModel(
                f"{path}: its adapter cannot have a bias, but other layers' adapters need one, "
                "since the bias of a norm is fused into these layers; fold without --merge"
            )
        b, key = edited[parts["lora_B.weight"]], f"{PREFIX}{path}.lora_B.bias"
        bias = edited.get(key, b.new_zeros(b.shape[0])).double()
        biases[key] = in_dtype(key, bias + shifts.get(path, 0.0), b.dtype)
    return biases


class EditedBase:
    """The base model: its edits by parameter, and the values that they use."""

    def __init__(self, plan: Plan, original: OpenedModel) -> None:
        self.model = build(original.as_class(plan.model_class).cls, original.config)
        self.edits = edits_of(plan, in_memory=True)
        self.checkpoint = original.checkpoint
        self.stored = {w.scale.parameter: w.scale.tensor for w in plan.edited_tensors if w.scale}
        self.stored |= {name.parameter: name.tensor for norm in plan.fused for name in norm.names}
        self.biases = {
            reader.weight.parameter.rpartition(".")[0]: (f"{norm.norm}.bias", reader)
            for norm in plan.fused
            for reader in norm.readers
            if reader.bias
        }
        """By path of a layer: the norm's bias that moves into it, and how the layer reads it."""

    @property
    def table(self) -> str:
        """The parameter that embeds tokens."""
        model: Any = self.model
        table = model.get_input_embeddings().weight
        return next(name for name, value in model.named_parameters() if value is table)

    def read(self, parameter: str) -> torch.Tensor:
        return read_tensor(self.checkpoint, self.stored[parameter])

    def path_of(self, path: str, get: Callable[..., Any] = nn.Module.get_submodule) -> str:
        """``path``, as the class of the plan names it."""
        try:
            path_in_model = locate(self.model, path, (), get)
        except UnsupportedModel:
            path_in_model = None
        if path_in_model is None:
            raise BadCheckpoint(
                f"{path}: the adapter changes it, and {type(self.model).__name__} lacks it; pass "
                "the model that the adapter was trained on, and its class with --model-class"
            )
        return path_in_model

    def output_dim(self, path: str) -> int | None:
        """The dimension of outputs in the weight of a linear layer."""
        from transformers.pytorch_utils import Conv1D

        return {nn.Linear: 0, Conv1D: 1}.get(type(self.model.get_submodule(path)))

    def require_fit(self, path: str, out: int, a: torch.Tensor, b: torch.Tensor) -> None:
        shape = tensor_at(self.model, f"{path}.weight").shape
        if (b.shape[0], a.shape[1]) != (shape[out], shape[1 - out]) or a.shape[0] != b.shape[1]:
            raise BadCheckpoint(
                f"{path}: the adapter has shapes {list(b.shape)} and {list(a.shape)}, which do not "
                f"fit a weight of {list(shape)}; pass the model that the adapter was trained on"
            )

    def edit_whole(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A tensor that the adapter stores whole (``modules_to_save``, biases), edited."""
        edit = self.edits.get(self.path_of(name, tensor_at), Edit())
        if not edit.is_linear_map or any(dim >= value.ndim for dim in edit.mixed_dims):
            raise UnsupportedModel(
                f"{name}: the adapter has its own values of this tensor, and the fold edits it "
                "together with others; merge the adapter into the original and fold the result"
            )
        return rounded(name, value, edit)
