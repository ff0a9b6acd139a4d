"""A Hub on this machine: as much of its API as ``huggingface_hub`` uses to download and to upload.

Repositories live in memory: a commit is all of its files, a ref names a commit. Files that a real
Hub would put into its large file storage are redirected to, uploaded apart and checked against
their SHA-256 as there. Xet is not spoken. Faults are asked for one by one::

    with serving() as hub, connected(hub.url, cache):
        hub.add("me/model", {"config.json": b"{}"})
        hub.fault("GET", "resolve/.*/config.json", status=429, headers={"Retry-After": "0"})
"""

from __future__ import annotations

import base64
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

from hub_repositories import (
    LARGE,
    Hub,
    Problem,
    Reply,
    Repository,
    Request,
    git_oid,
    oid_of,
    pointer,
    sha256,
)

Call = Callable[[Hub, Request, re.Match[str]], Reply]


def answer(content: Any, status: int = 200) -> Reply:
    return status, json.dumps(content).encode(), {"Content-Type": "application/json"}


# Reading.


def whoami(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    user = hub.user(request)
    if user is None:
        raise Problem(401, message="Invalid username or password.")
    return answer({"type": "user", "name": user})


def info(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    name, revision = match["repo"], match["revision"] or "main"
    repository = hub.opened(request, name)
    commit = hub.commit_named(repository, revision)
    siblings = [{"rfilename": path} for path in repository.commits[commit]]
    facts = {"id": name, "modelId": name, "sha": commit, "private": repository.private}
    return answer({**facts, "tags": [], "siblings": siblings, "downloads": 0})


def tree(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    repository = hub.opened(request, match["repo"])
    commit = hub.commit_named(repository, match["revision"])
    below = (match["path"] or "").strip("/")
    listing = []
    for path, data in repository.commits[commit].items():
        if below and not path.startswith(below + "/"):
            continue
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data)}
        entry["oid"] = oid_of(path, data)
        if path.endswith(LARGE):
            size = len(pointer(data))
            entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": size}
        listing.append(entry)
    if below and not listing:
        raise Problem(404, "EntryNotFound", f"{below} does not exist")
    return answer(listing)


def resolve(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    name, revision, path = match["repo"], match["revision"], match["path"]
    repository = hub.opened(request, name)
    if repository.gated:
        raise Problem(403 if hub.user(request) else 401, "GatedRepo", "Access is restricted")
    commit = hub.commit_named(repository, revision)
    headers = {"X-Repo-Commit": commit}
    if path not in repository.commits[commit]:
        raise Problem(404, "EntryNotFound", "Entry not found", **headers)
    data = repository.commits[commit][path]
    if path.endswith(LARGE):
        linked = {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data))}
        place = hub.url.replace("127.0.0.1", "localhost")  # another host, as the Hub's storage is
        return 302, b"", {**headers, **linked, "Location": f"{place}/storage/{sha256(data)}"}
    return content(data, {**headers, "ETag": f'"{git_oid(data)}"'}, request)


def stored(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    if match["oid"] not in hub.storage:
        raise Problem(404, message="no such object")
    return content(hub.storage[match["oid"]], {"ETag": f'"{match["oid"]}"'}, request)


def content(data: bytes, headers: dict[str, str], request: Request) -> Reply:
    """All of the bytes, or the bytes that a ``Range`` asks for."""
    asked = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    headers = {**headers, "Accept-Ranges": "bytes"}
    if not asked:
        return 200, data, headers
    start, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
    span = f"bytes {start}-{last}/{len(data)}"
    return 206, data[start : last + 1], {**headers, "Content-Range": span}


# Writing.


def create(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    asked, user = request.json, hub.user(request)
    if user is None:
        raise Problem(401, message="Invalid username or password.")
    owner = asked.get("organization") or user
    if user != owner:
        raise Problem(403, message="You don't have the rights to create a model there")
    name = f"{owner}/{asked['name']}"
    if name in hub.repositories:
        return answer({"error": "You already created this repo", "url": f"{hub.url}/{name}"}, 409)
    private = asked.get("private") or asked.get("visibility") == "private"
    hub.add(name, {".gitattributes": b"*.safetensors filter=lfs\n"}, private=bool(private))
    return answer({"url": f"{hub.url}/{name}", "name": name})


def branch(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    repository = hub.opened(request, match["repo"], match["name"])
    if match["name"].startswith("refs/"):
        raise Problem(400, message="Invalid reference name")
    if match["name"] in repository.refs:
        raise Problem(409, message="Reference already exists")
    repository.refs[match["name"]] = repository.refs["main"]
    return answer({})


def written(request: Request, match: re.Match[str]) -> str:
    return "" if request.query.get("create_pr") else match["revision"]


def preupload(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    repository = hub.opened(request, match["repo"], written(request, match))
    commit = hub.commit_named(repository, match["revision"])
    files = []
    for entry in request.json["files"]:
        path = entry["path"]
        there = repository.commits[commit].get(path)
        mode = "lfs" if path.endswith(LARGE) else "regular"
        named = sha256 if mode == "lfs" else git_oid
        oid = None if there is None else named(there)
        files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return answer({"files": files})


def batch(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    ref = request.json.get("ref", {}).get("name", "")
    hub.opened(request, match["repo"], ref)
    objects = []
    for entry in request.json["objects"]:
        oid, size = entry["oid"], entry["size"]
        if oid in hub.storage:
            objects.append({"oid": oid, "size": size})
            continue
        actions = {step: {"href": f"{hub.url}/{step}/{oid}"} for step in ("upload", "verify")}
        objects.append({"oid": oid, "size": size, "actions": actions})
    return answer({"transfer": "basic", "objects": objects})


def upload(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    hub.uploads[match["oid"]] = request.body
    return 200, b"", {}


def verify(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    """Into the storage, if what came is what was announced."""
    oid = match["oid"]
    data = hub.uploads.pop(oid, b"")
    if sha256(data) != oid or len(data) != request.json["size"]:
        raise Problem(400, message="the digest of the uploaded object is wrong")
    hub.storage[oid] = data
    return answer({})


def commit(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    name = match["repo"]
    repository = hub.opened(request, name, written(request, match))
    ref = match["revision"]
    if ref not in repository.refs:
        raise Problem(404, "RevisionNotFound", "Invalid rev id")
    files = dict(repository.files(ref))
    lines = [json.loads(line) for line in request.body.splitlines() if line]
    head = next(line["value"] for line in lines if line["key"] == "header")
    for line in lines:
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            if value["oid"] not in hub.storage:
                raise Problem(400, message=f"{value['path']} was not uploaded")
            files[value["path"]] = hub.storage[value["oid"]]
        elif line["key"] == "deletedFile":
            files.pop(value["path"], None)
    pull = None
    if request.query.get("create_pr"):
        pull = opened_pull(repository, ref, hub.user(request))
    made = repository.commit(pull or ref, files, head["summary"])
    told = {"success": True, "commitOid": made, "commitUrl": f"{hub.url}/{name}/commit/{made}"}
    number = (pull or "").rsplit("/", 1)[-1]
    return answer({**told, "pullRequestUrl": f"{hub.url}/{name}/discussions/{number}"})


def opened_pull(repository: Repository, ref: str, user: str | None) -> str:
    pull = f"refs/pr/{1 + sum(name.startswith('refs/pr/') for name in repository.refs)}"
    repository.refs[pull], repository.pulls[pull] = repository.refs[ref], str(user)
    return pull


def validate(hub: Hub, request: Request, match: re.Match[str]) -> Reply:
    """Whether a card's metadata is what the Hub takes: a base model is a Hub id."""
    import yaml

    block = re.match(r"\s*---\n(.*?)\n---", request.json["content"], re.DOTALL)
    data = (yaml.safe_load(block[1]) if block else None) or {}
    bases = data.get("base_model", [])
    wrong = [b for b in ([bases] if isinstance(bases, str) else bases) if b.count("/") > 1]
    relation = data.get("base_model_relation", "finetune")
    if relation not in ("adapter", "merge", "quantized", "finetune"):
        wrong.append(relation)
    errors = [{"message": f"{value} is not allowed"} for value in wrong]
    return answer({"errors": errors, "warnings": []}, 400 if errors else 200)


REPO = r"(?P<repo>[^/]+/[^/]+?)"
API = rf"/api/models/{REPO}"
READ = ("GET", "HEAD")
ROUTES: tuple[tuple[tuple[str, ...], str, Call], ...] = (
    (READ, "/api/whoami-v2", whoami),
    (("POST",), "/api/repos/create", create),
    (("POST",), "/api/validate-yaml", validate),
    (READ, rf"{API}(/revision/(?P<revision>.+))?", info),
    (READ, rf"{API}/tree/(?P<revision>refs/pr/\d+|[^/]+)(?P<path>/.*)?", tree),
    (("POST",), rf"{API}/branch/(?P<name>.+)", branch),
    (("POST",), rf"{API}/preupload/(?P<revision>.+)", preupload),
    (("POST",), rf"{API}/commit/(?P<revision>.+)", commit),
    (("POST",), rf"/{REPO}\.git/info/lfs/objects/batch", batch),
    (("PUT",), r"/upload/(?P<oid>\w+)", upload),
    (("POST",), r"/verify/(?P<oid>\w+)", verify),
    (READ, rf"/{REPO}/resolve/(?P<revision>refs/pr/\d+|[^/]+)/(?P<path>.+)", resolve),
    (READ, r"/storage/(?P<oid>\w+)", stored),
)


def reply(hub: Hub, request: Request) -> Reply:
    bearer = request.headers.get("authorization")
    try:
        if bearer and hub.user(request) is None:
            raise Problem(401, message="Invalid credentials in Authorization header")
        for methods, pattern, call in ROUTES:
            match = re.fullmatch(pattern, request.path)
            if match and request.method in methods:
                return call(hub, request, match)
        raise Problem(404, "EntryNotFound", "no such page")
    except Problem as problem:
        return problem.reply


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection as the ``hub`` does, but for its faults."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def respond(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query, keep_blank_values=True)
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers.get("content-length", 0)))
        request = Request(self.command, unquote(url.path), query, headers, body)
        self.hub.requests.append(request)
        fault = self.hub.fault_for(request)
        if fault.held:
            self.close_connection = not self.rfile.read(1)  # ends when the client hangs up
            return
        asked_for = (fault.status or 0, b"asked for", dict(fault.headers))
        status, content, more = asked_for if fault.status else reply(self.hub, request)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **more}.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection |= fault.cut
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if fault.cut else content)

    do_GET = do_HEAD = do_POST = do_PUT = respond

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def serving() -> Iterator[Hub]:
    """A Hub on a free port of this machine, in threads of its own."""
    hub = Hub()
    handler = type("HandlerOfHub", (Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()


def connected(
    url: str, home: Path, *, offline: bool = False
) -> AbstractContextManager[dict[str, Any]]:
    """In the block, the Hub of this process is at ``url``, and its cache and token in ``home``."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    return mock.patch.multiple(
        constants,
        ENDPOINT=url,
        HUGGINGFACE_CO_URL_TEMPLATE=f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}",
        HF_HUB_CACHE=str(home / "hub"),
        HF_TOKEN_PATH=str(home / "token"),
        HF_HUB_DISABLE_XET=True,
        HF_HUB_OFFLINE=offline,
    )


@contextmanager
def nobody() -> Iterator[str]:
    """The address of a port of this machine where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{free.getsockname()[1]}"
