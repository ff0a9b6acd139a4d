"""Read the headers of weight files, and check them.

A safetensors file is ``8 bytes: header length n, little endian | n bytes: JSON | tensors``. The
header is read and checked here without the safetensors library, because its offsets are used to
read and write in place. The tensors have to fill the rest of the file exactly, in any order,
without gap or overlap, each with ``bytes == elements * size(dtype)``. A ``.bin`` file is a pickle,
loaded with ``weights_only=True`` and memory-mapped if its format allows it.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from mmap import ACCESS_COPY, ALLOCATIONGRANULARITY, mmap
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import torch

from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel
from enjoyln_cli.text import first_line

MAX_HEADER = 100_000_000
"""Maximum bytes of a header in the safetensors format."""

MAX_ELEMENTS = (1 << 63) - 1
"""Maximum elements of a tensor in torch; for an empty tensor, the product of its other sizes."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Supported dtypes by their safetensors names. Smaller floats only occur in quantised models."""

FLOATS = {code: dtype for code, dtype in DTYPES.items() if dtype.is_floating_point}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_QUANTISED = ("F4", "F6_", "F8_")
_PACKED = ("I8", "U8", "I16", "U16", "I32", "U32")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file."""

    name: str
    file: str
    """Relative to the checkpoint's directory."""
    dtype: str
    """Safetensors name: F32, F16, BF16, F64, I64, ..."""
    shape: tuple[int, ...]
    offset: int
    """Position in the file, in bytes from its beginning; -1 for a ``.bin`` file."""
    nbytes: int


def read_header(path: Path) -> tuple[bytes, int]:
    """The first bytes of a safetensors file: the length of its header, and the header; its size.

    The size of the file is in bytes. Raises ``BadCheckpoint`` for a length that is impossible.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        if prefix == b"version ":
            raise _pointer(path.name)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > MAX_HEADER or 8 + length > size:
            raise BadCheckpoint(
                f"{path.name} says its header takes {length} bytes, but the file has {size}; "
                "it is truncated or no safetensors file, fetch it again"
            )
        return prefix + file.read(length), size


def tensors_in(file: str, header: bytes, size: int) -> tuple[list[StoredTensor], dict[str, str]]:
    """The tensors of a file in the order of their offsets, and its ``__metadata__``.

    ``header`` and ``size`` (of the whole file, in bytes) come from ``read_header``.
    Raises ``BadCheckpoint`` if the header is inconsistent or does not match the size,
    ``UnsupportedModel`` for dtypes that only quantised checkpoints have.
    """
    text = header[8:]
    entries = _parsed_header(file, text)
    metadata = _metadata(file, entries.pop("__metadata__", None))
    _require_printable(entries, file)
    start = 8 + len(text)
    tensors = [_entry(file, name, value, start) for name, value in entries.items()]
    tensors.sort(key=lambda stored: (stored.offset, stored.nbytes))
    end = _end(file, tensors, start)
    if end != size:
        _refuse_size(file, end, size)
    return tensors, metadata


def _parsed_header(file: str, text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"the header of {file} is not valid JSON ({first_line(error)}); fetch it again"
        ) from error
    if not isinstance(header, dict):
        raise BadCheckpoint(f"the header of {file} is not a JSON object; fetch it again")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} appears twice")
    return mapping


def _metadata(file: str, value: Any) -> dict[str, str]:
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise BadCheckpoint(f"__metadata__ of {file} does not map text to text; fetch it again")
    return value


def _entry(file: str, name: str, value: Any, start: int) -> StoredTensor:
    fields = value if isinstance(value, dict) else {}
    dtype, shape, span = (fields.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not (isinstance(dtype, str) and _naturals(shape) and _naturals(span) and len(span) == 2):
        raise BadCheckpoint(
            f"{name} in {file} has a malformed header entry {value!r:.100}; fetch it again"
        )
    if dtype.startswith(_QUANTISED):
        raise _quantised(name, file, dtype)
    if dtype not in DTYPES:
        raise BadCheckpoint(f"{name} in {file} has the unknown dtype {dtype!r:.40}")
    if prod(size for size in shape if size) > MAX_ELEMENTS:
        raise BadCheckpoint(
            f"{name} in {file} has the impossible shape {str(shape):.100}; fetch it again"
        )
    need, spanned = prod(shape) * DTYPES[dtype].itemsize, span[1] - span[0]
    if need != spanned:
        raise BadCheckpoint(
            f"{name} in {file}: {dtype} of shape {shape} takes {need} bytes, but its offsets "
            f"{span} hold {spanned}; fetch the file again"
        )
    return StoredTensor(name, file, dtype, tuple(shape), start + span[0], spanned)


def read_at(file: int, data: memoryview, stored: StoredTensor, start: int) -> None:
    """Fill ``data`` from an open safetensors file, from byte ``start`` of a tensor on.

    ``file`` is a file descriptor. Raises ``BadCheckpoint`` if the file is too short.
    """
    done = 0
    while done < len(data):
        got = os.preadv(file, [data[done:]], stored.offset + start + done)
        if got == 0:
            raise BadCheckpoint(f"{stored.file} ends inside {stored.name}; fetch it again")
        done += got


def map_tensor(file: int, stored: StoredTensor) -> torch.Tensor:
    """A stored tensor as a private map of its open safetensors file.

    Values that are written to it stay in memory.

    Raises ``BadCheckpoint`` if the file is too short.
    """
    try:
        return mapped(file, stored.offset, stored.dtype, stored.shape, ACCESS_COPY)
    except ValueError as error:
        raise BadCheckpoint(f"{stored.file} ends inside {stored.name}; fetch it again") from error


def mapped(file: int, offset: int, dtype: str, shape: tuple[int, ...], access: int) -> torch.Tensor:
    """A tensor in an open file, from the byte ``offset`` on; ``access`` is a mode of ``mmap``."""
    if not prod(shape):
        return torch.empty(shape, dtype=DTYPES[dtype])
    nbytes, shift = prod(shape) * DTYPES[dtype].itemsize, offset % ALLOCATIONGRANULARITY
    data = mmap(file, shift + nbytes, access=access, offset=offset - shift)
    flat = torch.frombuffer(data, dtype=DTYPES[dtype], offset=shift, count=prod(shape))
    return flat.view(shape)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in their order, as bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _naturals(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _end(file: str, tensors: list[StoredTensor], start: int) -> int:
    """Where the last tensor ends. Raises ``BadCheckpoint`` if tensors overlap or leave a gap."""
    end, before = start, "the header"
    for stored in tensors:
        if stored.offset != end:
            fault = "overlaps" if stored.offset < end else "leaves a gap after"
            raise BadCheckpoint(f"{stored.name} in {file} {fault} {before}; fetch it again")
        end, before = stored.offset + stored.nbytes, stored.name
    return end


def _refuse_size(file: str, end: int, size: int) -> NoReturn:
    if end > size:
        raise BadCheckpoint(
            f"{file} is truncated: its header promises {end} bytes, the file has {size}; "
            "fetch it again"
        )
    raise BadCheckpoint(
        f"{file} has {size - end} bytes that its header does not mention; fetch it again"
    )


def _require_printable(names: Iterable[str], file: str) -> None:
    """Raise ``BadCheckpoint`` for a tensor name with unprintable characters."""
    for name in names:
        if not name.isprintable():
            raise BadCheckpoint(f"{file} names a tensor {name!r:.100}; fetch it again")


def read_bin_header(path: Path) -> list[StoredTensor]:
    """The tensors of a pickled state dict, in its order. Raises as ``load_bin`` does."""
    stored = []
    for name, tensor in load_bin(path).items():
        if tensor.is_quantized or tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1:
            raise _quantised(name, path.name, str(tensor.dtype))
        if kind := _unfit_kind(tensor):
            raise BadCheckpoint(f"{name} in {path.name} is {kind}; save the model again")
        dtype, nbytes = _NAMES[tensor.dtype], tensor.numel() * tensor.dtype.itemsize
        stored.append(StoredTensor(name, path.name, dtype, tuple(tensor.shape), -1, nbytes))
    return stored


def _unfit_kind(tensor: torch.Tensor) -> str:
    """What kind of tensor it is, if safetensors cannot hold that kind; otherwise empty."""
    if tensor.is_meta:
        return "a meta tensor, without values"
    if tensor.is_nested:
        return "a nested tensor, which safetensors cannot hold"
    if tensor.dtype not in _NAMES or tensor.layout != torch.strided:
        return f"a {tensor.layout} tensor of {tensor.dtype}, which safetensors cannot hold"
    nbytes = tensor.numel() * tensor.dtype.itemsize
    if nbytes > tensor.untyped_storage().nbytes():
        return f"an expanded view, which would take {nbytes} bytes in safetensors"
    return ""


def load_bin(path: Path) -> dict[str, torch.Tensor]:
    """Load a pickled state dict. Callers share its tensors, and must not write to them.

    Raises ``BadCheckpoint`` for a pickle that contains code, is damaged, or is not a state dict.
    """
    state = path.stat()
    return _load_bin(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=2)
def _load_bin(path: Path, _changed: int, _size: int) -> dict[str, torch.Tensor]:
    import pickle
    import zipfile

    with path.open("rb") as file:
        if file.read(8) == b"version ":
            raise _pointer(path.name)
    try:
        mapped = zipfile.is_zipfile(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except pickle.UnpicklingError as error:
        text = str(error)
        if "GLOBAL" in text or "global" in text:
            raise BadCheckpoint(
                f"{path.name} is a pickle with code in it ({_culprit(text)}), which is not run; "
                "ask its author for safetensors"
            ) from error
        raise _damaged(path, error) from error
    except Exception as error:  # for a damaged pickle, torch.load may raise any exception
        raise _damaged(path, error) from error
    if not isinstance(content, dict):
        raise BadCheckpoint(
            f"{path.name} holds a {type(content).__name__}, not a state dict; save the model again"
        )
    for name, entry in content.items():
        if isinstance(entry, dict) and any(map(torch.is_tensor, entry.values())):
            raise BadCheckpoint(
                f"{path.name} keeps the tensors of the model in its entry {name!r:.60}; save that "
                f"entry alone: torch.save(torch.load(path)[{name!r:.60}], path)"
            )
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise BadCheckpoint(
                f"{path.name} is no state dict: {name!r:.60} is a {type(tensor).__name__}, not a "
                "tensor; save the model again"
            )
    _require_printable(content, path.name)
    return dict(content)


def _culprit(text: str) -> str:
    words = text.replace("`", " ").split()
    after = [b for a, b in zip(words, words[1:], strict=False) if a in ("GLOBAL", "global:")]
    named = [word for word in after if "." in word.strip(".")]
    return named[0].strip(".,") if named else "a global that is no tensor"


def _damaged(path: Path, error: Exception) -> BadCheckpoint:
    return BadCheckpoint(
        f"{path.name} cannot be read, it is damaged or truncated "
        f"({type(error).__name__}: {first_line(error)}); fetch it again"
    )


def _pointer(file: str) -> BadCheckpoint:
    return BadCheckpoint(f"{file} is a Git LFS pointer, not the file; run `git lfs pull`")


def require_unpacked(tensors: dict[str, StoredTensor]) -> None:
    """Raise ``UnsupportedModel`` if a weight matrix is stored as (packed) integers."""
    for stored in tensors.values():
        last = stored.name.rsplit(".", 1)[-1]
        if "weight" in last and len(stored.shape) == 2 and stored.dtype in _PACKED:
            raise _quantised(stored.name, stored.file, stored.dtype)


def _quantised(name: str, file: str, dtype: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{name} in {file} is quantised ({dtype}), and rounded weights cannot be compared or "
        "edited exactly; convert the original checkpoint, then quantise the result"
    )
