"""Random checkpoints are complete for stock transformers, of the size asked for, and repeatable."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import make_checkpoint
import pytest
import torch
import transformers
from safetensors import safe_open


def small(model_type: str) -> transformers.PreTrainedModel:
    """The architecture's usual class with one layer and few tokens, without memory."""
    config = make_checkpoint.scaled(model_type, 1, 1)
    if hasattr(config, "vocab_size"):
        config.vocab_size = 99
        config.bos_token_id = config.eos_token_id = config.pad_token_id = 1
    return make_checkpoint.on_meta(make_checkpoint.class_of(model_type, None), config)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "dtype", "shards"), [("gpt2", "float32", 1), ("opt", "bfloat16", 2)]
)
def test_stock_transformers_loads_all_of_it(
    tmp_path: Path, model_type: str, dtype: str, shards: int
) -> None:
    into = tmp_path / "out"
    asked = ["--params", "20M", "--dtype", dtype, "--shards", str(shards), "-o", str(into)]
    make_checkpoint.main([model_type, *asked])
    assert len(list(into.glob("*.safetensors"))) == shards
    model, info = transformers.AutoModelForCausalLM.from_pretrained(into, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.dtype == getattr(torch, dtype)
    assert model.config.architectures == [type(model).__name__]
    assert abs(model.num_parameters() / 20e6 - 1) < 0.05
    with torch.no_grad():
        assert model(torch.arange(16)[None]).logits.isfinite().all()
    norms = [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]
    assert norms
    for norm in norms:
        assert 0.1 < (norm.weight - 1).abs().mean() < 0.3
        assert norm.bias.abs().mean() > 0.005
    assert abs(float(model.get_input_embeddings().weight.detach().float().mean())) > 1e-3


@pytest.mark.one_case
@pytest.mark.parametrize("model_type", ["gpt2", "vit", "whisper"])
def test_names_and_shapes_are_those_of_save_pretrained(tmp_path: Path, model_type: str) -> None:
    model = small(model_type)
    type(model)(model.config).save_pretrained(tmp_path / "stock")
    make_checkpoint.write(model, tmp_path / "ours", "float32", 1, 0)
    stock, ours = tensors_in(tmp_path / "stock"), tensors_in(tmp_path / "ours")
    assert {n: t.shape for n, t in ours.items()} == {n: t.shape for n, t in stock.items()}


def test_the_index_names_the_file_of_every_tensor(tmp_path: Path) -> None:
    total = make_checkpoint.write(small("opt"), tmp_path / "out", "float16", 4, 0)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, "pt") as shard:
            assert shard.get_tensor(name).dtype == torch.float16


def test_the_seed_fixes_the_bytes(tmp_path: Path) -> None:
    model = small("gpt2")
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_checkpoint.write(model, tmp_path / name, "bfloat16", 1, seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_tensors_differ_from_each_other(tmp_path: Path) -> None:
    make_checkpoint.write(small("phi"), tmp_path / "out", "float32", 1, 0)
    found = tensors_in(tmp_path / "out")
    query, key = (found[f"model.layers.0.self_attn.{n}_proj.weight"] for n in "qk")
    assert not torch.equal(query, key)
    assert not torch.equal(query[0], query[1])


@pytest.mark.parametrize(
    ("text", "count"), [("2B", 2 * 10**9), ("20M", 20_000_000), ("1.5k", 1500), ("7", 7)]
)
def test_sizes_are_read(text: str, count: int) -> None:
    assert make_checkpoint.count_of(text) == count


@pytest.mark.parametrize("text", ["", "B", "twoB", "-3M", "0"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size"):
        make_checkpoint.count_of(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt3", "--params", "2M", "-o", "new"], "no architecture 'gpt3'"),
        (["gpt2", "--params", "2M", "-o", "."], "exists"),
        (["gpt2", "--params", "2M", "-o", "new", "--shards", "0"], "at least 1"),
    ],
)
def test_wrong_arguments_are_usage_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        make_checkpoint.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
