"""Opening a model: a directory, or a Hub id that a small local server answers."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hub_repositories import Hub
from hub_server import connected, nobody, serving

from enjoyln_cli.checkpoint.open_options import OpenOptions
from enjoyln_cli.checkpoint.source import Source, open_source
from enjoyln_cli.errors import EnjoyLNError, ModelNotFound, UnsupportedModel

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = json.dumps({"model_type": "gpt2", "n_layer": 1}).encode()
HEADER = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
TENSORS = struct.pack("<Q", len(HEADER)) + HEADER + struct.pack("<2f", 1.5, -3.0)
CODE = {"AutoConfig": "configuration_own.OwnConfig"}

REPOSITORIES: dict[str, dict[str, bytes]] = {
    "good/model": {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "model.safetensors": TENSORS,
        "pytorch_model.bin": b"the same in another form",
        "tf_model.h5": b"and another",
        "onnx/model.onnx": b"and another",
        "1_Pooling/config.json": b"{}",
    },
    "sharded/model": {
        "config.json": CONFIG,
        "model.safetensors.index.json": json.dumps(
            {"metadata": {}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
        ).encode(),
        "model-00001-of-00001.safetensors": TENSORS,
        "model.fp16.safetensors": TENSORS,
    },
    "own/code": {
        "config.json": json.dumps({"model_type": "own", "auto_map": CODE}).encode(),
        "configuration_own.py": b"raise SystemExit('never run')\n",
        "model.safetensors": TENSORS,
    },
    "flax/only": {"config.json": CONFIG, "flax_model.msgpack": b"?"},
}
REFUSALS = {
    "gated/model": (401, {"X-Error-Code": "GatedRepo"}),
    "missing/model": (404, {"X-Error-Code": "RepoNotFound"}),
    "private/model": (401, {}),
    "wrong/token": (401, {"X-Error-Message": "Invalid credentials in Authorization header"}),
    "forbidden/model": (403, {"X-Error-Message": "not yours"}),
    "disabled/model": (403, {"X-Error-Message": "Access to this resource is disabled."}),
    "stumbling/model": (520, {}),
    "empty/model": (404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}),
    "old/model": (404, {"X-Error-Code": "RevisionNotFound"}),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with serving() as found:
        for name, files in REPOSITORIES.items():
            found.add(name, files)
        for name, (status, headers) in REFUSALS.items():
            for method in ("HEAD", "GET"):
                found.fault(method, f"{name}/", status=status, headers=headers, times=1000)
        yield found


@pytest.fixture(scope="module")
def commit(server: Hub) -> str:
    return server.repositories["good/model"].refs["main"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the module's downloads lie; tests without a connection find the files of ``online``."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def online(server: Hub, cache: Path) -> Iterator[OpenOptions]:
    with connected(server.url, cache):
        yield OpenOptions(cache_dir=str(cache))


def files(source: Source) -> list[str]:
    found = (path for path in source.path.rglob("*.*") if path.is_file())
    return sorted(path.relative_to(source.path).as_posix() for path in found)


def refusal(kind: type[EnjoyLNError], name: str, opening: OpenOptions, **options: Any) -> str:
    """The message with which a model is not opened."""
    opening = replace(opening, revision=options.pop("revision", None))
    with pytest.raises(EnjoyLNError) as refused:
        open_source(name, opening, **options)
    assert type(refused.value) is kind
    return str(refused.value)


def test_weights_come_once_and_with_the_other_files(online: OpenOptions, commit: str) -> None:
    source = open_source("good/model", online, weights=True)
    assert source.revision == commit
    expected = ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]
    assert files(source) == expected
    assert (source.path / "model.safetensors").read_bytes() == TENSORS


def test_the_shards_of_the_index_are_fetched_and_no_variant(online: OpenOptions) -> None:
    names = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert files(open_source("sharded/model", online, weights=True)) == names


def test_code_that_the_config_names_is_fetched_with_it(online: OpenOptions) -> None:
    assert files(open_source("own/code", online)) == ["config.json", "configuration_own.py"]


@pytest.mark.parametrize(
    ("model", "options", "kind", "words"),
    [
        ("gated/model", {}, ModelNotFound, ["is gated", "/gated/model", "--token"]),
        ("missing/model", {}, ModelNotFound, ["no such model", "private", "--token"]),
        ("private/model", {}, ModelNotFound, ["refuses access", "401", "--token"]),
        ("wrong/token", {}, ModelNotFound, ["refuses access", "--token"]),
        ("forbidden/model", {}, ModelNotFound, ["refuses access", "403"]),
        ("disabled/model", {}, ModelNotFound, ["access to disabled/model is disabled"]),
        ("stumbling/model", {}, ModelNotFound, ["cannot serve", "(520); try again later"]),
        ("empty/model", {}, UnsupportedModel, ["empty/model has no config.json"]),
        ("old/model", {"revision": "v9"}, ModelNotFound, ["old/model has no revision 'v9'"]),
        (
            "flax/only",
            {"weights": True},
            UnsupportedModel,
            ["holds a Flax model (flax_model.msgpack)"],
        ),
    ],
)
def test_refusals_of_the_hub(
    online: OpenOptions,
    model: str,
    options: dict[str, Any],
    kind: type[EnjoyLNError],
    words: list[str],
) -> None:
    message = refusal(kind, model, online, **options)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_offline(server: Hub, online: OpenOptions, cache: Path) -> None:
    fetched = open_source("good/model", online, weights=True)
    open_source("flax/only", online)
    with connected(server.url, cache, offline=True):
        cached = open_source("good/model", online, weights=True)
        no_weights = refusal(ModelNotFound, "flax/only", online, weights=True)
        unknown = refusal(ModelNotFound, "other/model", online)
    assert (cached.path, cached.revision) == (fetched.path, fetched.revision)
    assert "without its weights" in no_weights
    assert "other/model is not in the cache, and HF_HUB_OFFLINE is set" in unknown


def test_nobody_answers(online: OpenOptions, cache: Path, commit: str) -> None:
    open_source("good/model", online)
    with nobody() as closed, connected(closed, cache):
        assert open_source("good/model", online).revision == commit
        unknown = refusal(ModelNotFound, "other/model", online)
    assert f"not in the cache, and {closed} cannot be reached" in unknown


def test_what_is_there_is_suggested_for_a_wrong_name(
    online: OpenOptions, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Directories and models in the cache, whether the Hub answers or not."""
    for name in ("missing/models", "other/vit"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    open_source("good/model", online)
    for name, near in (("missing/model", "missing/models"), ("god/model", "good/model")):
        message = refusal(ModelNotFound, name, online)
        assert "no such model" in message and f"; did you mean {near}" in message
    message = refusal(ModelNotFound, "other/bit", online)
    assert "no such model" in message and "did you mean" not in message
    with nobody() as closed, connected(closed, cache):
        message = refusal(ModelNotFound, "god/model", online)
        unlike = refusal(ModelNotFound, "other/bit", online)
    assert "cannot be reached" in message and message.endswith("; did you mean good/model?")
    assert "did you mean" not in unlike and "go online" in unlike


def test_a_directory_comes_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert open_source("gpt2").path.resolve() == tmp_path / "gpt2"
    assert open_source("gpt2").revision is None
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_source("~/gpt2").path == tmp_path / "gpt2"


def test_wrong_paths_are_refused_with_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelNotFound, match=f"did you mean {tmp_path}/my-model"):
        open_source(str(tmp_path / "my_model"))
    with pytest.raises(ModelNotFound, match="is a file; pass the directory"):
        open_source(str(tmp_path / "file"))
    with pytest.raises(ModelNotFound, match="has no revision 'main'"):
        open_source(str(tmp_path / "my-model"), OpenOptions(revision="main"))
    for name in ("", "a/b/c", "x\0y", "/" + "long" * 2000):
        with pytest.raises(ModelNotFound, match="there is no directory"):
            open_source(name)
