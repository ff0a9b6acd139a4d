"""The archive: one file from which a folded checkpoint's original is restored bit for bit.

Each tensor is restored in parts, which are slices along one of its dimensions. A part that the fold
changed is restored by its means and a difference of bits (see ``difference``); the bytes of other
parts are the original's. The archive is a safetensors file with

    parts       I64 (n, 5)   index of the tensor; dimension, first slice and number of slices;
                             bytes in ``stored``
    digests     U8 (n, 16)   128-bit XXH3 of each part of the original, faster than the disk
    stored      U8           means and differences of all parts, one after the other
    factor/I/NAME            the factors along dimension I of ``dims``, to divide by
    header/FILE, file/FILE   U8, the header of a weight file, or all of a file that changes

The file's ``__metadata__`` has JSON under ``kept``: ``version``; the digest of the result's
``marker``; ``tensors``, from each name to ``{dtype, shape, axes, dims, written}``, where
``written`` is its name in the result; ``unread``, the digests of written tensors that restoring
does not check; and ``sha256`` of everything else in the archive. The archive has a folder of its
own, in which no loader looks for weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from enjoyln_cli.archive.difference import Undo, fits
from enjoyln_cli.checkpoint.headers import DTYPES, StoredTensor, bytes_of, read_safetensors_header
from enjoyln_cli.checkpoint.result_files import FILE
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.fs.digests import digest_of_data
from enjoyln_cli.plan.axis import Axis, as_numbers

VERSION = 1

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_COPY_BYTES = 1 << 22
"""Bytes to copy at once."""
_ADVICE = "download the result again, or fold the source again"


# Writing.


@dataclass(frozen=True)
class Record:
    """What restores a part of a tensor."""

    tensor: str
    """Name of the original tensor."""
    part: tuple[int, int, int]
    """``(dim, first, count)``."""
    digest: bytes
    """Of the original part."""
    stored: bytes
    """What ``difference`` returned for it."""


@dataclass(frozen=True)
class Recorder:
    """Collects records on the disk."""

    undo: Mapping[str, Undo]
    """For every tensor of the original, how it is approximated."""
    written: Mapping[str, str]
    """Maps tensors that are written under another name to that name."""
    spool: BinaryIO
    """A temporary file for what is stored, open for reading and writing."""
    parts: list[tuple[int, ...]] = field(default_factory=list)
    """The numbers in ``parts`` of the archive."""
    digests: list[bytes] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    """Digests of written tensors that restoring does not check (see ``outputs_to_digest``)."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Index of each tensor of the original."""
    originals: dict[str, str] = field(default_factory=dict)
    """Maps the name of each written tensor to that of the original that it restores."""

    def __post_init__(self) -> None:
        self.numbers.update({name: i for i, name in enumerate(self.undo)})
        self.originals.update({self.written.get(name, name): name for name in self.undo})

    def add(self, record: Record) -> None:
        """Collect a record; those of a tensor are added in the order of its parts."""
        number = self.numbers[record.tensor]
        self.parts.append((number, *record.part, len(record.stored)))
        self.digests.append(record.digest)
        self.spool.write(record.stored)


def save_archive(
    recorder: Recorder,
    folder: Path,
    marker: Any,
    headers: Mapping[str, bytes],
    files: Mapping[str, bytes],
) -> None:
    """Write the archive to ``folder``.

    ``marker`` is the ``enjoyln`` entry of the result's config. ``headers`` and ``files`` map the
    original's file names to headers of weight files and to whole other files.
    """
    parts = np.array(recorder.parts, dtype=np.int64).reshape(-1, 5)
    digests = np.frombuffer(b"".join(recorder.digests), dtype=np.uint8)
    small = {"parts": torch.from_numpy(parts)}
    for name, undo in recorder.undo.items():
        small |= {f"factor/{i}/{name}": factor for i, factor in enumerate(undo.factors)}
    small = dict(sorted(small.items(), key=lambda item: -item[1].dtype.itemsize))
    small["digests"] = torch.from_numpy(digests.copy()).view(-1, 16)
    for kind, texts in (("header", headers), ("file", files)):
        for name, text in texts.items():
            small[f"{kind}/{name}"] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
    nbytes = int(parts[:, 4].sum())
    metadata = {"version": VERSION, "marker": digest_of_data(marker), "unread": recorder.unchecked}
    metadata["tensors"] = _tensor_entries(recorder)
    with (folder / FILE).open("xb") as file:
        file.write(_header(small, nbytes, {**metadata, "sha256": "0" * 64}))
        digest = hashlib.sha256(json.dumps(metadata).encode())
        for block in chain(_blocks_of(small), _stored_of(recorder)):
            digest.update(block)
            file.write(block)
        file.seek(0)
        file.write(_header(small, nbytes, {**metadata, "sha256": digest.hexdigest()}))


def _tensor_entries(recorder: Recorder) -> dict[str, Any]:
    return {
        name: {
            "dtype": _CODES[undo.dtype],
            "shape": list(undo.shape),
            "axes": [as_numbers(axis) for axis in undo.axes],
            "dims": list(undo.dims),
            "written": recorder.written.get(name, name),
        }
        for name, undo in recorder.undo.items()
    }


def _header(small: Mapping[str, torch.Tensor], nbytes: int, metadata: dict[str, Any]) -> bytes:
    """The header of the archive, with ``nbytes`` bytes of means and differences."""
    described = [(n, _CODES[t.dtype], list(t.shape), t.nbytes) for n, t in small.items()]
    described.append(("stored", "U8", [nbytes], nbytes))
    entries: dict[str, Any] = {"__metadata__": {"format": "enjoyln", "kept": json.dumps(metadata)}}
    at = 0
    for name, code, shape, size in described:
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks_of(small: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    for tensor in small.values():
        yield bytes(bytes_of(tensor))


def _stored_of(recorder: Recorder) -> Iterator[bytes]:
    """What is stored for all parts."""
    recorder.spool.seek(0)
    while block := recorder.spool.read(_COPY_BYTES):
        yield block


# Reading.


@dataclass(frozen=True)
class RecordedPart:
    """A part of an original tensor, and the place in the archive of what restores it."""

    dim: int
    first: int
    count: int
    digest: bytes
    offset: int
    """Absolute offset in the archive, in bytes."""
    nbytes: int


@dataclass(frozen=True)
class Archive:
    """The archive of one original, without its differences, which are read part by part."""

    path: Path
    undo: dict[str, Undo]
    written: dict[str, str]
    """Maps each original tensor to the written one that it is restored from."""
    parts: dict[str, list[RecordedPart]]
    headers: dict[str, bytes]
    files: dict[str, bytes]
    unchecked: dict[str, str]
    """Digests of written tensors that restoring does not check, as in ``Recorder``."""


_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def open_archive(folder: Path, marker: Any) -> Archive:
    """Open the archive in ``folder`` of the result whose config has ``marker``.

    Raises ``BadCheckpoint`` if it is missing or damaged, contradicts itself or belongs to another
    result.
    """
    path = folder / FILE
    try:
        found, texts = read_safetensors_header(path)
        stored = {one.name: one for one in found}
        metadata = _mapping(json.loads(texts["kept"]))
        if metadata["version"] != VERSION:
            raise BadCheckpoint(
                f"{path} has version {metadata['version']!r:.40}, but this program reads "
                f"{VERSION}; upgrade enjoyln"
            )
        if metadata["marker"] != digest_of_data(marker):
            raise BadCheckpoint(f"{path} belongs to the result of another fold; {_ADVICE}")
        if metadata.pop("sha256") != _digest(path, found, metadata):
            raise BadCheckpoint(f"{path} is damaged: its digest does not match; {_ADVICE}")
        return _read_archive(path, stored, metadata["tensors"], _mapping(metadata["unread"]))
    except FileNotFoundError as error:
        raise BadCheckpoint(f"{path} is missing; {_ADVICE}") from error
    except (*_MALFORMED, RecursionError) as error:
        raise BadCheckpoint(f"{path} is damaged: {type(error).__name__}; {_ADVICE}") from error


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError
    return value


def _digest(path: Path, found: list[StoredTensor], metadata: dict[str, Any]) -> str:
    """The digest as in ``save_archive``: of the metadata, then of all tensors in the file."""
    digest = hashlib.sha256(json.dumps(metadata).encode())
    with path.open("rb") as file:
        file.seek(min((one.offset for one in found), default=0))
        while block := file.read(_COPY_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _read_archive(
    path: Path, stored: dict[str, StoredTensor], tensors: dict[str, Any], unread: dict[str, Any]
) -> Archive:
    def read(name: str) -> torch.Tensor:
        one = stored[name]
        with path.open("rb") as file:
            file.seek(one.offset)
            data = bytearray(file.read(one.nbytes))
        flat = torch.frombuffer(data, dtype=DTYPES[one.dtype]) if data else torch.empty(0)
        return flat.to(DTYPES[one.dtype]).reshape(one.shape)

    def texts(kind: str) -> dict[str, bytes]:
        names = [name for name in stored if name.startswith(f"{kind}/")]
        return {name.partition("/")[2]: read(name).numpy().tobytes() for name in names}

    undo = {name: _read_undo(name, _mapping(one), read) for name, one in _mapping(tensors).items()}
    written = {name: str(entry["written"]) for name, entry in tensors.items()}
    table, digests = read("parts").tolist(), read("digests").numpy()
    parts: dict[str, list[RecordedPart]] = {name: [] for name in undo}
    names, at = list(undo), stored["stored"].offset
    for (number, dim, first, count, nbytes), digest in zip(table, digests, strict=True):
        part = RecordedPart(dim, first, count, digest.tobytes(), at, nbytes)
        parts[names[number]].append(part)
        at += nbytes
    if at != stored["stored"].offset + stored["stored"].nbytes:
        raise ValueError("parts")
    _check_parts(undo, parts)
    return Archive(path, undo, written, parts, texts("header"), texts("file"), unread)


def _read_undo(name: str, entry: dict[str, Any], read: Callable[[str], torch.Tensor]) -> Undo:
    axes = tuple(Axis(*map(int, numbers)) for numbers in entry["axes"])
    dims = tuple(map(int, entry["dims"]))
    undo = Undo(
        DTYPES[entry["dtype"]],
        tuple(map(int, entry["shape"])),
        axes,
        dims,
        tuple(read(f"factor/{i}/{name}") for i in range(len(dims))),
    )
    if not fits(undo):
        raise ValueError(name)
    return undo


def _check_parts(undo: dict[str, Undo], parts: dict[str, list[RecordedPart]]) -> None:
    """Raise ``ValueError`` unless the parts of each tensor cover it without gaps, in order."""
    for name, recorded in parts.items():
        shape = undo[name].shape or (1,)
        end, dims = 0, {part.dim for part in recorded}
        for part in recorded:
            if part.first != end or min(part.count, part.nbytes) < 0:
                raise ValueError(name)
            end += part.count
        if prod(shape) and (len(dims) != 1 or end != shape[dims.pop()]):
            raise ValueError(name)
