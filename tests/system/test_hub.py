"""Downloads from the Hub and pushes to it, with a local server in its place."""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import good, refused, running
from hub_repositories import TOKEN, Hub, sha256
from hub_server import connected, nobody
from live_models import CHECKPOINTS, ROOT
from rounding import TIMES, relative
from stored_files import rewritten
from terminal import asked_on_a_terminal
from transformers import AutoModelForCausalLM, AutoTokenizer

from enjoyln_cli import from_pretrained, load_recipe
from enjoyln_cli.comparison.data_files import read_user_data
from enjoyln_cli.errors import AlreadyFolded
from enjoyln_cli.quantisation.quantize import quantize
from enjoyln_cli.runtime.modules import RMSNorm

pytestmark = pytest.mark.usefixtures("quiet_hub")

GPT2 = CHECKPOINTS / "gpt2"
push = partial(good, "push", HF_TOKEN=TOKEN)
no_push = partial(refused, "push", HF_TOKEN=TOKEN)

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
    good("fold", "org/gpt2", "-o", out, "--revision", "v1", "--token", TOKEN)
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


def test_a_report_fetches_the_config_alone(hub: Hub, tmp_path: Path) -> None:
    printed = good("report", "org/gpt2", "--json", "--cache-dir", tmp_path)
    assert json.loads(printed)["become_rmsnorm"] == 7
    assert hub.fetched() == ["config.json"]


def test_a_fold_fetches_what_it_needs(hub: Hub, home: Path, tmp_path: Path) -> None:
    """It fetches neither weights for other frameworks nor a pickle of the same weights."""
    out, cache = tmp_path / "out", tmp_path / "cache"
    hub.add("org/twin", hub.repositories["org/gpt2"].files())
    good("fold", "org/twin", "-o", out, "--cache-dir", cache, "--no-verify")
    assert hub.fetched() == sorted([path.name for path in GPT2.iterdir()] + ["README.md"])
    assert (cache / "models--org--twin").is_dir()
    assert not (home / "hub" / "models--org--twin").exists()


def test_a_result_remembers_the_commit(hub: Hub, folded: Path) -> None:
    marker = json.loads((folded / "config.json").read_text())["enjoyln"]
    assert marker["source"] == "org/gpt2"
    commit = hub.repositories["org/gpt2"].refs["v1"]
    assert marker["revision"] == commit
    assert load_recipe(folded / "enjoyln_recipe.yaml").source == f"org/gpt2@{commit}"
    assert f"at revision `{commit}`" in (folded / "README.md").read_text()


def test_a_result_is_refused_before_its_weights_are_fetched(
    hub: Hub, folded: Path, tmp_path: Path
) -> None:
    hub.add("org/folded", {path.name: path.read_bytes() for path in folded.iterdir()})
    hub.requests.clear()
    error = refused("fold", "org/folded", "-o", tmp_path / "out", "--cache-dir", tmp_path / "cache")
    assert "org/folded is the result of an earlier fold" in error
    data = read_user_data(text=ROOT / "LICENSE")
    with pytest.raises(AlreadyFolded):
        quantize("org/folded", tmp_path / "out", data, cache_dir=str(tmp_path / "cache"))
    assert hub.fetched() == ["config.json"]


# To the Hub.


def test_a_push_sends_all_that_is_new(hub: Hub, out: Path) -> None:
    words = (out, "me/gpt2-rms", "--yes", "--private")
    dry = push(*words, "--dry-run")
    assert "would push 9 files, 1.6 MB, to me/gpt2-rms (private); nothing was sent" in dry
    for path in out.iterdir():
        assert re.search(rf"{re.escape(path.name)} .* [kM]?B", dry), path.name
    pages = [push(*words).splitlines()[-1] for _ in range(2)]
    there = hub.repositories["me/gpt2-rms"]
    assert pages == [f"{hub.url}/me/gpt2-rms/commit/{there.refs['main']}"] * 2
    assert there.private and len(there.log) == 1, "the second push has nothing to send"
    assert there.files()["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert not any(TOKEN.encode() in data for data in there.files().values())


@pytest.mark.slow
def test_a_result_on_the_hub_is_loaded_by_stock_transformers(hub: Hub, out: Path) -> None:
    hub.add("me/loaded", {path.name: path.read_bytes() for path in out.iterdir()})
    ids = AutoTokenizer.from_pretrained("me/loaded")("of this License", return_tensors="pt")
    original, stock = map(AutoModelForCausalLM.from_pretrained, ("org/gpt2", "me/loaded"))
    fast = from_pretrained("me/loaded")
    assert not any(isinstance(module, RMSNorm) for module in stock.modules())
    assert sum(isinstance(module, RMSNorm) for module in fast.modules()) == 7
    with torch.no_grad():
        logits = [model(**ids).logits for model in (original, stock, fast)]
        exact = original.double()(**ids).logits
    rounding, *errors = (relative(found, exact) for found in logits)
    assert 0 < max(errors) <= TIMES * rounding


def test_a_push_to_a_branch_and_as_a_pull_request(hub: Hub, out: Path) -> None:
    there = hub.add("me/taken", {"config.json": b"{}", "notes.txt": b"mine"})
    words = (out, "me/taken", "--yes", "--commit-message", "Less to compute")
    found = json.loads(push(*words, "--create-pr", "--json"))
    push(*words, "--revision", "rms")
    assert "drop --revision" in no_push(*words, "--revision", "rms", "--create-pr")
    assert found["url"] == f"{hub.url}/me/taken/discussions/1"
    assert {file["name"] for file in found["files"]} == {path.name for path in out.iterdir()}
    assert set(there.refs) == {"main", "refs/pr/1", "rms"}
    assert set(there.files()) == {"config.json", "notes.txt"}, "main is as it was"
    for ref in ("refs/pr/1", "rms"):
        assert there.files(ref)["notes.txt"] == b"mine"
        assert there.files(ref)["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert there.log == ["Less to compute"] * 2


def test_a_pull_request_that_was_opened_is_gone_on_with(hub: Hub, out: Path) -> None:
    """The answer to the commit is lost: a second pull request must not be opened."""
    there = hub.add("org/theirs", {"config.json": b"{}"})
    there.pulls["refs/pr/1"] = "another"
    there.refs["refs/pr/1"] = there.refs["main"]
    hub.fault("POST", "/commit/", status=500)
    hub.fault("POST", "/commit/", cut=True)
    for _ in range(2):
        error = no_push(out, "org/theirs", "--yes", "--create-pr")
        assert "if org/theirs has its pull request by now, push to that: --rev" in error
    there.commit("refs/pr/2", {"config.json": b"{}"}, "as if a part had come")
    assert "to org/theirs@refs/pr/2" in push(out, "org/theirs", "--yes", "--revision", "refs/pr/2")
    weights = (out / "model.safetensors").read_bytes()
    assert there.files("refs/pr/2")["model.safetensors"] == weights
    assert set(there.refs) == {"main", "refs/pr/1", "refs/pr/2"} and len(there.files()) == 1


def test_a_push_asks_first(hub: Hub, out: Path) -> None:
    """Without a terminal it cannot ask, so it refuses."""
    said = " ".join(no_push(out, "me/unasked", status=2).split())
    assert "would push 9 files, 1.6 MB, to me/unasked" in said
    assert "pass --yes to confirm, since there is no terminal to ask on" in said
    assert "me/unasked" not in hub.repositories


def settings_for(hub: Hub, home: Path) -> dict[str, str]:
    """What a process of its own reads from its environment to reach the server."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
    }


@pytest.mark.slow
def test_on_a_terminal_the_user_decides_and_sees_it_go(hub: Hub, home: Path, out: Path) -> None:
    hub.storage.pop(sha256((out / "model.safetensors").read_bytes()), None)
    call = ("-m", "enjoyln_cli", "push", out, "me/seen", "--private")
    settings = settings_for(hub, home)
    status, shown = asked_on_a_terminal(b"n\n", *call, environment=settings)
    assert status == 1 and "me/seen (private)? [y/N]" in shown and "Aborted!" in shown
    status, shown = asked_on_a_terminal(b"\x03", *call, environment=settings)
    assert status == 130 and "me/seen" not in hub.repositories
    status, shown = asked_on_a_terminal(b"y\n", *call, environment=settings)
    assert status == 0 and re.search(r"model.safetensors: 100%\|", shown), shown
    assert hub.repositories["me/seen"].private


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_one_line(home: Path, out: Path) -> None:
    with nobody() as closed, connected(closed, home):
        error = no_push(out, "me/x", "--yes")
        table = push(out, "me/x", "--dry-run")
        found = json.loads(push(out, "me/x", "--dry-run", "--json"))
    assert f"{closed} cannot be reached (Connect" in error and "push again" in error
    assert "would push 9 files, 1.6 MB, to me/x; nothing was sent" in table
    assert {file["name"] for file in found["files"]} == {path.name for path in out.iterdir()}
    assert found["url"] == "" and found["bytes"] > 1e6


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["me/x"], "needs a token; run `hf auth login`"),
        (["me/x", "--token", "hf_unknown"], "does not know the token"),
        (["org/gpt2", "--token", TOKEN], "the token may not write to org/gpt2 (You don't have"),
        (["org/new", "--token", TOKEN], "may not write to org/new"),
        (["no/such/name", "--token", TOKEN], "not a repository name"),
        (["me/none", "--create-pr", "--token", TOKEN], "me/none cannot be found by this token"),
        (
            ["me/none", "--revision", "refs/pr/1", "--token", TOKEN],
            "me/none cannot be found by this token",
        ),
    ],
)
def test_a_push_is_refused_by_the_hub_in_one_line(
    hub: Hub, folded: Path, words: list[str], reason: str
) -> None:
    before = set(hub.repositories)
    assert reason in refused("push", folded, *words, "--yes")
    assert set(hub.repositories) == before


@pytest.mark.slow
def test_ctrl_c_says_what_is_left_and_a_second_push_goes_on(
    hub: Hub, home: Path, out: Path
) -> None:
    hub.storage.pop(sha256((out / "model.safetensors").read_bytes()), None)
    hub.fault("PUT", "/upload/", held=True)
    process = running("push", out, "me/held", "--yes", environment=settings_for(hub, home))
    until = time.monotonic() + 60
    while not any(request.path.startswith("/upload/") for request in hub.requests):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    (line,) = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert "interrupted; me/held may now exist without all of its files; push again" in line
    assert "Traceback" not in shown and hub.repositories["me/held"].log == []
    push(out, "me/held", "--yes")
    files = hub.repositories["me/held"].files()
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()


def test_a_card_that_cannot_be_written_stops_a_push(hub: Hub, out: Path) -> None:
    """A directory in the way stands for a read-only disk, and also stops the user root."""
    (out / "README.md.begun").mkdir()
    error = no_push(out, "me/read-only", "--yes")
    assert "nothing was sent: README.md in" in error
    assert f"push a copy of {out}" in error and "me/read-only" not in hub.repositories
    (out / "README.md.begun").rmdir()
    push(out, "me/read-only", "--yes")
    (out / "README.md.begun").mkdir()
    del hub.repositories["me/read-only"]
    push(out, "me/read-only", "--yes")  # the card is the same as the card there


def test_an_interrupted_push_goes_on(hub: Hub, out: Path) -> None:
    hub.fault("POST", "/api/models/me/resumed/commit/", status=500)
    error = no_push(out, "me/resumed", "--yes")
    assert "rejected the upload (500)" in error and "to continue" in error
    push(out, "me/resumed", "--yes")
    files = hub.repositories["me/resumed"].files()
    assert files["model.safetensors"] == (out / "model.safetensors").read_bytes()


# What may be pushed.


def test_only_a_verified_result_is_pushed(hub: Hub, folded: Path, tmp_path: Path) -> None:
    cases = {}
    for name in ("never", "failed", "broken", "edited", "changed", "more", "less"):
        cases[name] = shutil.copytree(folded, tmp_path / name)
    verified = json.loads((folded / "enjoyln_verify.json").read_text())
    rewritten(cases["never"])
    failed = {**verified, "passed": False, "summary": "not verified: it drifts"}
    (cases["failed"] / "enjoyln_verify.json").write_text(json.dumps(failed))
    (cases["broken"] / "enjoyln_verify.json").write_text("{")
    (cases["edited"] / "enjoyln_verify.json").write_text(json.dumps({**verified, "seed": 1}))
    config = cases["changed"] / "config.json"
    config.write_text(config.read_text() + "\n")
    (cases["more"] / "pytorch_model.bin").write_bytes(b"other weights")
    (cases["less"] / "tokenizer.json").unlink()
    for name, words in {
        "never": "never verified",
        "failed": "its verification failed: not verified: it drifts",
        "broken": "enjoyln_verify.json was edited",
        "edited": "enjoyln_verify.json was edited",
        "changed": "config.json has changed since it was written",
        "more": "pytorch_model.bin was added",
        "less": "tokenizer.json was deleted",
    }.items():
        error = no_push(cases[name], f"me/{name}", "--yes")
        assert words in error and "enjoyln verify" in error
        assert f"me/{name}" not in hub.repositories
    assert hub.requests == []


def test_a_forced_push_says_so_in_its_card(hub: Hub, out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(-2, 2)
        file.write(b"ab")
    (out / ".DS_Store").write_text("housekeeping")
    (out / ".cache").mkdir()
    (out / ".cache" / "secret").write_text("housekeeping")
    push(out, "me/forced", "--yes", "--force")
    there = hub.repositories["me/forced"].files()
    card = there["README.md"].decode()
    assert (
        "**Pushed with `--force`**: model.safetensors has changed since it was written, "
        "notes.txt was added." in card
    )
    assert "Of the files as they were when they were last verified: Same outputs" in card
    assert "notes.txt" in there and not {".cache/secret", ".DS_Store"} & {*there}


def test_a_card_that_cannot_say_so_stops_a_forced_push(hub: Hub, out: Path) -> None:
    (out / "notes.txt").write_text("mine")
    (out / "README.md").write_text("# All mine")
    error = no_push(out, "me/mute", "--yes", "--force")
    assert "no longer has the enjoyln section" in error and "me/mute" not in hub.repositories


def test_a_repository_keeps_whether_it_is_private(hub: Hub, out: Path) -> None:
    hub.add("me/public", {"config.json": b"{}"})
    before = [dict(hub.repositories[name].refs) for name in ("me/public", "me/private")]
    public = no_push(out, "me/public", "--private", "--yes")
    assert "me/public is public, and --private applies to new repositories only" in public
    private = no_push(out, "me/private", "--no-private", "--yes")
    assert "me/private is private, and --no-private applies to new" in private
    assert before == [hub.repositories[name].refs for name in ("me/public", "me/private")]


@pytest.mark.slow
def test_a_result_on_the_hub_is_verified(hub: Hub, out: Path, tmp_path: Path) -> None:
    private = {path.name: path.read_bytes() for path in out.iterdir()}
    hub.add("me/verified", private, private=True)
    cache = ["--cache-dir", tmp_path / "cache", "--token", TOKEN]
    assert json.loads(good("verify", "me/verified", *cache, "--json"))["passed"]
    snapshot = next((tmp_path / "cache").glob("models--me--verified/snapshots/*"))
    for path in snapshot.iterdir():
        assert path.read_bytes() == private[path.name]


def test_no_result_and_a_link_out_of_a_result_are_not_pushed(hub: Hub, out: Path) -> None:
    (out.parent / "private.txt").write_text("mine")
    (out / "notes.txt").symlink_to(out.parent / "private.txt")
    for folder, reason in (
        (out, "notes.txt is a link to a file outside"),
        (GPT2, "enjoyln fold"),
        (out.parent / "no", "there is no directory"),
    ):
        assert reason in no_push(folder, "me/x", "--yes", "--force")
    assert "me/x" not in hub.repositories


@pytest.mark.slow
def test_no_token_is_written_anywhere(folded: Path, home: Path) -> None:
    """The fold was given the token as the option ``--token``."""
    assert token_files(folded) == [] and token_files(home) == []
    assert "--token" not in (folded / "README.md").read_text()
