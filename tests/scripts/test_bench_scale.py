"""The simulated checkpoint has the names and files of the real one, and is folded like it."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import bench_scale
import pytest
import torch
from safetensors.torch import load_file

TINY = {"model_type": "bloom", "hidden_size": 16, "n_head": 2, "n_layer": 3, "vocab_size": 120}


def test_the_whole_of_bloom_in_its_files() -> None:
    config, shapes, places = bench_scale.bloom()
    assert config.n_layer == 70 and len(set(places.values())) == 72
    assert sum(map(prod, shapes.values())) == 176_247_271_424
    assert shapes["word_embeddings.weight"] == (250_880, 14_336)
    assert places["h.69.mlp.dense_4h_to_h.bias"] == "model_00071-of-00072.safetensors"
    assert places["word_embeddings_layernorm.bias"] == "model_00001-of-00072.safetensors"


def test_a_matrix_is_smaller_where_no_mean_is_taken() -> None:
    assert bench_scale.shrunken((14_336, 57_344), {0}) == (14_336, 896)
    assert bench_scale.shrunken((250_880, 14_336), set()) == (3_920, 14_336)
    assert bench_scale.shrunken((14_336,), set()) == (14_336,)
    assert bench_scale.shrunken((8, 8), {0, 1}) == (8, 8)


def test_the_simulated_fold_centres_what_the_real_one_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(bench_scale.LARGE, "bloom-176b", TINY)
    monkeypatch.setattr(bench_scale, "SHRINK", 4)
    bench_scale.write_bloom(tmp_path / "in")
    bench_scale.fold_bloom(tmp_path / "in", tmp_path / "out")
    assert json.loads(capsys.readouterr().out)["fold_s"] > 0
    before, after = (
        {n: t for path in (tmp_path / side).glob("model_*") for n, t in load_file(path).items()}
        for side in ("in", "out")
    )
    assert before.keys() == after.keys() and len(after) == 12 * 3 + 5
    written = [name for name in after if name.endswith(("dense.weight", "dense_4h_to_h.weight"))]
    assert len(written) == 6
    for name in written:
        assert after[name].shape == before[name].shape
        assert abs(before[name].double().mean(0)).max() > 1e-3
        step = torch.finfo(after[name].dtype).eps * abs(after[name].double()).max()
        assert abs(after[name].double().mean(0)).max() <= step / 2  # each value is rounded once
    assert after["h.0.mlp.dense_4h_to_h.weight"].shape == (16, 16)
