"""What a checkpoint holds: headers, index, tensors; read, never trusted.

Only headers are read to open one. Every name, offset and size is checked against the files before
anything relies on it: a header is the word of whoever made the file.
"""

from __future__ import annotations

import fnmatch
import json
import math
import os
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.output import staged_output
from enjoyln_cli.source import (
    FOREIGN_WEIGHTS,
    Source,
    load_config,
    open_source,
    raw_config,
    require_unfolded,
)

__all__ = [
    "DTYPES", "Checkpoint", "Source", "Stored", "load_config", "open_checkpoint", "open_source",
    "other_files", "raw_config", "read_tensor", "require_unfolded", "same_values", "staged_output",
]  # fmt: skip

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_MOST_HEADER = 100_000_000
_BLOCK = 1 << 24
_SINGLE = {"safetensors": "model.safetensors", "bin": "pytorch_model.bin"}


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    name: str
    file: str
    dtype: str
    """As safetensors writes it: ``F32``, ``BF16``, ``I64``."""
    shape: tuple[int, ...]
    offset: int
    """First byte in the file; -1 in a pickled file, which has to be loaded."""
    nbytes: int


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a model, by name, and the files that hold them."""

    source: Source
    format: Literal["safetensors", "bin"]
    shards: tuple[str, ...]
    tensors: dict[str, Stored]
    metadata: dict[str, dict[str, str]]
    """The ``__metadata__`` of each shard's header."""
    index: str | None
    """Name of the index file, where there is one."""


def open_checkpoint(source: Source) -> Checkpoint:
    """Read the headers of every shard.

    Raises ``UnsupportedModel`` where there are no weights of a kind that can be read, and
    ``BadCheckpoint`` where the files contradict each other.
    """
    kind: Literal["safetensors", "bin"]
    for kind in ("safetensors", "bin"):  # type: ignore[assignment]
        single = source.path / _SINGLE[kind]
        index = source.path / f"{_SINGLE[kind]}.index.json"
        if index.is_file():
            weight_map = _read_index(index)
            shards = tuple(dict.fromkeys(weight_map.values()))
        elif single.is_file():
            weight_map, shards = {}, (single.name,)
        else:
            continue
        tensors, metadata = _read_shards(source, kind, shards)
        for name, file in weight_map.items():
            if name not in tensors or tensors[name].file != file:
                raise BadCheckpoint(f"{index.name} says that {file} holds {name}; it does not")
        return Checkpoint(
            source, kind, shards, tensors, metadata, index.name if weight_map else None
        )
    raise UnsupportedModel(_no_weights(source.path))


def _no_weights(path: Path) -> str:
    foreign = [p.name for p in path.iterdir() if _is_foreign(p.name)]
    if foreign:
        return f"{path} has weights for another framework only ({foreign[0]}); convert them first"
    return f"{path} has no weights: neither model.safetensors nor pytorch_model.bin"


def _is_foreign(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in FOREIGN_WEIGHTS)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        items = list(weight_map.items())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadCheckpoint(f"{path} is no index: it has to hold a weight_map object") from None
    for name, file in items:
        if not isinstance(file, str) or file != os.path.basename(file) or file in ("", ".", ".."):
            raise BadCheckpoint(f"{path.name} puts {name!r} into {file!r}, outside the directory")
    if not items:
        raise BadCheckpoint(f"{path} lists no tensor")
    return dict(items)


def _read_shards(
    source: Source, kind: str, shards: tuple[str, ...]
) -> tuple[dict[str, Stored], dict[str, dict[str, str]]]:
    tensors: dict[str, Stored] = {}
    metadata: dict[str, dict[str, str]] = {}
    for shard in shards:
        path = source.path / shard
        if not path.is_file():
            raise BadCheckpoint(f"{path} is missing; download the model again")
        _require_inside(path, source.path)
        found, metadata[shard] = _read_header(path) if kind == "safetensors" else _read_bin(path)
        for entry in found:
            if entry.name in tensors:
                raise BadCheckpoint(
                    f"{entry.name} is in {tensors[entry.name].file} and again in {shard}"
                )
            tensors[entry.name] = entry
    return tensors, metadata


def _require_inside(path: Path, directory: Path) -> None:
    """A shard may be a link into the blobs of its own Hub cache entry, and nowhere else."""
    target, home = path.resolve(), directory.resolve()
    blobs = home.parent.parent / "blobs"
    if not (target.is_relative_to(home) or target.is_relative_to(blobs)):
        raise BadCheckpoint(f"{path} is a link out of the model's directory, to {target}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands there twice")
    return found


def _read_header(path: Path) -> tuple[list[Stored], dict[str, str]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise BadCheckpoint(
                f"{path} is truncated or no safetensors file: its header claims {length} bytes, "
                f"the file has {size}"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
        metadata = header.pop("__metadata__", None) or {}
        entries = [_entry(name, info, path.name, 8 + length) for name, info in header.items()]
    except (ValueError, KeyError, TypeError, RecursionError, OverflowError) as error:
        raise BadCheckpoint(f"{path} has a damaged header: {str(error)[:150]}") from None
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise BadCheckpoint(f"{path} has a damaged header: its metadata is not all text")
    end = 8 + length
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != end:
            raise BadCheckpoint(f"{path}: {entry.name} overlaps another tensor or leaves a gap")
        end += entry.nbytes
    if end != size:
        raise BadCheckpoint(
            f"{path} is truncated or damaged: its tensors end at byte {end}, the file at {size}"
        )
    return entries, metadata


def _entry(name: str, info: Any, file: str, begin: int) -> Stored:
    code, shape = info["dtype"], tuple(info["shape"])
    first, last = info["data_offsets"]
    if code not in DTYPES:
        raise ValueError(f"{name} has dtype {code!r}, which enjoyln does not convert")
    if not all(type(n) is int and n >= 0 for n in (*shape, first, last)):
        raise ValueError(f"{name} has a shape or offset that is no natural number")
    if last - first != math.prod(shape) * DTYPES[code].itemsize:
        raise ValueError(f"{name}: {last - first} bytes do not hold {code} of shape {list(shape)}")
    return Stored(name, file, code, shape, begin + first, last - first)


def _load_bin(path: Path) -> dict[str, torch.Tensor]:
    try:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # a file of the old, unzipped kind cannot be mapped
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise BadCheckpoint(
            f"{path} holds more than tensors, maybe code, and is not loaded: "
            f"{str(error).split(chr(10))[0][:120]}"
        ) from None
    except (RuntimeError, EOFError, ValueError, OSError) as error:
        raise BadCheckpoint(f"{path} cannot be read: {str(error)[:150]}") from None
    if not isinstance(state, dict) or not all(torch.is_tensor(t) for t in state.values()):
        raise BadCheckpoint(f"{path} is no state dict: it has to map names to tensors")
    return state


def _read_bin(path: Path) -> tuple[list[Stored], dict[str, str]]:
    entries = []
    for name, tensor in _load_bin(path).items():
        if tensor.dtype not in _CODES:
            raise BadCheckpoint(f"{path}: {name} has dtype {tensor.dtype}, which is not converted")
        nbytes = tensor.numel() * tensor.element_size()
        entries.append(
            Stored(name, path.name, _CODES[tensor.dtype], tuple(tensor.shape), -1, nbytes)
        )
    return entries, {"format": "pt"}


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One tensor, read at its position. Raises ``BadCheckpoint`` if the file ends early."""
    stored = checkpoint.tensors[name]
    path = checkpoint.source.path / stored.file
    if checkpoint.format == "bin":
        return _load_bin(path)[name].contiguous()
    data = bytearray(b"".join(_blocks(path, stored)))
    if not data:
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).reshape(stored.shape)


def _blocks(path: Path, stored: Stored) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(stored.offset)
        left = stored.nbytes
        while left:
            block = file.read(min(left, _BLOCK))
            if not block:
                raise BadCheckpoint(f"{path} ends inside of {stored.name}")
            left -= len(block)
            yield block


def same_values(checkpoint: Checkpoint, first: str, second: str) -> bool:
    """Whether two stored tensors are equal bit for bit."""
    one, two = checkpoint.tensors[first], checkpoint.tensors[second]
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    if checkpoint.format == "bin":
        return torch.equal(read_tensor(checkpoint, first), read_tensor(checkpoint, second))
    path = checkpoint.source.path
    pairs = zip(_blocks(path / one.file, one), _blocks(path / two.file, two), strict=True)
    return all(left == right for left, right in pairs)


def other_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Every file that comes along: all but weights, their indexes, and hidden files."""
    root = checkpoint.source.path
    weights = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.index.json", *FOREIGN_WEIGHTS)
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = (Path(folder) / name).relative_to(root)
            hidden = name.startswith(".")
            weight = any(fnmatch.fnmatch(name, p) or fnmatch.fnmatch(str(path), p) for p in weights)
            if not hidden and not weight:
                found.append(str(path))
    return tuple(found)
