"""Which file each tensor of a result is stored in, and at which offset.

The layout, headers and index are the source's own. A new dtype, a larger shape or a size limit for
the files takes new headers, and the index is rewritten if any of its entries change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch

from enjoyln_cli.checkpoint.headers import DTYPES, FLOATS, StoredTensor
from enjoyln_cli.checkpoint.reader import Checkpoint
from enjoyln_cli.edits.edit import Edit
from enjoyln_cli.errors import OutputError


@dataclass(frozen=True)
class Slot:
    """One tensor to write, and the stored tensor that it is made from.

    Name, dtype and shape may differ from the stored tensor's. ``offset`` is the absolute
    offset in the new file, in bytes.
    """

    name: str
    stored: StoredTensor
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Number of bytes to write."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @property
    def stays(self) -> bool:
        """Whether the stored tensor's header entry is valid for this tensor."""
        stored = self.stored
        return (self.name, self.dtype, self.shape) == (stored.name, stored.dtype, stored.shape)


@dataclass(frozen=True)
class Shard:
    """One weight file of the result: its header, and the tensors after it."""

    name: str
    header: bytes
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return max((s.offset + s.nbytes for s in self.slots), default=len(self.header))


def plain_layout(checkpoint: Checkpoint) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """The headers of a copy of ``checkpoint`` by file name, and its index (name to bytes)."""
    shards = layout(checkpoint, {}, None, None)
    return {shard.name: shard.header for shard in shards}, index(checkpoint, shards)


def bytes_to_write(
    checkpoint: Checkpoint, edits: Mapping[str, Edit], dtype: torch.dtype | None = None
) -> int:
    """Bytes of all tensors that ``write_shards`` would write."""
    return sum(slot.nbytes for slot in _slots(checkpoint, edits, _code(dtype)))


def _code(dtype: torch.dtype | None) -> str | None:
    code = next((c for c, d in FLOATS.items() if d == dtype), None)
    if dtype is not None and code is None:
        raise OutputError(f"cannot store weights as {dtype}; choose one of {sorted(FLOATS)}")
    return code


def _slots(checkpoint: Checkpoint, edits: Mapping[str, Edit], code: str | None) -> list[Slot]:
    """Every tensor to write; new tensors come last."""
    all_edits = {name: Edit() for name in checkpoint.tensors} | dict(edits)
    slots = []
    for name, edit in all_edits.items():
        stored = checkpoint.tensors[edit.source or name]
        dtype = code if code and stored.dtype in FLOATS else stored.dtype
        slots.append(Slot(name, stored, dtype, edit.shape(stored.shape), stored.offset))
    return slots


def layout(
    checkpoint: Checkpoint,
    edits: Mapping[str, Edit],
    dtype: torch.dtype | None,
    max_shard_size: int | None,
) -> list[Shard]:
    """The weight files of the result, each with the offsets of its tensors."""
    slots = _slots(checkpoint, edits, _code(dtype))
    if max_shard_size is not None:
        ordered = [s for f in checkpoint.shards for s in slots if s.stored.file == f]
        return _cut(ordered, _common_metadata(checkpoint), max_shard_size)
    shards = []
    for file in checkpoint.shards:
        here = [slot for slot in slots if slot.stored.file == file]
        same = all(slot.stays for slot in here)
        if checkpoint.format == "safetensors" and same:
            header = checkpoint.headers[file]
            shards.append(Shard(file, header, tuple(sorted(here, key=lambda s: s.offset))))
        else:
            metadata = checkpoint.metadata.get(file) or {"format": "pt"}
            shards.append(_packed(_safetensors_name(file), here, metadata))
    return shards


def _cut(slots: list[Slot], metadata: dict[str, str], limit: int) -> list[Shard]:
    """Distribute tensors over files of at most ``limit`` bytes, but at least one tensor each."""
    groups: list[list[Slot]] = [[]]
    size = 0
    for slot in slots:
        if groups[-1] and size + slot.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(slot)
        size += slot.nbytes
    if len(groups) == 1:
        return [_packed("model.safetensors", groups[0], metadata)]
    return [
        _packed(f"model-{i:05d}-of-{len(groups):05d}.safetensors", group, metadata)
        for i, group in enumerate(groups, 1)
    ]


def _packed(name: str, slots: list[Slot], metadata: dict[str, str]) -> Shard:
    """A shard with a new header; tensors of wider dtypes come first, so that all are aligned."""
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    ordered = sorted(slots, key=lambda s: -(s.nbytes // max(prod(s.shape), 1)))
    ends = [0, *accumulate(slot.nbytes for slot in ordered)]
    for slot, (begin, end) in zip(ordered, pairwise(ends), strict=True):
        entries[slot.name] = {
            "dtype": slot.dtype,
            "shape": list(slot.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    moved = [
        replace(slot, offset=len(header) + begin)
        for slot, begin in zip(ordered, ends, strict=False)
    ]
    return Shard(name, header, tuple(moved))


def _safetensors_name(file: str) -> str:
    if not file.endswith(".bin"):
        return file
    return file.replace("pytorch_model", "model", 1).removesuffix(".bin") + ".safetensors"


def _common_metadata(checkpoint: Checkpoint) -> dict[str, str]:
    merged = {k: v for d in checkpoint.metadata.values() for k, v in (d or {}).items()}
    return merged or {"format": "pt"}


def index(checkpoint: Checkpoint, shards: list[Shard]) -> dict[str, bytes]:
    """The shard index by file name: the source's own if nothing in it changes.

    Empty for a single file without a source index.
    """
    slots = {slot.name: slot for shard in shards for slot in shard.slots}
    files = {slot.name: shard.name for shard in shards for slot in shard.slots}
    content: dict[str, Any] = {"metadata": {}, "weight_map": files}
    stays = all(files[slot.name] == slot.stored.file for slot in slots.values())
    if checkpoint.index and stays:
        text = (checkpoint.source.path / checkpoint.index).read_bytes()
        new = any(slot.nbytes != slot.stored.nbytes for slot in slots.values())
        if not new and slots.keys() == checkpoint.tensors.keys():
            return {checkpoint.index: text}
        content = {"metadata": {}, **json.loads(text)}
        content["weight_map"] = {**content["weight_map"], **files}
    elif [shard.name for shard in shards] == ["model.safetensors"]:
        return {}
    metadata = dict(content["metadata"] or {})
    if type(known := metadata.get("total_parameters")) is int:
        more = sum(prod(slot.shape) for slot in slots.values())
        more -= sum(prod(stored.shape) for stored in checkpoint.tensors.values())
        metadata["total_parameters"] = known + more
    metadata["total_size"] = sum(slot.nbytes for slot in slots.values())
    text = json.dumps({**content, "metadata": metadata}, indent=2).encode() + b"\n"
    return {"model.safetensors.index.json": text}
