"""Downloads of sharded and of private checkpoints, and what their messages do not name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import good, refused
from hub_repositories import TOKEN, Hub, sha256
from hub_server import connected
from live_models import CHECKPOINTS
from safetensors.torch import load_file, save
from transformers import GPT2Config, GPT2LMHeadModel

from enjoyln_cli.errors import EnjoyLNError

pytestmark = pytest.mark.usefixtures("quiet_hub")

GPT2 = CHECKPOINTS / "gpt2"
SHARDS = 3


def sharded(name: str) -> dict[str, bytes]:
    """The files of a trained checkpoint, its tensors divided among three shards."""
    folder = CHECKPOINTS / name
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    del files["model.safetensors"]
    return files | dealt(load_file(folder / "model.safetensors"))


def dealt(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    places = {n: f"model-{i % SHARDS + 1:05d}-of-00003.safetensors" for i, n in enumerate(tensors)}
    found = {
        file: save({n: t for n, t in tensors.items() if places[n] == file}, {"format": "pt"})
        for file in sorted(set(places.values()))
    }
    index = {"metadata": {}, "weight_map": places}
    return {**found, "model.safetensors.index.json": json.dumps(index).encode()}


def large() -> dict[str, bytes]:
    """A GPT-2 whose first shard is downloaded in several blocks of ten megabytes."""
    config = GPT2Config(
        n_embd=64, n_layer=1, n_head=4, vocab_size=120_000, n_positions=40,
        bos_token_id=0, eos_token_id=0, architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    state = GPT2LMHeadModel(config).state_dict()
    del state["lm_head.weight"]
    text = json.dumps(config.to_dict()).encode()
    return {"config.json": text, **dealt({n: t.contiguous() for n, t in state.items()})}


@pytest.fixture(scope="module")
def hub(hub_server: Hub) -> Hub:
    hub_server.tokens[TOKEN] = "me"
    hub_server.add("org/phi", sharded("phi"))
    hub_server.add("org/large", large())
    single = {path.name: path.read_bytes() for path in GPT2.iterdir()}
    hub_server.add("me/single", single, private=True)
    return hub_server


def fold(model: str, out: Path, *options: object) -> list[object]:
    """The words that fold ``model`` with the cache ``cache`` beside ``out``."""
    return ["fold", model, "-o", out, "--no-verify", "--cache-dir", out.parent / "cache", *options]


def test_the_token_does_not_reach_the_storage(hub: Hub, tmp_path: Path) -> None:
    found = json.loads(good(*fold("me/single", tmp_path / "out", "--token", TOKEN, "--json")))
    assert found["become_rmsnorm"] == 7
    of_storage = [request for request in hub.requests if request.path.startswith("/storage/")]
    assert of_storage
    assert not any("authorization" in request.headers for request in of_storage)


def test_offline_what_is_in_the_cache_is_enough(hub: Hub, home: Path, tmp_path: Path) -> None:
    good(*fold("org/phi", tmp_path / "out"))
    with connected(hub.url, home, offline=True):
        good(*fold("org/phi", tmp_path / "again"))
        (tmp_path / "empty").mkdir()
        assert "not in the cache" in refused(*fold("org/phi", tmp_path / "empty" / "out"))
    names = sorted(path.name for path in (tmp_path / "out").glob("model-*"))
    assert len(names) == SHARDS
    for name in names:
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def ranges_of(hub: Hub, oid: str) -> list[str]:
    """The byte ranges that were requested of a file."""
    return [r.headers.get("range", "") for r in hub.requests if r.path == f"/storage/{oid}"]


@pytest.mark.slow
def test_a_download_that_is_cut_goes_on(hub: Hub, tmp_path: Path) -> None:
    oid = sha256(hub.repositories["org/large"].files()["model-00001-of-00003.safetensors"])
    hub.requests.clear()
    hub.fault("GET", oid, cut=True)
    good(*fold("org/large", tmp_path / "out"))
    assert ranges_of(hub, oid) == ["", f"bytes={10 << 20}-"]


def test_vectors_from_other_files(tmp_path: Path) -> None:
    """The weight and bias of a norm are fused into linear layers that lie in another file."""
    merge = ("--merge", "affine")
    good(*fold("org/phi", tmp_path / "out", *merge))
    good("fold", CHECKPOINTS / "phi", "-o", tmp_path / "plain", "--no-verify", *merge)
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_message_names_no_password() -> None:
    error = EnjoyLNError("http://me:secret@hub.example:80/x and https://token@y cannot be reached")
    assert str(error) == "http://hub.example:80/x and https://y cannot be reached"
    assert str(EnjoyLNError("me@mail.example, then a/b@main")) == "me@mail.example, then a/b@main"
