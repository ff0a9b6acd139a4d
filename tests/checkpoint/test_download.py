"""``fold --stream``: weight files are downloaded one by one, for disks without room for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import enjoyln, good, refused
from hub_server import TOKEN, Hub, connected, sha256
from huggingface_hub import hf_hub_download
from live_models import CHECKPOINTS
from safetensors.torch import load_file, save
from transformers import GPT2Config, GPT2LMHeadModel

from enjoyln_cli.checkpoint.access import HubAccess
from enjoyln_cli.checkpoint.reader import open_checkpoint
from enjoyln_cli.checkpoint.source import open_source
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
    hub_server.add("org/sharded", sharded("gpt2"))
    hub_server.add("org/phi", sharded("phi"))
    hub_server.add("org/large", large())
    single = {path.name: path.read_bytes() for path in GPT2.iterdir()}
    hub_server.add("me/single", single, private=True)
    del single["model.safetensors"]
    hub_server.add("org/pickle", {**single, "pytorch_model.bin": b"a pickle"})
    return hub_server


@pytest.fixture(scope="module")
def plain(hub: Hub, home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2, folded after a complete download."""
    out = tmp_path_factory.mktemp("plain") / "out"
    good("fold", "org/sharded", "-o", out, "--no-verify", "--cache-dir", out.parent / "cache")
    return out


def stream(model: str, out: Path, *options: object) -> list[object]:
    """The words for ``fold --stream`` with the cache ``cache`` beside ``out``."""
    cache = out.parent / "cache"
    return ["fold", model, "-o", out, "--stream", "--cache-dir", cache, *options]


def weights(folder: Path) -> dict[str, str]:
    """Digests of those files of a result that do not depend on how it was downloaded."""
    names = [*folder.glob("model*"), folder / "config.json", *folder.glob("enjoyln_[pr]*")]
    return {path.name: sha256(path.read_bytes()) for path in names}


def cached_weights(folder: Path) -> list[str]:
    """Names of weight files in the cache beside an output, incomplete downloads included."""
    blobs = [path for path in (folder.parent / "cache").rglob("blobs/*") if path.is_file()]
    large = [path for path in blobs if path.stat().st_size > 50_000]
    links = [path.name for path in (folder.parent / "cache").rglob("snapshots/*/model-*.safet*")]
    return sorted([*(path.name for path in large), *links])


def test_the_result_is_the_same_and_the_cache_is_empty(plain: Path, tmp_path: Path) -> None:
    printed = good(*stream("org/sharded", tmp_path / "out"))
    assert weights(tmp_path / "out") == weights(plain)
    assert len(weights(plain)) == SHARDS + 4
    assert cached_weights(tmp_path / "out") == []
    assert cached_weights(plain) != []
    text = " ".join(printed.split())
    assert "not verified (--stream)" in text and "enjoyln verify" in text
    card = (tmp_path / "out" / "README.md").read_text()
    assert "--stream" in card


def test_a_single_file_of_a_private_repository(hub: Hub, tmp_path: Path) -> None:
    found = json.loads(good(*stream("me/single", tmp_path / "out", "--token", TOKEN, "--json")))
    assert found["streamed"] is True and found["verification"] is None
    assert found["become_rmsnorm"] == 7
    of_storage = [request for request in hub.requests if request.path.startswith("/storage/")]
    assert len(of_storage) >= 2
    assert not any("authorization" in request.headers for request in of_storage)


def test_one_file_at_a_time(tmp_path: Path) -> None:
    access = HubAccess(token=TOKEN, cache_dir=str(tmp_path))
    source = open_source("org/sharded", access=access, weights=True, stream=True)
    assert TOKEN not in repr(source)
    assert len(open_checkpoint(source).tensors) > 20
    blobs = source.path.parent.parent / "blobs"

    def large() -> int:
        return sum(path.stat().st_size > 50_000 for path in blobs.iterdir())

    assert source.remote and large() == 0
    for file in source.remote.files:
        with source.remote.at_hand(file):
            assert large() == 1 and (source.path / file).is_file()
        assert large() == 0


def test_what_was_in_the_cache_stays_there(hub: Hub, plain: Path, tmp_path: Path) -> None:
    file = "model-00002-of-00003.safetensors"
    hf_hub_download("org/sharded", file, cache_dir=tmp_path / "cache")
    before = cached_weights(tmp_path / "out")
    hub.requests.clear()
    good(*stream("org/sharded", tmp_path / "out"))
    assert cached_weights(tmp_path / "out") == before and file in before
    data = hub.repositories["org/sharded"].files()[file]
    assert not any(request.path.endswith(sha256(data)) for request in hub.requests)
    assert weights(tmp_path / "out") == weights(plain)


def test_offline_what_is_in_the_cache_is_enough(
    hub: Hub, home: Path, plain: Path, tmp_path: Path
) -> None:
    with connected(hub.url, home, offline=True):
        words = ("fold", "org/sharded", "--cache-dir", plain.parent / "cache", "--stream")
        good(*words, "-o", tmp_path / "out")
        assert "not in the cache" in refused(*stream("org/sharded", tmp_path / "other"))
    assert weights(tmp_path / "out") == weights(plain)


def asked(hub: Hub, oid: str) -> list[str]:
    """The byte ranges that were requested of a file, without those of its header."""
    ranges = [r.headers.get("range", "") for r in hub.requests if r.path == f"/storage/{oid}"]
    return [text for text in ranges if text != "bytes=0-131071"]


@pytest.mark.slow
def test_a_download_that_is_cut_goes_on(hub: Hub, tmp_path: Path) -> None:
    """A broken download resumes within a run. If the run fails, the partial file is deleted."""
    files = hub.repositories["org/large"].files()
    oid = sha256(files["model-00001-of-00003.safetensors"])
    whole = ("fold", "org/large", "--no-verify", "--cache-dir", tmp_path / "all")
    good(*whole, "-o", tmp_path / "plain")

    def cut(*later: int) -> None:
        hub.requests.clear()
        hub.faults.clear()
        hub.fault("GET", oid)  # the header, as it is
        hub.fault("GET", oid, cut=True)
        for status in later:
            hub.fault("GET", oid, status=status)

    cut()
    good(*stream("org/large", tmp_path / "out"))
    assert asked(hub, oid) == ["", f"bytes={10 << 20}-"]
    assert weights(tmp_path / "out") == weights(tmp_path / "plain")

    cut(404)
    again = stream("org/large", tmp_path / "again")
    assert "org/large" in refused(*again) and not (tmp_path / "again").exists()
    assert cached_weights(tmp_path / "again") == []
    good(*again)
    assert weights(tmp_path / "again") == weights(tmp_path / "plain")
    assert cached_weights(tmp_path / "again") == []


def test_a_run_that_failed_goes_on_with_the_files_that_are_missing(
    hub: Hub, plain: Path, tmp_path: Path
) -> None:
    files = hub.repositories["org/sharded"].files()
    first, *_, last = (sha256(files[name]) for name in sorted(files) if "-of-00003" in name)
    hub.fault("GET", last)  # the header, as it is
    hub.fault("GET", last, status=404)
    words = stream("org/sharded", tmp_path / "out")
    assert "org/sharded" in refused(*words) and not (tmp_path / "out").exists()
    hub.requests.clear()
    good(*words, "--resume")
    assert asked(hub, first) == [] and asked(hub, last) == [""]
    assert weights(tmp_path / "out") == weights(plain)
    assert cached_weights(tmp_path / "out") == []


def test_a_hub_that_serves_whole_files_only(hub: Hub, tmp_path: Path) -> None:
    hub.fault("GET", "storage/", status=200)
    assert "leave --stream out" in refused(*stream("org/sharded", tmp_path / "out"))


def test_vectors_from_other_files(tmp_path: Path) -> None:
    """The weight and bias of a norm are merged into linear layers that lie in another file."""
    merge = ("--merge", "affine")
    good(*stream("org/phi", tmp_path / "out", *merge))
    good("fold", CHECKPOINTS / "phi", "-o", tmp_path / "plain", "--no-verify", *merge)
    found: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(path)
    expected = load_file(tmp_path / "plain" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_head_that_is_stored_and_differs_is_not_tied(hub: Hub, tmp_path: Path) -> None:
    """Whether two tensors are equal, and so tied, is decided by their values on the Hub."""
    tensors = load_file(GPT2 / "model.safetensors")
    head = tensors["transformer.wte.weight"].clone()
    folded = {}
    for name, more in (("same", 0.0), ("other", 0.5)):
        config = json.loads((GPT2 / "config.json").read_text())
        stored = dealt({**tensors, "lm_head.weight": head + more})
        hub.add(f"org/{name}", {"config.json": json.dumps(config).encode(), **stored})
        options = ["--stream", "--dry-run", "--json", "--cache-dir", tmp_path / "cache"]
        done = enjoyln("fold", f"org/{name}", *options)
        folded[name] = json.loads(done.stdout) if done.exit_code == 0 else done.stderr
    assert folded["same"]["added_subtractions"] == 1
    assert folded["other"] != folded["same"]


@pytest.mark.parametrize(
    ("model", "options", "status", "reason"),
    [
        (str(GPT2), [], 1, "is a directory"),
        ("org/pickle", [], 1, "a pickle"),
        ("org/sharded", ["--max-shard-size", "1MB"], 2, "--max-shard-size"),
    ],
)
def test_refusals(model: str, options: list[str], status: int, reason: str, tmp_path: Path) -> None:
    assert reason in refused(*stream(model, tmp_path / "out", *options), status=status)
    assert not (tmp_path / "out").exists()


def test_a_message_names_no_password() -> None:
    error = EnjoyLNError("http://me:secret@hub.example:80/x and https://token@y cannot be reached")
    assert str(error) == "http://hub.example:80/x and https://y cannot be reached"
    assert str(EnjoyLNError("me@mail.example, then a/b@main")) == "me@mail.example, then a/b@main"
