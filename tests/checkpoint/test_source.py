"""Opening a model: a directory, or a Hub id that a small local server answers."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Hub, serving
from warm_process import run

from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import ModelNotFound

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

SCRIPT = """
import json, sys
from pathlib import Path
from enjoyln_cli.checkpoint.access import HubAccess
from enjoyln_cli.checkpoint.source import open_source
from enjoyln_cli.errors import EnjoyLNError
cache = sys.argv[1]
for call in json.loads(sys.argv[2]):
    try:
        access = HubAccess(cache_dir=cache)
        found = open_source(call.pop("model"), access=access, **call)
        files = sorted(p.relative_to(found.path).as_posix() for p in found.path.rglob("*.*")
                       if p.is_file())
        print(json.dumps([str(found.path), found.revision, files]))
    except EnjoyLNError as error:
        print(json.dumps([type(error).__name__, str(error)]))
"""


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
def hub(server: Hub) -> str:
    return server.url


@pytest.fixture(scope="module")
def commit(server: Hub) -> str:
    return server.repositories["good/model"].refs["main"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def asked(
    calls: list[dict[str, Any]], cache: Path, here: Path | None = None, **environment: str
) -> list[list[Any]]:
    """What ``open_source`` returns or raises for each call, in a separate process."""
    settings = {"HF_HUB_DISABLE_XET": "1", **environment}
    words = ("-c", SCRIPT, cache, json.dumps(calls))
    status, out, err = run(*words, settings=settings, cwd=here, fresh=True)
    assert status == 0, err
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture(scope="module")
def answers(hub: str, cache: Path) -> dict[str, list[Any]]:
    calls: dict[str, dict[str, Any]] = {
        "config": {"model": "good/model"},
        "weights": {"model": "good/model", "weights": True},
        "sharded": {"model": "sharded/model", "weights": True},
        "code": {"model": "own/code"},
        "flax": {"model": "flax/only", "weights": True},
        "revision": {"model": "old/model", "revision": "v9"},
        **{model: {"model": model} for model in REFUSALS},
    }
    found = asked([dict(call) for call in calls.values()], cache, HF_ENDPOINT=hub)
    return dict(zip(calls, found, strict=True))


def test_weights_come_once_and_with_the_other_files(
    answers: dict[str, list[Any]], commit: str
) -> None:
    path, revision, files = answers["weights"]
    expected = ["1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json"]
    assert (revision, files) == (commit, expected)
    assert Path(path, "model.safetensors").read_bytes() == TENSORS


def test_the_shards_of_the_index_are_fetched_and_no_variant(answers: dict[str, list[Any]]) -> None:
    names = ["config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"]
    assert answers["sharded"][2] == names


def test_code_that_the_config_names_is_fetched_with_it(answers: dict[str, list[Any]]) -> None:
    assert answers["code"][2] == ["config.json", "configuration_own.py"]


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("gated/model", "ModelNotFound", ["is gated", "/gated/model", "--token"]),
        ("missing/model", "ModelNotFound", ["no such model", "private", "--token"]),
        ("private/model", "ModelNotFound", ["refuses access", "401", "--token"]),
        ("wrong/token", "ModelNotFound", ["refuses access", "--token"]),
        ("forbidden/model", "ModelNotFound", ["refuses access", "403"]),
        ("disabled/model", "ModelNotFound", ["access to disabled/model is disabled"]),
        ("stumbling/model", "ModelNotFound", ["cannot serve", "(520); try again later"]),
        ("empty/model", "UnsupportedModel", ["empty/model has no config.json"]),
        ("revision", "ModelNotFound", ["old/model has no revision 'v9'"]),
        ("flax", "UnsupportedModel", ["holds a Flax model (flax_model.msgpack)"]),
    ],
)
def test_refusals_of_the_hub(
    answers: dict[str, list[Any]], case: str, kind: str, words: list[str]
) -> None:
    found, message = answers[case]
    assert found == kind
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.slow
def test_offline(answers: dict[str, list[Any]], hub: str, cache: Path) -> None:
    calls = [
        {"model": "good/model", "weights": True},
        {"model": "flax/only", "weights": True},
        {"model": "other/model"},
    ]
    cached, no_weights, unknown = asked(calls, cache, HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    assert cached == answers["weights"]
    assert no_weights[0] == unknown[0] == "ModelNotFound"
    assert "without its weights" in no_weights[1]
    assert "other/model is not in the cache, and HF_HUB_OFFLINE is set" in unknown[1]


@pytest.mark.slow
def test_nobody_answers(answers: dict[str, list[Any]], cache: Path, commit: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        calls = [{"model": "good/model"}, {"model": "other/model"}]
        cached, unknown = asked(calls, cache, HF_ENDPOINT=closed)
    assert cached[1] == commit
    assert unknown[0] == "ModelNotFound"
    assert f"not in the cache, and {closed} cannot be reached" in unknown[1]


@pytest.mark.slow
def test_a_directory_is_suggested_where_the_hub_has_no_such_model(hub: str, tmp_path: Path) -> None:
    """If the Hub cannot be reached, there is no suggestion: the name may be right."""
    for name in ("missing/models", "other/vit"):
        (tmp_path / name).mkdir(parents=True)
    calls = [{"model": "missing/model"}, {"model": "missing/modles"}, {"model": "other/bit"}]
    close, too, tiny = asked(calls, tmp_path / "cache", tmp_path, HF_ENDPOINT=hub)
    for found in (close, too):
        assert "no such model" in found[1] and "; did you mean missing/models?" in found[1]
    assert "no such model" in tiny[1] and "did you mean" not in tiny[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{free.getsockname()[1]}"
        (unknown,) = asked(calls[:1], tmp_path / "cache", tmp_path, HF_ENDPOINT=closed)
    assert "cannot be reached" in unknown[1] and "did you mean" not in unknown[1]


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
        open_source(str(tmp_path / "my-model"), revision="main")
    for name in ("", "a/b/c", "x\0y", "/" + "long" * 2000):
        with pytest.raises(ModelNotFound, match="there is no directory"):
            open_source(name)
