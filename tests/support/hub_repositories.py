"""What a Hub on this machine holds: repositories, large files, tokens, requests, faults to come."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TOKEN = "hf_PLANTEDtokenPLANTEDtoken"
"""Of the user ``me``; it may stand in no output and in no file."""


LARGE = (".safetensors", ".bin", ".h5", ".msgpack", ".onnx", ".data")
"""Names of files that lie in the large file storage."""


Files = dict[str, bytes]


Reply = tuple[int, bytes, dict[str, str]]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def pointer(data: bytes) -> bytes:
    """What git stores in place of a large file."""
    head = "version https://git-lfs.github.com/spec/v1"
    return f"{head}\noid sha256:{sha256(data)}\nsize {len(data)}\n".encode()


def oid_of(path: str, data: bytes) -> str:
    return git_oid(pointer(data) if path.endswith(LARGE) else data)


@dataclass
class Repository:
    """Commits by their id, refs by their name."""

    commits: dict[str, Files]
    refs: dict[str, str]
    private: bool = False
    gated: bool = False
    log: list[str] = field(default_factory=list)
    """Messages of the commits since its creation."""
    pulls: dict[str, str] = field(default_factory=dict)
    """Refs of pull requests, and who has opened them."""

    def files(self, ref: str = "main") -> Files:
        return self.commits[self.refs[ref]]

    def commit(self, ref: str, files: Files, message: str) -> str:
        names = "".join(f"{name}\0{sha256(data)}\0" for name, data in sorted(files.items()))
        commit = hashlib.sha1(f"{len(self.commits)}{message}{names}".encode()).hexdigest()
        self.commits[commit] = files
        self.refs[ref] = commit
        self.log.append(message)
        return commit


@dataclass
class Request:
    method: str
    path: str
    query: Mapping[str, list[str]]
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Fault:
    """What goes wrong with the next ``times`` requests that match."""

    method: str
    pattern: str
    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: bool = False
    """Send half of the answer, then hang up."""
    held: bool = False
    """Never answer; it lasts until the client hangs up."""
    times: int = 1


class Problem(Exception):
    """Ends a call with the refusal that the Hub would send."""

    def __init__(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        named = {"X-Error-Code": code, "X-Error-Message": message, **headers}
        headers = {name: value for name, value in named.items() if value}
        self.reply: Reply = status, json.dumps({"error": message}).encode(), headers


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    storage: dict[str, bytes] = field(default_factory=dict)
    """The large files, by their SHA-256."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """What was uploaded and is not checked yet, by the SHA-256 that was announced."""
    tokens: dict[str, str] = field(default_factory=dict)
    """Tokens, and whose they are. A user may write where the owner has the user's name."""
    requests: list[Request] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    def add(self, name: str, files: Files, **options: Any) -> Repository:
        self.storage |= {sha256(data): data for path, data in files.items() if path.endswith(LARGE)}
        made = self.repositories[name] = Repository({}, {}, **options)
        made.commit("main", dict(files), "initial commit")
        made.log.clear()
        return made

    def fault(self, method: str, pattern: str, **how: Any) -> None:
        self.faults.append(Fault(method, pattern, **how))

    def fetched(self) -> list[str]:
        """Paths of the files that were asked for, sorted, each once."""
        matches = [re.search(r"/resolve/[^/]+/(.*)", request.path) for request in self.requests]
        return sorted({match[1] for match in matches if match})

    def user(self, request: Request) -> str | None:
        return self.tokens.get(request.headers.get("authorization", "").removeprefix("Bearer "))

    def fault_for(self, request: Request) -> Fault:
        for fault in self.faults:
            hit = fault.method == request.method and re.search(fault.pattern, request.path)
            if fault.times and hit:
                fault.times -= 1
                return fault
        return Fault("", "")

    def opened(self, request: Request, name: str, ref: str | None = None) -> Repository:
        """The repository, if the user may read it, or write to it if there is a ``ref``.

        ``ref`` is to be written, ``""`` is a pull request to be opened, as everybody may.
        """
        user, owner = self.user(request), name.split("/")[0]
        repository = self.repositories.get(name)
        if repository is None or (repository.private and owner != user):
            status = 404 if user else 401
            raise Problem(status, "RepoNotFound", "Repository not found")
        own = user is not None and (ref == "" or repository.pulls.get(ref or "") == user)
        if ref is not None and not own and user != owner:
            text = "You don't have the required permissions"
            raise Problem(403 if user else 401, message=text)
        return repository

    def commit_named(self, repository: Repository, revision: str) -> str:
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            raise Problem(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit
