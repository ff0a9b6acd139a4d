"""Download models from the Hub: which files, when, and what its error responses mean.

Weight files are downloaded with all others, or streamed (``--stream``, for disks that cannot hold
all of them). Streaming reads the headers of all weight files first, with HTTP range requests. Then
it downloads each file when it is needed, and deletes it afterwards unless it was in the cache
before. A broken connection is resumed. If a run fails, files that are complete stay in the cache,
except for those that streaming deletes.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from enjoyln_cli.checkpoint.access import HubAccess, access_keywords
from enjoyln_cli.checkpoint.file_roles import (
    CONFIG,
    WEIGHTS,
    comes_along,
    shards_in_index,
    weights_among,
)
from enjoyln_cli.checkpoint.headers import header_bytes, read_header
from enjoyln_cli.checkpoint.model_name import similar
from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError, ModelNotFound, UnsupportedModel
from enjoyln_cli.text import first_line


@dataclass(frozen=True)
class Remote:
    """The safetensors files of a repository: their headers, and downloads of one file at a time."""

    model: str
    path: Path
    """The directory of the commit in the cache."""
    files: dict[str, tuple[bytes, int]]
    """The ``header_bytes`` of each file, and its size in bytes."""
    access: HubAccess

    def read(self, file: str, start: int, count: int) -> bytes:
        """``count`` bytes of a file from byte ``start`` on, without downloading all of it.

        Raises ``BadCheckpoint`` if the Hub sends another number of bytes, ``ModelNotFound`` if the
        request fails.
        """
        return _part(self.model, self.path, file, start, count, self.access)

    @contextmanager
    def at_hand(self, file: str) -> Iterator[None]:
        """Download ``file`` into the cache; it is there for the length of the block.

        Raises ``BadCheckpoint`` if its header or size differs from the one read before,
        ``ModelNotFound`` if it cannot be downloaded.
        """
        from huggingface_hub import hf_hub_download

        cached, linked = blobs(self.path), os.path.lexists(self.path / file)
        fetch = access_keywords(self.access)
        try:
            hf_hub_download(self.model, file, revision=self.path.name, **fetch)
        except Exception as error:  # by huggingface_hub, its HTTP library, or the cache's disk
            raise _hub_error(error, self.model, self.path.name) from error
        path = self.path / file
        real = path.resolve()
        try:
            if read_header(path) != self.files[file]:
                raise BadCheckpoint(
                    f"{file} of {self.model} has another header or size than at the start of this "
                    "run; start again"
                )
            yield
        finally:
            if not linked:
                path.unlink(missing_ok=True)
            if not linked and real != path and real.name not in cached:
                real.unlink(missing_ok=True)


def remote(model: str, path: Path, files: Sequence[str], access: HubAccess) -> Remote:
    """Read the headers of weight files of a commit, whose cache directory is ``path``.

    Raises ``UnsupportedModel`` for pickles, and as ``Remote.read`` does.
    """
    if any(not file.endswith(".safetensors") for file in files):
        raise UnsupportedModel(
            f"{model} has {files[0]}, a pickle, which can only be read whole: leave --stream out"
        )

    def first_bytes(file: str) -> tuple[bytes, int]:
        size = _size(model, path, file, access)

        def read(start: int, count: int) -> bytes:
            return _part(model, path, file, start, min(count, size - start), access)

        return header_bytes(file, size, read), size

    return Remote(model, path, {file: first_bytes(file) for file in files}, access)


def _size(model: str, path: Path, file: str, access: HubAccess) -> int:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    if (path / file).is_file():
        return (path / file).stat().st_size
    url = hf_hub_url(model, file, revision=path.name)
    return int(get_hf_file_metadata(url, token=access.token).size or 0)


def _part(model: str, path: Path, file: str, start: int, count: int, access: HubAccess) -> bytes:
    """``count`` bytes of a file from byte ``start`` on, from the cache or else from the Hub."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    if count <= 0:
        return b""
    if (path / file).is_file():
        with (path / file).open("rb") as opened:
            opened.seek(start)
            return opened.read(count)
    url = hf_hub_url(model, file, revision=path.name)
    byte_range = {"Range": f"bytes={start}-{start + count - 1}", "Accept-Encoding": "identity"}
    try:
        headers = {**build_hf_headers(token=access.token), **byte_range}
        with http_stream_backoff("GET", url, headers=headers, follow_redirects=True) as response:
            hf_raise_for_status(response)
            data = response.read() if response.status_code == 206 else b""
    except Exception as error:  # by huggingface_hub or its HTTP library
        raise _hub_error(error, model, path.name) from error
    if len(data) != count:
        raise BadCheckpoint(
            f"the Hub sent {len(data)} of {count} requested bytes of {file} of {model}; leave "
            "--stream out if the Hub does not serve parts of files"
        )
    return data


def snapshot(
    model: str,
    revision: str | None,
    access: HubAccess,
    *,
    weights: bool,
    stream: bool,
) -> tuple[Path, Remote | None]:
    """Download a model; returns its cache directory, which is named after the commit.

    Without ``weights`` only ``config.json`` and code that it names are downloaded; with ``weights``
    all files of the checkpoint; with ``stream`` all except the weight files, which the ``Remote``
    downloads one by one. Raises as ``open_source`` does.
    """
    from huggingface_hub import errors, hf_hub_download, snapshot_download

    fetch, problem = access_keywords(access), "is not in the cache"
    try:
        path = Path(hf_hub_download(model, CONFIG, revision=revision, **fetch)).parent
        if b'"auto_map"' in (path / CONFIG).read_bytes():
            snapshot_download(model, revision=path.name, allow_patterns=["*.py"], **fetch)
        if not weights:
            return path, None
        problem = "is in the cache without its weights"
        names = _names(model, path, access)
        first = weights_among(names, model)
        shards: tuple[str, ...] = ()
        if first.endswith(".json"):
            index = hf_hub_download(model, first, revision=path.name, **fetch)
            shards = shards_in_index(Path(index))[0]
        along = {first, *(name for name in names if comes_along(name))}
        later = set(shards or (first,)) if stream else set()
        patterns = [glob.escape(name) for name in sorted({*along, *shards} - later)]
        if patterns:
            snapshot_download(model, revision=path.name, allow_patterns=patterns, **fetch)
        return path, remote(model, path, sorted(later), access) if stream else None
    except EnjoyLNError:
        raise
    except errors.LocalEntryNotFoundError as error:
        if isinstance(answer := error.__cause__, errors.HfHubHTTPError):
            raise _hub_error(answer, model, revision) from answer
        raise _not_cached(model, problem, error) from error
    except Exception as error:  # by huggingface_hub, its HTTP library, or the cache's disk
        raise _hub_error(error, model, revision) from error


def _names(model: str, path: Path, access: HubAccess) -> list[str]:
    """The files of a commit; those in its cache directory ``path`` if the Hub cannot be reached."""
    from huggingface_hub import HfApi, errors

    try:
        return HfApi(token=access.token).list_repo_files(model, revision=path.name)
    except errors.HfHubHTTPError:
        raise
    except (errors.HTTPError, errors.OfflineModeIsEnabled) as error:
        names = [entry.name for entry in path.iterdir()]
        if not set(names) & set(WEIGHTS):
            raise errors.LocalEntryNotFoundError("no weights") from error
        return names


def blobs(path: Path) -> set[str]:
    """Names of the cached files that the files of a snapshot may link to."""
    blobs = path.parent.parent / "blobs"
    return {entry.name for entry in os.scandir(blobs)} if blobs.is_dir() else set()


def _not_cached(model: str, problem: str, error: Exception) -> ModelNotFound:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set"
    else:
        cause = error.__cause__ or error
        first = first_line(cause)
        why = f"{constants.ENDPOINT} cannot be reached ({type(cause).__name__}: {first})"
    return ModelNotFound(
        f"{model} {problem}, and {why}; no directory has this name either: check it, or go online"
    )


def _hub_error(error: Exception, model: str, revision: str | None) -> EnjoyLNError:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{model}"
    first = first_line(error)
    status = getattr(getattr(error, "response", None), "status_code", None)
    match error:
        case errors.GatedRepoError():
            return ModelNotFound(
                f"{model} is gated: accept its terms at {page}, then run `hf auth login` or pass "
                "--token"
            )
        case errors.RevisionNotFoundError():
            return ModelNotFound(f"{model} has no revision {revision!r}; see {page}/tree/main")
        case errors.DisabledRepoError():
            return ModelNotFound(f"access to {model} is disabled by the Hub; see {page}")
        case errors.RepositoryNotFoundError():
            return ModelNotFound(
                f"there is no directory {model} and no such model on the Hub; for a "
                f"private model run `hf auth login` or pass --token{similar(model)}"
            )
        case errors.HfHubHTTPError() if status in (401, 403):
            return ModelNotFound(
                f"the Hub refuses access to {model} ({status}); run `hf auth login` or pass a "
                "--token that may read it"
            )
        case errors.HfHubHTTPError() if status is not None and (status == 429 or status >= 500):
            return ModelNotFound(f"the Hub cannot serve {model} now ({status}); try again later")
        case errors.EntryNotFoundError():
            return UnsupportedModel(f"{model} has no {CONFIG} on the Hub; see {page}/tree/main")
        case errors.HFValidationError():
            return ModelNotFound(f"there is no directory {model}, and it is no Hub id: {first}")
    return ModelNotFound(f"{model} cannot be fetched: {type(error).__name__}: {first}")
