"""Which files of a result have changed since they were written.

``fold``, ``rotate`` and ``quantize`` record the SHA-256 digest of every file that they write in
``enjoyln_verify.json``, which also holds the verdict of the last check. ``verify`` compares the
files with these digests and never replaces them: if the user accepts a changed file by name, the
new digest is noted beside the first. The field ``digest`` is the digest of all other fields, so an
edit of the record shows.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint.file_roles import is_housekeeping
from enjoyln_cli.checkpoint.result_files import REPORTS, VERIFY_FILE
from enjoyln_cli.checkpoint.source import Source
from enjoyln_cli.events import Event, write_or_warn
from enjoyln_cli.fs.digests import digest_of_data, digest_of_file
from enjoyln_cli.fs.whole_file import read_object
from enjoyln_cli.text import listed_briefly, matches
from enjoyln_cli.version import versions

_DIGEST = "digest"
_ADDED = "was added"


@dataclass(frozen=True)
class WrittenFiles:
    """The files of a result, compared with their record."""

    recorded: Mapping[str, str]
    """From each file to its digest when it was written."""
    accepted: Mapping[str, str | None]
    """From each file whose change the user has accepted to its new digest; ``None`` if deleted."""
    changes: Mapping[str, str]
    """From each other file that differs from its record to how it differs, in words."""
    record: str
    """The name of the record, which may have changed itself."""

    @property
    def objection(self) -> str:
        """The changed files and how each has changed; empty if there are none."""
        return listed_briefly([f"{name} {change}" for name, change in self.changes.items()])

    @property
    def failure(self) -> str:
        """The sentence for a verdict, with what to do; empty if no file has changed."""
        if not self.changes:
            return ""
        names = shlex.quote(",".join(self.changes)) if len(self.changes) <= 3 else "NAMES"
        advice = "undo the changes, or if they are meant"
        if len(self.changes) == 1:
            verb = "remove" if _ADDED in self.changes.values() else "restore"
            advice = f"{verb} it, or if the change is meant"
        return f"{self.objection}; {advice} pass --accept {names}"


def written_files(result: Source, accept: Sequence[str] = ()) -> WrittenFiles:
    """Compare the files of ``result`` with their record. Reads every file.

    ``accept`` has names of files, or patterns, whose present state the user accepts. A result in
    the Hub's cache may be incomplete: only the files that are there are compared.
    """
    name = Path(result.folder, VERIFY_FILE).as_posix()
    present = digests_of_files(result)
    record = read_object(result.path / VERIFY_FILE)
    damage = _damage(result.path / VERIFY_FILE, record)
    if damage and not matches(name, accept):
        return WrittenFiles({}, {}, {name: damage}, name)
    recorded = present if damage else dict(record["sha256"])
    accepted = {} if damage else dict(record.get("accepted", {}))
    changes = {}
    for file in sorted({*present, *recorded, *accepted}):
        now, before = present.get(file), recorded.get(file)
        if now in (before, accepted.get(file, before)) or result.cached and now is None:
            continue
        if matches(file, accept):
            accepted[file] = now
        else:
            changes[file] = _change(now, before)
    return WrittenFiles(recorded, accepted, changes, name)


def digests_of_files(result: Source) -> dict[str, str]:
    """The SHA-256 of every file of ``result`` except reports, by its path in ``result.root``.

    Each file is read by one thread.
    """
    reports = {*REPORTS, *(f"{result.folder}/{name}" for name in REPORTS)}
    paths = {
        name: path
        for path in sorted(result.root.rglob("*"))
        if path.is_file()
        and not is_housekeeping(name := path.relative_to(result.root).as_posix())
        and name not in reports
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(paths, pool.map(digest_of_file, paths.values()), strict=True))


def record_files(result: Source, verdict: Mapping[str, Any]) -> None:
    """Record the files of a new result and the ``verdict`` on it, which is empty without a check.

    Raises ``OSError`` if the record cannot be written.
    """
    text = _record_text(verdict, digests_of_files(result), {})
    (result.path / VERIFY_FILE).write_text(text, encoding="utf-8")


def record_verdict(
    result: Source, verdict: Mapping[str, Any], files: WrittenFiles, event: Event
) -> None:
    """Replace the verdict in the record of ``result``; the digests of ``files`` stay.

    A record that was edited or has vanished is left as it is.
    """
    if files.record not in files.changes:
        text = _record_text(verdict, files.recorded, files.accepted)
        write_or_warn(result.path / VERIFY_FILE, text, event)


def _record_text(
    verdict: Mapping[str, Any], recorded: Mapping[str, str], accepted: Mapping[str, str | None]
) -> str:
    record: dict[str, Any] = {
        **verdict,
        "versions": versions("torch", "transformers") | {"python": platform.python_version()},
        "sha256": dict(recorded),
    }
    if accepted:
        record["accepted"] = dict(accepted)
    record[_DIGEST] = digest_of_data(record)
    return json.dumps(record, indent=2) + "\n"


def _damage(path: Path, record: Mapping[str, Any]) -> str:
    """The fault of the record at ``path``; empty if it is as it was written."""
    if not path.is_file():
        return "is missing"
    rest = {key: value for key, value in record.items() if key != _DIGEST}
    return "" if record.get(_DIGEST) == digest_of_data(rest) else "was edited"


def _change(now: str | None, before: str | None) -> str:
    """How a file has changed, from its digests; ``None`` for a file that is missing."""
    if now is None:
        return "was deleted"
    return _ADDED if before is None else "has changed since it was written"
