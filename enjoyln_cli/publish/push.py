"""Upload a converted checkpoint to the Hub, with a model card.

Decides what may be pushed: a directory whose config has the ``enjoyln`` marker, and whose
``enjoyln_verify.json`` says that the present files have passed. All files are uploaded, except
those of git and caches. If the Hub has all of them already, nothing is sent.

Uploads of every size use ``HfApi.upload_folder``. With ``hf_xet`` it commits hundreds of files in
parts; without it, all files in one commit. A second push continues an interrupted one, since the
Hub recognises content that it already has. (``upload_large_folder`` did this before; it was removed
in ``huggingface_hub`` 2.)

No token is stored or printed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from enjoyln_cli.checkpoint.access import DEFAULT_ACCESS, HubAccess
from enjoyln_cli.checkpoint.config import raw_config
from enjoyln_cli.checkpoint.file_roles import CONFIG, is_housekeeping
from enjoyln_cli.checkpoint.marker import read_marker
from enjoyln_cli.checkpoint.result_files import (
    ADAPTER_CONFIG,
    ADAPTER_FOLDER,
    BENCH_FILE,
    CARD_FILE,
    VERIFY_FILE,
    verified_files,
)
from enjoyln_cli.checkpoint.source import Source, open_source
from enjoyln_cli.errors import BadCheckpoint, ModelNotFound, PushRefused
from enjoyln_cli.fs.digests import digest_of_file
from enjoyln_cli.fs.whole_file import write_whole
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.publish import card
from enjoyln_cli.publish.target import AGAIN, Target, own_pulls, refusal, target

Change = Literal["new", "changed", "same"]

MAX_METADATA_CHARS = 100_000
"""Longest metadata of a card that is parsed, in characters."""


@dataclass(frozen=True)
class File:
    """One file of an upload."""

    name: str
    size: int
    change: Change


@dataclass(frozen=True)
class Upload:
    """What a push will send, decided before anything is sent; afterwards, what it has sent."""

    out: Path
    target: Target
    files: tuple[File, ...]
    card: str | None
    """The new text of the model card; ``None`` if there is no card."""
    complaint: str
    """Why the push needs ``force``; empty if it does not."""
    warnings: tuple[str, ...]
    url: str = ""
    """URL of the commit, of the pull request, or of the unchanged files; empty before the push."""
    commit: str = ""

    @property
    def size(self) -> int:
        """Total bytes of the files that are new or changed."""
        return sum(file.size for file in self.files if file.change != "same")

    @property
    def changes_files(self) -> bool:
        """Whether any file is new or changed."""
        return self.count("same") < len(self.files)

    @property
    def differs(self) -> bool:
        """Whether there is anything to push: a file or a new branch."""
        return self.target.new_branch or self.changes_files

    def count(self, change: Change) -> int:
        return sum(file.change == change for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """All fields as plain values."""
        files = [{"name": f.name, "size": f.size, "change": f.change} for f in self.files]
        target = self.target
        return {
            "out": str(self.out),
            "repo_id": target.repo_id,
            "revision": target.revision,
            "new_branch": target.new_branch,
            "create_pr": target.create_pr,
            "exists": target.exists,
            "private": target.private,
            "files": files,
            "differs": self.differs,
            "bytes": self.size,
            "forced": self.complaint,
            "warnings": list(self.warnings),
            "url": self.url,
            "commit": self.commit,
        }


# Cards.


def write_card(
    out: Path, plan: Plan, source: Source, options: Mapping[str, Any], final: Path
) -> None:
    """Write the card of a fold to ``out``, above the text of the original's card if that is there.

    ``final`` is the path that ``out`` will be renamed to, ``options`` are those of the command.
    """
    from huggingface_hub import ModelCard, ModelCardData

    data, text = _parse_card(out / CARD_FILE)
    checked = section(out, source.folder, final.name, plan.classes)
    made = ModelCard.from_template(
        ModelCardData(**card.metadata(data, source, out)),
        template_str=card.template("card"),
        **card.values(plan, source, final, options, text, checked),
    )
    write_whole(out / CARD_FILE, f"{made}\n")


def section(root: Path, folder: str, place: str, names: Sequence[str], complaint: str = "") -> str:
    """The text of the card's section that may change. The arguments are those of ``card.state``."""
    from huggingface_hub import ModelCard, ModelCardData

    return ModelCard.from_template(
        ModelCardData(),
        template_str="---\n{}\n---\n" + card.template("state"),
        **card.state(root, folder, place, names, complaint),
    ).text.strip()


def _parse_card(path: Path) -> tuple[dict[str, Any], str]:
    """A card's metadata and text; the whole card as text if the metadata cannot be parsed.

    Uses ``RepoCard``, since ``ModelCard`` compares tags, which may be deeply nested in an untrusted
    file.
    """
    from huggingface_hub import RepoCard

    if not path.is_file():
        return {}, ""
    content = path.read_bytes().decode("utf-8-sig", errors="replace").replace("\r\n", "\n")
    if content.find("\n---", 1) > MAX_METADATA_CHARS:
        return {}, content
    try:
        found = RepoCard(content)
        return found.data.to_dict(), found.text
    except Exception:  # any error of the YAML parser on an untrusted file
        return {}, content


# What may go.


def publishing_objection(result: Source) -> str:
    """Why ``result`` should not be published; empty if it was verified and has not changed."""
    path = result.path / VERIFY_FILE
    if not path.is_file():
        return f"it was never verified (there is no {VERIFY_FILE})"
    try:
        found = json.loads(path.read_text("utf-8"))
        passed, summary, digests = found["passed"], found["summary"], dict(found["sha256"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return f"its {VERIFY_FILE} cannot be read"
    if passed is not True:
        return f"its verification failed: {summary}"
    here = verified_files(result)
    changed = [n for n in here if n in digests and digest_of_file(result.root / n) != digests[n]]
    found = {
        "has changed since": changed,
        "was deleted after": {*digests} - {*here},
        "was added after": {*here} - {*digests},
    }
    return "; ".join(
        f"{name} {what} its verification" for what, names in found.items() for name in sorted(names)
    )


def prepare(
    out: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    access: HubAccess = DEFAULT_ACCESS,
    force: bool = False,
    look_only: bool = False,
) -> Upload:
    """Decide what pushing ``out`` to ``repo_id`` would send. Sends and writes nothing.

    With ``look_only`` no token is needed; the result cannot be passed to ``send``.

    Raises ``PushRefused`` if the present files were not verified (unless ``force``) or the Hub
    refuses; ``ModelNotFound`` or ``BadCheckpoint`` if ``out`` is not the result of a fold.
    """
    out = Path(out).expanduser()
    if not out.is_dir():
        raise ModelNotFound(
            f"there is no directory {str(out)!r}; push a directory that `enjoyln fold` wrote"
        )
    source = open_source(str(out))
    marker = read_marker(raw_config(source), source.model)
    complaint = publishing_objection(source)
    if complaint and not force:
        raise PushRefused(
            f"{out} is not pushed: {complaint}; run `enjoyln verify {out}`, or push it anyway with "
            "--force"
        )
    found = target(
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        access=access,
        look_only=look_only,
    )
    origins = published_paths(source, marker.source).items()
    warnings = tuple(f"{', '.join(names)} would publish the path {path}" for path, names in origins)
    text = None
    if (out / CARD_FILE).is_file():
        text = (out / CARD_FILE).read_bytes().decode("utf-8", errors="replace")
        updated = section(out, source.folder, found.repo_id, marker.classes, complaint)
        text = card.replace_section(text, updated)
    if complaint and complaint not in (text or ""):
        raise PushRefused(
            f"{out} is not pushed: {complaint}, and its {CARD_FILE} no longer has the enjoyln "
            f"section, where --force must say so; run `enjoyln verify {out}`"
        )
    files = _files(out, found.there, text)
    return Upload(out, found, files, text, complaint, warnings)


def published_paths(result: Source, marked: str) -> dict[str, list[str]]:
    """From each local path that files of the result contain, to these files."""
    sources = {CONFIG: marked}
    for name in (VERIFY_FILE, BENCH_FILE):
        sources[name] = str(card.read_json(result.path / name).get("source", ""))
    adapter = f"{ADAPTER_FOLDER}/{ADAPTER_CONFIG}"
    base = card.read_json(result.path / adapter).get("base_model_name_or_path")
    sources[adapter] = str(base or "")
    found: dict[str, list[str]] = {}
    for name, path in sources.items():
        if os.path.isabs(path) or path.startswith((".", "~")):  # never the case for a Hub id
            found.setdefault(path, []).append(Path(result.folder, name).as_posix())
    return found


def _files(out: Path, there: Mapping[str, tuple[str, str]], text: str | None) -> tuple[File, ...]:
    found = []
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name = path.relative_to(out).as_posix()
        if is_housekeeping(name):
            continue
        if not path.resolve().is_relative_to(out.resolve()):
            raise BadCheckpoint(f"{name} is a link to a file outside {out}; copy the file there")
        data = text.encode(errors="replace") if text is not None and name == CARD_FILE else None
        size = path.stat().st_size if data is None else len(data)
        found.append(File(name, size, _change(path, size, data, there.get(name))))
    return tuple(found)


def _change(path: Path, size: int, data: bytes | None, there: tuple[str, str] | None) -> Change:
    """How a file differs from the Hub's; ``data`` is its future content if that is not on disk."""
    if there is None:
        return "new"
    kind, known = there
    if kind == "sha256":
        own = digest_of_file(path) if data is None else hashlib.sha256(data).hexdigest()
    else:  # git's blob id
        data = path.read_bytes() if data is None else data
        own = hashlib.sha1(b"blob %d\0" % size + data).hexdigest()
    return "same" if own == known else "changed"


# The Hub.


def send(
    upload: Upload,
    *,
    commit_message: str | None = None,
    access: HubAccess = DEFAULT_ACCESS,
) -> Upload:
    """Carry out what ``prepare`` returned: write the card, create the repository, upload.

    Returns it with ``url`` and ``commit`` set. Sends and writes nothing if nothing differs.

    Raises ``PushRefused`` if the Hub refuses or fails. A second push need not send again what the
    Hub has received.
    """
    to = upload.target
    if not upload.differs:
        return replace(upload, url=to.page, commit=to.commit)
    _renew_card(upload)
    try:
        return _send(upload, commit_message, access)
    except KeyboardInterrupt:
        left = f"{to.repo_id} may now exist without all of its files"
        raise KeyboardInterrupt(f"{left}; {_how_to_continue(to, access)}") from None
    except Exception as error:  # any error of huggingface_hub and its HTTP library
        raise refusal(error, to.repo_id, _how_to_continue(to, access)) from error


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
            f"{upload.target.repo_id} and cannot be written ({error.strerror}); push a copy of "
            f"{upload.out}"
        ) from error


def _send(upload: Upload, commit_message: str | None, access: HubAccess) -> Upload:
    from huggingface_hub import HfApi

    to, api = upload.target, HfApi(token=access.token)
    if not to.exists:
        api.create_repo(to.repo_id, private=to.private, exist_ok=True)
    if to.new_branch:
        api.create_branch(to.repo_id, branch=str(to.revision), exist_ok=True)
    if not upload.changes_files:
        return replace(upload, url=to.page, commit=to.commit)
    done = api.upload_folder(
        repo_id=to.repo_id,
        folder_path=upload.out,
        allow_patterns=[glob.escape(file.name) for file in upload.files],
        revision=to.revision,
        create_pr=to.create_pr,
        commit_message=commit_message or "Upload a checkpoint folded by enjoyln",
    )
    return replace(upload, url=done.pr_url or done.commit_url, commit=done.oid)


def _how_to_continue(to: Target, access: HubAccess) -> str:
    """How to continue an interrupted push: in the pull request that it has opened, if any."""
    if not to.create_pr:
        return AGAIN
    try:
        opened = own_pulls(to, access) - to.pulls
    except Exception:  # any error of huggingface_hub and its HTTP library
        return f"if {to.url}/discussions has its pull request, push to that with --revision"
    if not opened:
        return AGAIN
    return f"push again with --revision {max(opened)} and without --create-pr to continue there"


def push(
    out: str | Path,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    token: str | None = None,
    force: bool = False,
) -> Upload:
    """Upload the verified result ``out`` to the Hub as ``repo_id``: ``prepare``, then ``send``."""
    access = HubAccess(token=token)
    upload = prepare(
        out,
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        access=access,
        force=force,
    )
    return send(upload, commit_message=commit_message, access=access)
