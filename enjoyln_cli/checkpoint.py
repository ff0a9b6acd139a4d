"""Where a model comes from, and what its directory holds.

Decides what ``MODEL`` means (a directory if there is one, otherwise a Hub id), which of its files
are the weights (safetensors before pickles), which files come along to a converted checkpoint, and
which models are refused before anything is computed: without a config that transformers knows, with
code of their own, quantised, folded already. Nothing is believed that a file says about another:
a shard is read only if it lies in the directory (or in the Hub cache that the directory is part
of), and only at the places that its checked header gives.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from enjoyln_cli.config import (
    CONFIG,
    load_config,
    raw_config,
    require_no_code_of,
    require_unfolded,
    require_unquantised,
)
from enjoyln_cli.errors import BadCheckpoint, ModelNotFound, UnsupportedModel
from enjoyln_cli.files import comes_along, shards_in_index, weights_among
from enjoyln_cli.output import staged_output
from enjoyln_cli.pipeline import transformer_folder
from enjoyln_cli.remote import Remote, require_token, similar, snapshot
from enjoyln_cli.shards import (
    DTYPES,
    Stored,
    bytes_of,
    load_bin,
    read_at,
    read_bin_header,
    read_safetensors_header,
    require_unpacked,
    tensors_in,
)

__all__ = [
    "Checkpoint",
    "Source",
    "State",
    "Stored",
    "file_of",
    "header_of",
    "load_config",
    "open_checkpoint",
    "open_source",
    "other_files",
    "pipeline_files",
    "raw_config",
    "read_part",
    "read_tensor",
    "require_no_code_of",
    "require_token",
    "require_unchanged",
    "require_unfolded",
    "same_values",
    "staged_output",
    "states_of",
]

BLOCK = 1 << 22
"""Bytes compared at once."""

_HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_.-]+)?")


State = tuple[int, int]
"""Size of a file, and the time of its last change in nanoseconds."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    model: str
    """As the user gave it: a Hub id or a path."""
    path: Path
    """The directory that holds config and weights; for a Hub id its snapshot in the cache."""
    revision: str | None
    """The commit of a Hub id, ``None`` for a directory."""
    folder: str = ""
    """Where ``path`` lies in the directory that ``model`` names: of a pipeline, the transformer."""
    remote: Remote | None = None
    """The files of weights, where they are not in ``path`` but fetched one by one."""

    @property
    def cached(self) -> bool:
        """Whether it lies in the Hub's cache, where nobody else writes."""
        return self.revision is not None

    @property
    def root(self) -> Path:
        """The directory of the whole pipeline; that of the model where it is not part of one."""
        return self.path.parents[len(Path(self.folder).parts) - 1] if self.folder else self.path


@dataclass(frozen=True)
class Checkpoint:
    """Every tensor of a model's weight files, known from their headers."""

    source: Source
    format: Literal["safetensors", "bin"]
    shards: tuple[str, ...]
    tensors: dict[str, Stored]
    metadata: dict[str, dict[str, str]]
    """Shard to the ``__metadata__`` of its header."""
    index: str | None
    """Name of the index file, if there is one."""
    states: Mapping[str, State] = field(default_factory=dict)
    """What the config and the weight files were before anything was read."""


def open_source(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    cache_dir: str | Path | None = None,
    weights: bool = False,
    stream: bool = False,
) -> Source:
    """Find ``model``: a directory if there is one of that name, otherwise a Hub id.

    Of a Hub id only ``config.json`` (and code that it names) is fetched; with ``weights`` also the
    weights, safetensors if there are any, and all files that come along; with ``stream`` each file
    of weights not before its turn comes (``Remote``). Raises ``ModelNotFound`` where it does not
    exist or cannot be reached, ``UnsupportedModel`` without config or weights, and for a directory
    or pickles with ``stream``.
    """
    local = os.path.expanduser(model)
    if model and os.path.isdir(local):
        if stream:
            raise UnsupportedModel(
                f"{model} is a directory, so there is nothing to download: leave --stream out"
            )
        if revision is not None:
            raise ModelNotFound(f"{model} is a directory and has no revision {revision!r}; drop it")
        folder = transformer_folder(Path(local))
        return Source(model, Path(local, folder), None, folder)
    if model and os.path.exists(local):
        raise ModelNotFound(f"{model} is a file; pass the directory that holds it")
    if not _HUB_ID.fullmatch(model):
        advice = similar(local) or "; pass a directory, or a Hub id such as owner/name"
        raise ModelNotFound(f"there is no directory {model!r}{advice}")
    require_token(token)
    path, remote = snapshot(model, revision, token, cache_dir, weights, stream)
    return Source(model, path, path.name, remote=remote)


def open_checkpoint(source: Source) -> Checkpoint:
    """Every tensor of the weight files, from headers that were checked.

    Raises ``UnsupportedModel`` where there are no weights for PyTorch or only quantised ones,
    ``BadCheckpoint`` for files that are missing, damaged, or contradict each other.
    """
    states = states_of(source.path, (CONFIG,))
    config = raw_config(source)
    require_unquantised(config, source.model)
    if config.get("transformers_weights"):
        raise UnsupportedModel(
            f"the config of {source.model} names its own weight file (transformers_weights); load "
            "it and save it with save_pretrained first"
        )
    remote = source.remote
    names = {entry.name for entry in os.scandir(source.path)}
    first = weights_among(sorted(names.union(remote.headers if remote else ())), source.model)
    states |= states_of(source.path, (first,))
    index = first if first.endswith(".json") else None
    shards, promised = shards_in_index(_located(source, first)) if index else ((first,), {})
    safetensors = ".safetensors" in first
    tensors: dict[str, Stored] = {}
    metadata: dict[str, dict[str, str]] = {}
    for shard in shards:
        states |= states_of(source.path, (shard,))
        if remote:
            found, metadata[shard] = tensors_in(shard, remote.headers[shard], remote.sizes[shard])
        elif safetensors:
            found, metadata[shard] = read_safetensors_header(_located(source, shard))
        else:
            found = read_bin_header(_located(source, shard))
        for stored in found:
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
    return Checkpoint(source, kind, shards, tensors, metadata, index, states)


def states_of(folder: Path, names: Iterable[str]) -> dict[str, State]:
    """What some files are now, by which a change can be told without reading them."""
    found = {name: (folder / name).stat() for name in names if (folder / name).is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def require_unchanged(folder: Path, before: Mapping[str, State]) -> None:
    """Raises ``BadCheckpoint`` for a file that is not what it was ``before``."""
    now = states_of(folder, before)
    for name, state in before.items():
        if now.get(name) != state:
            what = "has vanished" if name not in now else "has changed"
            raise BadCheckpoint(
                f"{name} {what} in {folder} while it was read; start again once nobody writes there"
            )


def _located(source: Source, name: str) -> Path:
    """The file, which has to lie in the directory, or in the Hub cache that it is part of."""
    root = source.path.resolve()
    allowed = [root] + ([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])
    try:
        real = (root / name).resolve()
    except (OSError, RuntimeError) as error:
        raise BadCheckpoint(f"{root / name} is a broken link") from error
    if not any(real.is_relative_to(place) for place in allowed):
        raise BadCheckpoint(
            f"{name} is a link to {real}, outside of {source.path}; put the file itself there"
        )
    if not real.is_file():
        raise BadCheckpoint(f"{name} is missing in {source.path}; fetch it again")
    if not os.access(real, os.R_OK):
        raise BadCheckpoint(f"{root / name} cannot be read; check its permissions")
    return root / name


def read_tensor(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """One tensor of its stored dtype and shape, in memory of its own.

    Raises ``BadCheckpoint`` where it is not stored, or where its file has become shorter.
    """
    stored = _stored(checkpoint, name)
    path = checkpoint.source.path / stored.file
    if checkpoint.format == "bin":
        return load_bin(path)[name].clone()
    if stored.nbytes == 0:
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
    data = _bytes(checkpoint, stored, 0, stored.nbytes)
    return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).reshape(stored.shape)


def read_part(checkpoint: Checkpoint, name: str, dim: int, start: int, count: int) -> torch.Tensor:
    """``read_tensor(...).narrow(dim, start, count)``, without reading all of it where that works.

    Raises as ``read_tensor`` does.
    """
    stored = _stored(checkpoint, name)
    if checkpoint.format == "bin" or checkpoint.source.remote:
        return read_tensor(checkpoint, name).narrow(dim, start, count).clone()
    dtype = DTYPES[stored.dtype]
    try:
        mapped = np.memmap(
            checkpoint.source.path / stored.file,
            dtype=f"u{dtype.itemsize}",
            mode="r",
            offset=stored.offset,
            shape=stored.shape,
        )
    except ValueError as error:
        raise BadCheckpoint(f"{stored.file} ends inside {name}; fetch it again") from error
    part = mapped[(slice(None),) * dim + (slice(start, start + count),)]
    return torch.from_numpy(part.copy()).view(dtype)


def read_rows(checkpoint: Checkpoint, name: str, elements: int) -> Iterator[torch.Tensor]:
    """The slices of one tensor along its first dimension, about so many elements at a time.

    A slice is there until the next is asked for. Raises as ``read_tensor`` does.
    """
    stored = _stored(checkpoint, name)
    if checkpoint.format == "bin" or stored.nbytes == 0:
        yield read_tensor(checkpoint, name)
        return
    dtype, (length, *rest) = DTYPES[stored.dtype], stored.shape
    size = stored.nbytes // length
    count = min(length, max(1, elements * length * dtype.itemsize // stored.nbytes))
    data = bytearray(count * size)
    with _reading(checkpoint, stored) as read:
        for first in range(0, length, count):
            some = min(count, length - first)
            read(memoryview(data)[: some * size], first * size)
            part = torch.frombuffer(data, dtype=dtype)[: some * size // dtype.itemsize]
            yield part.reshape(some, *rest)


def same_values(checkpoint: Checkpoint, a: str, b: str) -> bool:
    """Whether two stored tensors have the same dtype and shape and are equal bit for bit."""
    one, two = _stored(checkpoint, a), _stored(checkpoint, b)
    if (one.dtype, one.shape) != (two.dtype, two.shape):
        return False
    pairs = zip(blocks_of(checkpoint, a), blocks_of(checkpoint, b), strict=True)
    return all(left == right for left, right in pairs)


def _stored(checkpoint: Checkpoint, name: str) -> Stored:
    if name not in checkpoint.tensors:
        raise BadCheckpoint(f"{checkpoint.source.model} stores no tensor {name}")
    return checkpoint.tensors[name]


def blocks_of(
    checkpoint: Checkpoint, name: str, first: int = 0, count: int | None = None
) -> Iterator[bytes]:
    """The bytes of a stored tensor, a few megabytes at a time; ``count`` of them from ``first`` on.

    Raises as ``read_tensor`` does, and for bytes that the tensor does not have.
    """
    stored = _stored(checkpoint, name)
    end = stored.nbytes if count is None else first + count
    if not 0 <= first <= end <= stored.nbytes:
        raise BadCheckpoint(f"{name} has {stored.nbytes} bytes, and not those up to {end}")
    starts = range(first, end, BLOCK)
    if checkpoint.format == "bin":
        data = bytes_of(load_bin(checkpoint.source.path / stored.file)[name])
        yield from (bytes(data[start : min(start + BLOCK, end)]) for start in starts)
        return
    for start in starts:
        yield bytes(_bytes(checkpoint, stored, start, min(BLOCK, end - start)))


def _bytes(checkpoint: Checkpoint, stored: Stored, start: int, count: int) -> bytearray:
    """``count`` bytes of a tensor from its byte ``start`` on."""
    data = bytearray(count)
    with _reading(checkpoint, stored) as read:
        read(memoryview(data), start)
    return data


@contextmanager
def _reading(checkpoint: Checkpoint, stored: Stored) -> Iterator[Callable[[memoryview, int], None]]:
    """What fills memory from a byte of the tensor on."""
    if remote := checkpoint.source.remote:

        def fetch(data: memoryview, start: int) -> None:
            data[:] = remote.read(stored.file, stored.offset + start, len(data))

        yield fetch
        return
    with (checkpoint.source.path / stored.file).open("rb", buffering=0) as file:
        yield lambda data, start: read_at(file.fileno(), data, stored, start)


def file_of(checkpoint: Checkpoint, name: str) -> Path:
    """Where a file of weights lies; one that is fetched has to be at hand."""
    remote = checkpoint.source.remote
    return remote.here[name] if remote else checkpoint.source.path / name


def header_of(checkpoint: Checkpoint, name: str) -> bytes:
    """The first bytes of a safetensors file: the length of its header, and the header."""
    if checkpoint.source.remote:
        return checkpoint.source.remote.headers[name]
    with (checkpoint.source.path / name).open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def other_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Every file of the model that comes along: all but weights and their indices.

    Names are relative to the model's directory. Raises ``BadCheckpoint`` for a link out of it or to
    another directory.
    """
    return _carried(checkpoint.source)


def pipeline_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Every file of the pipeline outside of the model's folder, relative to the pipeline.

    There is none where the model's directory is the whole. Raises as ``other_files`` does.
    """
    source = checkpoint.source
    if not source.folder:
        return ()
    whole = Source(source.model, source.root, source.revision)
    return _carried(whole, leaving=source.folder)


def _carried(source: Source, leaving: str = "") -> tuple[str, ...]:
    """The files below ``source.path`` that come along, except for those of one folder."""
    found = []
    for folder, folders, files in os.walk(source.path):
        inside = Path(folder).relative_to(source.path)
        below = {name: (inside / name).as_posix() for name in folders}
        folders[:] = [n for n, at in below.items() if at != leaving and comes_along(f"{at}/")]
        linked = [name for name in folders if Path(folder, name).is_symlink()]
        names = [(inside / name).as_posix() for name in files + linked]
        found += [name for name in names if comes_along(name)]
    return tuple(name for name in sorted(found) if _located(source, name))
