"""Upload a result to the Hub, with a model card.

Decides what may be pushed: a directory that ``fold``, ``rotate`` or ``quantize`` has written, whose
last check has passed, and in which no file has changed. For a quantised result this needs
no data: ``quantize`` has measured these very files. All files are uploaded, except files of git and
caches. What the Hub has already is not sent again.

Uploads of every size use ``HfApi.upload_folder``. With ``hf_xet`` it commits hundreds of files in
parts; without it, all files in one commit. A second push continues an interrupted push, since the
Hub recognises content that it already has. (``upload_large_folder`` did this before; it was removed
in ``huggingface_hub`` 2.)

No token is stored or printed.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from enjoyln_cli.checkpoint.config import raw_config
from enjoyln_cli.checkpoint.file_roles import CONFIG, is_housekeeping
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.checkpoint.open_options import require_token
from enjoyln_cli.checkpoint.result_files import CARD_FILE, PRECISIONS_FILE, VERIFY_FILE
from enjoyln_cli.checkpoint.source import Source, open_source
from enjoyln_cli.errors import BadCheckpoint, EnjoyLNError, PushRefused
from enjoyln_cli.fs.whole_file import read_object, write_whole
from enjoyln_cli.plan import schema
from enjoyln_cli.plan.option_field import keywords_of
from enjoyln_cli.publish import card
from enjoyln_cli.publish.precisions import records
from enjoyln_cli.publish.push_options import PushOptions
from enjoyln_cli.publish.repository import (
    AGAIN,
    PULLS,
    full_name,
    open_repository,
    refusal,
    require_directory,
    require_repo_id,
)
from enjoyln_cli.publish.written_card import quantised_section, section
from enjoyln_cli.rewrite.written_files import written_files


@dataclass(frozen=True)
class File:
    """One file of an upload."""

    name: str
    size: int


@dataclass(frozen=True)
class Upload:
    """What a push will send, decided before anything is sent; afterwards, where it is."""

    out: Path
    repo_id: str
    private: bool | None
    """Visibility of a new repository; ``None``: public, or as the owner's settings say."""
    revision: str | None
    create_pr: bool
    files: tuple[File, ...]
    card: str | None
    """The new text of the model card; ``None`` if there is no card."""
    forced: str
    """Why the push needs ``force``; empty if it does not."""
    warnings: tuple[str, ...]
    url: str = ""
    """URL of the commit, or of the pull request; empty before the push."""
    commit: str = ""

    @property
    def size(self) -> int:
        """Total bytes of the files."""
        return sum(file.size for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """All fields but the card as plain values, and the size in bytes."""
        data = {**schema.to_json(self), "bytes": self.size}
        del data["card"]
        return data


# What may go.


def publishing_objection(result: Source) -> str:
    """Why ``result`` should not be published; empty if it was verified and has not changed."""
    report = read_object(result.path / VERIFY_FILE)
    if "passed" in report and report["passed"] is not True:
        summary = report.get("summary")
        return f"its verification failed: {summary}" if summary else "its verification failed"
    changed = written_files(result).objection
    return changed if changed or "passed" in report else "it was never verified"


def prepare(out: str | Path, repo_id: str, options: PushOptions) -> Upload:
    """Decide what pushing ``out`` to ``repo_id`` would send. Sends and writes nothing.

    Needs neither a token nor a network. Raises ``PushRefused`` if the present files were not
    verified (unless ``force``), ``ModelNotFound`` or ``BadCheckpoint`` if ``out`` is no result.
    """
    require_repo_id(repo_id)
    if options.create_pr and options.revision is not None:
        raise PushRefused("a pull request starts from the main branch; drop --revision")
    out = Path(out).expanduser()
    require_directory(out)
    classes: tuple[str, ...] = ()
    is_quantised = (out / PRECISIONS_FILE).is_file()
    if is_quantised:
        source = Source(str(out), out, None)
        sources = {str(entry.get("source")) for entry in records(out).values()}
        made_from = {PRECISIONS_FILE: next(iter(sources), "")}
    else:
        source = open_source(str(out))
        marker = read_marker(raw_config(source), source.model)
        made_from, classes = {CONFIG: marker.source}, marker.plan.classes
    complaint = publishing_objection(source)
    check = f"run `enjoyln verify {out}`{' with your data' if is_quantised else ''}"
    if complaint and not options.force:
        raise PushRefused(
            f"{out} is not pushed: {complaint}; {check}, or push it anyway with --force"
        )
    origins = published_paths(source, made_from).items()
    warnings = tuple(f"{', '.join(names)} would publish the path {path}" for path, names in origins)
    text = None
    if (out / CARD_FILE).is_file():
        text = (out / CARD_FILE).read_bytes().decode("utf-8", errors="replace")
        updated = (
            quantised_section(out, repo_id, complaint)
            if is_quantised
            else section(out, source.folder, repo_id, classes, complaint)
        )
        text = card.replace_section(text, updated)
    if complaint and complaint not in (text or ""):
        raise PushRefused(
            f"{out} is not pushed: {complaint}, and its {CARD_FILE} no longer has the enjoyln "
            f"section, where --force must say so; {check}"
        )
    return Upload(
        out,
        repo_id,
        options.private,
        options.revision,
        options.create_pr,
        _files(out, text),
        text,
        complaint,
        warnings,
    )


def published_paths(result: Source, made_from: Mapping[str, str]) -> dict[str, list[str]]:
    """The files of the result that contain each local path, by the path.

    ``made_from`` has what a file names as the original.
    """
    verified = str(read_object(result.path / VERIFY_FILE).get("source", ""))
    sources = {**made_from, VERIFY_FILE: verified}
    names_of: dict[str, list[str]] = {}
    for name, path in sources.items():
        if os.path.isabs(path) or path.startswith((".", "~")):  # never the case for a Hub id
            names_of.setdefault(path, []).append(Path(result.folder, name).as_posix())
    return names_of


def _files(out: Path, text: str | None) -> tuple[File, ...]:
    files = []
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name = path.relative_to(out).as_posix()
        if is_housekeeping(name):
            continue
        if not path.resolve().is_relative_to(out.resolve()):
            raise BadCheckpoint(f"{name} is a link to a file outside {out}; copy the file there")
        size = path.stat().st_size
        if text is not None and name == CARD_FILE:
            size = len(text.encode(errors="replace"))
        files.append(File(name, size))
    return tuple(files)


# The Hub.


def send(upload: Upload, options: PushOptions) -> Upload:
    """Carry out what ``prepare`` returned: write the card, create the repository, upload.

    Returns it with ``url`` and ``commit`` set. Raises ``PushRefused`` if the Hub refuses or fails.
    A second push need not send again what the Hub has received.
    """
    require_token(options.opening)
    _renew_card(upload)
    try:
        return _send(upload, options)
    except KeyboardInterrupt:
        left = f"{upload.repo_id} may now exist without all of its files"
        raise KeyboardInterrupt(f"{left}; {_how_to_continue(upload)}") from None
    except EnjoyLNError:
        raise
    except Exception as error:  # any error of huggingface_hub and its HTTP library
        raise refusal(error, upload.repo_id, _how_to_continue(upload)) from error


def _renew_card(upload: Upload) -> None:
    """Write the new card if it differs. Raises ``PushRefused`` if it cannot be written."""
    if upload.card is None:
        return
    path = upload.out / CARD_FILE
    try:
        if path.read_bytes() != upload.card.encode(errors="replace"):
            write_whole(path, upload.card)
    except OSError as error:
        raise PushRefused(
            f"nothing was sent: {CARD_FILE} in {upload.out} must be updated for "
            f"{upload.repo_id} and cannot be written ({error.strerror}); push a copy of "
            f"{upload.out}"
        ) from error


def _send(upload: Upload, options: PushOptions) -> Upload:
    from huggingface_hub import HfApi

    api = HfApi(token=options.token or True)  # True: a stored token is needed
    open_repository(api, upload.repo_id, upload.private, upload.revision, upload.create_pr)
    done = api.upload_folder(
        repo_id=upload.repo_id,
        folder_path=upload.out,
        allow_patterns=[glob.escape(file.name) for file in upload.files],
        revision=upload.revision,
        create_pr=upload.create_pr,
        commit_message=options.commit_message or "Upload a result of enjoyln",
    )
    return replace(upload, url=done.pr_url or done.commit_url, commit=done.oid)


def _how_to_continue(upload: Upload) -> str:
    if not upload.create_pr:
        return AGAIN
    return f"if {upload.repo_id} has its pull request by now, push to that: --revision {PULLS}N"


@keywords_of(options=PushOptions)
def push(out: str | Path, repo_id: str, *, options: PushOptions) -> Upload:
    """Upload the verified result ``out`` to the Hub as ``repo_id``: ``prepare``, then ``send``.

    The user that ``token`` belongs to owns a ``repo_id`` without an owner. The other keywords:
    """
    name = repo_id if "/" in repo_id else full_name(repo_id, options.opening)
    return send(prepare(out, name, options), options)
