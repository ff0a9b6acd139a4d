"""Notes on finished weight files, so that a later run can continue an interrupted one.

    .OUT.partial/made-from.json          everything that determines the result's bytes, by name
    .OUT.partial/finished/SHARD.json     {"size": bytes, "pieces": [[first byte, bytes, XXH3]],
                                          "reads": [[tensor, first byte, bytes, XXH3]],
                                          "digest": SHA-256 of the rest}

Files are recognised by content. A shard counts as finished if it has the noted size, begins with
its header, and is covered by pieces with the noted digests. There is one piece for each write, with
the digest of the data in memory. A shard is noted only after it was synced to the disk. Unless file
names identify the source's content, the note has the digests of everything read from the source as
well. Nothing is taken over from a run with other inputs or options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from enjoyln_cli.checkpoint.headers import bytes_of
from enjoyln_cli.errors import BadCheckpoint, OutputError
from enjoyln_cli.fs.digests import digest_of_data, digest_of_piece, digest_of_tensor, new_digest
from enjoyln_cli.fs.staging import FINISHED, RESULT, clear, count_finished
from enjoyln_cli.fs.whole_file import write_whole
from enjoyln_cli.rewrite.processes import ALONE, ProcessGroup, gather, share_out
from enjoyln_cli.rewrite.shard_layout import Shard

MADE_FROM = "made-from.json"

Piece = tuple[int, int, str]
"""First byte, number of bytes, digest."""
Read = tuple[str, int, int, str]
"""Tensor of the source, first byte in it, number of bytes, digest."""


@dataclass(frozen=True)
class FinishedFile:
    """The note on a finished file."""

    size: int
    pieces: tuple[Piece, ...]
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Journal:
    """The notes of one result, in its work directory."""

    work: Path
    made_from: Mapping[str, str]
    """Everything that the result depends on, by name: digests, sizes, options."""
    team: ProcessGroup = ALONE
    force: bool = False
    """Whether to discard the work of a run with other inputs, instead of refusing to start."""
    source: Callable[[str, int, int], Iterable[bytes]] | None = None
    """Reads bytes of a source tensor again: ``source(name, first, nbytes)``.

    ``None`` if names identify the source's content, so that nothing has to be read again.
    """
    reads: dict[str, list[Read]] = field(default_factory=dict)
    """The reads for each tensor of the files that are being written."""
    taken_over: list[str] = field(default_factory=list)
    """The names of the files that an earlier run had finished."""

    @property
    def result(self) -> Path:
        return self.work / RESULT


def assign_shards(journal: Journal, into: Path, shards: Sequence[Shard]) -> list[Shard]:
    """Prepare the directory ``into`` and return the shards that this process has to write.

    The first process finds out which files an earlier run has finished. The others are distributed
    by size. Raises as ``resume_shards`` does, and ``OutputError`` if the processes differ in their
    inputs or options, or do not see the same directory.
    """
    team = journal.team
    done = [] if team.rank else resume_shards(journal, into, shards)
    answers = gather(team, (dict(journal.made_from), done))
    first, done = answers[0]
    for rank, (made_from, _) in enumerate(answers):
        for name in (*first, *made_from):
            if made_from.get(name) != first.get(name):
                if team.rank:
                    raise SystemExit(1)  # the first process reports the reason
                there, here = (str(found.get(name))[:40] for found in (made_from, first))
                raise OutputError(
                    f"process {rank} differs from process 0: {name} is {there} there and {here} "
                    "here; start all processes with the same source, options and versions"
                )
    if _read_json(journal.work / MADE_FROM) != journal.made_from:
        raise OutputError(
            f"process {team.rank} does not see the files that process 0 wrote to {journal.work}; "
            "choose a directory that all machines share"
        )
    left = [shard for shard in shards if shard.name not in done]
    items = share_out([shard.size for shard in left], team.size)[team.rank]
    return [left[item] for item in items]


def wait_for_all(journal: Journal, into: Path, shards: Sequence[Shard]) -> None:
    """Return once every process has written its share.

    Raises ``OutputError`` if a process fails, or if one of the files is missing or incomplete. Only
    the first process checks the files, since it may rename their directory before others look.
    """
    gather(journal.team, True)
    for shard in () if journal.team.rank else shards:
        path = into / shard.name
        if not path.is_file() or path.stat().st_size != shard.size:
            raise OutputError(f"{path} is missing or incomplete, although it was written")


def resume_shards(journal: Journal, into: Path, shards: Sequence[Shard]) -> list[str]:
    """The names of those ``shards`` that are finished in ``into``; other files are removed.

    Raises ``OutputError`` if an earlier run with other inputs has finished some shards, unless
    ``journal.force`` allows to discard them.
    """
    before = _read_json(journal.work / MADE_FROM)
    done: list[str] = []
    if count_finished(journal.work) and before is not None and _made_from_same(journal, before):
        for shard in shards:
            found = _read_note(journal, shard.name)
            if found is None or not _intact(into / shard.name, shard, found):
                continue
            if not _same_reads(journal, found):
                done = []
                break
            done.append(shard.name)
    keep = {*(into / name for name in done), *(_note_path(journal, name) for name in done)}
    clear(journal.work, keep)
    into.mkdir(parents=True, exist_ok=True)
    (journal.work / FINISHED).mkdir(exist_ok=True)
    write_whole(journal.work / MADE_FROM, json.dumps(dict(journal.made_from)))
    journal.taken_over.extend(done)
    return done


def reads_for(journal: Journal | None, tensor: str) -> list[Read] | None:
    """The list to note the reads for one written tensor in; ``None`` if they are not noted."""
    return journal.reads.setdefault(tensor, []) if journal and journal.source else None


def note_read(reads: list[Read] | None, name: str, first: int, data: memoryview) -> None:
    """Note that ``data`` was read from byte ``first`` of the source's tensor ``name``."""
    if reads is not None and data:
        reads.append((name, first, len(data), digest_of_piece(data).hex()))


def digest_while_reading(
    reads: list[Read] | None, name: str, parts: Iterable[torch.Tensor]
) -> Iterator[torch.Tensor]:
    """Yield the ``parts`` of the whole source tensor ``name``, then note them as one read."""
    digest, nbytes = new_digest(), 0
    for part in parts:
        if reads is not None:
            digest.update(bytes_of(part))
            nbytes += part.nbytes
        yield part
    if reads is not None:
        reads.append((name, 0, nbytes, digest.hexdigest()))


def note(journal: Journal, file: Path, pieces: Iterable[Piece], tensors: Iterable[str]) -> None:
    """Note that ``file`` is finished and synced to the disk, so that no run writes it again."""
    reads = dict.fromkeys(read for name in tensors for read in journal.reads.pop(name, ()))
    found = asdict(FinishedFile(file.stat().st_size, tuple(sorted(pieces)), tuple(reads)))
    write_whole(
        _note_path(journal, file.name), json.dumps({**found, "digest": digest_of_data(found)})
    )


def _made_from_same(journal: Journal, before: Mapping[str, Any]) -> bool:
    """Whether the earlier run had the same inputs and options."""
    now = journal.made_from
    for name in (*now, *before):
        if before.get(name) != now.get(name):
            old, new = (str(found.get(name, "nothing"))[:40] for found in (before, now))
            return _discard_or_refuse(journal, f"{name} was {old} then and is {new} now")
    return True


def _same_reads(journal: Journal, found: FinishedFile) -> bool:
    """Whether the source still has the content that a finished file was made from."""
    if journal.source is None:
        return True
    for name, first, nbytes, digest in found.reads:
        try:
            same = digest_of_tensor(journal.source(name, first, nbytes)) == digest
        except BadCheckpoint:
            same = False
        if not same:
            return _discard_or_refuse(journal, f"{name} of the source has changed since")
    return True


def _discard_or_refuse(journal: Journal, difference: str) -> bool:
    """Return false with ``journal.force``, so that nothing is taken over; else ``OutputError``."""
    if journal.force:
        return False
    raise OutputError(
        f"--resume cannot continue the run in {journal.work}: {difference}; start anew with --force"
    )


def _intact(path: Path, shard: Shard, found: FinishedFile) -> bool:
    """Whether a file still has the size, header and digests of its note."""
    try:
        size = found.size
        if size != shard.size or path.is_symlink() or path.stat().st_size != size:
            return False
        with path.open("rb") as file:
            if file.read(len(shard.header)) != shard.header:
                return False
            at = 0
            for first, nbytes, digest in found.pieces:
                file.seek(at)
                data = memoryview(file.read(min(max(nbytes, 0), size)))
                if (first, nbytes, digest) != (at, len(data), digest_of_piece(data).hex()):
                    return False
                at += nbytes
        return at == size
    except OSError:
        return False


def _read_note(journal: Journal, name: str) -> FinishedFile | None:
    """The note of an earlier run on one file; ``None`` if it is missing or damaged."""
    found = _read_json(_note_path(journal, name)) or {}
    if found.pop("digest", None) != digest_of_data(found):
        return None
    try:
        pieces = tuple((int(a), int(b), str(c)) for a, b, c in found["pieces"])
        reads = tuple((str(a), int(b), int(c), str(d)) for a, b, c, d in found["reads"])
        return FinishedFile(int(found["size"]), pieces, reads)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _note_path(journal: Journal, name: str) -> Path:
    return journal.work / FINISHED / f"{name}.json"


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
