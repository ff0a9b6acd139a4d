"""Find the transformer of a sentence-transformers pipeline.

``modules.json`` lists the modules of the pipeline with a folder each. The transformer is the first.
It lies in the pipeline's own directory (path ``""``) or in a subfolder. The functions here find
that folder, and tell whether later modules read hidden states. Paths that lead out of the
directory are refused.
"""

from __future__ import annotations

from pathlib import Path, PureWindowsPath
from typing import Any

from enjoyln_cli.checkpoint.file_roles import LONGEST_NAME, read_json
from enjoyln_cli.errors import BadCheckpoint

MODULES = "modules.json"


def transformer_folder(root: Path) -> str:
    """The folder of the first module, relative to ``root``; ``""`` for ``root`` itself.

    Raises ``BadCheckpoint`` if ``modules.json`` is malformed or names a folder outside of ``root``.
    """
    path = root / MODULES
    if not path.is_file():
        return ""
    listed = read_json(path)
    if not isinstance(listed, list) or not listed:
        raise BadCheckpoint(f"{path} lists no modules; fetch it again")
    first, *_ = [_folder(root, entry) for entry in listed]
    if not (root / first).is_dir():  # only the first: empty folders of later modules are often lost
        raise BadCheckpoint(f"{first} is missing in {root}, {MODULES} names it; fetch it again")
    return first


def _folder(root: Path, entry: Any) -> str:
    """The folder of one module, relative to ``root``, as sentence-transformers finds it."""
    named = entry.get("path") if isinstance(entry, dict) else None
    if not (isinstance(named, str) and named.isprintable() and len(named) <= LONGEST_NAME):
        raise BadCheckpoint(f"{root / MODULES} names no path in {entry!r:.100}; fetch it again")
    parsed = PureWindowsPath(named)
    inside = not parsed.anchor and ".." not in parsed.parts and "\\" not in named
    if not inside or not (root / named).resolve().is_relative_to(root.resolve()):
        raise BadCheckpoint(
            f"{MODULES} names {named!r:.100}, which is not a folder inside {root}; do not use this "
            "model"
        )
    return "" if parsed == PureWindowsPath() else parsed.as_posix()


def reads_hidden_states(folder: Path) -> bool:
    """Whether the settings of the transformer (``sentence_*_config.json``) use hidden states."""
    return any(
        b"hidden_states" in path.read_bytes()
        for path in sorted(folder.glob("sentence_*_config.json"))
        if path.is_file()
    )
