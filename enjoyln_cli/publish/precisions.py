"""A directory with a model in several precisions: the record of each, and what may be added.

``enjoyln_precisions.json`` has an entry for each precision, by the name of its scheme or dtype:
what it was made from, and what was measured. To add a precision, the directory is written anew,
with all files that it had, and replaced at once (see ``fs.staging``).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint.config import MARKER
from enjoyln_cli.checkpoint.file_roles import CONFIG, ONNX_WEIGHTS, is_housekeeping
from enjoyln_cli.checkpoint.result_files import PRECISIONS_FILE, REPORTS, VERIFY_FILE
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.digests import digest_of_file
from enjoyln_cli.fs.whole_file import read_object
from enjoyln_cli.rewrite.written_files import record_files, written_files


@dataclass(frozen=True)
class MadeFrom:
    """What a precision is made from."""

    source: str
    """The original: a Hub id, or the path of a directory."""
    revision: str | None
    """The commit of a Hub id."""
    model_class: str

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{self.source}{at} ({self.model_class})"


def records(out: Path) -> dict[str, dict[str, Any]]:
    """The entry of each precision in ``out`` by its name; empty if ``out`` has no record."""
    found = read_object(out / PRECISIONS_FILE)
    return {name: entry for name, entry in found.items() if isinstance(entry, dict)}


def needs_data(out: Path) -> bool:
    """Whether a check of ``out`` needs data of the user: unless all precisions were exported."""
    found = records(out)
    return not found or not all("exported" in entry for entry in found.values())


def can_add(out: Path, force: bool) -> bool:
    """Whether a new precision is added to ``out``, which is not replaced by ``force``.

    Only ONNX files of several precisions lie beside each other.
    """
    found = records(out.expanduser())
    return not force and bool(found) and {one.get("format") for one in found.values()} == {"onnx"}


def require_addition(
    out: Path, precision: str, made_from: MadeFrom, copies: Mapping[str, Path]
) -> None:
    """Raise ``OutputError`` if ``precision`` cannot be added to ``out``, with the reason.

    ``copies`` has, for each file that would be copied to ``out``, such as the tokenizer's, where it
    is copied from.
    """
    if why := _why_not(out.expanduser(), precision, made_from, copies):
        raise OutputError(
            f"{precision} of {made_from} cannot be added to {out}: {why}; choose another "
            "directory, or replace the whole directory with --force"
        )


def _why_not(out: Path, precision: str, made_from: MadeFrom, copies: Mapping[str, Path]) -> str:
    """Why a precision cannot be added to ``out``; empty if it can."""
    present, verdict = records(out), read_object(out / VERIFY_FILE)
    if precision in present:
        return f"it has {precision} already"
    for entry in present.values():
        before = MadeFrom(entry["source"], entry["revision"], entry["model_class"])
        if before != made_from:
            return f"it was made from {before}"
    for name, origin in copies.items():
        present_file = out / name
        if origin.name in REPORTS or not present_file.is_file():
            continue
        if digest_of_file(present_file) != digest_of_file(origin):
            return f"its {name} differs"
    if changed := written_files(Source(str(out), out, None)).objection:
        return changed
    if verdict.get("passed") is False:
        return f"its last check failed ({verdict.get('summary')})"
    return ""


def keep_files(out: Path, staged: Path) -> None:
    """Copy the files of ``out`` to ``staged``, except for files that are there already."""
    for file in sorted(path for path in out.expanduser().rglob("*") if path.is_file()):
        name = file.relative_to(out.expanduser())
        if not (staged / name).exists() and not is_housekeeping(name.as_posix()):
            (staged / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, staged / name)


def write_config(folder: Path, original: Mapping[str, Any], model_class: str) -> None:
    """Write the config of the ONNX programs in ``folder``, whose ``original`` has another.

    Programs with weights beside them are named there, where transformers.js looks.
    """
    config = {**original, "architectures": [model_class]}
    config.pop(MARKER, None)
    if files := sorted(folder.glob(f"onnx/*{ONNX_WEIGHTS}")):
        apart, name = {f"{file.stem}.onnx": 1 for file in files}, "transformers.js_config"
        config[name] = {**config.get(name, {}), "use_external_data_format": apart}
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def record(
    staged: Path, precision: str, entry: Mapping[str, Any], verdict: Mapping[str, Any]
) -> None:
    """Add the ``entry`` of a precision to the record in ``staged``, and record all files there.

    ``verdict`` is empty for a precision that was not checked.
    """
    text = json.dumps({**records(staged), precision: entry}, indent=2) + "\n"
    (staged / PRECISIONS_FILE).write_text(text, encoding="utf-8")
    record_files(Source(str(staged), staged, None), verdict)
