"""Opening a checkpoint: its tensors are found, and inconsistent files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stored_files import opened, refused, tensors

from enjoyln_cli.checkpoint.reader import other_files, read_tensor, same_values
from enjoyln_cli.errors import BadCheckpoint, UnsupportedModel

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def write_index(folder: Path, weight_map: Any, name: str = "model.safetensors") -> None:
    (folder / f"{name}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )


def test_shards_in_order(folder: Path) -> None:
    save_file(tensors("b", "c"), folder / TWO)
    save_file(tensors("a"), folder / ONE)
    write_index(folder, {"c": TWO, "a": ONE})
    found = opened(folder)
    assert (found.shards, found.index) == ((ONE, TWO), "model.safetensors.index.json")
    assert {name: stored.file for name, stored in found.tensors.items()} == {
        "a": ONE,
        "b": TWO,  # the index does not name it, the file has it
        "c": TWO,
    }
    for file in (ONE, TWO):
        for name, tensor in load_file(folder / file).items():
            assert torch.equal(read_tensor(found, name), tensor)


def test_one_file_before_shards_before_pickles(folder: Path) -> None:
    torch.save(tensors("pickled"), folder / "pytorch_model.bin")
    assert opened(folder).format == "bin"
    save_file(tensors("sharded"), folder / ONE)
    write_index(folder, {"sharded": ONE})
    assert opened(folder).shards == (ONE,)
    save_file(tensors("single"), folder / "model.safetensors")
    assert opened(folder).shards == ("model.safetensors",)


def test_a_tensor_that_is_not_stored(folder: Path) -> None:
    save_file(tensors("a"), folder / "model.safetensors")
    with pytest.raises(BadCheckpoint, match="stores no tensor b"):
        read_tensor(opened(folder), "b")


def test_a_file_that_shrinks_after_it_was_opened(folder: Path) -> None:
    save_file(tensors("a"), folder / "model.safetensors")
    found = opened(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadCheckpoint, match="model.safetensors ends inside a"):
        read_tensor(found, "a")


def values() -> dict[str, torch.Tensor]:
    long = torch.randn(100_003, generator=torch.Generator().manual_seed(5))
    other = long.clone()
    other[-1] += 1
    return {
        "long": long,
        "same": long.clone(),
        "other": other,
        "narrow": long.bfloat16(),
        "yes": torch.tensor(True),
        "no": torch.tensor(False),
        "empty": torch.zeros(0, 3),
        "row": torch.tensor([[0.0, torch.nan]]),
        "row_again": torch.tensor([[0.0, torch.nan]]),
        "negative_zero": torch.tensor([[-0.0, torch.nan]]),
        "column": torch.tensor([[0.0], [torch.nan]]),
    }


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_same_values_means_every_bit(folder: Path, kind: str) -> None:
    if kind == "bin":
        torch.save(values(), folder / "pytorch_model.bin")
    else:
        save_file(values(), folder / "model.safetensors")
    found = opened(folder)
    assert found.format == kind
    for one, two in (
        ("long", "same"),
        ("long", "long"),
        ("row", "row_again"),
        ("yes", "yes"),
        ("empty", "empty"),
    ):
        assert same_values(found, one, two)
    for one, two in (
        ("long", "other"),
        ("long", "narrow"),
        ("row", "negative_zero"),
        ("row", "column"),
        ("yes", "no"),
    ):
        assert not same_values(found, one, two)


def test_sharded_pickles(folder: Path) -> None:
    torch.save(tensors("a"), folder / "pytorch_model-00001-of-00002.bin")
    torch.save(tensors("b"), folder / "pytorch_model-00002-of-00002.bin")
    names = {"a": "pytorch_model-00001-of-00002.bin", "b": "pytorch_model-00002-of-00002.bin"}
    write_index(folder, names, "pytorch_model.bin")
    found = opened(folder)
    assert (found.format, found.index) == ("bin", "pytorch_model.bin.index.json")
    assert {name: stored.file for name, stored in found.tensors.items()} == names
    assert torch.equal(read_tensor(found, "b"), tensors("b")["b"])


@pytest.mark.parametrize(
    ("weight_map", "words"),
    [
        ({"a": "../other/model.safetensors"}, "is no .safetensors file of its own directory"),
        ({"a": "/etc/secret.safetensors"}, "is no .safetensors file of its own directory"),
        ({"a": "inner/x.safetensors"}, "is no .safetensors file of its own directory"),
        ({"a": "..\\x.safetensors"}, "is no .safetensors file of its own directory"),
        ({"a": "x\0.safetensors"}, "is no .safetensors file of its own directory"),
        ({"a": "pytorch_model.bin"}, "is no .safetensors file of its own directory"),
        ({"a": ".."}, "is no .safetensors file of its own directory"),
        ({"a": ""}, "is no .safetensors file of its own directory"),
        ({"a": 7}, "is no .safetensors file of its own directory"),
        ({"a": "\ud800.safetensors"}, "is no .safetensors file of its own directory"),
        ({"a": "a" * 5000 + ".safetensors"}, "is no .safetensors file of its own directory"),
        ({"a\nb": ONE}, r"names a tensor 'a\\nb'"),
        ({}, "has no weight_map"),
        (["a"], "has no weight_map"),
        ({"a": ONE, "b": TWO}, f"{TWO} is missing"),
        ({"a": ONE, "b": ONE}, f"{ONE} lacks b, which model.safetensors.index.json lists"),
    ],
)
def test_wrong_indices(folder: Path, weight_map: Any, words: str) -> None:
    save_file(tensors("a"), folder / ONE)
    torch.save(tensors("a"), folder / "pytorch_model.bin")
    write_index(folder, weight_map)
    refused(folder, words)


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", "{}", '{"weight_map": null}'])
def test_malformed_indices(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    refused(folder, "index.json (is not valid JSON|has no weight_map)")


@pytest.mark.parametrize("metadata", [{}, {"total_size": 48, "of": "somebody"}])
def test_metadata_of_an_index_may_be_anything_by_name(folder: Path, metadata: Any) -> None:
    save_file(tensors("a"), folder / ONE)
    index = {"metadata": metadata, "weight_map": {"a": ONE}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(opened(folder).tensors) == ["a"]


@pytest.mark.parametrize("metadata", [[1, 2], [], "x", 5, 0, False])
def test_metadata_of_an_index_without_names(folder: Path, metadata: Any) -> None:
    """It is refused at once, since writing the index would fail after all other work."""
    save_file(tensors("a"), folder / ONE)
    index = {"metadata": metadata, "weight_map": {"a": ONE}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "metadata in .*index.json is .*, not a JSON object; fetch it again")


@pytest.mark.parametrize("index", [{}, {"metadata": None}], ids=["none", "null"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_an_index_without_metadata(folder: Path, index: dict[str, Any], name: str) -> None:
    """transformers cannot load it (``KeyError`` or ``TypeError``), original and result alike."""
    shard = name.replace(".", "-00001-of-00001.")
    if name == "model.safetensors":
        save_file(tensors("a"), folder / shard)
    else:
        torch.save(tensors("a"), folder / shard)
    text = json.dumps({**index, "weight_map": {"a": shard}})
    (folder / f"{name}.index.json").write_text(text)
    refused(folder, 'index.json has no metadata, .*; add "metadata": {} to it')


def test_an_index_that_mixes_up_its_shards(folder: Path) -> None:
    save_file(tensors("a"), folder / ONE)
    save_file(tensors("b"), folder / TWO)
    write_index(folder, {"a": TWO, "b": ONE})
    refused(folder, f"{TWO} lacks a")
    save_file(tensors("a", "b"), folder / TWO)
    write_index(folder, {"a": ONE, "b": TWO})
    refused(folder, f"a is both in {ONE} and {TWO}")


def test_links_stay_in_the_directory_or_the_hub_cache(tmp_path: Path) -> None:
    def linked(repository: str, target: str) -> Path:
        snapshot = tmp_path / repository / "snapshots" / "0123"
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text('{"model_type": "gpt2"}')
        (snapshot / "model.safetensors").symlink_to(target)
        return snapshot

    cached = linked("models--one", "../../blobs/aa")
    (tmp_path / "models--one" / "blobs").mkdir()
    save_file(tensors("a"), tmp_path / "models--one" / "blobs" / "aa")
    assert list(opened(cached).tensors) == ["a"]
    (tmp_path / "alias").symlink_to(cached)
    assert list(opened(tmp_path / "alias").tensors) == ["a"]
    inside = linked("inside", "weights")
    save_file(tensors("b"), inside / "weights")
    assert list(opened(inside).tensors) == ["b"]
    other = linked("models--two", "../../../models--one/blobs/aa")
    refused(other, "model.safetensors is a link to")
    refused(linked("absolute", str(tmp_path / "models--one/blobs/aa")), "is a link to")
    refused(linked("broken", "nothing"), "model.safetensors is missing")
    refused(linked("loop", "model.safetensors"), "model.safetensors is (a broken link|missing)")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([], "has no weights: neither model.safetensors nor pytorch_model.bin"),
        (["tf_model.h5"], r"a TensorFlow model \(tf_model.h5\)"),
        (["model.ckpt.index"], r"a TensorFlow model \(model.ckpt.index\)"),
        (["flax_model.msgpack"], r"a Flax model \(flax_model.msgpack\)"),
        (["rust_model.ot"], "a rust-bert model"),
        (["model-q4.gguf"], "a GGUF model"),
        (["model.fp16.safetensors"], r"has no weights.*\(but model.fp16.safetensors\)"),
    ],
)
def test_no_weights(folder: Path, files: list[str], words: str) -> None:
    for name in files:
        (folder / name).write_text("")
    refused(folder, words, UnsupportedModel)


def test_quantised_or_unusual_configs_are_refused(folder: Path) -> None:
    save_file(tensors("a"), folder / "model.safetensors")
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    refused(folder, r"is quantised \(gptq\)", UnsupportedModel)
    (folder / "config.json").write_text('{"transformers_weights": "x.safetensors"}')
    refused(folder, "names its own weight file", UnsupportedModel)


COMING = [
    "0_Inner/model.safetensors",
    "1_Pooling/config.json",
    "README.md",
    "config.json",
    "generation_config.json",
    "modeling_own.py",
    "spiece.model",
    "tokenizer.json",
    "training_args.bin",
    "voices/one.pt",
]
STAYING = [
    ".cache/huggingface/x",
    ".git/config",
    ".gitattributes",
    "Thumbs.db",
    "voices/.DS_Store",
    "__pycache__/modeling_own.cpython-311.pyc",
    "checkpoint-500/config.json",
    "flax_model.msgpack",
    "model-00001-of-00002.safetensors",
    "model.fp16.safetensors",
    "model.safetensors",
    "model.safetensors.index.json",
    "onnx/config.json",
    "onnx/model.onnx",
    "optimizer.pt",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "tf_model.h5",
]


def test_other_files(folder: Path) -> None:
    for name in COMING + STAYING:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    save_file(tensors("a"), folder / "model.safetensors")
    assert list(other_files(opened(folder))) == [n for n in COMING if n != "config.json"]


def test_other_files_must_not_be_links_out_of_the_directory(folder: Path, tmp_path: Path) -> None:
    save_file(tensors("a"), folder / "model.safetensors")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("k")
    found = opened(folder)
    for target in (tmp_path / "secret" / "key", tmp_path / "secret", tmp_path / "nothing"):
        (folder / "tokenizer.json").symlink_to(target)
        with pytest.raises(BadCheckpoint, match="tokenizer.json is a link to"):
            other_files(found)
        (folder / "tokenizer.json").unlink()
    assert other_files(found) == ()
