"""Downloads from the Hub and pushes to it: a local server, and each command in its own process."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest
from hub_clients import GPT2, TOKEN, enjoyln, python, settings_for
from hub_server import Hub, sha256
from rounding import TIMES
from warm_process import asked_on_a_terminal, start

pytestmark = pytest.mark.usefixtures("quiet_hub")

CARD = """\
---
license: mit
language: en
pipeline_tag: text-generation
tags: [tiny]
model-index: []
---
# A tiny model

Trained on a licence.
"""


@pytest.fixture(scope="module")
def hub(hub_server: Hub) -> Hub:
    hub_server.tokens[TOKEN] = "me"
    files = {path.name: path.read_bytes() for path in GPT2.iterdir()}
    foreign = ("tf_model.h5", "flax_model.msgpack", "onnx/model.onnx", "pytorch_model.bin")
    files |= {name: b"the same in another form" for name in foreign}
    files |= {"README.md": CARD.encode()}
    hub_server.add("org/gpt2", files).commit("v1", dict(files), "a branch")
    hub_server.add("me/private", files, private=True)
    hub_server.add("org/gated", files, gated=True)
    return hub_server


@pytest.fixture(scope="module")
def folded(hub: Hub, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 folded by its Hub id; tests do not change it."""
    out = tmp_path_factory.mktemp("out") / "gpt2-rms"
    call = ["fold", "org/gpt2", "-o", out, "--revision", "v1", "--token", TOKEN]
    (done,) = enjoyln(hub, home, call)
    assert done.status == 0, done.err
    return out


@pytest.fixture
def out(folded: Path, tmp_path: Path) -> Path:
    """A copy of the folded checkpoint to work on."""
    return Path(shutil.copytree(folded, tmp_path / "gpt2-rms"))


def token_files(folder: Path) -> list[Path]:
    """The files that hold the planted token."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if TOKEN.encode() in path.read_bytes()]


# From the Hub.


def test_a_report_fetches_the_config_alone(hub: Hub, home: Path, tmp_path: Path) -> None:
    call = ["report", "org/gpt2", "--json", "--cache-dir", tmp_path]
    (done,) = enjoyln(hub, home, call)
    assert json.loads(done.out)["become_rmsnorm"] == 7
    assert hub.fetched() == ["config.json"]


def test_a_fold_fetches_what_it_needs(hub: Hub, home: Path, tmp_path: Path) -> None:
    """It fetches neither weights for other frameworks nor a pickle of the same weights."""
    out, cache = tmp_path / "out", tmp_path / "cache"
    hub.add("org/twin", hub.repositories["org/gpt2"].files())
    call = ["fold", "org/twin", "-o", out, "--cache-dir", cache, "--no-verify"]
    (done,) = enjoyln(hub, home, call)
    assert done.status == 0, done.err
    assert hub.fetched() == sorted([path.name for path in GPT2.iterdir()] + ["README.md"])
    assert (cache / "models--org--twin").is_dir()
    assert not (home / "hub" / "models--org--twin").exists()


def test_a_result_remembers_the_commit(hub: Hub, folded: Path) -> None:
    marker = json.loads((folded / "config.json").read_text())["enjoyln"]
    assert marker["source"] == "org/gpt2"
    assert marker["revision"] == hub.repositories["org/gpt2"].refs["v1"]


def test_a_result_is_refused_before_its_weights_are_fetched(
    hub: Hub, home: Path, folded: Path, tmp_path: Path
) -> None:
    hub.add("org/folded", {path.name: path.read_bytes() for path in folded.iterdir()})
    hub.requests.clear()
    call = ["fold", "org/folded", "-o", tmp_path / "out", "--cache-dir", tmp_path / "cache"]
    (done,) = enjoyln(hub, home, call)
    assert done.status == 1 and "org/folded is the result of an earlier fold" in done.err
    assert hub.fetched() == ["config.json"]


# To the Hub.


def test_a_push_sends_all_that_is_new(hub: Hub, home: Path, out: Path) -> None:
    call = ["push", out, "me/gpt2-rms", "--yes", "--private"]
    dry, done, again = enjoyln(hub, home, [*call, "--dry-run"], call, call, HF_TOKEN=TOKEN)
    assert "would push 9 files, 1.6 MB, to me/gpt2-rms (private); nothing was sent" in dry.out
    for path in out.iterdir():
        assert re.search(rf"{re.escape(path.name)} .* [kM]?B", dry.out), path.name
    assert done.status == 0, done.err
    there = hub.repositories["me/gpt2-rms"]
    page = f"{hub.url}/me/gpt2-rms/commit/{there.refs['main']}"
    assert done.out.splitlines()[-1] == again.out.splitlines()[-1] == page
    assert there.private and len(there.log) == 1, "the second push has nothing to send"
    assert there.files()["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert not any(TOKEN.encode() in data for data in there.files().values())


@pytest.mark.slow
def test_a_result_on_the_hub_is_loaded_by_stock_transformers(
    hub: Hub, out: Path, tmp_path: Path
) -> None:
    hub.add("me/loaded", {path.name: path.read_bytes() for path in out.iterdir()})
    code = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from enjoyln_cli import from_pretrained
from enjoyln_cli.runtime.modules import RMSNorm
ids = AutoTokenizer.from_pretrained("me/loaded")("of this License", return_tensors="pt")
stock = AutoModelForCausalLM.from_pretrained("me/loaded")
fast = from_pretrained("me/loaded")
original = AutoModelForCausalLM.from_pretrained("org/gpt2")
assert not any(isinstance(m, RMSNorm) for m in stock.modules())
assert sum(isinstance(m, RMSNorm) for m in fast.modules()) == 7
with torch.no_grad():
    found = [model(**ids).logits for model in (original, stock, fast)]
    exact = original.double()(**ids).logits
print(*(float((one - exact).norm() / exact.norm()) for one in found))
"""
    own, *errors = map(float, python(hub, tmp_path, code, HF_TOKEN=TOKEN).split())
    assert 0 < max(errors) <= TIMES * own and len(errors) == 2


def test_a_push_to_a_branch_and_as_a_pull_request(hub: Hub, home: Path, out: Path) -> None:
    there = hub.add("me/taken", {"config.json": b"{}", "notes.txt": b"mine"})
    message = ["--yes", "--commit-message", "Less to compute"]
    calls = [["push", out, "me/taken", "--create-pr", *message, "--json"]]
    calls += [["push", out, "me/taken", "--revision", "rms", *message]]
    calls += [["push", out, "me/taken", "--revision", "rms", "--create-pr", *message]]
    pull, branch, both = enjoyln(hub, home, *calls, HF_TOKEN=TOKEN)
    found = json.loads(pull.out)
    assert found["url"] == f"{hub.url}/me/taken/discussions/1"
    assert {file["name"] for file in found["files"]} == {path.name for path in out.iterdir()}
    assert set(there.refs) == {"main", "refs/pr/1", "rms"}
    assert set(there.files()) == {"config.json", "notes.txt"}, "main is as it was"
    for ref in ("refs/pr/1", "rms"):
        assert there.files(ref)["notes.txt"] == b"mine"
        assert there.files(ref)["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert there.log == ["Less to compute"] * 2
    assert branch.status == 0 and "drop --revision" in both.error


def test_a_pull_request_that_was_opened_is_gone_on_with(hub: Hub, home: Path, out: Path) -> None:
    """The answer to the commit is lost: a second pull request must not be opened."""
    there = hub.add("org/theirs", {"config.json": b"{}"})
    there.pulls["refs/pr/1"] = "another"
    there.refs["refs/pr/1"] = there.refs["main"]
    hub.fault("POST", "/commit/", status=500)
    call: list[object] = ["push", out, "org/theirs", "--yes"]
    hub.fault("POST", "/commit/", cut=True)
    for done in enjoyln(hub, home, *[[*call, "--create-pr"]] * 2, HF_TOKEN=TOKEN):
        assert "if org/theirs has its pull request by now, push to that: --rev" in done.error
    there.commit("refs/pr/2", {"config.json": b"{}"}, "as if a part had come")
    (done,) = enjoyln(hub, home, [*call, "--revision", "refs/pr/2"], HF_TOKEN=TOKEN)
    assert done.status == 0 and "to org/theirs@refs/pr/2" in done.out, done.err
    weights = (out / "model.safetensors").read_bytes()
    assert there.files("refs/pr/2")["model.safetensors"] == weights
    assert set(there.refs) == {"main", "refs/pr/1", "refs/pr/2"} and len(there.files()) == 1


def test_a_push_asks_first(hub: Hub, home: Path, out: Path) -> None:
    """Without a terminal it cannot ask, so it refuses."""
    (done,) = enjoyln(hub, home, ["push", out, "me/unasked"], HF_TOKEN=TOKEN)
    said = " ".join(done.err.split())
    assert done.status == 2 and "would push 9 files, 1.6 MB, to me/unasked" in said
    assert "pass --yes to confirm, since there is no terminal to ask on" in said
    assert "me/unasked" not in hub.repositories


def with_reply(hub: Hub, home: Path, reply: bytes, *arguments: object) -> tuple[int, str]:
    return asked_on_a_terminal(
        reply,
        *("-m", "enjoyln_cli", *arguments),
        settings=settings_for(hub, home),
        environment={"HF_TOKEN": TOKEN},
        fresh=True,  # whether bars are drawn is settled by an import
    )


@pytest.mark.slow
def test_on_a_terminal_the_user_decides_and_sees_it_go(hub: Hub, home: Path, out: Path) -> None:
    hub.storage.pop(sha256((out / "model.safetensors").read_bytes()), None)
    call = ["push", out, "me/seen", "--private"]
    status, shown = with_reply(hub, home, b"n\n", *call)
    assert status == 1 and "me/seen (private)? [y/N]" in shown and "Aborted!" in shown
    status, shown = with_reply(hub, home, b"\x03", *call)
    assert status == 130 and "me/seen" not in hub.repositories
    status, shown = with_reply(hub, home, b"y\n", *call)
    assert status == 0 and re.search(r"model.safetensors: 100%\|", shown), shown
    assert hub.repositories["me/seen"].private


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line_and_no_matter_to_a_dry_run(
    hub: Hub, home: Path, out: Path
) -> None:
    calls: list[list[object]] = [
        ["push", out, "me/x", "--yes"],
        ["push", out, "me/x", "--dry-run"],
        ["push", out, "me/x", "--dry-run", "--json"],
    ]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        done, table, plain = enjoyln(hub, home, *calls, HF_TOKEN=TOKEN, HF_ENDPOINT=closed)
    assert f"{closed} cannot be reached (Connect" in done.error and "push again" in done.error
    assert "would push 9 files, 1.6 MB, to me/x; nothing was sent" in table.out
    found = json.loads(plain.out)
    assert {file["name"] for file in found["files"]} == {path.name for path in out.iterdir()}
    assert found["url"] == "" and found["bytes"] > 1e6


def test_a_push_is_refused_by_the_hub_in_one_line(hub: Hub, home: Path, out: Path) -> None:
    calls: list[list[object]] = [
        ["push", out, "me/x", "--yes"],
        ["push", out, "me/x", "--yes", "--token", "hf_unknown"],
        ["push", out, "org/gpt2", "--yes", "--token", TOKEN],
        ["push", out, "org/new", "--yes", "--token", TOKEN],
        ["push", out, "no/such/name", "--yes", "--token", TOKEN],
        ["push", out, "me/none", "--create-pr", "--yes", "--token", TOKEN],
        ["push", out, "me/none", "--revision", "refs/pr/1", "--yes", "--token", TOKEN],
    ]
    found = [done.error for done in enjoyln(hub, home, *calls)]
    assert "needs a token; run `hf auth login`" in found[0]
    assert "does not know the token" in found[1]
    assert "the token may not write to org/gpt2 (You don't have" in found[2]
    assert "may not write to org/new" in found[3]
    assert "not a repository name" in found[4]
    assert all("me/none cannot be found by this token" in error for error in found[5:])
    assert set(hub.repositories) & {"me/x", "me/none", "org/new"} == set()


@pytest.mark.slow
def test_ctrl_c_says_what_is_left_and_a_second_push_goes_on(
    hub: Hub, home: Path, out: Path
) -> None:
    hub.storage.pop(sha256((out / "model.safetensors").read_bytes()), None)
    hub.fault("PUT", "/upload/.*/2", held=True)
    process = start(
        *("-m", "enjoyln_cli", "push", out, "me/held", "--yes"),
        settings=settings_for(hub, home),
        environment={"HF_TOKEN": TOKEN},
    )
    until = time.monotonic() + 60
    while not any(re.fullmatch("/upload/.*/2", request.path) for request in hub.requests):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert "interrupted; me/held may now exist without all of its files; push again" in line
    assert "Traceback" not in shown and hub.repositories["me/held"].log == []
    (done,) = enjoyln(hub, home, ["push", out, "me/held", "--yes"], HF_TOKEN=TOKEN)
    assert done.status == 0, done.err
    files = hub.repositories["me/held"].files()
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()


def test_a_card_that_cannot_be_written_stops_a_push(hub: Hub, home: Path, out: Path) -> None:
    """A directory in the way stands for a read-only disk, and also stops the user root."""
    (out / "README.md.begun").mkdir()
    call = ["push", out, "me/read-only", "--yes"]
    (done,) = enjoyln(hub, home, call, HF_TOKEN=TOKEN)
    assert "nothing was sent: README.md in" in done.error
    assert f"push a copy of {out}" in done.error and "me/read-only" not in hub.repositories
    (out / "README.md.begun").rmdir()
    (first,) = enjoyln(hub, home, call, HF_TOKEN=TOKEN)
    assert first.status == 0, first.err
    (out / "README.md.begun").mkdir()
    del hub.repositories["me/read-only"]
    (again,) = enjoyln(hub, home, call, HF_TOKEN=TOKEN)
    assert again.status == 0, "the card is the one that lies there"


def test_an_interrupted_push_goes_on(hub: Hub, home: Path, out: Path) -> None:
    hub.fault("POST", "/api/models/me/resumed/commit/", status=500)
    call = ["push", out, "me/resumed", "--yes"]
    first, second = enjoyln(hub, home, call, call, HF_TOKEN=TOKEN)
    assert "rejected the upload (500)" in first.error and "to continue" in first.error
    assert second.status == 0, second.err
    files = hub.repositories["me/resumed"].files()
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()


# What may be pushed.


def test_only_a_verified_result_is_pushed(
    hub: Hub, home: Path, folded: Path, tmp_path: Path
) -> None:
    cases = {}
    for name in ("never", "failed", "broken", "changed", "more", "less"):
        cases[name] = shutil.copytree(folded, tmp_path / name)
    verified = json.loads((folded / "enjoyln_verify.json").read_text())
    (cases["never"] / "enjoyln_verify.json").unlink()
    failed = {**verified, "passed": False, "summary": "not verified: it drifts"}
    (cases["failed"] / "enjoyln_verify.json").write_text(json.dumps(failed))
    (cases["broken"] / "enjoyln_verify.json").write_text("{")
    config = cases["changed"] / "config.json"
    config.write_text(config.read_text() + "\n")
    (cases["more"] / "pytorch_model.bin").write_bytes(b"other weights")
    (cases["less"] / "tokenizer.json").unlink()
    calls = [["push", case, f"me/{name}", "--yes"] for name, case in cases.items()]
    found = dict(zip(cases, enjoyln(hub, home, *calls, HF_TOKEN=TOKEN), strict=True))
    for name, words in {
        "never": "never verified",
        "failed": "its verification failed: not verified: it drifts",
        "broken": "enjoyln_verify.json cannot be read",
        "changed": "config.json has changed since its verification",
        "more": "pytorch_model.bin was added after its verification",
        "less": "tokenizer.json was deleted after its verification",
    }.items():
        assert words in found[name].error and "enjoyln verify" in found[name].error
        assert f"me/{name}" not in hub.repositories
    assert hub.requests == []


def test_a_forced_push_says_so_in_its_card(hub: Hub, home: Path, out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"ab")
    (out / ".DS_Store").write_text("housekeeping")
    (out / ".cache").mkdir()
    (out / ".cache" / "secret").write_text("housekeeping")
    (done,) = enjoyln(hub, home, ["push", out, "me/forced", "--yes", "--force"], HF_TOKEN=TOKEN)
    assert done.status == 0, done.err
    there = hub.repositories["me/forced"].files()
    card = there["README.md"].decode()
    assert (
        "**Pushed with `--force`**: model.safetensors has changed since its verification; "
        "notes.txt was added after its verification." in card
    )
    assert "Of the files as they were when they were last verified: Same outputs" in card
    assert "notes.txt" in there and not {".cache/secret", ".DS_Store"} & {*there}


def test_a_card_that_cannot_say_so_stops_a_forced_push(hub: Hub, home: Path, out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    (out / "README.md").write_text("# All mine")
    (done,) = enjoyln(hub, home, ["push", out, "me/mute", "--yes", "--force"], HF_TOKEN=TOKEN)
    assert "no longer has the enjoyln section" in done.error and "me/mute" not in hub.repositories


def test_a_repository_keeps_whether_it_is_private(hub: Hub, home: Path, out: Path) -> None:
    hub.add("me/public", {"config.json": b"{}"})
    calls: list[list[object]] = [["push", out, "me/public", "--private", "--yes"]]
    calls += [["push", out, "me/private", "--no-private", "--yes"]]
    before = [dict(hub.repositories[name].refs) for name in ("me/public", "me/private")]
    public, private = enjoyln(hub, home, *calls, HF_TOKEN=TOKEN)
    assert "me/public is public, and --private applies to new repositories only" in public.error
    assert "me/private is private, and --no-private applies to new" in private.error
    assert before == [hub.repositories[name].refs for name in ("me/public", "me/private")]


@pytest.mark.slow
def test_a_result_on_the_hub_is_verified_and_its_cache_left_alone(
    hub: Hub, home: Path, out: Path, tmp_path: Path
) -> None:
    private = {path.name: path.read_bytes() for path in out.iterdir()}
    hub.add("me/verified", private, private=True)
    cache = ["--cache-dir", tmp_path / "cache", "--token", TOKEN]
    (done,) = enjoyln(hub, home, ["verify", "me/verified", *cache, "--json"])
    assert done.status == 0 and json.loads(done.out)["passed"], done.err
    snapshot = next((tmp_path / "cache").glob("models--me--verified/snapshots/*"))
    for path in snapshot.iterdir():
        assert path.read_bytes() == private[path.name]


def test_what_is_no_result_and_a_link_out_of_one_are_not_pushed(
    hub: Hub, home: Path, out: Path
) -> None:
    (out.parent / "private.txt").write_text("mine")
    (out / "notes.txt").symlink_to(out.parent / "private.txt")
    places = (out, GPT2, out.parent / "no")
    calls = [["push", place, "me/x", "--yes", "--force"] for place in places]
    linked, plain, nowhere = enjoyln(hub, home, *calls, HF_TOKEN=TOKEN)
    assert "notes.txt is a link to a file outside" in linked.error
    assert "enjoyln fold" in plain.error and "there is no directory" in nowhere.error
    assert "me/x" not in hub.repositories


@pytest.mark.slow
def test_a_push_tells_where_a_local_source_lay(hub: Hub, home: Path, tmp_path: Path) -> None:
    calls: list[list[object]] = [["fold", GPT2, "-o", tmp_path / "out", "--samples", 1]]
    calls += [["push", tmp_path / "out", "me/local", "--dry-run", "--json"]]
    fold, push = enjoyln(hub, home, *calls, HF_TOKEN=TOKEN)
    assert fold.status == 0, fold.err
    (warning,) = json.loads(push.out)["warnings"]
    files = "config.json, enjoyln_verify.json"
    assert warning == f"{files} would publish the path {GPT2}"
    telling = [
        path for path in (tmp_path / "out").iterdir() if str(GPT2).encode() in path.read_bytes()
    ]
    assert sorted(path.name for path in telling) == files.split(", "), "no other file tells it"
    (tmp_path / "out" / "enjoyln_verify.json").write_text('{"source": "~/secret/gpt2"}')
    call = ["push", tmp_path / "out", "me/local", "--dry-run", "--json", "--force"]
    (push,) = enjoyln(hub, home, call, HF_TOKEN=TOKEN)
    assert json.loads(push.out)["warnings"] == [
        f"config.json would publish the path {GPT2}",
        "enjoyln_verify.json would publish the path ~/secret/gpt2",
    ]
    assert str(GPT2.parent) not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_no_token_is_written_anywhere(folded: Path, home: Path) -> None:
    """The fold was given the token as the option ``--token``."""
    assert token_files(folded) == [] and token_files(home) == []
    assert "--token" not in (folded / "README.md").read_text()
