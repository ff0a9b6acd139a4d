"""A converted checkpoint goes to the Hub, with a card that says what it is.

Decides what may be pushed: a directory that carries the marker of a fold, and whose
``enjoyln_verify.json`` has passed for the very bytes that lie there. Everything in it goes along,
but for housekeeping of git and caches. Uploads are ``HfApi.upload_folder`` at every size: with
``hf_xet`` it commits hundreds of files in parts, without it all in one commit. Run again it goes on
where it stopped, since the Hub knows the content that it has (``upload_large_folder`` did so
before, and is gone from ``huggingface_hub`` 2). Where nothing differs nothing is sent.

No token is kept, printed or written.
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
from enjoyln_cli.checkpoint.result_files import BENCH_FILE, CARD_FILE, VERIFY_FILE, verified_files
from enjoyln_cli.checkpoint.source import Source, open_source
from enjoyln_cli.errors import BadCheckpoint, ModelNotFound, PushRefused
from enjoyln_cli.fs.digests import digest_of_file
from enjoyln_cli.fs.whole_file import write_whole
from enjoyln_cli.plan.plan import Plan
from enjoyln_cli.publish import card
from enjoyln_cli.publish.target import AGAIN, Target, own_pulls, refusal, target

Change = Literal["new", "changed", "same"]

MAX_METADATA_CHARS = 100_000
"""Characters of a card's metadata that are read."""


@dataclass(frozen=True)
class File:
    """One file of an upload."""

    name: str
    size: int
    change: Change


@dataclass(frozen=True)
class Upload:
    """What a push would send, settled before anything is sent; or what it has sent."""

    out: Path
    target: Target
    files: tuple[File, ...]
    card: str | None
    """The card's text as it will be; ``None`` where there is none."""
    complaint: str
    """What stands against it, where the user insists."""
    warnings: tuple[str, ...]
    url: str = ""
    """Of the commit or of the pull request, or of what is there already; none before."""
    commit: str = ""

    @property
    def size(self) -> int:
        """Bytes of the files that the Hub does not have as they are."""
        return sum(file.size for file in self.files if file.change != "same")

    @property
    def changes_files(self) -> bool:
        """Whether the Hub lacks a file as it is here."""
        return self.count("same") < len(self.files)

    @property
    def differs(self) -> bool:
        """Whether there is anything to push: a file, or the branch itself."""
        return self.target.new_branch or self.changes_files

    def count(self, change: Change) -> int:
        return sum(file.change == change for file in self.files)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
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
    """Write the card of a fold to ``out``, above the original's own if that lies there.

    ``final`` is the name that ``out`` is going to have, ``options`` are those of the command.
    """
    from huggingface_hub import ModelCard, ModelCardData

    data, text = _parsed(out / CARD_FILE)
    checked = section(out, source.folder, final.name, plan.classes)
    made = ModelCard.from_template(
        ModelCardData(**card.metadata(data, source, out)),
        template_str=card.template("card"),
        **card.values(plan, source, final, options, text, checked),
    )
    write_whole(out / CARD_FILE, f"{made}\n")


def section(root: Path, folder: str, place: str, names: Sequence[str], complaint: str = "") -> str:
    """The card's changing section, as text. The arguments are those of ``card.state``."""
    from huggingface_hub import ModelCard, ModelCardData

    return ModelCard.from_template(
        ModelCardData(),
        template_str="---\n{}\n---\n" + card.template("state"),
        **card.state(root, folder, place, names, complaint),
    ).text.strip()


def _parsed(path: Path) -> tuple[dict[str, Any], str]:
    """A card's metadata and text; all of it as text where the metadata cannot be read.

    Read as any card's: ``ModelCard`` would compare its tags, however deep a stranger nested them.
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
    except Exception:  # whatever YAML and its reader make of what somebody has written
        return {}, content


# What may go.


def publishing_objection(result: Source) -> str:
    """Why ``result`` should not be published: never verified, failed, or each file that changed."""
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
        "is gone since": {*digests} - {*here},
        "came after": {*here} - {*digests},
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
    """What pushing ``out`` to ``repo_id`` would send. Nothing is sent or written.

    To ``look_only``, with nothing to be sent afterwards, takes no token.

    Raises ``PushRefused`` where the result is not verified as it lies there (unless ``force``), or
    where the Hub refuses; ``ModelNotFound`` or ``BadCheckpoint`` where ``out`` is no fold's result.
    """
    out = Path(out).expanduser()
    if not out.is_dir():
        raise ModelNotFound(f"there is no directory {str(out)!r}; push what `enjoyln fold` wrote")
    source = open_source(str(out))
    marker = read_marker(raw_config(source), source.model)
    complaint = publishing_objection(source)
    if complaint and not force:
        raise PushRefused(
            f"{out} is not pushed: {complaint}; run `enjoyln verify {out}`, or insist with --force"
        )
    found = target(
        repo_id,
        private=private,
        revision=revision,
        create_pr=create_pr,
        access=access,
        look_only=look_only,
    )
    origins = _origins(source, marker.source).items()
    warnings = tuple(f"{', '.join(names)} would publish the path {path}" for path, names in origins)
    text = None
    if (out / CARD_FILE).is_file():
        text = (out / CARD_FILE).read_bytes().decode("utf-8", errors="replace")
        renewed = section(out, source.folder, found.repo_id, marker.classes, complaint)
        text = card.replace_section(text, renewed)
    if complaint and complaint not in (text or ""):
        raise PushRefused(
            f"{out} is not pushed: its {CARD_FILE} no longer has the section of enjoyln, which "
            f"would have to say that {complaint}; run `enjoyln verify {out}`"
        )
    files = _files(out, found.there, text)
    return Upload(out, found, files, text, complaint, warnings)


def _origins(result: Source, marked: str) -> dict[str, list[str]]:
    """Each local path that the result's files call their original, and those files."""
    told = {CONFIG: marked}
    for name in (VERIFY_FILE, BENCH_FILE):
        told[name] = str(card.read_json(result.path / name).get("source", ""))
    found: dict[str, list[str]] = {}
    for name, path in told.items():
        if os.path.isabs(path) or path.startswith((".", "~")):  # as no Hub id does
            found.setdefault(path, []).append(Path(result.folder, name).as_posix())
    return found


def _files(out: Path, there: Mapping[str, tuple[str, str]], text: str | None) -> tuple[File, ...]:
    found = []
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        name = path.relative_to(out).as_posix()
        if is_housekeeping(name):
            continue
        if not path.resolve().is_relative_to(out.resolve()):
            raise BadCheckpoint(f"{name} is a link out of {out}; put the file itself there")
        written = text.encode(errors="replace") if text is not None and name == CARD_FILE else None
        size = path.stat().st_size if written is None else len(written)
        found.append(File(name, size, _change(path, size, written, there.get(name))))
    return tuple(found)


def _change(path: Path, size: int, written: bytes | None, there: tuple[str, str] | None) -> Change:
    if there is None:
        return "new"
    kind, known = there
    if kind == "sha256":
        own = digest_of_file(path) if written is None else hashlib.sha256(written).hexdigest()
    else:  # as git names it
        data = path.read_bytes() if written is None else written
        own = hashlib.sha1(b"blob %d\0" % size + data).hexdigest()
    return "same" if own == known else "changed"


# The Hub.


def send(
    upload: Upload,
    *,
    commit_message: str | None = None,
    access: HubAccess = DEFAULT_ACCESS,
) -> Upload:
    """Carry out what ``prepare`` settled: write the card, make the repository, upload.

    What comes back has ``url`` and ``commit``. Nothing is sent or written where nothing differs.

    Raises ``PushRefused``; what the Hub has then taken it need not be sent again.
    """
    to = upload.target
    if not upload.differs:
        return replace(upload, url=to.page, commit=to.commit)
    _renew_card(upload)
    try:
        return _send(upload, commit_message, access)
    except KeyboardInterrupt:
        left = f"{to.repo_id} may now exist without all of its files"
        raise KeyboardInterrupt(f"{left}; {_again(to, access)}") from None
    except Exception as error:  # of huggingface_hub and its HTTP library
        raise refusal(error, to.repo_id, _again(to, access)) from error


def _renew_card(upload: Upload) -> None:
    """Raises ``PushRefused`` where the card in ``out`` is another and cannot be written."""
    if upload.card is None:
        return
    path = upload.out / CARD_FILE
    try:
        if path.read_bytes() != upload.card.encode(errors="replace"):
            write_whole(path, upload.card)
    except OSError as error:
        raise PushRefused(
            f"nothing was sent: {CARD_FILE} has to be written anew for {upload.target.repo_id}, "
            f"which {upload.out} does not allow ({error.strerror}); push a copy of {upload.out}"
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


def _again(to: Target, access: HubAccess) -> str:
    """How to go on; in the pull request that this push has opened, if it came to that."""
    if not to.create_pr:
        return AGAIN
    try:
        opened = own_pulls(to, access) - to.pulls
    except Exception:  # of huggingface_hub and its HTTP library
        return f"if {to.url}/discussions has its pull request, push to that with --revision"
    if not opened:
        return AGAIN
    return f"push again with --revision {max(opened)} and without --create-pr, it goes on there"


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
