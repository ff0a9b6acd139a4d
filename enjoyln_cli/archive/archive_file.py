"""The archive: one file from which a folded checkpoint's original is restored bit for bit.

Each tensor is restored in pieces, the runs of bytes that the fold read at once. A piece was either
copied, so that the written bytes are the original, or it is predicted and then corrected:
``original = correct(take_back(written), corrections)``. The archive is a safetensors file with

    pieces     I64 (n, 7)   index of the tensor; first byte and number of bytes in the original;
                            whether the piece is predicted (1) or copied (0);
                            bytes of its gaps, of its steps and of its exact elements
    digests    U8 (n, 16)   128-bit XXH3 of each piece of the original, faster than the disk
    gaps, steps, exact      U8, the corrections of all pieces, one after the other
    means/I/NAME            the means over axis I of the tensor, to add back
    factor/I/NAME           the factors along dimension I of ``dims``, to divide by
    header/FILE, file/FILE  U8, the header of a weight file, or all of a file that the fold rewrites

The file's ``__metadata__`` has JSON under ``kept``: ``version``; the digest of the result's
``marker``; ``tensors``, from each name to ``{dtype, shape, axes, dims, written}``, where
``written`` is its name in the result; ``unread``, the digests of written tensors that restoring
does not check; and ``sha256`` of everything else in the archive. The archive has a folder of its
own, in which no loader looks for weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from enjoyln_cli.archive.prediction import Undo, fits
from enjoyln_cli.archive.residuals import Corrections
from enjoyln_cli.checkpoint.headers import DTYPES, StoredTensor, bytes_of, read_safetensors_header
from enjoyln_cli.checkpoint.result_files import FILE
from enjoyln_cli.errors import BadCheckpoint
from enjoyln_cli.fs.digests import digest_of_data, digest_of_piece
from enjoyln_cli.plan.axis import Axis, as_numbers

VERSION = 1

_CODES = {dtype: code for code, dtype in DTYPES.items()}
_RUNS = ("gaps", "steps", "exact")
_COPY_BYTES = 1 << 22
"""Bytes to copy at once."""
_ADVICE = "download the result again, or fold the source again"


# Writing.


@dataclass(frozen=True)
class Recorder:
    """Collects pieces on the disk; any thread may add them in any order."""

    undo: Mapping[str, Undo]
    """For every tensor of the original, how it is predicted."""
    written: Mapping[str, str]
    """Maps tensors that are written under another name to that name."""
    spool: int
    """Descriptor of a temporary file for corrections, open for reading and writing."""
    pieces: list[tuple[int, ...]] = field(default_factory=list)
    """The numbers in ``pieces`` of the archive, then the offset of the corrections in the spool."""
    digests: list[bytes] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    """Digests of written tensors that restoring does not check (see ``outputs_to_digest``)."""
    numbers: dict[str, int] = field(default_factory=dict)
    """Index of each tensor of the original."""
    originals: dict[str, str] = field(default_factory=dict)
    """Maps the name of each written tensor to that of the original that it restores."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.numbers.update({name: i for i, name in enumerate(self.undo)})
        self.originals.update({self.written.get(name, name): name for name in self.undo})


@dataclass(frozen=True)
class TensorRecorder:
    """Records the pieces of one tensor of the original."""

    recorder: Recorder
    name: str
    undo: Undo


def tensor_recorder(recorder: Recorder, written: str) -> TensorRecorder | None:
    """A recorder for the original of a written tensor; ``None`` if it restores none."""
    name = recorder.originals.get(written)
    return None if name is None else TensorRecorder(recorder, name, recorder.undo[name])


def record_piece(
    tensor: TensorRecorder, start: int, data: memoryview, found: Corrections | None = None
) -> None:
    """Record one piece of the original: its bytes from ``start`` on, and their corrections.

    Without corrections (``found``), the piece is one that was copied.
    """
    recorder, predicted = tensor.recorder, found is not None
    runs = [found.gaps, found.steps, found.exact] if found else []
    sizes = [run.nbytes for run in runs] or [0, 0, 0]
    digest = digest_of_piece(data)
    with recorder.lock:
        at = sum(recorder.pieces[-1][4:]) if recorder.pieces else 0
        number = recorder.numbers[tensor.name]
        recorder.pieces.append((number, start, len(data), predicted, *sizes, at))
        recorder.digests.append(digest)
    for run in runs:
        at += os.pwrite(recorder.spool, run.view(np.uint8).data, at)


def save_archive(
    recorder: Recorder,
    folder: Path,
    marker: Any,
    headers: Mapping[str, bytes],
    files: Mapping[str, bytes],
) -> None:
    """Write the archive to ``folder``; its bytes do not depend on the order of recording.

    ``marker`` is the ``enjoyln`` entry of the result's config. ``headers`` and ``files`` map the
    original's file names to headers of weight files and to whole other files.
    """
    order = sorted(range(len(recorder.pieces)), key=lambda i: recorder.pieces[i])
    pieces = np.array([recorder.pieces[i] for i in order], dtype=np.int64).reshape(-1, 8)
    digests = np.frombuffer(b"".join(recorder.digests[i] for i in order), dtype=np.uint8)
    small = {"pieces": torch.from_numpy(pieces[:, :7].copy())}
    for name, undo in recorder.undo.items():
        small |= {f"means/{i}/{name}": means for i, means in enumerate(undo.means)}
        small |= {f"factor/{i}/{name}": factor for i, factor in enumerate(undo.factors)}
    small = dict(sorted(small.items(), key=lambda item: -item[1].dtype.itemsize))
    small["digests"] = torch.from_numpy(digests.copy()).view(-1, 16)
    for kind, texts in (("header", headers), ("file", files)):
        for name, text in texts.items():
            small[f"{kind}/{name}"] = torch.from_numpy(np.frombuffer(text, np.uint8).copy())
    sizes = dict(zip(_RUNS, pieces[:, 4:7].sum(0).tolist(), strict=True))
    metadata = {"version": VERSION, "marker": digest_of_data(marker), "unread": recorder.unchecked}
    metadata["tensors"] = _tensor_entries(recorder)
    with (folder / FILE).open("xb") as file:
        file.write(_header(small, sizes, {**metadata, "sha256": "0" * 64}))
        digest = hashlib.sha256(json.dumps(metadata).encode())
        for block in chain(_blocks_of(small), _corrections_of(recorder, pieces)):
            digest.update(block)
            file.write(block)
        file.seek(0)
        file.write(_header(small, sizes, {**metadata, "sha256": digest.hexdigest()}))


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


def _header(
    small: Mapping[str, torch.Tensor], sizes: Mapping[str, int], metadata: dict[str, Any]
) -> bytes:
    described = [(n, _CODES[t.dtype], list(t.shape), t.nbytes) for n, t in small.items()]
    described += [(name, "U8", [size], size) for name, size in sizes.items()]
    entries: dict[str, Any] = {"__metadata__": {"format": "enjoyln", "kept": json.dumps(metadata)}}
    at = 0
    for name, code, shape, nbytes in described:
        entries[name] = {"dtype": code, "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks_of(small: Mapping[str, torch.Tensor]) -> Iterator[bytes]:
    for tensor in small.values():
        yield bytes(bytes_of(tensor))


def _corrections_of(recorder: Recorder, pieces: Any) -> Iterator[bytes]:
    """All gaps in the order of the pieces, then all steps, then all exact elements."""
    for run in range(3):
        starts = pieces[:, 7] + pieces[:, 4 : 4 + run].sum(1)
        for start, size in zip(starts.tolist(), pieces[:, 4 + run].tolist(), strict=True):
            for first in range(start, start + size, _COPY_BYTES):
                yield os.pread(recorder.spool, min(_COPY_BYTES, start + size - first), first)


# Reading.


@dataclass(frozen=True)
class Piece:
    """A run of bytes of an original tensor, and the place of its corrections in the archive."""

    start: int
    nbytes: int
    predicted: bool
    """Whether it is predicted from the written bytes; otherwise these are the original."""
    digest: bytes
    runs: tuple[tuple[int, int], ...]
    """Offset and number of bytes of the gaps, the steps and the exact elements."""


@dataclass(frozen=True)
class Archive:
    """The archive of one original, without its corrections, which are read piece by piece."""

    path: Path
    undo: dict[str, Undo]
    written: dict[str, str]
    """Maps each original tensor to the written one that it is restored from."""
    pieces: dict[str, list[Piece]]
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
    table, digests = read("pieces").tolist(), read("digests").numpy()
    at = [stored[run].offset for run in _RUNS]
    pieces: dict[str, list[Piece]] = {name: [] for name in undo}
    names = list(undo)
    for (number, start, nbytes, told, *sizes), digest in zip(table, digests, strict=True):
        runs = tuple(zip(at, sizes, strict=True))
        pieces[names[number]].append(Piece(start, nbytes, bool(told), digest.tobytes(), runs))
        at = [first + size for first, size in runs]
    if at != [stored[run].offset + stored[run].nbytes for run in _RUNS]:
        raise ValueError("pieces")
    _check_pieces(undo, pieces)
    return Archive(path, undo, written, pieces, texts("header"), texts("file"), unread)


def _read_undo(name: str, entry: dict[str, Any], read: Callable[[str], torch.Tensor]) -> Undo:
    axes = tuple(Axis(*map(int, numbers)) for numbers in entry["axes"])
    dims = tuple(map(int, entry["dims"]))
    undo = Undo(
        DTYPES[entry["dtype"]],
        tuple(map(int, entry["shape"])),
        axes,
        tuple(read(f"means/{i}/{name}") for i in range(len(axes))),
        dims,
        tuple(read(f"factor/{i}/{name}") for i in range(len(dims))),
    )
    if not fits(undo):
        raise ValueError(name)
    return undo


def _check_pieces(undo: dict[str, Undo], pieces: dict[str, list[Piece]]) -> None:
    """Raise ``ValueError`` unless the pieces of each tensor cover it without gaps, in order."""
    for name, found in pieces.items():
        end = 0
        for piece in found:
            sizes = [size for _, size in piece.runs]
            if piece.start != end or min(piece.nbytes, *sizes) < 0:
                raise ValueError(name)
            end += piece.nbytes
        if end != prod(undo[name].shape) * undo[name].dtype.itemsize:
            raise ValueError(name)


def read_corrections(file: int, piece: Piece, dtype: torch.dtype) -> Corrections:
    """Read the corrections of a piece from the open archive; ``dtype`` is the original's."""
    gaps, steps, exact = (np.frombuffer(os.pread(file, n, at), np.uint8) for at, n in piece.runs)
    return Corrections(gaps, steps.view(np.int8), exact.view(f"i{dtype.itemsize}"))


TRANSFER = 1 << 22
"""Bytes of a tensor to read or write at once."""
