"""Open a checkpoint by the headers of its weight files, and read single tensors from it.

A tensor is always read from the place given in the checked header of its own file, never from
a place that another file names, such as the shard index.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from enjoyln_cli.checkpoint.config import raw_config, require_unquantised
from enjoyln_cli.checkpoint.file_roles import CONFIG, shards_in_index, weights_among
from enjoyln_cli.checkpoint.headers import (
    StoredTensor,
    load_bin,
    map_tensor,
    read_bin_header,
    read_header,
    require_unpacked,
    tensors_in,
)
from enjoyln_cli.checkpoint.result_files import is_own
from enjoyln_cli.checkpoint.source import (
    Source,
    State,
    carried_files,
    locate,
    states_of,
)
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel


@dataclass(frozen=True)
class Checkpoint:
    """The tensors in a model's weight files, as listed in the headers of these files."""

    source: Source
    raw_config: dict[str, Any]
    """The content of ``config.json``, parsed but not interpreted."""
    format: Literal["safetensors", "bin"]
    shards: tuple[str, ...]
    tensors: dict[str, StoredTensor]
    headers: dict[str, bytes]
    """The first bytes of each safetensors file: the length of its header, and the header."""
    metadata: dict[str, dict[str, str]]
    """The ``__metadata__`` in the header of each shard."""
    index: str | None
    """Name of the index file, if any."""
    states: Mapping[str, State] = field(default_factory=dict)
    """Size and time of the config and the weight files before anything was read."""


def open_checkpoint(source: Source) -> Checkpoint:
    """Read and check the headers of all weight files.

    Raises ``UnsupportedModel`` if there are no weights for PyTorch or only quantised weights,
    ``BadCheckpoint`` if files are missing, damaged, or contradict each other.
    """
    states = states_of(source.path, (CONFIG,))
    config = raw_config(source)
    require_unquantised(config, source.model)
    if config.get("transformers_weights"):
        raise UnsupportedModel(
            f"the config of {source.model} names its own weight file (transformers_weights); load "
            "the model, and save it with save_pretrained first"
        )
    names = {entry.name for entry in os.scandir(source.path)}
    first = weights_among(sorted(names), source.model)
    states |= states_of(source.path, (first,))
    index = first if first.endswith(".json") else None
    shards, promised = shards_in_index(locate(source, first)) if index else ((first,), {})
    states |= states_of(source.path, shards)
    safetensors = ".safetensors" in first
    tensors: dict[str, StoredTensor] = {}
    headers: dict[str, bytes] = {}
    metadata: dict[str, dict[str, str]] = {}
    for shard in shards:
        path = locate(source, shard)
        if safetensors:
            headers[shard], size = read_header(path)
            listed, metadata[shard] = tensors_in(shard, headers[shard], size)
        else:
            listed = read_bin_header(path)
        for stored in listed:
            if stored.name in tensors:
                other = tensors[stored.name].file
                raise BadCheckpoint(f"{stored.name} is both in {other} and {shard}; remove one")
            tensors[stored.name] = stored
    for name, shard in promised.items():
        if name not in tensors or tensors[name].file != shard:
            raise BadCheckpoint(f"{shard} lacks {name}, which {first} lists; fetch it again")
    if not tensors:
        raise BadCheckpoint(f"{first} of {source.model} holds no tensors; fetch it again")
    require_unpacked(tensors)
    kind: Literal["safetensors", "bin"] = "safetensors" if safetensors else "bin"
    return Checkpoint(source, config, kind, shards, tensors, headers, metadata, index, states)


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One tensor with its stored dtype and shape.

    It is a private map of a local safetensors file, and otherwise in memory; callers may write to
    it. Raises ``BadCheckpoint`` if it is not stored, or if its file has become shorter.
    """
    stored = _stored(checkpoint, name)
    path = checkpoint.source.path / stored.file
    if checkpoint.format == "bin":
        return load_bin(path)[name].clone()
    with path.open("rb") as file:
        return map_tensor(file.fileno(), stored)


def same_values(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Whether two stored tensors have the same dtype, the same shape and identical bytes."""
    first, second = _stored(checkpoint, a), _stored(checkpoint, b)
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    left, right = (read_tensor(checkpoint, name).flatten().view(torch.uint8) for name in (a, b))
    return torch.equal(left, right)


def _stored(checkpoint: Checkpoint, name: str) -> StoredTensor:
    if name not in checkpoint.tensors:
        raise BadCheckpoint(f"{checkpoint.source.model} stores no tensor {name}")
    return checkpoint.tensors[name]


def other_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The files of the model that are copied to the result (see ``file_roles``).

    These are neither weights nor files that a fold writes itself. Names are relative to the model's
    directory. Raises ``BadCheckpoint`` for a link to a directory, or to a file outside of the
    model's directory.
    """
    return tuple(name for name in carried_files(checkpoint.source) if not is_own(name))


def pipeline_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """The files of the pipeline outside of the model's folder that are copied to the result.

    Names are relative to the pipeline. Empty if the model is not part of a pipeline. Raises as
    ``other_files`` does.
    """
    source = checkpoint.source
    if not source.folder:
        return ()
    whole = Source(source.model, source.root, source.revision)
    return carried_files(whole, leaving=source.folder)
