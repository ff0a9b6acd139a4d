"""Edit an EAGLE-3 draft model so that it goes on working when its target model is rotated.

A draft model proposes the tokens that its target then checks. A draft of EAGLE-3 reads hidden
states of several layers of its target, side by side, and its target's embeddings, through a norm:

    h = fc [x_1, x_2, x_3]                     x_i' = Q x_i,   so  fc' = fc diag(Q', Q', Q')
    q = W_q [norm(e), hidden_norm(h)]          e' = Q e,       so  W_q' = [W_q1 diag(g) Q', W_q2]

``g`` is the weight of the RMSNorm, which becomes ones; keys and values are read as queries are.
Everything else (its layer, norms, head and token tables) is the draft's own, and stays. A draft
without an embedding table reads the target's table. A copy of the target's table in the draft is
rotated as the table itself was, so it does not matter which of the two a program takes.

Drafts that write what the target's head reads cannot be rotated, and are refused (EAGLE-1 and 2,
Medusa).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from enjoyln_cli.checkpoint.config import raw_config
from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY, OpenOptions
from enjoyln_cli.checkpoint.reader import Checkpoint, open_checkpoint, read_tensor
from enjoyln_cli.checkpoint.result_files import ADAPTER_CONFIG
from enjoyln_cli.checkpoint.source import Source, carried_files, open_source
from enjoyln_cli.conversion.adapter import EditedBase
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.edits.finite import rounded
from enjoyln_cli.edits.linear_steps import RotateAxis, Scale
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.plan.axis import Axis
from enjoyln_cli.plan.orthogonal_matrices import Rotation
from enjoyln_cli.rewrite.directory import copy_files
from enjoyln_cli.runtime.weight_check import tensor_at

if TYPE_CHECKING:
    from enjoyln_cli.plan.plan import Plan, RotationGroup
    from enjoyln_cli.rewrite.opened_model import OpenedModel

FC, TABLE, HEAD = "fc.weight", "embed_tokens.weight", "lm_head.weight"
LAYERS = ("midlayer", "layers.0")
"""Names of the first layer: of the authors of EAGLE, and of vLLM's speculators."""
WITHIN = ("midlayer.", "layers.", "norm.", HEAD, "d2t", "t2d")
"""How the names of the draft's own tensors begin."""
RMS_NORM = ("llama", "mistral", "qwen2", "qwen3")
"""Model types of drafts whose norms multiply by their weight, as Llama's RMSNorm does."""
_TRAIN = "train the draft on the result"


@dataclass(frozen=True)
class Draft:
    """The tensors of a draft, edited for the result of its target, and where its files are."""

    source: Source
    files: tuple[str, ...]
    """The other files, which are copied."""
    tensors: dict[str, torch.Tensor]

    def write(self, folder: Path, base: str) -> None:
        """Write it to ``folder``. ``base``, the target, is named by whoever runs the draft."""
        copy_files(self.files, self.source.path, folder)
        save_file(self.tensors, folder / "model.safetensors", {"format": "pt"})


@dataclass(frozen=True)
class Read:
    """A weight of the draft whose first columns read features of the target."""

    weight: str
    groups: int
    """How many hidden states or embeddings it reads, side by side."""
    norm: str
    """The weight of the RMSNorm between; empty if there is none."""


def edit_draft(
    model: str | Path,
    plan: Plan,
    original: OpenedModel,
    like: str,
    opening: OpenOptions = OPENED_PLAINLY,
) -> Draft:
    """The draft ``model``, a directory or a Hub id, for the result ``like`` of ``plan``.

    The edits are computed in float64, and rounded once to the dtype of the draft. Raises
    ``UnsupportedModel`` for a draft that cannot be edited, ``BadCheckpoint`` if it does not fit
    ``original``, and as ``open_source`` and ``open_checkpoint`` do.
    """
    source = open_source(str(model), opening, weights=True)
    config = raw_config(source)
    if "medusa_num_heads" in config or any(source.path.glob("medusa_lm_head.*")):
        raise UnsupportedModel(
            f"{model}: each Medusa head computes x + SiLU(W x + b) (its 0.linear) from what the "
            "lm_head of the target reads. x can be rotated and the SiLU cannot, so no Medusa head "
            f"computes the same on rotated features; {_TRAIN}"
        )
    checkpoint = open_checkpoint(source)
    layer = _first_layer(checkpoint)
    stream, table, edit = _rotated_stream(plan, original, like)
    reads = _reads_of_hidden_states(checkpoint, stream)
    tensors = {name: read_tensor(checkpoint, name) for name in checkpoint.tensors}
    if _is_table_of_target(tensors, original, table):
        reads += _reads_of_embeddings(checkpoint, layer, edit, stream)
        if TABLE in tensors:
            tensors[TABLE] = rounded(TABLE, tensors[TABLE], edit)
    for read in reads:
        tensors[read.weight] = _rotated(tensors, read, stream.rotation(plan.seed))
    for norm in {read.norm for read in reads if read.norm}:
        tensors[norm] = torch.ones_like(tensors[norm])
    return Draft(source, carried_files(source), tensors)


def _first_layer(checkpoint: Checkpoint) -> str:
    """The name of the first layer. Raises ``UnsupportedModel`` unless it is a draft of EAGLE-3."""
    model, names = checkpoint.source.model, checkpoint.tensors.keys()
    if FC not in names:
        raise UnsupportedModel(
            f"{model} has no {ADAPTER_CONFIG}, so it is no adapter of PEFT, and no {FC}, so it is "
            "no draft of EAGLE-3; only these can be edited"
        )
    layer = next((name for name in LAYERS if f"{name}.hidden_norm.weight" in names), None)
    if layer is None:
        raise UnsupportedModel(
            f"{model}: {FC} of EAGLE-1 and EAGLE-2 reads the last hidden state, and the layers "
            "after it write what the lm_head of the target reads. This lm_head is rotated, and the "
            "weight of the last norm is fused into it, which the norms within these layers do not "
            f"allow; {_TRAIN}"
        )
    if HEAD not in names:
        raise UnsupportedModel(
            f"{model} stores no {HEAD}, so it uses its target's, which is edited; {_TRAIN}"
        )
    if (checkpoint.raw_config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise UnsupportedModel(
            f"{model}: use_aux_hidden_state is false, so it reads the last hidden state, into "
            f"which the weight of a norm was fused; {_TRAIN}"
        )
    known = (FC, "fc.bias", TABLE, "input_norm.weight")
    for name in names:
        if name not in known and not name.startswith(WITHIN):
            raise UnsupportedModel(f"{model}: {name} is no known tensor of EAGLE-3; {_TRAIN}")
    return layer


def _rotated_stream(
    plan: Plan, original: OpenedModel, like: str
) -> tuple[RotationGroup, str, Edit]:
    """The stream of hidden states, the stored embedding table, and how the table was edited.

    Raises ``UnsupportedModel`` unless the hidden states of all layers are rotated and nothing else.
    """
    if plan.folded:
        raise UnsupportedModel(
            f"{like} is folded, so its hidden states lack their mean, which the draft reads; "
            "rotate the original without folding it"
        )
    if plan.scaled:
        raise UnsupportedModel(
            f"the hidden states of {like} have another scale, which the draft reads; rotate the "
            "original without --fp16-safe"
        )
    base = EditedBase(plan, original)
    features = tensor_at(base.model, base.table).shape[1]
    count = getattr(original.config.get_text_config(), "num_hidden_layers", 0)
    for group in plan.rotated:
        stored = {rotated.parameter: rotated.tensor for rotated in group.tensors}
        layers = {next(filter(str.isdigit, name.split(".")), "") for name in stored}
        whole = group.size == features and base.table in stored
        if whole and count and layers >= {str(number) for number in range(count)}:
            return group, stored[base.table], base.edits[base.table]
    raise UnsupportedModel(
        f"the hidden states of {like} were not rotated; if its embeddings were not either, the "
        "draft works as it is"
    )


def _reads_of_hidden_states(checkpoint: Checkpoint, stream: RotationGroup) -> list[Read]:
    """How ``fc`` reads hidden states. Raises ``BadCheckpoint`` if it has no columns for them."""
    columns = checkpoint.tensors[FC].shape[1]
    if columns % stream.size or columns < 2 * stream.size:
        raise BadCheckpoint(
            f"{FC} of {checkpoint.source.model} reads {columns} features, which are not several "
            f"hidden states of {stream.size}; pass the result of the model it was trained for"
        )
    norm = "input_norm.weight"
    return [Read(FC, columns // stream.size, norm if norm in checkpoint.tensors else "")]


def _is_table_of_target(
    tensors: dict[str, torch.Tensor], original: OpenedModel, table: str
) -> bool:
    """Whether the draft reads the target's embeddings: it has no table, or a copy of this table."""
    if TABLE not in tensors:
        return True
    values, copy = read_tensor(original.checkpoint, table), tensors[TABLE]
    return values.shape == copy.shape and torch.equal(values.to(copy.dtype), copy)


def _reads_of_embeddings(
    checkpoint: Checkpoint, layer: str, edit: Edit, stream: RotationGroup
) -> list[Read]:
    """How the first layer reads embeddings of the target, whose table was changed by ``edit``."""
    model, config = checkpoint.source.model, checkpoint.raw_config
    kind = config.get("transformer_layer_config", config).get("model_type")
    if kind not in RMS_NORM or [type(step) for step in edit.steps] != [RotateAxis]:
        raise UnsupportedModel(
            f"{model} reads the embeddings of the target, and its model_type {kind} is not one of "
            f"{', '.join(RMS_NORM)}, or the embeddings were not only rotated; {_TRAIN}"
        )
    names = [f"{layer}.self_attn.{part}_proj.weight" for part in "qkv"]
    for name in names:
        stored = checkpoint.tensors.get(name)
        if stored is None or stored.shape[1] != 2 * stream.size:
            raise BadCheckpoint(
                f"{model}: {name} does not read {stream.size} features of an embedding and as many "
                "of a hidden state; pass the result of the model it was trained for"
            )
    return [Read(name, 1, f"{layer}.input_layernorm.weight") for name in names]


def _rotated(tensors: dict[str, Any], read: Read, rotation: Rotation) -> torch.Tensor:
    """A weight of the draft for features of the target that have been rotated."""
    weight = tensors[read.weight].clone()
    axis = Axis(1, 0, read.groups, rotation.size, 1)
    edit = Edit((RotateAxis(axis, rotation),))
    if read.norm:
        edit = edit.adding(Scale(read.norm, 1))
    columns = weight.narrow(1, 0, axis.length)
    columns.copy_(rounded(read.weight, columns, edit.loaded(tensors.__getitem__)))
    return weight
