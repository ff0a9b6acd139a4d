"""Find the model that ``MODEL`` names, and the files that are copied to its result.

``MODEL`` is a directory if that directory exists, otherwise a Hub id. A file is read only if
it lies in the directory, or in the Hub cache that the directory is part of.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from enjoyln_cli.checkpoint.file_roles import comes_along
from enjoyln_cli.checkpoint.model_name import local_folder
from enjoyln_cli.checkpoint.open_options import OPENED_PLAINLY, OpenOptions, require_token
from enjoyln_cli.checkpoint.sentence_transformers import transformer_folder
from enjoyln_cli.errors import BadCheckpoint, ModelNotFound

State = tuple[int, int]
"""Size of a file, and the time of its last change in nanoseconds."""


@dataclass(frozen=True)
class Source:
    """Where a model comes from."""

    model: str
    """The Hub id or path, as the user typed it."""
    path: Path
    """The directory with config and weights; for a Hub id, its snapshot in the cache."""
    revision: str | None
    """The commit of a Hub id, ``None`` for a directory."""
    folder: str = ""
    """In a sentence-transformers pipeline: the subfolder of the transformer, if it is in one."""

    @property
    def cached(self) -> bool:
        """Whether the model lies in the Hub cache, where its files do not change."""
        return self.revision is not None

    @property
    def pinned(self) -> str:
        """The Hub id with its commit, ``NAME@COMMIT``; empty for a directory."""
        return f"{self.model}@{self.revision}" if self.revision else ""

    @property
    def origin(self) -> str:
        """The name by which a result names it: the Hub id, or the absolute path of the pipeline."""
        return self.model if self.revision is not None else str(self.root.resolve())

    @property
    def root(self) -> Path:
        """The directory of the whole pipeline; ``path`` if the model is not in a subfolder."""
        return self.path.parents[len(Path(self.folder).parts) - 1] if self.folder else self.path


def open_source(
    model: str, opening: OpenOptions = OPENED_PLAINLY, *, weights: bool = False
) -> Source:
    """Find ``model``: a directory if that directory exists, otherwise a Hub id.

    For a Hub id, this downloads only ``config.json`` and code that it names. With ``weights`` it
    also downloads the weights (safetensors if there are any) and all files that are copied to the
    result.

    Raises ``ModelNotFound`` if the model does not exist or cannot be reached, ``UnsupportedModel``
    if it has no config or no weights.
    """
    local = local_folder(model)
    if local is not None:
        if (revision := opening.revision) is not None:
            raise ModelNotFound(f"{model} is a directory and has no revision {revision!r}; drop it")
        folder = transformer_folder(local)
        return Source(model, local / folder, None, folder)
    from enjoyln_cli.checkpoint.download import snapshot  # imports huggingface_hub

    require_token(opening)
    path = snapshot(model, opening, weights=weights)
    return Source(model, path, path.name)


def states_of(folder: Path, names: Iterable[str]) -> dict[str, State]:
    """Size and time of some files, to detect later changes without reading them."""
    stats = {name: (folder / name).stat() for name in names if (folder / name).is_file()}
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats.items()}


def require_unchanged(folder: Path, before: Mapping[str, State]) -> None:
    """Raise ``BadCheckpoint`` if a file has changed since its state in ``before`` was taken."""
    now = states_of(folder, before)
    for name, state in before.items():
        if now.get(name) != state:
            change = "has vanished" if name not in now else "has changed"
            raise BadCheckpoint(
                f"{name} {change} in {folder} while it was read; start again when no other program "
                "writes there"
            )


def locate(source: Source, name: str) -> Path:
    """The path of a file that lies in the directory, or in the Hub cache that it is part of.

    Raises ``BadCheckpoint`` for a file elsewhere, a broken link, and a file that cannot be read.
    """
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


def carried_files(source: Source, leaving: str = "") -> tuple[str, ...]:
    """The files below ``source.path`` to copy to the result, except the files in ``leaving``."""
    carried = []
    for folder, folders, files in os.walk(source.path):
        inside = Path(folder).relative_to(source.path)
        below = {name: (inside / name).as_posix() for name in folders}
        folders[:] = [n for n, at in below.items() if at != leaving and comes_along(f"{at}/")]
        linked = [name for name in folders if Path(folder, name).is_symlink()]
        names = [(inside / name).as_posix() for name in files + linked]
        carried += [name for name in names if comes_along(name)]
    return tuple(name for name in sorted(carried) if locate(source, name))
