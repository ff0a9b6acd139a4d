"""Notes on finished weight files, so that a later run can continue an interrupted run.

    .OUT.partial/made-from.json          everything that determines the result's bytes, by name
    .OUT.partial/finished/SHARD.json     {"size": bytes, "modified": nanoseconds}

A shard is noted only after it was synced to the disk. It counts as finished if it still has the
noted size and time and begins with its header. Nothing is taken over from a run with other inputs
or options. Weight files of the source are recognised by size and time, files of the Hub by their
commit, and its other files by their digests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from enjoyln_cli.errors import OutputError
from enjoyln_cli.fs.staging import FINISHED, clear, count_finished
from enjoyln_cli.fs.whole_file import read_object, write_whole
from enjoyln_cli.rewrite.shard_layout import Shard

MADE_FROM = "made-from.json"


@dataclass(frozen=True)
class Journal:
    """The notes of one result, in its work directory."""

    work: Path
    made_from: Mapping[str, str]
    """Everything that the result depends on, by name: digests, sizes, options."""
    force: bool = False
    """Whether to discard the work of a run with other inputs, instead of refusing to start."""
    taken_over: list[str] = field(default_factory=list)
    """The names of the files that an earlier run had finished."""


def resume_shards(journal: Journal, into: Path, shards: Sequence[Shard]) -> list[str]:
    """The names of the ``shards`` that are finished in ``into``; other files are removed.

    Raises ``OutputError`` if an earlier run with other inputs has finished some shards, unless
    ``journal.force`` allows to discard them.
    """
    before = read_object(journal.work / MADE_FROM)
    done: list[str] = []
    if count_finished(journal.work) and before and _made_from_same(journal, before):
        done = [shard.name for shard in shards if _is_finished(journal, into / shard.name, shard)]
    keep = {*(into / name for name in done), *(_note_path(journal, name) for name in done)}
    clear(journal.work, keep)
    into.mkdir(parents=True, exist_ok=True)
    (journal.work / FINISHED).mkdir(exist_ok=True)
    write_whole(journal.work / MADE_FROM, json.dumps(dict(journal.made_from)))
    journal.taken_over.extend(done)
    return done


def note(journal: Journal, file: Path) -> None:
    """Note that ``file`` is finished and synced to the disk, so that no run writes it again."""
    write_whole(_note_path(journal, file.name), json.dumps(_state_of(file)))


def _state_of(file: Path) -> dict[str, int]:
    state = file.stat()
    return {"size": state.st_size, "modified": state.st_mtime_ns}


def _is_finished(journal: Journal, path: Path, shard: Shard) -> bool:
    """Whether a shard is noted, and its file has not changed since."""
    state = read_object(_note_path(journal, shard.name))
    try:
        if path.is_symlink() or state != _state_of(path) or state["size"] != shard.size:
            return False
        with path.open("rb") as file:
            return file.read(len(shard.header)) == shard.header
    except OSError:
        return False


def _made_from_same(journal: Journal, before: Mapping[str, Any]) -> bool:
    """Whether the earlier run had the same inputs and options.

    Raises ``OutputError`` if it had not, unless ``journal.force`` discards its work.
    """
    now = journal.made_from
    for name in (*now, *before):
        if before.get(name) != now.get(name):
            if journal.force:
                return False
            old, new = (str(run.get(name, "nothing"))[:40] for run in (before, now))
            raise OutputError(
                f"--resume cannot continue the run in {journal.work}: {name} was {old} then and is "
                f"{new} now; start anew with --force"
            )
    return True


def _note_path(journal: Journal, name: str) -> Path:
    return journal.work / FINISHED / f"{name}.json"
